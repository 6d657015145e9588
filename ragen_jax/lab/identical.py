"""Identical runs: they count once, and treatments that changed nothing are reported.

Two runs are identical if all metrics of all rows are equal; times are not compared.
"""

from collections.abc import Sequence

from ragen_jax.core.types import Metrics
from ragen_jax.lab.curves import Rows, Runs, factors

Key = tuple[str, str, int]  # setting, treatment, seed
NOT_COMPARED = ("time/", "throughput/")  # metrics that may differ between identical runs
SAME = "identical runs"  # shown in place of a difference


def _comparable_values(row: Metrics) -> frozenset[tuple[str, float]]:
    """Return the metrics of a row that are equal in identical runs."""
    return frozenset(item for item in row.items() if not item[0].startswith(NOT_COMPARED))


def _is_same(a: Rows, b: Rows) -> bool:
    """Return whether two runs are identical."""
    return len(a) == len(b) and all(
        _comparable_values(x) == _comparable_values(y) for x, y in zip(a, b, strict=True)
    )


def classes(runs: Runs) -> list[list[Key]]:
    """Return lists of identical runs, in order of appearance."""
    found: list[list[Key]] = []
    classes_by_key: dict[tuple[int, frozenset[tuple[str, float]]], list[list[Key]]] = {}
    for key, rows in runs.items():
        candidates = classes_by_key.setdefault(
            (len(rows), _comparable_values(rows[-1])), []
        )  # same last row
        same = next((keys for keys in candidates if _is_same(runs[keys[0]], rows)), None)
        if same is None:
            candidates.append([key])
            found.append(candidates[-1])
        else:
            same.append(key)
    return found


def distinct(runs: Runs) -> Runs:
    """Return the runs without those that are identical to an earlier run."""
    return {keys[0]: runs[keys[0]] for keys in classes(runs)}


def count_unchanged(
    runs: Runs, treatment: str, reference: str, settings: Sequence[str] | None = None
) -> tuple[int, int]:
    """Return (pairs of identical runs with a treatment and a reference, compared pairs)."""
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
    """Return whether all runs with a treatment are identical to those with a reference."""
    same, pairs = count_unchanged(runs, treatment, reference, settings)
    return treatment != reference and same == pairs


def describe(runs: Runs) -> str:
    """Return a sentence that names the identical runs; "" if all differ."""
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
        one = len(settings) == 1
        names = [f"`{name}`" if one else f"`{name}` ({setting})" for setting, name in arms]
        word = "seed" if len(found) == 1 else "seeds"
        where = "" if found == seeds else f" ({word} {', '.join(map(str, found))})"
        parts.append(f"{', '.join(names[:-1])} and {names[-1]}{where}")
    return f"These arms have identical runs, which count once: {'; '.join(parts)}."
