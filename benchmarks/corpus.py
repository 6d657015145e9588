"""Time and memory of indexing a large corpus, and time of searching it.

    python -m benchmarks.corpus [--passages=300000] [--seed=0]

Passages have 100 words with the frequencies of a language (Zipf), and each has a new word. The
command that makes the index runs in a separate process, whose peak memory is reported. This memory
includes mapped files, which the system can release when it is short of memory.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ragen_jax.envs.search_qa.words import Words

QUERIES = 50  # number of queries, each of five words
VOCABULARY = 200_000  # number of different words, not counting those in a single passage


def write(path, passages, seed):
    """Write the corpus."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, VOCABULARY + 1)
    ends = np.cumsum(share) / share.sum()
    with path.open("w") as file:
        for number in range(passages):
            words = np.searchsorted(ends, rng.random(99))
            text = " ".join(f"w{word}" for word in words)
            file.write(json.dumps({"id": number, "contents": f"p{number} {text}"}) + "\n")


def search_seconds(index, seed):
    """Return the seconds of each search; a query is five common words."""
    rng = np.random.default_rng(seed)
    seconds = []
    for _ in range(QUERIES):
        query = " ".join(f"w{word}" for word in rng.integers(0, 10_000, 5))
        start = time.perf_counter()
        index.search([query], 5)
        seconds.append(time.perf_counter() - start)
    return seconds


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus")
    parser.add_argument("--passages", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        corpus, index = Path(folder) / "corpus.jsonl", Path(folder) / "index"
        write(corpus, options.passages, options.seed)
        start = time.perf_counter()
        command = [sys.executable, "-m", "ragen_jax.retriever", "build"]
        subprocess.run([*command, f"--corpus={corpus}", f"--index={index}"], check=True)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # KiB to GiB
        size = sum(file.stat().st_size for file in index.iterdir()) / 2**30
        print(
            f"{options.passages} passages, {corpus.stat().st_size / 2**30:.2f} GiB: index of "
            f"{size:.2f} GiB in {seconds:.0f} s, peak memory {peak:.2f} GiB"
        )
        start = time.perf_counter()
        words = Words(index)
        open_seconds = time.perf_counter() - start
        found = search_seconds(words, options.seed)
        print(
            f"opened in {open_seconds:.2f} s; a search for five words: median "
            f"{1e3 * statistics.median(found):.1f} ms, longest {1e3 * max(found):.1f} ms"
        )


if __name__ == "__main__":
    main()
