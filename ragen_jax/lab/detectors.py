"""The page of experiment detectors: which metrics detect a known collapse, and when.

These rules were fixed before the runs:

    truth      a probe is collapsed if its fraction of grounded replies is below half of the first
               probe's
    score      change of a metric from the mean of the run's first BASELINE probes, in the direction
               that should signal collapse, divided by the absolute value of that mean; metrics of
               every step are means over the WINDOW steps around a probe
    AUC        over all later probes of all runs: the probability that a collapsed probe has a
               higher score than a healthy one (ties count half). 95 % interval: Wilson's, with the
               number of independent observations that gives the jackknife's variance over runs, at
               most SIZE per run (simulated coverage 0.93 to 1.00 for eight and twelve runs, AUC 0.5
               to 1)
    alarm      a score above the QUANTILE of all scores of healthy runs; for the false alarms of a
               healthy run, the quantile is that of the other healthy runs
    detected   a collapsed run has an alarm; the delay of its first alarm is counted from the first
               collapsed probe, the lead to the step at which success has lost a quarter
    noise      results of detectors of pure noise on the same runs (noise.py)

`step` is a control that measures only time: its score is the step of the probe.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab import noise
from ragen_jax.lab.curves import (
    WINDOW,
    Rows,
    Runs,
    Verdict,
    alarm_step,
    curve,
    draw_ranking,
    factors,
)
from ragen_jax.lab.identical import distinct
from ragen_jax.lab.noise import KINDS, Control, Truth

HEALTHY = ("entropy 0", "no penalty")  # settings whose runs should not collapse
BASELINE = 2  # number of first probes
QUANTILE = 0.95
CHANCE = 0.65  # largest AUC that counts as no detection
SIZE = 4  # largest number of independent observations per run
NOISE_CELLS = {  # result of noise detectors -> form of its (2.5 %, median, 97.5 %)
    "auc": "{1:.2f} ({0:.2f} to {2:.2f})",
    "false": "{1:.0%} ({0:.0%} to {2:.0%})",
    "runs": "{1:.0f} ({0:.0f} to {2:.0f})",
    "delay": "{1:+.0f} ({0:+.0f} to {2:+.0f})",
    "lead": "{1:+.0f} ({0:+.0f} to {2:+.0f})",
}
STEP, ALARM, ENTROPY = "step", "regime/alarm", "update/entropy"
DIRECTIONS = {  # metric -> whether it should fall (-1) or rise (+1) in a collapse
    **dict.fromkeys((f"probe/{name}" for name in ("mi_seq", "mi", "mi_released")), -1),
    **dict.fromkeys(("probe/mi_zscore", "probe/retrieval_acc"), -1),
    **dict.fromkeys(("collapse/first_turn/mi_seq", "collapse/first_turn/retrieval_acc"), -1),
    **dict.fromkeys(("collapse/trajectory/mi_seq", "collapse/trajectory/retrieval_acc"), -1),
    ENTROPY: -1,  # a fall of entropy is the usual warning sign
    "probe/h_cond": -1,
    "probe/h_marginal": -1,
    "flow/first_turn/za_swap": -1,
    "flow/first_turn/za_given_x": -1,
    "flow/first_turn/xa_swap": 1,
    "flow/first_turn/xa_given_z": 1,
    "probe/mediation/kl_direct": 1,
    "probe/mediation/kl_necessity": -1,
    "probe/mediation/kl_leakage": -1,
    "probe/mediation/h_through": 1,
    "probe/mediation/grad_prompt": 1,
    "probe/mediation/grad_reasoning": -1,
    "probe/mediation/necessity": -1,
    "probe/mediation/substantivity": -1,
    "reasoning/grounded_rate": -1,
    "reasoning/stated": -1,
    "rollout/reasoning_length": -1,
    "rollout/valid_rate": -1,
    "filter/score_mean": -1,  # reward variance
    "rollout/success": -1,
    STEP: 1,
}
FIGURES = (*(name for name in DIRECTIONS if name != STEP), *organism.FIGURES)


class Reading(NamedTuple):
    """A detector's scores of a run, at the probes after the baseline."""

    step_P: np.ndarray
    score_P: np.ndarray
    collapsed_P: np.ndarray  # bool: the truth


