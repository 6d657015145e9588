"""The page of experiment mechanism: which prompts, by which part of the loss, carry the drift.

These rules were fixed before the runs:

    pull          of a part of the loss on a quarter of 48 held-out groups by reward variance: how
                  far a plain gradient step on it moves the log-odds of the grounded style
                  (diagnostics/drift.py), per unit of learning rate; the mean over the steps until
                  half of mi_seq is lost. Below 0: towards templates
    theory        RAGEN-2's, in two predictions: the entropy part of the two lower quarters pulls
                  harder towards templates than that of the two upper quarters; and a bonus on only
                  the upper half of a step's groups keeps more information than a bonus on only the
                  lower half (`treatments.kept_figure`)
    figure 3    of RAGEN-2, before and after: at the first and the last measurement the norm of the
                task's gradient is larger on the two upper quarters than on the two lower ones, that
                of the entropy bonus is the same: within FLAT. Differences over the mean of all

Each is decided by an interval over seeds (Student's t) on one side of 0. Its confidence is that of
the interim analysis at which the experiment ended (interim_analyses.py), 95 % without interim
analyses.
"""

from pathlib import Path

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.diagnostics.intervals import interval
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab import treatments as cures
from ragen_jax.lab.curves import SUCCESS, Rows, Runs, Verdict, curve, factors, judged, judged_within
from ragen_jax.lab.identical import is_unchanged
from ragen_jax.lab.interim_analyses import confidence, looks
from ragen_jax.lab.model_organism import GROUNDED, MI
from ragen_jax.lab.statistics import ERROR, p_value, p_within
from ragen_jax.storage.writers import save_figure

ALL, UPPER, LOWER = "bonus on all", "bonus on the upper half", "bonus on the lower half"
QUARTERS = 4
PARTS = ("task", "entropy")
PULLS = tuple(
    f"gradient/bucket_{quarter}/{part}_pull" for quarter in range(QUARTERS) for part in PARTS
)
NORMS = tuple(
    f"gradient/bucket_{quarter}/{part}_norm" for quarter in range(QUARTERS) for part in PARTS
)
FLAT = 0.25
MOMENTS = {"before collapse": 0, "after collapse": -1}  # which of a run's measurements
VARIANCES = tuple(f"gradient/bucket_{quarter}/reward_variance" for quarter in range(QUARTERS))
FIGURES = (*organism.FIGURES, *PULLS, *NORMS, *VARIANCES)


def until_half(rows: Rows, name: str) -> float:
    """The mean of a figure over the steps until half of mi_seq is lost; at least the first."""
    steps, values = curve(rows, name)
    return float(values[steps <= max(cures.half(rows), steps[0])].mean())


def pulls(runs: Runs) -> np.ndarray:
    """[seeds, quarters, parts], of the arm with a bonus on all groups."""
    ((setting,), _, seeds) = factors(runs)
    found = [[until_half(runs[setting, ALL, seed], name) for name in PULLS] for seed in seeds]
    return np.reshape(found, (len(seeds), QUARTERS, len(PARTS)))


def slope_of_norms(runs: Runs, part: str, measurement: int, level: float) -> tuple[float, float]:
    """(mean, half-width over seeds at confidence `level`) of the norms of the upper quarters less
    those of the lower quarters, over the mean of all."""
    ((setting,), _, seeds) = factors(runs)
    found = []
    for seed in seeds:
        rows = runs[setting, ALL, seed]
        norm_Q = np.array(
            [
                curve(rows, f"gradient/bucket_{quarter}/{part}_norm")[1][measurement]
                for quarter in range(QUARTERS)
            ]
        )
        found.append(float((norm_Q[2:].mean() - norm_Q[:2].mean()) / norm_Q.mean()))
    return interval(found, confidence=level)


def level_of(experiment: Experiment, runs: Runs) -> float:
    """The confidence of the page's verdicts."""
    return confidence(experiment, len(factors(runs)[2]))


def spent(p: float, level: float) -> float:
    """Rescale a p-value to a single look: below 0.05 if the interval at `level` decides."""
    return min(1.0, p * ERROR / (1 - level))


