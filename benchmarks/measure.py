"""Timing of two functions in turn, the limits of the machine, and the table of results."""

import ctypes
import dataclasses
import json
import os
import statistics
import sys
import time

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a case's table. Times are medians in seconds of one run of `name`."""

    name: str
    ours: float
    other_name: str = ""
    other: float | None = None  # None: no comparison, or the peer is not installed
    ratio: float | None = None  # median over repeats of other / ours: above 1, ours is faster
    target: float | None = None  # minimum ratio
    work: float | None = None  # amount of work of one run, in `unit`
    unit: str = "tokens"
    bytes: float | None = None  # minimum bytes that one run of ours moves
    flops: float | None = None  # minimum FLOPs that one run of ours computes
    skipped: str = ""  # reason why the other was not run


@dataclasses.dataclass(frozen=True)
class Limits:
    """Rates of simple programs on the default device."""

    copy: float  # bytes per second, read plus written
    product: float  # floating-point operations per second of a square matrix product
    dtype: str  # dtype of the product


def compare(ours, other=None, *, repeats, warmup=2):
    """Run functions without arguments in turn, and return their median times.

    Each function must wait for its result. `other` may be None.

    Returns:
      {"ours": seconds} and, if `other` is given, "other" and "ratio": arguments of a `Row`.
    """
    seconds = []
    for _ in range(warmup + repeats):
        seconds.append([time_once(one) for one in (ours, other) if one is not None])
    return summarise(seconds[warmup:])


def summarise(seconds):
    """Return the medians of [(ours,) or (ours, other), ...], and of other / ours of each pair."""
    found = {"ours": statistics.median(pair[0] for pair in seconds)}
    if len(seconds[0]) > 1:
        found["other"] = statistics.median(pair[1] for pair in seconds)
        found["ratio"] = statistics.median(other / ours for ours, other in seconds)
    return found


def time_once(function, clock=time.perf_counter):
    """Return the seconds of one call of a function without arguments.

    With the clock time.process_time, they are the processor time of all threads, which other
    programs disturb less.
    """
    start = clock()
    function()
    return clock() - start


def give_back_freed_memory():
    """Return freed memory to the system, which malloc keeps (ragen_jax/core/memory.py)."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)


def limits(dtype="float32"):
    """Measure the `Limits` of the default device, the best of some runs."""
    on_cpu = jax.default_backend() == "cpu"
    x = jnp.zeros((64 if on_cpu else 1024, 1 << 20), jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    size = 3000 if on_cpu else 8192
    a = jnp.ones((size, size), dtype)
    multiply = jax.jit(lambda a: a @ a)
    copies, products = [], []
    for _ in range(5):
        start = time.perf_counter()
        x = jax.block_until_ready(add(x))
        copies.append(time.perf_counter() - start)
        products.append(time_once(lambda: jax.block_until_ready(multiply(a))))
    return Limits(2 * x.nbytes / min(copies), 2 * size**3 / min(products), jnp.dtype(dtype).name)


def report(case, rows, before, after, *, repeats):
    """Return the JSON object of a case: rows with rates and shares, and limits before and after.

    A share is our rate as a fraction of the higher of the two measured limits.
    """
    copy, product = max(before.copy, after.copy), max(before.product, after.product)
    lines = []
    for row in rows:
        line = {k: v for k, v in dataclasses.asdict(row).items() if v not in (None, "")}
        if row.ratio is not None and row.target is not None:
            line["met"] = row.ratio >= row.target
        if row.work:
            line["rate"] = row.work / row.ours
        if row.bytes:
            line["copy_share"] = row.bytes / row.ours / copy
        if row.flops:
            line["product_share"] = row.flops / row.ours / product
        lines.append(line)
    return {
        "case": case,
        "repeats": repeats,
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "jax": jax.__version__,
        "copy_gb_s": [round(x.copy / 1e9, 2) for x in (before, after)],
        "product_gflop_s": [round(x.product / 1e9, 1) for x in (before, after)],
        "product_dtype": before.dtype,
        "rows": lines,
    }


def as_json(found):
    """Return a report as one line of JSON."""
    return json.dumps(found)


def as_table(found):
    """Return a report as a table."""
    head = ("", "ours", "other", "ratio", "target", "rate", "of copy", "of product")
    table = [head]
    notes = []
    for row in found["rows"]:
        target = f"{row['target']:g}" if "target" in row else ""
        if "met" in row:
            target += " met" if row["met"] else " missed"
        table.append(
            (
                row["name"],
                _seconds(row["ours"]),
                f"{_seconds(row['other'])} {row['other_name']}" if "other" in row else "",
                f"{row['ratio']:.2f} x" if "ratio" in row else "",
                target,
                f"{row['rate']:,.0f} {row['unit']}/s" if "rate" in row else "",
                f"{row['copy_share']:.0%}" if "copy_share" in row else "",
                f"{row['product_share']:.0%}" if "product_share" in row else "",
            )
        )
        if "skipped" in row and row["skipped"] not in notes:
            notes.append(row["skipped"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    copy = " and ".join(f"{x:.1f}" for x in found["copy_gb_s"])
    product = " and ".join(f"{x:,.0f}" for x in found["product_gflop_s"])
    lines.append(
        f"{found['case']}: medians of {found['repeats']} runs in turn on {found['cores']} cores, "
        f"{found['device']}, jax {found['jax']}"
    )
    lines.append(
        f"before and after: copy {copy} GB/s, {found['product_dtype']} product {product} GFLOP/s"
    )
    return "\n".join([*lines, *notes])


def _seconds(x):
    return f"{x:.3g} s" if x >= 0.1 else f"{1e3 * x:.3g} ms"
