"""Rules about levels: planted runs get the colour, sentence and cause that were planted."""

from pathlib import Path

import numpy as np
import pytest
from simulated_runs import write_run

from ragen_jax.diagnostics.level_rules import (
    BAD,
    RULES,
    UNKNOWN,
    WEAK,
    Records,
    estimate,
    find_levels,
)
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
    "two steps": (dict(steps=2), "unknown", "2 steps are too few to judge", "too few steps"),
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


def test_a_healthy_run_answers_the_three_questions(tmp_path):
    found = judged(tmp_path / "run", levels={ZA: (0.9, 0.1, 0.2)})
    depends, follows, true = found.answers
    assert depends.startswith("The reasoning depends on its prompt: 9")
    assert "(chance: 12%)" in depends
    assert follows.startswith("The action follows the reasoning: za_swap is 0.")
    assert true.startswith("9") and true.endswith("of the facts in the reasoning are true.")


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
@pytest.mark.parametrize("steps", [5, 50])
def test_noise_fulfils_no_rule(name, retrieval, effect, true, steps):
    """Runs whose true level is above a rule's, if not far: the rule holds in at most 5 %."""
    rng, runs = np.random.default_rng(0), 1000
    found = [
        {f.rule.name for f in find_levels(simulated(rng, steps, retrieval, effect, true))}
        for _ in range(runs)
    ]
    assert sum(name in names for names in found) <= 0.05 * runs
    assert not any(names - {name} for names in found)


@pytest.mark.parametrize("steps", [5, 50])
def test_rules_hold_at_their_level(steps):
    rng, runs = np.random.default_rng(1), 300
    found = [
        {f.rule.name for f in find_levels(simulated(rng, steps, 0.125, 0.0, 0.3))}
        for _ in range(runs)
    ]
    for name in ("no dependence on the prompt", "reasoning as decoration"):
        assert sum(name in names for names in found) >= (0.9 if steps == 50 else 0.75) * runs, name


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
