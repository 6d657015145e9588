"""The types of experiments and claims, and config fields that several experiments share."""

import dataclasses
from typing import Any

Fields = dict[str, Any]  # dotted name of a config field -> value
RAGEN_2 = "RAGEN-2"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The fields that all arms of an experiment share, and those in which they differ."""

    question: str
    config: str  # value of --config for all arms
    settings: dict[str, Fields]
    treatments: dict[str, Fields]  # the last treatment is the reference
    seeds: tuple[int, ...]
    common_fields: Fields  # fields of every arm
    doubt: str  # results that would change the conclusions; last section of the page
    minutes: float  # measured duration of a single arm
    quick: "Quick | None" = None
    cores: int = 1  # those of `minutes`
    # The experiment may end after this number of seeds, and after each further seed, if its verdict
    # is certain (ragen_jax/lab/interim_analyses.py); 0: it ends after all seeds.
    least_seeds: int = 0
    claims: "tuple[Claim, ...]" = ()
    runs: str = ""  # experiment with which this experiment shares its folder of runs; "": none
    # Experiment whose stored rows the page reads, so that it needs no runs; "": its own.
    rows: str = ""
    paper: str = RAGEN_2  # paper whose claims the page judges
    # Treatments that are doses of one thing, from the smallest to the largest (lab/rivals.py).
    ladders: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim: a metric is higher with a treatment than with the experiment's last treatment, or
    higher at the end of a run than at its start."""

    source: str  # table, figure, section or page in which the paper makes the claim
    treatment: str
    figure: str = "eval/success"
    sign: int = 1  # 1: higher, -1: lower, 0: equal
    settings: tuple[str, ...] = ()  # settings over which the difference is averaged; (): all
    since_start: bool = False  # compare with the start of the same runs
    reference: str = ""  # treatment to compare with (lab/rivals.py); "": the last one


@dataclasses.dataclass(frozen=True)
class Quick:
    """The part of an experiment that --quick runs."""

    treatments: tuple[str, ...]
    seeds: tuple[int, ...]
    common_fields: Fields


TOP_P = {"filter.strategy": "top_p", "filter.value": 0.9}
NONE = {"filter.strategy": "none"}
# Fewer checkpoints and stored episodes, in all experiments.
FEWER_FILES = {"checkpoint.every": 30, "checkpoint.export": False, "rollout.save_every": 30}
# Collapsed runs continue, because the experiments study them.
WARN_ONLY = {
    f"stopping.{rule}.action": "warn" for rule in ("variance", "success", "empty", "nonfinite")
}
