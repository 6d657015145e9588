"""The page of experiment asking: do agents stop asking, and stop using what they are told?

These rules were fixed before the runs. All figures are changes within a run: the last evaluation
minus that before any update, on the same held-out problems. A claim is reproduced if the 95 %
interval of the change over seeds (Student's t) is on the claimed side of 0, and reversed if it is
on the other side:

    reward     success; where searches cost reward, success minus the cost of the questions
    questions  searches per episode (eval/ask/questions)
    shown      fraction of the needed facts that the agent has seen (eval/ask/shown): from question
               to observation
    use        success with all needed facts seen minus success without (eval/ask/use): from
               observation to belief

Where all runs change by the same amount, as those of agents that stop asking do, agreement is no
certainty: the interval is then that of the held-out problems.
"""

import math
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.intervals import interval, wilson_half_width
from ragen_jax.lab.ceiling import config_of
from ragen_jax.lab.curves import (
    SUCCESS,
    Rows,
    Runs,
    Verdict,
    curve,
    factors,
    judge_difference,
    missing_seeds,
    updates,
)
from ragen_jax.lab.statistics import in_words, p_text, p_value
from ragen_jax.storage.writers import save_figure

QUESTIONS, INFORMATIVE = "eval/ask/questions", "eval/ask/informative"
SHOWN, USE = "eval/ask/shown", "eval/ask/use"
SHOWN_SUCCESS, BLIND_SUCCESS = "eval/ask/success_shown", "eval/ask/success_blind"
FIGURES = (SUCCESS, QUESTIONS, INFORMATIVE, SHOWN, USE, SHOWN_SUCCESS, BLIND_SUCCESS)
SOURCE = "arXiv 2603.12109"
COST = "env.options.search_cost"
NOT_TESTABLE = "not testable"
NO_USE = "no run saw all needed facts, or lacked some, at both evaluations"
COLORS = ("tab:red", "tab:orange", "tab:blue", "tab:green")


def reward_at_evaluations(rows: Rows, cost: float) -> np.ndarray:
    """Return success minus the cost of the questions, at each evaluation."""
    _, success = curve(rows, SUCCESS)
    _, questions = curve(rows, QUESTIONS)
    return success - cost * questions


def measures(cost: float) -> dict[str, Callable[[Rows], np.ndarray]]:
    """Return {figure: function from a run's rows to its values at the evaluations}."""
    return {
        "reward": lambda rows: reward_at_evaluations(rows, cost),
        "questions": lambda rows: curve(rows, QUESTIONS)[1],
        "shown": lambda rows: curve(rows, SHOWN)[1],
        "use": lambda rows: curve(rows, USE)[1],
    }


def cost_of(experiment: Experiment, treatment: str) -> float:
    """Return the reward that a search costs with a treatment."""
    return float(experiment.treatments.get(treatment, {}).get(COST, 0.0))


def first_and_last(rows: Rows) -> list[Metrics]:
    """Return the rows of the first and the last evaluation."""
    evaluated = [row for row in rows if SUCCESS in row]
    return [evaluated[0], evaluated[-1]]


def half_width(value: float, least: float, most: float, episodes: int) -> float:
    """Return (at least) the 95 % half-width of the mean over episodes of values within bounds."""
    width = most - least
    return width * wilson_half_width((value - least) / width, episodes)


