"""Runs that are the same to the digit: they count once, and a treatment that changed nothing is
reported as such.

Two runs are identical if every figure of every row is equal; times are not compared.
"""

import json
from collections.abc import Sequence

from ragen_jax.lab.curves import Rows, Runs, factors

Key = tuple[str, str, int]  # setting, treatment, seed
NOT_COMPARED = ("time/", "throughput/")  # the only figures that may differ in identical runs
SAME = "the same runs"


def _fingerprint(rows: Rows) -> str:
    """A run's rows without times, as text."""
    return json.dumps(
        [
            sorted(
                (name, value) for name, value in row.items() if not name.startswith(NOT_COMPARED)
            )
            for row in rows
        ]
    )


def classes(runs: Runs) -> list[list[Key]]:
    """The runs in classes of identical runs, each in order of appearance."""
    found: dict[str, list[Key]] = {}
    for key, rows in runs.items():
        found.setdefault(_fingerprint(rows), []).append(key)
    return list(found.values())


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
    return sum(_fingerprint(a) == _fingerprint(b) for a, b in pairs), len(pairs)


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
