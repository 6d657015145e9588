"""Rules about a run's metrics: their form, and the records that they read."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from ragen_jax.configs.base import Regimes
from ragen_jax.core.types import Metrics

BAD, WEAK, UNKNOWN = "bad", "weak", "unknown"  # grades of findings


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of an environment of a run that the rules read."""

    rows: Sequence[Metrics]  # rows of metrics.jsonl, all steps, without labels
    updates: Sequence[Metrics]  # the same rows with the metrics that environments share
    outcomes: Mapping[int, Sequence[float]]  # {step: success on each held-out problem}
    # Fraction of the invalid saved replies that were cut off; read if rows have no cut_off_rate.
    saved_cut_off: float = math.nan
    imitated: bool = False  # whether the run began with imitation (warmstart)
    baseline: int = Regimes().baseline  # number of values in a level of the alarm

    @property
    def steps(self) -> Sequence[Metrics]:
        """The rows of the steps, without the evaluation of a run before them."""
        rows = self.rows
        evaluated = rows and rows[0]["step"] == 0 and any(k.startswith("eval/") for k in rows[0])
        return rows[1:] if evaluated else rows


@dataclasses.dataclass(frozen=True)
class LevelRule:
    """A named rule, and what to do if it holds."""

    name: str
    grade: str  # BAD, WEAK or UNKNOWN
    rule: str  # in words, thresholds included
    cure: str
    find: Callable[[Records], str | None]  # the evidence in words; None: the rule does not hold


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that holds."""

    rule: LevelRule
    words: str  # the evidence: a sentence without a full stop
