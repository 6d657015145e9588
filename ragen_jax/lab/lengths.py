"""The page of experiments on length: do replies shorten because information is lost?

The project page of RAGEN-2 says that replies get shorter in all environments, and the paper's MI is
divided by the number of tokens of the reasoning. Here information has no length: mi_seq is in nats
per reasoning. These rules were fixed before the rows were read for them:

    length     tokens of a reasoning, mean of the last STEPS steps over that of the first STEPS
    shorter    the length is below SHORTER
    kept       last mi_seq of the probe over its first; lost: below HALF
    per token  the same for `mi`, which is mi_seq divided by the length
    claims     most runs that lost information got shorter; most runs that got shorter lost
               information (exact binomial tests); and arms with shorter reasoning keep less
               information (Spearman's correlation over arms, means over seeds, permutation test)

Identical runs count once.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab.curves import Rows, Runs, Verdict, curve
from ragen_jax.lab.identical import distinct
from ragen_jax.lab.model_organism import HALF
from ragen_jax.lab.statistics import ERROR, LEAST_SETTINGS, judge_count, p_text, permutation_test
from ragen_jax.storage.writers import save_figure

LENGTH, MI, PER_TOKEN = "rollout/reasoning_length", "probe/mi_seq", "probe/mi"
FIGURES = (LENGTH, MI, PER_TOKEN)
STEPS = 3
SHORTER = 0.95
SOURCE = "RAGEN-2, project page"
KINDS = (  # (shorter, lost) -> description
    ((True, True), "shorter, information lost"),
    ((True, False), "shorter, information kept (healthy)"),
    ((False, True), "not shorter, information lost"),
    ((False, False), "not shorter, information kept"),
)


class Reading(NamedTuple):
    """The changes of a run; 1: unchanged."""

    length: float
    kept: float
    per_token: float

    @property
    def kind(self) -> tuple[bool, bool]:
        """Return (got shorter, lost its information), by the rule above."""
        return self.length < SHORTER, self.kept < HALF


def read(rows: Rows) -> Reading:
    """Return the changes of a run, by the rule above."""
    _, length = curve(rows, LENGTH)
    _, mi = curve(rows, MI)
    _, per_token = curve(rows, PER_TOKEN)
    return Reading(
        float(length[-STEPS:].mean() / length[:STEPS].mean()),
        float(mi[-1] / mi[0]),
        float(per_token[-1] / per_token[0]),
    )


def by_arm(runs: Runs) -> dict[tuple[str, str], Reading]:
    """Return {(setting, treatment): mean changes over seeds}; identical runs count once."""
    found: dict[tuple[str, str], list[Reading]] = {}
    for (setting, treatment, _), rows in distinct(runs).items():
        found.setdefault((setting, treatment), []).append(read(rows))
    return {arm: Reading(*np.mean(readings, axis=0).tolist()) for arm, readings in found.items()}


def verdicts(experiment: Experiment, runs: Runs) -> list[Verdict]:
    """Return the verdicts on length and information."""
    kinds = [read(rows).kind for rows in distinct(runs).values()]
    found = []
    for claim, chosen, yes in (
        ("most runs that lose half of their information get shorter", 1, 0),
        ("most runs that get shorter lose half of their information", 0, 1),
    ):
        of = [kind[yes] for kind in kinds if kind[chosen]]
        if not of:
            found.append(Verdict(SOURCE, claim, "not testable (no such run)", "0 runs"))
            continue
        word, p, (low, high) = judge_count(sum(of), len(of) - sum(of))
        text = f"{sum(of)} of {len(of)} runs (95 % CI {low:.2f} to {high:.2f})"
        found.append(Verdict(SOURCE, claim, word, text, p))
    claim = "arms whose reasoning gets shorter keep less information, in nats per reasoning"
    length, kept, _ = np.array(list(by_arm(runs).values())).T
    if len(length) < LEAST_SETTINGS:
        found.append(Verdict(SOURCE, claim, "too few settings", f"{len(length)} arms"))
        return found
    correlation, p = permutation_test(length.tolist(), kept.tolist())
    word = "reproduced" if correlation > 0 else "reversed"
    text = f"Spearman {correlation:+.2f} over {len(length)} arms"
    found.append(Verdict(SOURCE, claim, word if p < ERROR else "undecided", text, p))
    return found


def markdown(experiment: Experiment, runs: Runs, picture: str) -> str:
    """Return the text of the page, after its question and command."""
    readings = [read(rows) for rows in distinct(runs).values()]
    arms = by_arm(runs)
    lines = [
        f"The runs are those of [{experiment.rows}]({experiment.rows}.md): {len(runs)}, of which "
        f"{len(readings)} differ.",
        "",
        "| claim | result | p | verdict |",
        "| --- | --- | --- | --- |",
    ]
    for v in verdicts(experiment, runs):
        lines.append(f"| {v.claim} | {v.figures} | {p_text(v.p)} | **{v.verdict}** |")
    lines += [
        "",
        f"![length and information]({picture})",
        "",
        "| kind of run | runs | length, last over first | information kept | kept per token |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind, text in KINDS:
        of = [r for r in readings if r.kind == kind]
        means = [f"{x:.2f}" for x in np.mean(of, axis=0)] if of else [""] * 3
        lines.append(f"| {text} | {len(of)} | " + " | ".join(means) + " |")
    if len(arms) >= LEAST_SETTINGS:
        length, _, per_token = np.array(list(arms.values())).T
        correlation, p = permutation_test(length.tolist(), per_token.tolist())
        lines += [
            "",
            "With information per token, as in the paper's MI, the correlation of length and "
            f"information kept over arms is {correlation:+.2f} (p = {p:.3f}): the length is in its "
            "denominator.",
        ]
    lines += [
        "",
        "The rule, fixed before the rows were read for it: the length is the mean number of tokens "
        f"of a reasoning in the last {STEPS} steps over that in the first {STEPS}; a run got "
        f"shorter below {SHORTER:g}. Information kept is the last `mi_seq` of the probe (nats per "
        "reasoning) over its first, lost below one half. Counts are judged by the exact binomial "
        "test, correlations over arms (means over seeds) by the permutation test. Identical runs "
        "count once. The rows are older than the rule.",
    ]
    return "\n".join(lines) + "\n"


def draw(runs: Runs, path: Path) -> None:
    """Draw information kept against length, a point per run: in nats, and per token."""
    import matplotlib.pyplot as plt

    length, kept, per_token = np.array([read(rows) for rows in distinct(runs).values()]).T
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, values, name in zip(axes, (kept, per_token), ("mi_seq", "mi"), strict=True):
        axis.plot(length, values, ".", color="tab:blue")
        axis.axvline(SHORTER, color="gray", linewidth=0.8)
        axis.axhline(HALF, color="gray", linewidth=0.8)
        axis.set_xlabel("tokens of a reasoning, last over first")
        axis.set_title(f"{name}, last over first", fontsize=10)
    save_figure(fig, path, dpi=110)
    plt.close(fig)
