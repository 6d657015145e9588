"""Two ways of doing one thing, timed in turn; what the machine can do at most; the table."""

import dataclasses
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a case's table. Times are medians in seconds of one run of `name`."""

    name: str
    ours: float
    other_name: str = ""
    other: float | None = None  # None: nothing to compare with, or the peer is not installed
    ratio: float | None = None  # median over repeats of other / ours: above 1, ours is faster
    target: float | None = None  # of the ratio
    work: float | None = None  # tokens (or what `unit` says) of one run
    unit: str = "tokens"
    bytes: float | None = None  # that one run of ours must move at least
    flops: float | None = None  # that one run of ours must compute at least
    skipped: str = ""  # why there is no other


@dataclasses.dataclass(frozen=True)
class Limits:
    """What simple programs reach on the default device."""

    copy: float  # bytes a second, read and written both counted
    product: float  # floating-point operations a second, square matrix product
    dtype: str  # of the product


def compare(ours, other=None, *, repeats, warmup=2):
    """Medians of functions without arguments that are run in turn.

    Each function must wait for its own result. `other` may be None.

    Returns:
      dict of ours and, with an other, other and ratio: the arguments of a `Row`.
    """
    seconds = []
    for _ in range(warmup + repeats):
        seconds.append([_time(one) for one in (ours, other) if one is not None])
    return summarise(seconds[warmup:])


def summarise(seconds):
    """The medians of [(ours,) or (ours, other), ...], and of other / ours within a pair."""
    found = {"ours": statistics.median(pair[0] for pair in seconds)}
    if len(seconds[0]) > 1:
        found["other"] = statistics.median(pair[1] for pair in seconds)
        found["ratio"] = statistics.median(other / ours for ours, other in seconds)
    return found


def _time(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def limits(dtype="float32"):
    """`Limits` of the default device, the best of some runs."""
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
        products.append(_time(lambda: jax.block_until_ready(multiply(a))))
    return Limits(2 * x.nbytes / min(copies), 2 * size**3 / min(products), jnp.dtype(dtype).name)


def report(case, rows, before, after, *, repeats):
    """The JSON object of a case: its rows, the limits on either side of it, shares and rates.

    A share is what ours reached of the better of the two measured limits.
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
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "copy_gb_s": [round(x.copy / 1e9, 2) for x in (before, after)],
        "product_gflop_s": [round(x.product / 1e9, 1) for x in (before, after)],
        "product_dtype": before.dtype,
        "rows": lines,
    }


def as_json(found):
    """One line."""
    return json.dumps(found)


def as_table(found):
    """A report for people."""
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