def figure_3(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return, per moment and part, whether its gradient's norm rises with reward variance."""
    found = []
    level, df = level_of(experiment, runs), len(factors(runs)[2]) - 1
    for when, measurement in MOMENTS.items():
        for part, claim in (("task", "grows with reward variance"), ("entropy", "does not")):
            mean, half_width = slope_of_norms(runs, part, measurement, level)
            if part == "task":
                word = judged(mean, half_width)
                p = p_value(mean, half_width, df, confidence=level)
            else:
                word = judged_within(mean, half_width, FLAT)
                p = p_within(mean, half_width, df, FLAT, confidence=level)
            text = f"{when} the norm of the {part} gradient {claim}"
            figures = f"upper minus lower half, over the mean: {mean:+.2f} ± {half_width:.2f}"
            found.append(Verdict("figure 3", text, word, figures, spent(p, level)))
    return found


def primary(runs: Runs) -> list[float]:
    """Return information kept with the bonus on the upper half minus the lower half, by seed."""
    ((setting,), _, seeds) = factors(runs)
    return [
        cures.kept_figure(runs[setting, UPPER, seed])
        - cures.kept_figure(runs[setting, LOWER, seed])
        for seed in seeds
    ]


def pull_of_entropy(runs: Runs) -> tuple[list[float], list[float]]:
    """The entropy part's pull on the two lower and the two upper quarters, by seed."""
    entropy_SQ = pulls(runs)[:, :, PARTS.index("entropy")]
    return entropy_SQ[:, :2].sum(1).tolist(), entropy_SQ[:, 2:].sum(1).tolist()


def predictions(
    experiment: Experiment, runs: Runs
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(mean, half-width at the page's confidence) of both predictions of the theory: by how much
    harder the entropy part of the lower half pulls towards templates, and how much more information
    a bonus on the upper half keeps."""
    lower_S, upper_S = pull_of_entropy(runs)
    harder = [upper - lower for lower, upper in zip(lower_S, upper_S, strict=True)]
    level = level_of(experiment, runs)
    return interval(harder, confidence=level), interval(primary(runs), confidence=level)


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Both predictions of the theory, and figure 3."""
    of_pull, of_bonus = predictions(experiment, runs)
    level, df = level_of(experiment, runs), len(factors(runs)[2]) - 1

    def p_of(estimate):
        return spent(p_value(*estimate, df, confidence=level), level)

    idle = is_unchanged(runs, UPPER, LOWER)
    return [
        Verdict(
            "section 5",
            "the entropy bonus pulls harder towards templates on prompts of low reward variance",
            judged(*of_pull),
            "lower minus upper half {:+.3g} ± {:.2g}".format(*of_pull),
            p_of(of_pull),
        ),
        Verdict(
            "section 5",
            "a bonus on the upper half alone keeps more information than one on the lower half",
            "not testable (the same runs)" if idle else judged(*of_bonus),
            "{:+.3f} ± {:.3f}".format(*of_bonus),
            None if idle else p_of(of_bonus),
        ),
        *figure_3(experiment, runs),
    ]


def verdict(experiment: Experiment, runs: Runs) -> str:
    """Sentences: both predictions of the theory."""
    lower_S, upper_S = pull_of_entropy(runs)
    of_pull, of_bonus = predictions(experiment, runs)
    words = {
        "reproduced": "as predicted",
        "undecided": "no difference seen",
        "reversed": "reversed",
    }
    return (
        "The entropy part of the lower half pulls towards templates "
        f"{-np.mean(lower_S):.3g}, that of the upper half {-np.mean(upper_S):.3g}: lower minus "
        f"upper {of_pull[0]:+.3g} ± {of_pull[1]:.3g} (**{words[judged(*of_pull)]}**). Information "
        "kept with a bonus on the upper half alone minus one on the lower half alone: "
        f"{of_bonus[0]:+.3f} ± {of_bonus[1]:.3f} (**{words[judged(*of_bonus)]}**)."
    )


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    ((setting,), treatments, seeds) = factors(runs)
    steps = max(rows[-1]["step"] for rows in runs.values())
    pull_SQP = pulls(runs)
    lines = [
        f"{len(runs)} runs of {steps} steps without filter, seeds {', '.join(map(str, seeds))}; "
        f"{setting}. Written by that command.",
        "",
        verdict(experiment, runs),
        "",
        f"![pull by quarter, and information]({picture})",
        "",
        "## Pull of each part, by reward variance",
        "",
        "Of held-out groups, with a bonus on all; means until half of `mi_seq` was lost, 95 % "
        f"intervals over {len(seeds)} seeds (Student's t). Below 0: towards templates. The task's "
        "advantages are deviations from the group's mean.",
        "",
        "| quarter | reward variance | " + " | ".join(PARTS) + " |",
        "| --- | --- | " + " | ".join("---" for _ in PARTS) + " |",
    ]
    for quarter in range(QUARTERS):
        variance = np.mean([until_half(runs[setting, ALL, s], VARIANCES[quarter]) for s in seeds])
        cells = [
            "{:+.3g} ± {:.2g}".format(*interval(pull_SQP[:, quarter, part].tolist()))
            for part in range(len(PARTS))
        ]
        lines.append(f"| {quarter + 1} | {variance:.3g} | " + " | ".join(cells) + " |")
    lines += ["", "## Figure 3 of RAGEN-2, before and after", ""]
    lines += ["| claim | verdict | figures |", "| --- | --- | --- |"]
    lines += [f"| {v.claim} | **{v.verdict}** | {v.figures} |" for v in figure_3(experiment, runs)]
    lines += [
        "",
        "## Where the bonus lies",
        "",
        "| arm | kept | to a bonus on all | half | grounded at the end | success at the end |",
        "| --- | --- | --- | --- | --- | --- |",
    ]

    def mean(measure, name):
        return float(np.mean([measure(runs[setting, name, seed]) for seed in seeds]))

    for name in treatments:
        middle = float(np.median([cures.half(runs[setting, name, seed]) for seed in seeds]))
        compared = cures.difference(runs, cures.kept_figure, name, ALL)
        cells = (
            *(name, f"{mean(cures.kept_figure, name):.2f}"),
            "" if name == ALL else cures.shown(runs, name, ALL, compared),
            f"> {steps}" if np.isinf(middle) else f"{middle:.0f}",
            *(
                f"{mean(lambda rows, x=x: cures.last(rows, x), name):.2f}"
                for x in (GROUNDED, SUCCESS)
            ),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "The rule, fixed before the runs: the paper's theory predicts that the entropy part of "
        "the two lower quarters pulls harder towards templates than that of the two upper ones, "
        "and that a bonus on the upper half of a step's groups alone keeps more information than "
        "one on the lower half alone; each counts where its interval over seeds excludes 0, at a "
        f"confidence of {level_of(experiment, runs):.1%}, which leaves the rest of the error of 5 "
        f"% to looks at fewer seeds ({len(looks(experiment))} looks in all). "
        "Before and after: the first and the last measurement of a run with a bonus on all; the "
        f"entropy gradient is called the same where the interval lies within {FLAT:g} of 0.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """The pull of each part by quarter, and mi_seq of every arm."""
    import matplotlib.pyplot as plt

    ((setting,), treatments, seeds) = factors(runs)
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    pull_SQP = pulls(runs)
    for part, name in enumerate(PARTS):
        at = np.arange(QUARTERS) + 0.4 * part
        means, halves = zip(*(interval(x.tolist()) for x in pull_SQP[:, :, part].T), strict=True)
        left.bar(at, means, 0.38, yerr=halves if len(seeds) > 1 else None, label=name)
    left.set_xticks(np.arange(QUARTERS) + 0.2, [f"{q + 1}" for q in range(QUARTERS)])
    left.set_xlabel("quarter by reward variance")
    left.set_title("pull on the log-odds of the grounded style", fontsize=10)
    left.legend(fontsize=8)
    for color, name in zip(("tab:green", "tab:red", "tab:gray"), treatments, strict=True):
        for seed in seeds:
            right.plot(*curve(runs[setting, name, seed], MI), color=color, alpha=0.3, linewidth=0.8)
        steps = curve(runs[setting, name, seeds[0]], MI)[0]
        means = np.mean([curve(runs[setting, name, seed], MI)[1] for seed in seeds], axis=0)
        right.plot(steps, means, color=color, linewidth=2, label=name)
    right.set_title("mi_seq of the probe, nats", fontsize=10)
    right.set_xlabel("step")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
