"""The curves of a page: charts, healthy bands, and means of runs that differ only in their seed."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.intervals import interval

DIGITS = 7  # significant digits of a value on the page
FIRST = 10  # number of values from which a healthy band is computed


@dataclasses.dataclass(frozen=True)
class Chart:
    """Metrics that share an axis of a page."""

    title: str
    words: str  # what the reader should look for
    figures: tuple[str, ...]
    band: str = ""  # metric whose healthy band is shown
    names: tuple[str, ...] = ()  # short names of the metrics; (): their full names
    overlay: tuple[str, ...] = ()  # metrics shown for several runs; (): the first two
    logarithmic: bool = False  # a logarithmic axis, without intervals, which may be below 0
    share: bool = False  # values and intervals are in [0, 1]
    unit: str = "fraction"  # name of the vertical axis
    smooth: tuple[str, ...] = ()  # metrics drawn as running means, with their values faint behind


STAGES = ("rollout", "batch", "diagnose", "inform", "update", "eval")
FIRST_TURN = "collapse/first_turn"
CHARTS = (
    Chart(
        "Success",
        "Fraction of episodes solved, on held-out and on training problems.",
        ("eval/success", "rollout/success"),
        names=("held out", "training"),
        overlay=("eval/success",),
        share=True,
        smooth=("rollout/success",),
        unit="fraction of episodes",
    ),
    Chart(
        "Information of the reasoning about the prompt",
        "How much likelier reasoning is under its own prompt than under other prompts "
        "(own_margin), in nats. It has no upper bound and does not change with length alone; "
        "the alarm reads the first two lines. It falls when reasoning turns into a template.",
        (
            f"{FIRST_TURN}/own_margin",
            "collapse/trajectory/own_margin",
            "probe/own_margin",
        ),
        band=f"{FIRST_TURN}/own_margin",
        names=("first turn", "trajectory", "probe"),
        overlay=(f"{FIRST_TURN}/own_margin",),
        unit="nats per reasoning",
    ),
    Chart(
        "Retrieval against chance",
        "How often reasoning is most likely under its own prompt. At chance level it shows no "
        "dependence on the prompt.",
        (
            f"{FIRST_TURN}/retrieval_acc",
            "probe/retrieval_acc",
            f"{FIRST_TURN}/retrieval_chance",
            "probe/retrieval_chance",
        ),
        band=f"{FIRST_TURN}/retrieval_acc",
        names=("first turn", "probe", "chance", "chance level of the probe"),
        share=True,
        overlay=(f"{FIRST_TURN}/retrieval_acc", f"{FIRST_TURN}/retrieval_chance"),
        unit="fraction of reasonings",
    ),
    Chart(
        "Entropy",
        "Nats per token: of the reasoning given its prompt, H(Z|X), and of all training "
        "tokens. At twice its initial value, the bonus dominates the task.",
        (f"{FIRST_TURN}/h_cond", "update/entropy"),
        band=f"{FIRST_TURN}/h_cond",
        names=("H(Z|X), first turn", "policy"),
        unit="nats per token",
    ),
    Chart(
        "Truth of the reasoning",
        "Fraction of stated facts that are true.",
        ("reasoning/grounded_rate",),
        band="reasoning/grounded_rate",
        names=("grounded",),
        share=True,
        unit="fraction of facts",
    ),
    Chart(
        "Valid replies",
        "Well formed with known actions; with closed, non-empty reasoning.",
        ("rollout/valid_rate", "rollout/valid_think_rate"),
        band="rollout/valid_rate",
        names=("valid actions", "valid reasoning"),
        share=True,
        unit="fraction of replies",
    ),
    Chart(
        "Symptoms in the text",
        "Fraction of reasonings that fit any prompt; of replies that repeat themselves, have no "
        "reasoning or do not close it. All are near 0 in a healthy run.",
        (
            "symptoms/prompt_free",
            "symptoms/loop_rate",
            "symptoms/empty_rate",
            "symptoms/unclosed_rate",
        ),
        names=("fit any prompt", "repeated text", "empty", "not closed"),
        share=True,
        unit="fraction",
    ),
    Chart(
        "Flow",
        "Whether the action depends on the reasoning (za), and on the prompt beyond the "
        "reasoning (xa), in nats per action. If za is within its interval of 0, the reasoning "
        "has no effect on the action.",
        ("flow/first_turn/za_swap", "flow/first_turn/xa_swap"),
        band="flow/first_turn/za_swap",
        names=("za_swap", "xa_swap"),
        unit="nats per action",
    ),
    Chart(
        "Training data",
        "Fraction of episodes that the filter kept; fraction of groups without reward variance.",
        ("filter/kept_ratio", "filter/zero_groups"),
        band="filter/kept_ratio",
        names=("kept", "groups without variance"),
        share=True,
    ),
    Chart(
        "Length of replies",
        "Sampled tokens per reply. Not conclusive alone.",
        ("rollout/response_length", "rollout/reasoning_length"),
        band="rollout/response_length",
        names=("reply", "reasoning"),
        unit="tokens per reply",
    ),
    Chart(
        "Gradient by reward variance: task",
        "Norm of the task's gradient in buckets of groups, from low to high variance. It "
        "should increase with the bucket.",
        tuple(f"gradient/{b}/task_norm" for b in ("zero", *(f"bucket_{i}" for i in range(6)))),
        names=("no variance", *(f"bucket {i}" for i in range(6))),
        overlay=("gradient/bucket_0/task_norm", "gradient/bucket_5/task_norm"),
        unit="norm of the gradient",
    ),
    Chart(
        "Gradient by reward variance: dominance",
        "The regularisers' fraction of the norms. Near 1 in the low buckets, only KL and "
        "entropy contribute.",
        tuple(f"gradient/{b}/dominance" for b in ("zero", *(f"bucket_{i}" for i in range(6)))),
        names=("no variance", *(f"bucket {i}" for i in range(6))),
        overlay=("gradient/bucket_0/dominance", "gradient/bucket_5/dominance"),
        unit="fraction of the norm",
    ),
    Chart(
        "Sampler against trainer",
        "Largest difference in a token's log-probability. Float rounding alone stays below "
        "1e-3 in float32.",
        ("rollout/logp_gap",),
        names=("gap",),
        logarithmic=True,
        unit="nats per token",
    ),
    Chart(
        "Seconds by stage",
        "Per step. The first step compiles.",
        tuple(f"time/{stage}" for stage in ("step", *STAGES)),
        names=("step", *STAGES),
        overlay=("time/step",),
        logarithmic=True,
        unit="seconds per step",
    ),
)


def cut(value: float) -> float:
    """Round a value to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")


