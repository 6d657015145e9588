"""lab/asking.py on simulated runs with known effects."""

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import asking
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast
EXPERIMENT = EXPERIMENTS["asking"]
STOPPED, COSTLY, FREE = "search cost 1", "search cost 0.3", "free searches"


def run(success, questions, shown, use):
    """A run whose figures begin at 0.5, 2, 0.8 and 0.6."""
    rows = []
    for step, values in ((0, (0.5, 2.0, 0.8, 0.6)), (40, (success, questions, shown, use))):
        row = dict(zip((SUCCESS, asking.QUESTIONS, asking.SHOWN, asking.USE), values, strict=True))
        rows.append({"step": step, "update/count": 2.0, asking.INFORMATIVE: 0.7} | row)
    return rows


def world():
    rng, runs = np.random.default_rng(0), {}
    for seed in range(5):
        noise = rng.normal(0, 0.01, 8)
        runs["SearchQA", COSTLY, seed] = run(*(np.array([0.1, 0.2, 0.1, 0.6]) + noise[:4]))
        runs["SearchQA", FREE, seed] = run(*(np.array([0.6, 2.0, 0.9, 0.6]) + 3 * noise[4:]))
    return runs


def test_the_reward_counts_the_questions():
    rows = run(0.1, 0.2, 0.1, 0.6)
    np.testing.assert_allclose(asking.reward_at_evaluations(rows, 0.3), [-0.1, 0.04])
    mean, half_width, df = asking.change(EXPERIMENT, world(), COSTLY, "reward")
    assert abs(mean - 0.14) < 0.02 and half_width < 0.05 and df == 4


def test_verdicts():
    found = {(v.claim, v.source): v.verdict for v in asking.verdicts(EXPERIMENT, world())}
    words = {claim: word for (claim, _), word in found.items()}
    assert words[f"RL lowers the number of questions, `{COSTLY}`"] == "reproduced"
    assert words[f"reward rises, `{COSTLY}`"] == words[f"reward rises, `{FREE}`"] == "reproduced"
    assert words[f"RL lowers the number of questions, `{FREE}`"] == "undecided"
    assert words[f"RL lowers the use of observations, `{COSTLY}`"] == "undecided"
    assert words[f"RL lowers the fraction of needed facts seen, `{COSTLY}`"] == "reproduced"
    assert len(found) == 7
    assert {source for claim, source in found if FREE in claim} == {asking.SOURCE}


def test_runs_without_a_figure_are_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    runs = world()
    del runs["SearchQA", COSTLY, 0][-1][asking.USE]  # the agent saw all facts in no episode
    assert asking.change(EXPERIMENT, runs, COSTLY, "use")[2] == 3
    text = write_page("asking", tmp_path / "asking.md", "run asking", EXPERIMENT, runs)
    assert text.count(f"| {FREE} | ") == 5
    assert (tmp_path / "asking.png").stat().st_size > 5000


def test_agents_that_all_stop_asking_are_judged_by_the_held_out_problems(tmp_path):
    """All runs lose the same: two questions and 0.8 of the facts, so that seeds have no spread."""
    pytest.importorskip("matplotlib")
    runs = world()
    for seed in range(5):
        rows = runs["SearchQA", STOPPED, seed] = run(0.0, 0.0, 0.0, None)
        # After 20 steps the agent still saw all facts in some episodes, at the end in none.
        rows.insert(1, rows[0] | {"step": 20, asking.USE: 0.9})
        del rows[-1][asking.USE]
    found = {v.claim: v for v in asking.verdicts(EXPERIMENT, runs)}
    # 512 held-out problems, up to four questions: half-widths of Wilson's intervals at 0.5 and 0
    z, n = 1.959964, 512
    at_half = z * np.sqrt(0.25 / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    at_none = z**2 / (2 * n) / (1 + z**2 / n)
    mean, half, _ = asking.change(EXPERIMENT, runs, STOPPED, "questions")
    assert (mean, half) == (-2, pytest.approx(4 * np.hypot(at_half, at_none) / np.sqrt(5)))
    questions = found[f"RL lowers the number of questions, `{STOPPED}`"]
    assert questions.verdict == "reproduced" and 0 < questions.p < 1e-4
    assert found[f"reward rises, `{STOPPED}`"].figures.startswith("+1.500 ± ")
    assert found[f"RL lowers the use of observations, `{STOPPED}`"][2:] == (
        "not testable",
        asking.NO_USE,
        None,
    )
    text = write_page("asking", tmp_path / "asking.md", "run asking", EXPERIMENT, runs)
    assert text.count("| 0.60 -> none |") == 5
    assert "< 0.001" in text and "0.000" not in text
