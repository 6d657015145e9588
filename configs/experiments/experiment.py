"""Data classes of the laboratory's experiments, and fields that several experiments set."""

import dataclasses
from typing import Any

Fields = dict[str, Any]  # dotted name of a config field -> value


@dataclasses.dataclass(frozen=True)
class Experiment:
    """An experiment: a run (arm) for each setting, treatment and seed."""

    question: str
    config: str  # config of all arms, as --config accepts it
    settings: dict[str, Fields]  # name -> fields
    treatments: dict[str, Fields]  # name -> fields; the last treatment is the baseline
    seeds: tuple[int, ...]
    always: Fields  # fields of all arms
    doubt: str  # evidence that would change the conclusion
    minutes: float  # measured duration of an arm on one core, without other arms in parallel
    quick: "Quick | None" = None
    # Number of seeds after which the experiment may end early: from then on it ends after any seed
    # if its verdict is certain (ragen_jax/lab/interim_analyses.py). 0: run all seeds.
    least_seeds: int = 0
    claims: "tuple[Claim, ...]" = ()
    runs: str = ""  # name of the experiment whose runs it shares; "": it has separate runs


@dataclasses.dataclass(frozen=True)
class Claim:
    """The claim that a treatment changes a metric.

    The metric is compared with that of the experiment's last treatment, or with its value at the
    start of the same runs.
    """

    source: str  # place in the paper, and the claim
    treatment: str
    figure: str = "eval/success"  # the metric
    sign: int = 1  # 1: higher, -1: lower, 0: no difference
    settings: tuple[str, ...] = ()  # settings to average over; (): all
    since_start: bool = False  # whether to compare with the start of the same runs


@dataclasses.dataclass(frozen=True)
class Quick:
    """The part of an experiment that --quick runs."""

    treatments: tuple[str, ...]
    seeds: tuple[int, ...]
    always: Fields


TOP_P = {"filter.strategy": "top_p", "filter.value": 0.9}
NONE = {"filter.strategy": "none"}
# All runs of the laboratory write fewer files than the default.
SPARING = {"checkpoint.every": 30, "checkpoint.export": False, "rollout.save_every": 30}
# No early stopping: the experiments need runs that collapse.
WATCHING = {
    f"stopping.{rule}.action": "warn" for rule in ("variance", "success", "empty", "nonfinite")
}
