"""Convert a GGUF file to a model directory in Hugging Face format, kept in the cache."""

import collections
import functools
import math
from pathlib import Path

from ragen_jax.core.progress import enter_phase
from ragen_jax.model import config_json, hf, tokenizer_config, weights
from ragen_jax.model.families.types import SAME
from ragen_jax.model.gguf.reader import GGUF, list_files, open_gguf
from ragen_jax.model.gguf.shape import read_shape, unread_keys
from ragen_jax.model.gguf.tensors import (
    ROPE_DIVISORS,
    StoredArray,
    check_quantisations,
    tensor_name,
)
from ragen_jax.model.gguf.tokenizer import build_tokenizer, stop_ids
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.storage.cache import cache_directory, content_hash, lock_path
from ragen_jax.storage.checksums import write_checksums
from ragen_jax.storage.console import console
from ragen_jax.storage.datasets import settings_hash
from ragen_jax.storage.heartbeat import heartbeat

RECIPE = 1  # raise it when a change of this folder changes the result
MAX_SHARD_BYTES = 2_000_000_000  # largest weight file, and so the memory that converting takes
FILE = "gguf.json"  # in the directory: {"types": {quantisation: number of tensors}}
NOT_QUANTISED = ("F32", "F16", "BF16")


def convert(path: str | Path, cache: str | Path | None = None) -> Path:
    """Return the directory of a GGUF file's model in the cache; convert it on first use.

    Args:
      path: the file, or one of the files that a model is split into.
      cache: folder of generated models.

    Raises:
      ValueError: the file is missing or damaged, or has an architecture, tokenizer, quantisation
        or feature that is not supported.
    """
    path = Path(path).expanduser()
    with heartbeat():
        hashes = [content_hash(file) for file in list_files(path)]
        directory = converted_directory(hashes, cache)
        if not directory.exists():  # without a lock: the cache may be read-only
            with lock_path(directory):
                if not directory.exists():
                    enter_phase(f"converting {path.name}")
                    _write_directory(open_gguf(path), directory)
    report_quantisation(path.name, directory)
    return directory


def converted_directory(hashes: list[str], cache: str | Path | None = None) -> Path:
    """Return the directory of the model whose files have these content hashes."""
    cache = cache_directory() if cache is None else Path(cache)
    return cache / "models" / f"gguf_{settings_hash({'recipe': RECIPE, 'files': hashes})}"


@functools.cache
def report_quantisation(name: str, directory: Path) -> None:
    """Print, once per process, that quantised weights are another policy than the original.

    Args:
      name: name of the GGUF file.
      directory: its model's directory.
    """
    types = hf.read_json(directory / FILE)["types"]
    quantised = sorted(types.keys() - set(NOT_QUANTISED), key=lambda kind: -types[kind])
    if quantised:
        console(
            f"{name} holds weights quantised to {', '.join(quantised)}: the policy, and with it "
            "the KL reference, differs from the original model"
        )


def _write_directory(file: GGUF, directory: Path) -> None:
    config = read_shape(file)
    tensors = _plan_tensors(file, config)
    check_quantisations(file)
    tokenizer = build_tokenizer(file, config.vocab_size)
    size = 4 * sum(math.prod(tensor.shape) for tensor in tensors)
    console(
        f"{file.path.name}: writing its weights in float32 to {directory} "
        f"({size / 1e6:,.0f} MB, once)"
    )
    unread = unread_keys(file)
    if unread:
        listed = ", ".join(f"{key!r:.60}" for key in unread)
        console(f"warning: these keys of {file.path.name} are ignored: {listed}")
    types = collections.Counter(tensor.tensor_type.name for tensor in file.tensors.values())
    fields = config_json.from_config(config, "float32") | hf.token_ids(tokenizer, stop_ids(file))
    with hf.replacement(directory) as fresh:
        hf.write_json(fresh / "config.json", fields)
        generation = {k: fields[k] for k in config_json.TOKEN_IDS if k in fields}
        hf.write_json(fresh / "generation_config.json", generation)
        tokenizer_config.save_tokenizer(fresh, tokenizer)
        hf.write_json(fresh / FILE, {"types": dict(types)})
        weights.write(fresh, tensors, dtype="float32", max_shard_bytes=MAX_SHARD_BYTES, writer=True)
        write_checksums(fresh)


def _plan_tensors(file: GGUF, config: ModelConfig) -> list[weights.StoredTensor]:
    """Return the tensors to write.

    Raises:
      ValueError: tensors are missing, unknown or of another shape.
    """
    plan = [(name, leaf.tensor_shape) for leaf in weights.plan(config) for name in leaf.names]
    want = {tensor_name(name): shape for name, shape in plan}
    missing = sorted(want.keys() - file.tensors.keys())
    unknown = sorted(file.tensors.keys() - want.keys() - {ROPE_DIVISORS})
    for problem, names in (("lacks", missing), ("has further", unknown)):
        if names:
            some = ", ".join(f"{name!r:.60}" for name in names[:4])
            some += ", ..." if len(names) > 4 else ""
            raise ValueError(
                f"{file.path} {problem} tensors: {some}; expected those of a model of architecture "
                f"{file.architecture!r} with {config.layers} layers"
            )
    for name, shape in want.items():
        found = tuple(int(n) for n in reversed(file.tensors[name].shape))
        if found != shape:
            raise ValueError(
                f"{file.path}: tensor {name} has shape {found}; the file's keys need {shape}"
            )
    stored = []
    for name, shape in plan:
        # ty: ignore[invalid-argument-type] NumPy reads it through __array__
        part = weights.Part(StoredArray(file, config, name), (), SAME)
        stored.append(weights.StoredTensor(name, shape, (part,)))
    return stored
