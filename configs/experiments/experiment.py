"""What an experiment of the laboratory is, and what several of them share."""

import dataclasses
from typing import Any

Fields = dict[str, Any]  # dotted name -> value


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What its arms have in common, and what they differ in."""

    question: str
    config: str  # of all arms, as --config takes it
    settings: dict[str, Fields]
    treatments: dict[str, Fields]
    seeds: tuple[int, ...]
    always: Fields  # of every arm
    doubt: str  # what would change our mind
    minutes: float  # that an arm was seen to take, one at a time on one core
    quick: "Quick | None" = None
    # After so many seeds, and after each further one, it ends if its verdict is certain
    # (ragen_jax/lab/interim_analyses.py); 0: after all.
    least_seeds: int = 0
    claims: "tuple[Claim, ...]" = ()
    runs: str = ""  # of which experiment, where some are the same; "": its own


@dataclasses.dataclass(frozen=True)
class Claim:
    """That a treatment's figure is higher than that of the experiment's last treatment, or than it
    was at the start."""

    source: str  # where it is made
    treatment: str
    figure: str = "eval/success"
    sign: int = 1  # 1: higher, -1: lower, 0: neither
    settings: tuple[str, ...] = ()  # over which; (): all
    since_start: bool = False  # than at the start of the same runs


@dataclasses.dataclass(frozen=True)
class Quick:
    """The part of an experiment that --quick runs."""

    treatments: tuple[str, ...]
    seeds: tuple[int, ...]
    always: Fields


TOP_P = {"filter.strategy": "top_p", "filter.value": 0.9}
NONE = {"filter.strategy": "none"}
# What every run of the laboratory leaves out or writes less of.
SPARING = {"checkpoint.every": 30, "checkpoint.export": False, "rollout.save_every": 30}
# A run that collapses is what is looked for.
WATCHING = {
    f"stopping.{rule}.action": "warn" for rule in ("variance", "success", "empty", "nonfinite")
}