def change(
    experiment: Experiment, runs: Runs, treatment: str, figure: str
) -> tuple[float, float, int] | None:
    """Return (mean over seeds, 95 % half-width, degrees of freedom) of the change of a figure.

    Runs without the figure at their first or last evaluation are left out; None if no run is left.
    """
    cost = cost_of(experiment, treatment)
    found, halves = [], []
    for (setting, name, _), rows in runs.items():
        values = measures(cost)[figure](first_and_last(rows)) if name == treatment else ()
        if len(values) < 2:
            continue
        found.append(float(values[1] - values[0]))
        config = config_of(experiment, setting, treatment)
        turns, episodes = config.env.max_turns, config.eval.episodes
        bounds = {"reward": (-cost * turns, 1.0), "questions": (0.0, turns), "shown": (0.0, 1.0)}
        # The episodes of each of the two rates of use are not counted.
        halves.append(
            math.hypot(*(half_width(value, *bounds[figure], episodes) for value in values))
            if figure in bounds
            else 1.0
        )
    return (*interval(found, halves=halves), len(found) - 1) if found else None


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on questions, observations and beliefs of each treatment."""
    _, treatments, _ = factors(runs)
    costly = [name for name in treatments if cost_of(experiment, name)]
    free = [name for name in treatments if name not in costly]
    claims = [
        *(("RL lowers the number of questions", name, "questions", -1) for name in free),
        *(("RL lowers the use of observations", name, "use", -1) for name in free),
        *(("reward rises", name, "reward", 1) for name in treatments),
        *(("RL lowers the number of questions", name, "questions", -1) for name in costly),
        *(("RL lowers the fraction of needed facts seen", name, "shown", -1) for name in costly),
        *(("RL lowers the use of observations", name, "use", -1) for name in costly),
    ]
    found = []
    for claim, treatment, figure, sign in claims:
        source = SOURCE if treatment in free else "organism of this page"
        claim = f"{claim}, `{treatment}`"
        changed = change(experiment, runs, treatment, figure)
        if changed is None:
            found.append(Verdict(source, claim, NOT_TESTABLE, NO_USE))
            continue
        mean, half, df = changed
        word = judge_difference(sign * mean, half)
        found.append(Verdict(source, claim, word, in_words(mean, half), p_value(*changed)))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    _, _, seeds = factors(runs)
    lines = [
        f"{len(runs)} runs of {max(rows[-1]['step'] for rows in runs.values())} steps, config "
        f"{experiment.config}, seeds {', '.join(map(str, seeds))}."
        + missing_seeds(runs, experiment.seeds),
        "",
        "| claim | source | change | p | verdict |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {v.claim} | {v.source} | {v.figures} | {p_text(v.p)} | **{v.verdict}** |"
            for v in verdicts(experiment, runs)
        ),
        "",
        f"![success, questions, facts seen and their use]({picture})",
        "",
        "## Every run",
        "",
        "`a -> b`: before any update, and at the end. Reward: success minus the cost of the "
        "questions. Informative: fraction of the questions that showed a needed fact for the first "
        "time. Facts seen: fraction of the needed facts. Use: success with all needed facts seen "
        "minus success without, which are the last two columns. None: no such question or episode.",
        "",
        "| treatment | seed | updates | reward | success | questions | informative | facts seen | "
        "use | success, all seen | success, others |",
        "|" + " --- |" * 11,
    ]
    for (_, treatment, seed), rows in runs.items():
        ends = first_and_last(rows)
        reward = reward_at_evaluations(ends, cost_of(experiment, treatment))
        columns = [reward] + [[row.get(name) for row in ends] for name in FIGURES]
        shown = [" -> ".join("none" if x is None else f"{x:.2f}" for x in pair) for pair in columns]
        cells = (treatment, seed, updates(rows), *shown)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "The rule, fixed before the runs: a claim is about the change of a figure from the "
        "evaluation before any update to the last, on the same held-out questions; it is "
        "reproduced if the 95 % CI over seeds (Student's t) is on the claimed side of 0, and "
        "reversed if it is on the other side. If all runs change by the same amount, the interval "
        "is that of the held-out questions instead. `diagnostics/asking.py` defines the figures. "
        "Where searches cost reward, the agent has a reason to stop: it is an organism whose loss "
        "of observations is known, and says whether the figures see it. A step in which all "
        "episodes of each group have the same reward makes no update.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw the figures at each evaluation, a line per run."""
    import matplotlib.pyplot as plt

    _, treatments, seeds = factors(runs)
    figures = {
        "held-out success": SUCCESS,
        "questions per episode": QUESTIONS,
        "needed facts seen": SHOWN,
        "use: success with all facts\nminus success without": USE,
    }
    fig, axes = plt.subplots(1, len(figures), figsize=(13, 3), layout="constrained")
    for axis, (title, name) in zip(axes, figures.items(), strict=True):
        for color, treatment in zip(cycle(COLORS), treatments, strict=False):
            for (_, of_run, seed), rows in runs.items():
                if of_run == treatment:
                    label = treatment if seed == seeds[0] else None
                    axis.plot(*curve(rows, name), ".-", color=color, linewidth=0.9, label=label)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axes[0].legend(fontsize=7)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