class Detection(NamedTuple):
    """The detection results of a metric."""

    auc: float
    low: float  # lower end of the 95 % interval
    high: float
    false: float  # fraction of the healthy runs' probes with an alarm
    runs: int  # number of collapsed runs with an alarm
    delay: float | None  # median steps from the first collapsed probe to the alarm; None: no alarm
    lead: float | None  # median steps from the alarm to the loss of success; None: no such run


def truth(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps of the probes, whether each probe is collapsed)."""
    steps, grounded = curve(rows, organism.GROUNDED)
    return steps, grounded < organism.HALF * grounded[0]


def read(rows: Rows, name: str) -> Reading | None:
    """Return a run's scores of a metric; None if it was not measured."""
    probes, collapsed = truth(rows)
    if name == STEP:
        return Reading(probes[BASELINE:], probes[BASELINE:].astype(float), collapsed[BASELINE:])
    steps, values = curve(rows, name)
    near = [values[np.abs(steps - probe) <= WINDOW // 2] for probe in probes]
    if not name.startswith("probe/"):
        values = np.array([x.mean() if len(x) else np.nan for x in near])
        # Metrics that are not measured at every step keep their last value.
        last = np.maximum.accumulate(np.where(np.isnan(values), -1, np.arange(len(values))))
        values = np.where(last >= 0, values[last], np.nan)
    if len(values) != len(probes) or np.isnan(values).all():
        return None
    base = np.nanmean(values[:BASELINE])
    score = DIRECTIONS[name] * (values - base) / abs(base)
    kept = ~np.isnan(score) & (np.arange(len(probes)) >= BASELINE)
    return Reading(probes[kept], score[kept], collapsed[kept])


def area(readings: Sequence[Reading]) -> float:
    """Return the probability that a collapsed probe has a higher score than a healthy one."""
    score = np.concatenate([r.score_P for r in readings])
    collapsed = np.concatenate([r.collapsed_P for r in readings])
    if collapsed.all() or not collapsed.any():
        return float("nan")
    positive, negative = np.sort(score[collapsed]), score[~collapsed]
    below = np.searchsorted(positive, negative, "left")
    tied = np.searchsorted(positive, negative, "right") - below
    return float(1 - (below + tied / 2).mean() / len(positive))


def observations(readings: Sequence[Reading]) -> float | None:
    """Return the number of independent observations that would give the variance of `area`.

    None if the area cannot be computed without one of the runs.
    """
    deleted = np.array([area([r for r in readings if r is not removed]) for removed in readings])
    if np.isnan(deleted).any():
        return None
    runs, value = len(readings), area(readings)
    variance = (runs - 1) / runs * float(np.sum((deleted - deleted.mean()) ** 2))
    most = SIZE * runs
    return most if variance == 0 else min(most, max(value * (1 - value) / variance, 1.0))


def area_interval(readings: Sequence[Reading]) -> tuple[float, float]:
    """Return the 95 % interval of `area` over runs; (0, 1) if `observations` is None."""
    n = observations(readings)
    if n is None:
        return 0.0, 1.0
    value, t = area(readings), stdtrit(len(readings) - 1, 0.975)
    middle = (value + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * np.sqrt(value * (1 - value) / n + t * t / (4 * n * n))
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def area_p(readings: Sequence[Reading], null: float) -> float:
    """Return the two-sided p-value of an AUC of `null`, < 0.05 if the interval excludes it."""
    n = observations(readings)
    if n is None:
        return 1.0
    distance = abs(area(readings) - null) / np.sqrt(null * (1 - null) / n)
    return float(2 * stdtr(len(readings) - 1, -distance))


def truths(runs: Runs) -> dict[tuple[str, str, int], Truth]:
    """Return the known truth about each run at the probes after the baseline."""
    found = {}
    for key, rows in runs.items():
        reading = read(rows, STEP)
        if reading is not None:
            lost = organism.success_lost(rows)
            found[key] = Truth(reading.step_P, reading.collapsed_P, key[0] in HEALTHY, lost)
    return found


def controls(runs: Runs) -> dict[str, Control]:
    """Return {kind: results of noise detectors}; {} without healthy or without collapsed runs."""
    known = truths(distinct(runs))
    healthy = sum(truth.healthy for truth in known.values())
    ill = sum(t.collapsed_P.any() and not t.healthy for t in known.values())
    if healthy < 2 or not ill:
        return {}
    return {kind: noise.control(known, kind, baseline=BASELINE, level=QUANTILE) for kind in KINDS}


def compare_with_noise(seen: Detection, found: dict[str, Control]) -> str:
    """Return whether the AUC distinguishes a metric from noise, and in which direction."""
    every = np.concatenate([control.draws["auc"] for control in found.values()])
    if seen.auc > every.max():
        return "yes"
    return "yes, in the other direction" if seen.auc < every.min() else "**no**"


def judge(runs: Runs, name: str) -> Detection | None:
    """Return a metric's results over all runs; identical runs count once.

    None if the runs lack the metric, or without healthy or collapsed runs.
    """
    runs = distinct(runs)
    readings = {key: reading for key, rows in runs.items() if (reading := read(rows, name))}
    healthy = [r for (setting, *_), r in readings.items() if setting in HEALTHY]
    ill = {key: r for key, r in readings.items() if r.collapsed_P.any() and key[0] not in HEALTHY}
    if len(healthy) < 2 or not ill:
        return None
    every = list(readings.values())
    low, high = area_interval(every)

    def threshold(these):
        return np.quantile(np.concatenate([r.score_P for r in these]), QUANTILE)

    false = [np.mean(r.score_P > threshold([x for x in healthy if x is not r])) for r in healthy]
    level = threshold(healthy)
    delays, leads = [], []
    for key, r in ill.items():
        alarms = r.step_P[r.score_P > level]
        if len(alarms):
            delays.append(alarms[0] - r.step_P[r.collapsed_P][0])
            lost = organism.success_lost(runs[key])
            leads += [] if lost is None else [lost - alarms[0]]
    return Detection(
        *(area(every), low, high, float(np.mean(false)), len(delays)),
        float(np.median(delays)) if delays else None,
        float(np.median(leads)) if leads else None,
    )


def _readings(runs: Runs, name: str) -> list[Reading]:
    """Return a metric's scores in all distinct runs that have it."""
    return [r for rows in distinct(runs).values() if (r := read(rows, name))]


def judge_alarm(runs: Runs) -> tuple[int, int, int, int, float | None]:
    """Return (healthy runs, those with alarm, collapsed runs, those with alarm, median delay)."""
    false, healthy, seen, ill, delays = 0, 0, 0, 0, []
    for (setting, *_), rows in runs.items():
        probes, collapsed = truth(rows)
        step = alarm_step(rows)
        if setting in HEALTHY:
            healthy, false = healthy + 1, false + (step is not None)
        elif collapsed.any():
            ill, seen = ill + 1, seen + (step is not None)
            delays += [] if step is None else [step - probes[collapsed][0]]
    return healthy, false, ill, seen, float(np.median(delays)) if delays else None


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on RAGEN-2's claim that MI detects the collapse and entropy does not."""
    found, noise_controls = [], controls(runs)
    for name, should_detect in ((organism.MI, True), (ENTROPY, False)):
        seen = judge(runs, name)
        if not seen:
            continue
        if should_detect:
            claim = f"a fall of `{name}` detects the loss of input dependence"
            word = (
                "reproduced" if seen.low > 0.5 else "reversed" if seen.high < 0.5 else "undecided"
            )
            noisy = compare_with_noise(seen, noise_controls) == "**no**"
            word = "undecided" if noisy else word
            p = 1.0 if noisy else area_p(_readings(runs, name), 0.5)
        else:
            claim = f"a fall of `{name}` does not detect the loss of input dependence"
            word = "reversed" if seen.low > CHANCE else "undecided"
            word = "reproduced" if seen.high < CHANCE else word
            p = area_p(_readings(runs, name), CHANCE)
        text = f"AUC {seen.auc:.2f} (95 % CI {seen.low:.2f} to {seen.high:.2f})"
        found.append(Verdict("section 4", claim, word, text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    results = {name: seen for name in DIRECTIONS if (seen := judge(runs, name))}
    ill = sum(bool(truth(rows)[1].any()) for key, rows in runs.items() if key[0] not in HEALTHY)
    collapsed_runs = sum(
        bool(truth(rows)[1].any()) for key, rows in runs.items() if key[0] in HEALTHY
    )
    healthy = sum(key[0] in HEALTHY for key in runs)
    settings, treatments, seeds = factors(runs)
    driven = ", ".join(f"`{x}`" for x in settings if x not in HEALTHY)
    at_rest = ", ".join(f"`{x}`" for x in settings if x in HEALTHY)
    lines = [
        f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}, treatments "
        f"{', '.join(treatments)}. In the setting {driven}, {ill} of {len(runs) - healthy} runs "
        f"fell below half of their first fraction of grounded replies; in {at_rest}, "
        f"{collapsed_runs} of {healthy} did.",
        "",
        f"![area under the ROC curve of every metric]({picture})",
        "",
        "| metric | expected | AUC (95 % CI) | false alarms | runs detected | delay, steps | "
        "lead, steps | distinguishable from noise |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    noise_controls = controls(runs)
    for kind, found in noise_controls.items():
        auc, false, runs_seen, delay, lead = (
            "" if (spread := found.spread(name)) is None else form.format(*spread)
            for name, form in NOISE_CELLS.items()
        )
        cells = f"*noise, {kind}*", "", auc, false, f"{runs_seen} of {ill}", delay, lead, ""
        lines.append("| " + " | ".join(cells) + " |")
    for name, seen in sorted(results.items(), key=lambda item: -item[1].auc):
        direction = "rise" if DIRECTIONS[name] > 0 else "fall"
        cells = (
            *(f"`{name}`", direction, f"{seen.auc:.2f} ({seen.low:.2f} to {seen.high:.2f})"),
            *(
                f"{seen.false:.0%}",
                f"{seen.runs} of {ill}{_mark(noise_controls, 'runs', seen.runs)}",
            ),
            *(
                "" if x is None else f"{x:+.0f}{_mark(noise_controls, what, x)}"
                for what, x in (("delay", seen.delay), ("lead", seen.lead))
            ),
            compare_with_noise(seen, noise_controls),
        )
        lines.append("| " + " | ".join(cells) + " |")
    count, false, _, seen, delay = judge_alarm(runs)
    shown = "" if delay is None else f"{delay:+.0f}"
    lines += [
        f"| `{ALARM}` | | | {false} of {count} runs | {seen} of {ill} | {shown} | | |",
        "",
        f"Noise: {noise.DRAWS} detectors of white noise and {noise.DRAWS} of a random walk, on the "
        "same runs: the median and, in brackets, the range of 95 % of them. ~: the value is within "
        "that range for at least one kind of noise, so it alone does not distinguish the metric "
        "from noise. Distinguishable from noise: whether the AUC is outside the range of all noise "
        "detectors. Alarms without a reason come early, so a long lead alone is no evidence.",
        "",
        "Expected: the direction in which the metric should move in a collapse. An AUC below "
        "0.5 means that it moved in the other direction. Delay: steps from the first collapsed "
        "probe to the first alarm. Lead: steps from that alarm until success has lost a quarter of "
        "its peak. Both are medians over the runs that have them.",
        "",
        "The rule, fixed before the runs: a probe is collapsed if its fraction of grounded replies "
        "is below half of the run's first. A score is the change of a metric from its mean over "
        f"the first {BASELINE} probes, divided by that mean (metrics of every step: means over "
        f"{WINDOW} steps). A score raises an alarm if it is above {100 * QUANTILE:.0f} % of the "
        "scores of the healthy runs; for the false alarms of a healthy run, this level is computed "
        "from the other healthy runs. Intervals are Wilson's, with the jackknife's variance over "
        f"runs. In runs recorded before `own_margin` existed, `{ALARM}` read `mi_released` "
        "(docs/diagnostics.md describes both).",
    ]
    return "\n".join(lines) + "\n"


def _mark(noise_controls: dict[str, Control], name: str, value: float) -> str:
    """Return a mark for a value within the range of a kind of noise; "" for any other value."""
    return " ~" if any(found.contains(name, value) for found in noise_controls.values()) else ""


def draw(runs: Runs, path: Path) -> None:
    """Draw the AUC of each metric with its interval."""
    results = {name: seen for name in DIRECTIONS if (seen := judge(runs, name))}
    areas = {name: (seen.auc, seen.low, seen.high) for name, seen in results.items()}
    draw_ranking(areas, path, "area under the ROC curve", (0, 1))
