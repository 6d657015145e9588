"""Identical runs: they count once, and a treatment that changed nothing is reported as such.

Two runs are identical if every figure of every row is equal; times are not compared.
"""

from collections.abc import Sequence

from ragen_jax.core.types import Metrics
from ragen_jax.lab.curves import Rows, Runs, factors

Key = tuple[str, str, int]  # setting, treatment, seed
NOT_COMPARED = ("time/", "throughput/")  # the only figures that may differ in identical runs
SAME = "the same runs"


def _compared(row: Metrics) -> frozenset[tuple[str, float]]:
    """The figures of a row that identical runs have in common."""
    return frozenset(item for item in row.items() if not item[0].startswith(NOT_COMPARED))


def _is_same(a: Rows, b: Rows) -> bool:
    """Whether two runs are identical."""
    return len(a) == len(b) and all(_compared(x) == _compared(y) for x, y in zip(a, b, strict=True))


def classes(runs: Runs) -> list[list[Key]]:
    """The runs in classes of identical runs, each in order of appearance."""
    found: list[list[Key]] = []
    alike: dict[tuple[int, frozenset[tuple[str, float]]], list[list[Key]]] = {}
    for key, rows in runs.items():
        candidates = alike.setdefault((len(rows), _compared(rows[-1])), [])  # by the last row
        same = next((keys for keys in candidates if _is_same(runs[keys[0]], rows)), None)
        if same is None:
            candidates.append([key])
            found.append(candidates[-1])
        else:
            same.append(key)
    return found


def distinct(runs: Runs) -> Runs:
    """The runs without those that repeat an earlier run."""
    return {keys[0]: runs[keys[0]] for keys in classes(runs)}


def unchanged(
    runs: Runs, treatment: str, reference: str, settings: Sequence[str] | None = None
) -> tuple[int, int]:
    """(pairs of runs that a treatment left identical to those of another, pairs compared)."""
    every, _, seeds = factors(runs)
    pairs = [
        (runs[setting, treatment, seed], runs[setting, reference, seed])
        for setting in settings or every
        for seed in seeds
    ]
    return sum(_is_same(a, b) for a, b in pairs), len(pairs)


def is_unchanged(
    runs: Runs, treatment: str, reference: str, settings: Sequence[str] | None = None
) -> bool:
    """Whether every run with a treatment is identical to that with another."""
    same, pairs = unchanged(runs, treatment, reference, settings)
    return treatment != reference and same == pairs


def describe(runs: Runs) -> str:
    """A sentence that names the identical runs; "" if all differ."""
    by_seed: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for keys in classes(runs):
        if len(keys) > 1:
            arms = tuple((setting, treatment) for setting, treatment, _ in keys)
            by_seed.setdefault(arms, []).extend(sorted({seed for *_, seed in keys}))
    if not by_seed:
        return ""
    settings, _, seeds = factors(runs)
    parts = []
    for arms, found in by_seed.items():
        names = [name if len(settings) == 1 else f"{name} ({setting})" for setting, name in arms]
        where = "" if found == seeds else f" with seed {', '.join(map(str, found))}"
        parts.append(f"{', '.join(names[:-1])} and {names[-1]}{where}")
    return f"Identical to the digit, and counted once: {'; '.join(parts)}."