def columns(rows: Sequence[Metrics], steps: Sequence[int]) -> dict[str, list[float | None]]:
    """Return {metric: its value at each of `steps`, or None}."""
    at = {int(row["step"]): row for row in rows}
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    return {
        name: [cut(at[s][name]) if s in at and name in at[s] else None for s in steps]
        for name in names
    }


def healthy_band(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval for a further value of a healthy run, or None below three values.

    This is the prediction interval of normal draws, mean ± t(n - 1) s sqrt(1 + 1 / n), from the
    first FIRST values.
    """
    first = np.asarray(values[:FIRST], float)
    n = len(first)
    if n < 3:
        return None
    half = float(stdtrit(n - 1, 0.975)) * float(first.std(ddof=1)) * math.sqrt(1 + 1 / n)
    return cut(float(first.mean()) - half), cut(float(first.mean()) + half)


def labelled(figure: str, label: str) -> str:
    """Return the name of an environment's metric a/b: a/label/b, or a/b if it is the only one."""
    return figure.replace("/", f"/{label}/", 1) if label else figure


def bands(
    figures: Mapping[str, Sequence[float | None]], labels: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Return {metric: healthy band} for CHARTS with a band, overall and per environment."""
    found = {}
    for label in dict.fromkeys(("", *labels)):
        for chart in CHARTS:
            name = labelled(chart.band, label)
            band = healthy_band([x for x in figures.get(name, ()) if x is not None])
            if band:
                found[name] = band
    return found


def average(runs: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, Any]:
    """Return {metric: [mean over runs]} and, under the name with _ci95, half-widths over runs.

    These are Student's t half-widths, or those of the runs' own intervals if all runs agree
    (`intervals.interval`). Only steps at which all runs have the metric count: otherwise the mean
    would jump when a run ends.

    Args:
      runs: `columns` of at least two runs, for the same steps.
    """
    found: dict[str, Any] = {}
    for name in runs[0]:
        if name.endswith("_ci95") or any(name not in run for run in runs):
            continue
        means, halves = [], []
        steps = zip(*(run[name] for run in runs), strict=True)
        own = [run.get(f"{name}_ci95", [None] * len(run[name])) for run in runs]
        for values, widths in zip(steps, zip(*own, strict=True), strict=True):
            given = [x for x in values if x is not None]
            whole = len(given) == len(values)
            known = [x for x in widths if x is not None]
            within = known if len(known) == len(values) else []
            means.append(cut(float(np.mean(given))) if whole else None)
            halves.append(cut(interval(given, halves=within)[1]) if whole else None)
        found |= {name: means, f"{name}_ci95": halves}
    return found


def described(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return charts as JSON objects."""
    return [dataclasses.asdict(chart) for chart in charts]
