"""Total time of `python -m ragen_jax.score` for rollouts of another trainer.

    python -m benchmarks.dumped [--rows=2000] [--tokens=300] [--members=16] [--samples=64]
                                [--model=DIR]

The model is --model, or one of the tiny agent's shape with random weights. The rows are random
words, a token each; half of them are prompt and half are reply. --samples is the maximum number of
scored reasonings per step (0: all). The whole command is timed, including its imports and
compilations.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.llm import random_params
from benchmarks.scoring import SHAPE
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model import hf
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.tokenizer import build_tokenizer

WORDS = [word for word in Sokoban.words if word.isalpha()]  # one token each


def write_rows(path, rows, tokens, members):
    """Write a dump as verl does: `rows` replies, `members` per prompt."""
    rng = np.random.default_rng(0)

    def words(count):
        return "".join(rng.choice(WORDS, count))

    with path.open("w") as file:
        for row in range(rows):
            if row % members == 0:
                prompt = f"user\n{words(tokens // 2 - 7)}\nassistant\n"
            reply = f"<think>{words(tokens // 2 - 5)}</think><answer>{words(1)}</answer>"
            record = {"input": prompt, "output": reply, "score": float(rng.integers(2)), "step": 1}
            file.write(json.dumps(record) + "\n")


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dumped", description=__doc__)
    for name, usual in (("rows", 2000), ("tokens", 300), ("members", 16), ("samples", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, rollouts = options.model or Path(folder) / "model", Path(folder) / "1.jsonl"
        if options.model is None:
            hf.save(model, Qwen(SHAPE), random_params(SHAPE), build_tokenizer(Sokoban.words))
        write_rows(rollouts, options.rows, options.tokens, options.members)
        words = [sys.executable, "-m", "ragen_jax.score", f"--model={model}"]
        words += [f"--rollouts={rollouts}", f"--out={folder}/score.json"]
        start = time.perf_counter()
        subprocess.run([*words, f"--first_turn_samples={options.samples}"], check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{options.rows} rows of {options.tokens} tokens: {time.perf_counter() - start:.1f} s, "
            f"{used.ru_utime + used.ru_stime:.1f} s of CPU"
        )


if __name__ == "__main__":
    main()
