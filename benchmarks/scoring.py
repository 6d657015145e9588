"""Cross-scoring by shared prompts against a forward pass for every pair, and its growth.

    python -m benchmarks scoring                              compare the two methods
    python -m benchmarks.scoring [--repeats=5] [--png=FILE]   growth of time and memory

The model has the tiny agent's shape and random weights; tokens are random.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from benchmarks.llm import random_params
from benchmarks.measure import Row, compare
from ragen_jax.core.memory import keep_freed_memory
from ragen_jax.diagnostics import cross_scoring
from ragen_jax.diagnostics.cross_scoring import blocks, cross_score, cross_score_pairs
from ragen_jax.model.qwen import ModelConfig, Qwen

SHAPE = ModelConfig(
    vocab_size=512, width=96, layers=2, heads=4, kv_heads=1, head_dim=24, mlp_width=256
)
MICRO_BATCH, PAIRS = 32, 2  # rows per call, shared prompts and pairs: about the fastest
# number of prompts, number of reasonings, mean tokens of a prompt and of a reasoning, target ratio
SIZES = ((8, 128, 350, 80, 4), (64, 64, 900, 80, 8))
BASE = {"M": 32, "N": 16, "P": 256, "Z": 64}
VARIED_SIZES = {
    "M": (16, 32, 64, 128, 256),
    "N": (8, 16, 32, 64, 128),
    "P": (64, 128, 256, 512, 1024),
    "Z": (16, 32, 64, 128, 256),
}
NAMES = {"M": "reasonings M", "N": "prompts N", "P": "prompt tokens P", "Z": "reasoning tokens Z"}


def scoring(repeats, *, sizes=SIZES):
    """All reasonings under all prompts: shared prompts against a forward pass for every pair."""
    model, params = Qwen(SHAPE), random_params(SHAPE)
    rows = []
    for N, M, P, Z, target in sizes:
        rng = np.random.default_rng(0)
        prompts, reasonings = _ids(rng, N, P, P // 20), _ids(rng, M, Z, Z // 4)
        found = {}

        def ours(prompts=prompts, reasonings=reasonings, found=found):
            found["ours"] = cross_score(model, params, prompts, reasonings, micro_batch=MICRO_BATCH)

        def naive(prompts=prompts, reasonings=reasonings, found=found):
            found["naive"] = cross_score_pairs(
                model, params, prompts, reasonings, micro_batch=PAIRS
            )

        seconds = compare(ours, naive, repeats=repeats, warmup=1)
        (score, length_M), (expected, _) = found["ours"], found["naive"]
        difference = np.abs((score - expected) / length_M[:, None]).max()
        if difference > 1e-4:
            raise RuntimeError(f"the two methods differ by {difference:.2g} nats per token")
        tokens, lengths = sum(map(len, prompts)), sum(map(len, reasonings))
        ceiling = (M * tokens + N * lengths) / (tokens + N * lengths)
        memory = call_memory(N=N, M=M, P=max(map(len, prompts)), Z=max(map(len, reasonings)))
        rows.append(
            Row(
                name=f"{N} prompts of {P} x {M} reasonings of {Z} "
                f"(ceiling {ceiling:.1f}, {difference:.0e} nats, {memory / 1e6:.0f} MB a call)",
                other_name="pairs",
                target=target,
                work=N * lengths,
                **seconds,
            )
        )
    return rows


def _ids(rng, count, mean, spread):
    """Return `count` lists of random token ids, of random lengths."""
    lengths = rng.integers(mean - spread, mean + spread + 1, count)
    return [rng.integers(0, SHAPE.vocab_size, length).tolist() for length in lengths]


def call_memory(*, N, M, P, Z):
    """Return the bytes of the largest device call, as reported by the compiler.

    These are inputs, temporaries and outputs, without parameters. At most two calls are in flight.
    """
    model = Qwen(SHAPE)
    params = jax.eval_shape(lambda: random_params(SHAPE))
    n, m = blocks(N, M, MICRO_BATCH)
    ints = [
        jax.ShapeDtypeStruct(shape, np.int32)
        for shape in (
            (n, cross_scoring.padded_length(P, 32)),
            (n,),
            (m, cross_scoring.padded_reasoning(Z)),
            (m,),
        )
    ]
    read = cross_scoring.read_prompts
    outs = jax.eval_shape(lambda params, *args: read(model, params, *args), params, *ints[:2])
    parameters = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    largest = 0
    for program in (
        read.lower(model, params, *ints[:2]),
        cross_scoring.score_block.lower(model, params, *outs, *ints[2:]),
    ):
        found = program.compile().memory_analysis()
        call_bytes = (
            found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes
        )
        largest = max(largest, call_bytes - parameters)
    return largest


# ------------------------------------------------------------------------------ growth


def growth(repeats, *, base=BASE, varied_sizes=VARIED_SIZES):
    """Return [(name of the varied size, sizes, median seconds, bytes of the largest call)].

    All points are measured in turn, `repeats` times, so that a slow period of the machine affects
    all of them.
    """
    model, params = Qwen(SHAPE), random_params(SHAPE)
    points = [
        (name, base | {name: value}) for name, values in varied_sizes.items() for value in values
    ]
    seconds = [[] for _ in points]
    for _ in range(1 + repeats):
        for (_, sizes), times in zip(points, seconds, strict=True):
            rng = np.random.default_rng(0)
            prompts = _ids(rng, sizes["N"], sizes["P"], 0)
            reasonings = _ids(rng, sizes["M"], sizes["Z"], 0)
            start = time.perf_counter()
            cross_score(model, params, prompts, reasonings, micro_batch=MICRO_BATCH)
            times.append(time.perf_counter() - start)
    return [
        (name, sizes, statistics.median(times[1:]), call_memory(**sizes))
        for (name, sizes), times in zip(points, seconds, strict=True)
    ]


def counts(*, N, M, P, Z):
    """Return (tokens, (query, key) pairs of a head and layer), which should determine the time."""
    return N * P + M * N * Z, N * P * P + M * N * Z * (P + Z)


def fit_rates(points):
    """Return seconds per token and per (query, key) pair, with the least relative errors."""
    times = np.array([seconds for _, _, seconds, _ in points])
    work = np.array([counts(**sizes) for _, sizes, _, _ in points])
    rates, *_ = np.linalg.lstsq(work / times[:, None], np.ones(len(times)), rcond=None)
    return rates


def draw(points, path):
    """Draw seconds and memory against each size, with the predictions from the counts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = fit_rates(points)
    figure, axes = plt.subplots(2, len(NAMES), figsize=(13, 6), sharey="row")
    for column, (name, label) in enumerate(NAMES.items()):
        one = [point for point in points if point[0] == name]
        values = [sizes[name] for _, sizes, _, _ in one]
        top, bottom = axes[:, column]
        top.loglog(values, [seconds for *_, seconds, _ in one], "o", label="measured")
        predicted = [rates @ counts(**sizes) for _, sizes, _, _ in one]
        top.loglog(values, predicted, "-", label="predicted by the counts")
        memory = [call_bytes / 1e6 for *_, call_bytes in one]
        bottom.loglog(values, memory, "s-", label="largest call")
        pairs = memory[0] * np.array(values) / values[0]
        bottom.loglog(values, pairs, ":", label=f"in proportion to {name}")
        bottom.set_xlabel(label)
        for axis in (top, bottom):
            axis.set_xticks(values, map(str, values), minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("seconds")
    axes[1, 0].set_ylabel("MB without parameters")
    for row in axes:
        row[0].legend()
    fixed = ", ".join(f"{name} = {value}" for name, value in BASE.items())
    figure.suptitle(f"Cross-scoring by shared prompts; one size varied at a time, from {fixed}")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--png", help="draw to this file")
    options = parser.parse_args()
    keep_freed_memory()
    points = growth(options.repeats)
    token, pair = fit_rates(points)
    for name, sizes, seconds, call_bytes in points:
        predicted = np.array([token, pair]) @ counts(**sizes)
        print(
            f"{name} = {sizes[name]:<5} {seconds:7.3f} s  predicted {predicted:7.3f} s  "
            f"{call_bytes / 1e6:6.1f} MB per call"
        )
    print(f"{1e6 * token:.3f} us per token, {1e9 * pair:.3f} ns per (query, key) pair")
    if options.png:
        draw(points, options.png)


if __name__ == "__main__":
    main()
