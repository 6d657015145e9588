"""Rules about levels: planted runs get the colour, sentence and cause that were planted."""

import re
from pathlib import Path

import numpy as np
import pytest
from simulated_runs import write_run

from ragen_jax.diagnostics.estimates import Estimate, estimate, newest_rows
from ragen_jax.diagnostics.level_rules import RULES, find_levels
from ragen_jax.diagnostics.rules import BAD, UNKNOWN, WEAK, Records
from ragen_jax.report import sentences
from ragen_jax.report.episodes import Truncation
from ragen_jax.report.runs import read_run
from ragen_jax.report.verdict import judge

pytestmark = pytest.mark.fast
FIRST_TURN = "collapse/first_turn"
CHANCE = {f"{FIRST_TURN}/retrieval_acc": (0.125, 0.03, 0.06)}
FELL = {
    "collapse/first_turn/own_margin": (30, 0.2, 15),
    "collapse/trajectory/own_margin": (30, 0.2, 15),
}
ZA = "flow/first_turn/za_swap"
FORM = {"rollout/valid_rate": (0.0, 0.0, 0.02), "rollout/valid_think_rate": (0.6, 0.02, 0.05)}
EMPTY = {
    "filter/kept_ratio": (0.0, 0.0, None),
    "filter/zero_groups": (1.0, 0.0, None),
    "rollout/success": (0.3, 0.02, 0.1),
}
LAST_STEP = {
    name: (11, share, 1)
    for name, share in {f"{FIRST_TURN}/retrieval_acc": 0.13, f"{FIRST_TURN}/own_margin": 0}.items()
}
PRECISE = {  # a few prompts: retrieval has wide intervals, and the likelihoods show more
    f"{FIRST_TURN}/retrieval_acc": (0.95, 0.01, 0.3),
    f"{FIRST_TURN}/own_margin": (33.0, 0.03, 0.1),
}
PLANTED = {  # name -> (settings of write_run, colour, words of the sentence, cause)
    "valid 0": (
        dict(levels=FORM, success=(0.3, 0.3)),
        *("trouble", "0% of the replies have the required form"),
        "replies without the required form",
    ),
    "kept 0": (
        dict(levels=EMPTY, success=(0.3, 0.3)),
        *("trouble", "No step was learned from", "no update"),
    ),
    "solved at step 0": (
        dict(success=(1.0, 1.0)),
        *("weak", "Held-out success was 1.000 before the first update", "solved before training"),
    ),
    "decoration": (
        dict(levels={ZA: (0.0, 0.05, 0.1)}),
        *("trouble", "actions did not depend on the reasoning", "reasoning as decoration"),
    ),
    "template": (
        dict(levels=CHANCE),
        *("trouble", "no likelier under its own prompt", "no dependence on the prompt"),
    ),
    "misread": (
        dict(levels={"reasoning/grounded_rate": (0.3, 0.02, 0.05)}),
        *(
            "weak",
            "of the facts stated in the reasoning were true",
            "false statements from the start",
        ),
    ),
    "truncated": (
        dict(levels=FORM, success=(0.3, 0.3), truncated={10: Truncation(0.9, 0.9)}),
        *("trouble", "90% of the others were cut off", "replies that are cut off"),
    ),
    "imitation at chance": (
        dict(success=(0.5, 0.5), first={"eval/chance_success": 0.5}, levels=CHANCE),
        *(
            "trouble",
            "no better than with answers to other problems (0.500)",
            "imitation at chance",
        ),
    ),
    "one step": (
        dict(steps=1),
        *("unknown", "1 step is too few to judge a change over time", "too few steps"),
    ),
    "eight steps": (
        dict(steps=8),
        *("unknown", "8 steps are too few to judge a change over time", "too few steps"),
    ),
    "template at the end": (
        dict(steps=12, levels=PRECISE, changes=LAST_STEP),
        *("trouble", "At step 12, reasoning was no likelier", "no dependence on the prompt"),
    ),
    "decoration at the end": (
        dict(steps=12, levels={ZA: (0.9, 0.02, 0.1)}, changes={ZA: (11, 0.0, 1)}),
        *("trouble", "At step 12, actions did not depend", "reasoning as decoration"),
    ),
    "valid 0 at the end": (
        dict(steps=12, success=(0.3, 0.3), changes={"rollout/valid_rate": (11, 0.0, 1)}),
        *("trouble", "of the replies have the required form", "replies without the required form"),
    ),
    "healthy": (dict(levels={ZA: (0.9, 0.1, 0.2)}), "well", "There was no alarm", "none needed"),
    "collapsed": (dict(changes=FELL, success=(0.4, 0.4)), "trouble", "The alarm", "template"),
    "not finite": (
        dict(levels={"update/skipped": (4.0, 0.0, None)}, success=(0.4, 0.4)),
        *("trouble", "updates were not finite", "updates that are not finite"),
    ),
}


def judged(folder, **settings):
    truncated = settings.pop("truncated", {})
    return judge(read_run(write_run(folder, **settings)), "", truncated)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_run_gets_its_card(name, seed, tmp_path):
    settings, colour, words, cause = PLANTED[name]
    found = judged(tmp_path / "run", seed=seed, **settings)
    assert found.state == colour, found.findings
    assert words.lower() in sentences.headline(found).lower()
    run = read_run(tmp_path / "run")
    html = sentences.top([run], [[found]], [[0]])
    assert f'class="verdict {colour}"' in html
    assert f"<dt>Cause</dt><dd><b>{cause}</b>" in html
    assert ("What to do" in html) == (name != "healthy")
    # Nothing is said to have kept its level that was not compared with it.
    tested = settings.get("steps", 100) >= 9
    assert ("no metric could be compared with its level" in html) == (not tested)
    assert tested or "kept" not in html and "There was no alarm" not in html


