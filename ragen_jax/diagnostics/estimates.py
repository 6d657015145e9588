"""Means of a metric over steps with their intervals, and the latest state of a metric."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Metrics

RECENT = 5  # maximum number of newest steps whose mean is the latest state
NO_EFFECT = 0.25  # nats; an effect of the prompt or the reasoning below this is none
NO_DEPENDENCE = 0.1  # retrieval above chance that counts as none
FIRST_TURN, PROBE, ZA_SWAP = "collapse/first_turn", "probe", "flow/first_turn/za_swap"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The mean of a metric over some steps, with a 95 % interval."""

    mean: float
    half_width: float  # NaN if the rows have no interval
    steps: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def percentage(self) -> str:
        """Return a fraction in percent, with its interval in words if a number says nothing."""
        if math.isnan(self.half_width):
            return f"{self.mean:.0%} (interval unknown)"
        if self.low <= 0 and self.high >= 1:
            return f"{self.mean:.0%} (interval 0 to 100%)"
        return f"{self.mean:.0%} ± {100 * self.half_width:.0f}"


def estimate(rows: Sequence[Metrics], name: str, *, minus: str = "") -> Estimate | None:
    """Return the mean of a metric over the rows that have it, or None if no row has it.

    Steps are independent, so the variance of the mean is that of the steps' 95 % intervals
    (`name`_ci95) divided by their number.

    Args:
      minus: a metric that is subtracted, such as the chance level.
    """
    found = [row for row in rows if name in row and (not minus or minus in row)]
    if not found:
        return None
    values = [row[name] - (row[minus] if minus else 0.0) for row in found]
    halves = [row.get(f"{name}_ci95", math.nan) for row in found]
    half_width = math.sqrt(sum(half**2 for half in halves)) / len(halves)
    return Estimate(float(np.mean(values)), half_width, len(found))


def newest_rows(rows: Sequence[Metrics], name: str, *, minus: str = "") -> list[Metrics]:
    """Return the rows of the latest state of a metric: at most RECENT that agree with the newest.

    Two values agree if each is within the 95 % interval of the other. Without intervals, the newest
    row is alone.

    Args:
      minus: as in `estimate`.
    """
    found = [row for row in rows if name in row and (not minus or minus in row)]
    recent = [estimate([row], name, minus=minus) for row in reversed(found[-RECENT:])]

    def agree(one, other):
        change = abs(one.mean - other.mean)
        return change <= one.half_width and change <= other.half_width

    agreeing = itertools.takewhile(lambda other: agree(recent[0], other), recent[1:])
    number = 1 + len(list(agreeing))
    return found[-number:]


def name_steps(rows: Sequence[Metrics]) -> str:
    """Return the steps of rows in words, such as "at step 3" or "in steps 36 to 40"."""
    first, last = (f"{row['step']:.0f}" for row in (rows[0], rows[-1]))
    return f"at step {last}" if first == last else f"in steps {first} to {last}"


def find_independence(rows: Sequence[Metrics], scope: str) -> str | None:
    """Return the figure that shows that reasoning is no likelier under its own prompt, or None.

    Retrieval of few prompts has a wide interval; the likelihoods of a template show more.
    """
    excess = estimate(rows, f"{scope}/retrieval_acc", minus=f"{scope}/retrieval_chance")
    margin = estimate(rows, f"{scope}/own_margin")
    if not excess or not excess.low <= 0:
        return None
    if excess.high < NO_DEPENDENCE:
        return f"retrieval minus chance {excess.mean:+.2f} ± {excess.half_width:.2f}"
    if margin and margin.high < NO_EFFECT:
        return f"own_margin {margin.mean:+.2f} ± {margin.half_width:.2f} nats"
    return None
