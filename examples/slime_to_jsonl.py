"""Convert rollouts of slime to JSON lines, which `python -m ragen_jax.score` reads.

    python slime_to_jsonl.py P12.pt [P13.pt ...] [--out=FOLDER]

slime's --save-debug-rollout-data=P{rollout_id}.pt writes a pickle, which can run code when it is
opened, so that `score` does not open it. This script needs only PyTorch: copy it to where slime
runs. It opens the file with weights_only=True, which accepts numbers, texts, lists, dicts, tensors
and NumPy arrays, and refuses everything else. slime writes its samples as such dicts.

Each sample becomes a line with the fields SAMPLE and the step; P12.pt becomes P12.jsonl, next to it
or in FOLDER.
"""

import argparse
import json
import math
import pickle
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

# Fields of slime's Sample (slime/utils/types.py) that are kept.
SAMPLE = ("group_index", "tokens", "response_length", "loss_mask", "reward", "status")


def safe_types() -> list[Any]:
    """Return the types with which NumPy's arrays are pickled; none without NumPy."""
    try:
        import numpy as np
    except ImportError:
        return []
    rebuild = np.zeros(1).__reduce__()[0]  # the private function has moved between versions
    kinds = np.typecodes["AllInteger"] + np.typecodes["Float"] + "?"
    return [rebuild, np.ndarray, np.dtype, *{type(np.dtype(each)) for each in kinds}]


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file that slime wrote.

    Raises:
      ValueError: it holds objects other than plain data, or is no such file.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not there, or is not a complete file of torch.save")
    try:
        with torch.serialization.safe_globals(safe_types()):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"{name[1]}, which could run code" if name else "data that could run code"
        raise ValueError(
            f"{path} holds {what}; it is not opened. If you trust the file, load it where slime "
            "runs with torch.load(PATH, weights_only=False), keep only the fields "
            f"{', '.join(SAMPLE)} of each dict in its samples, and save it again"
        ) from error
    except (OSError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    samples = found.get("samples") if isinstance(found, dict) else None
    if not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
        raise ValueError(f"{path} has no samples; expected a file of --save-debug-rollout-data")
    return found


def plain(value: Any) -> Any:
    """Return tensors and arrays as lists, and numbers that JSON lacks as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def convert(path: Path, folder: Path) -> str:
    """Write the samples of a file as JSON lines and return a line about it."""
    found = load(path)
    out = folder / f"{path.stem}.jsonl"
    with open(out, "w", encoding="utf-8") as file:
        for sample in found["samples"]:
            row = {name: plain(sample[name]) for name in SAMPLE if sample.get(name) is not None}
            file.write(json.dumps({"step": found.get("rollout_id")} | row, default=str) + "\n")
    return f"{path}: {len(found['samples'])} samples in {out}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert rollouts of slime to JSON lines.")
    parser.add_argument("files", nargs="+", type=Path, help="files of --save-debug-rollout-data")
    parser.add_argument("--out", type=Path, help="folder of the JSON lines; default: the file's")
    words = parser.parse_args()
    try:
        for path in words.files:
            print(convert(path, words.out or path.parent))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