def test_a_healthy_run_answers_the_three_questions(tmp_path):
    found = judged(tmp_path / "run", levels={ZA: (0.9, 0.1, 0.2)})
    depends, follows, true = found.answers
    assert depends.startswith("The reasoning depends on its prompt: 9")
    assert "(chance: 12%)" in depends
    assert follows.startswith("The action follows the reasoning: za_swap is 0.")
    assert re.fullmatch(
        r"9\d% ± \d of the facts in the reasoning are true (at|in) step.*100\.", true
    )


def test_answers_of_the_other_kind(tmp_path):
    levels = CHANCE | {ZA: (0.0, 0.02, 0.1), "reasoning/grounded_rate": None}
    found = judged(tmp_path / "run", levels=levels)
    depends, follows = found.answers
    assert depends.startswith("The reasoning does not depend on its prompt: 1")
    assert follows.startswith("The action does not follow the reasoning")
    wide = {f"{FIRST_TURN}/retrieval_acc": (0.2, 0.03, 0.6), ZA: (0.1, 0.02, 0.9)}
    found = judged(tmp_path / "other", levels=wide)
    assert all(answer.startswith("It is open whether") for answer in found.answers[:2])


def simulated(rng, steps, retrieval, effect, true):
    """Rows whose metrics vary as their intervals say, around the given true values."""
    rows = [{"step": 0}]
    for step in range(1, steps + 1):
        row = {"step": step, "time/step": 1.0, "filter/kept_ratio": 0.5}
        for name, value, half in (
            (f"{FIRST_TURN}/retrieval_acc", retrieval, 0.15),
            (ZA, effect, 0.2),
            ("reasoning/grounded_rate", true, 0.1),
        ):
            row |= {name: value + half / 1.96 * rng.normal(), f"{name}_ci95": half}
        rows.append(row | {f"{FIRST_TURN}/retrieval_chance": 0.125, "rollout/valid_rate": 0.9})
    return Records(rows=rows, updates=rows, outcomes={})


@pytest.mark.parametrize(
    "name, retrieval, effect, true",
    [
        ("no dependence on the prompt", 0.25, 1.0, 0.9),  # twice chance
        ("reasoning as decoration", 0.9, 0.25, 0.9),
        ("false statements from the start", 0.9, 1.0, 0.6),
    ],
)
@pytest.mark.parametrize("steps", [1, 5, 50])
def test_noise_fulfils_no_rule(name, retrieval, effect, true, steps):
    """Runs whose true level is above a rule's, if not far: the rule holds in at most 5 %."""
    rng, runs = np.random.default_rng(0), 1000
    found = [
        {f.rule.name for f in find_levels(simulated(rng, steps, retrieval, effect, true))}
        for _ in range(runs)
    ]
    assert sum(name in names for names in found) <= 0.05 * runs
    assert not any(names - {name, "too few steps"} for names in found)


@pytest.mark.parametrize("steps", [5, 50])
def test_rules_hold_at_their_level(steps):
    rng, runs = np.random.default_rng(1), 300
    found = [
        {f.rule.name for f in find_levels(simulated(rng, steps, 0.125, 0.0, 0.3))}
        for _ in range(runs)
    ]
    for name in ("no dependence on the prompt", "reasoning as decoration"):
        assert sum(name in names for names in found) >= (0.9 if steps == 50 else 0.75) * runs, name


def test_answers_are_about_the_latest_state(tmp_path):
    """Means of the newest steps that agree, with their numbers."""
    found = judged(tmp_path / "run", steps=12, levels=PRECISE, changes=LAST_STEP)
    assert found.answers[0].startswith("The reasoning does not depend on its prompt: 1")
    assert found.answers[0].endswith(
        "is most likely under its own prompt at step 12 (chance: 12%)."
    )
    found = judged(tmp_path / "level", steps=12, levels=PRECISE)
    assert "95% ± 13 of it is most likely under its own prompt in steps 8 to 12" in found.answers[0]


def test_the_newest_rows_agree():
    rows = [
        {"step": step, "x": x, "x_ci95": half}
        for step, (x, half) in enumerate([(1, 1), (9, 1), (1.4, 1), (1.1, 2), (1.2, 0.5), (1, 0.5)])
    ]
    assert [row["step"] for row in newest_rows([*rows, {"step": 6}], "x")] == [2, 3, 4, 5]
    assert [row["step"] for row in newest_rows(rows[:2], "x")] == [1]
    assert newest_rows(rows, "y") == []
    assert newest_rows([*rows, {"step": 7, "x": 1.0}], "x") == [{"step": 7, "x": 1.0}]


def test_intervals_that_say_nothing_are_words():
    for half, words in (
        (0.049, "50% ± 5"),
        (0.5, "50% (interval 0 to 100%)"),
        (1.69, "50% (interval 0 to 100%)"),
        (float("nan"), "50% (interval unknown)"),
    ):
        assert Estimate(0.5, half, 1).percentage == words


def test_an_estimate_has_the_interval_of_its_steps():
    rows = [{"x": 1.0, "x_ci95": 0.3, "c": 0.5}, {"x": 2.0, "x_ci95": 0.4, "c": 0.5}, {"y": 1}]
    found = estimate(rows, "x", minus="c")
    assert found.mean == pytest.approx(1.0) and found.half_width == pytest.approx(0.25)
    assert found.steps == 2 and estimate(rows, "z") is None


def test_every_rule_is_documented():
    page = (Path(__file__).parents[2] / "docs/report.md").read_text()
    colours = {BAD: "red", WEAK: "amber", UNKNOWN: "grey"}
    for rule in RULES:
        assert f"| {rule.name} | {colours[rule.grade]} | {rule.rule} |" in page
