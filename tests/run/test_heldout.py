"""heldout.py: pass@k and the figures of an evaluation."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from ragen_jax.config.load import load_config
from ragen_jax.configs import base
from ragen_jax.diagnostics.intervals import effective_trials, pass_at_k, wilson_interval
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.run import heldout
from ragen_jax.run.heldout import summarise
from ragen_jax.run.tasks import build_tasks

pytestmark = pytest.mark.fast


def share_with_a_success(solved, samples, k):
    """Return the fraction of all draws of k samples that contain at least one success."""
    draws = list(itertools.combinations([i < solved for i in range(samples)], k))
    return sum(any(draw) for draw in draws) / len(draws)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_what_enumeration_gives(samples):
    for k in range(1, samples + 1):
        for solved in range(samples + 1):
            expected = share_with_a_success(solved, samples, k)
            assert pass_at_k([solved], samples, k) == pytest.approx(expected, abs=1e-12)
    every = np.arange(samples + 1.0)
    mean = np.mean([share_with_a_success(int(s), samples, samples) for s in every])
    assert pass_at_k(every, samples, samples) == pytest.approx(mean)


def test_summary_by_hand(make_turn, make_episode):
    # Three problems, two samples each: 2, 1 and 0 solved.
    good = make_turn([1], [2, 3], reward=9.0)
    bad = make_turn([1], [2], reward=-0.5, valid=False)
    plays = [
        [([good], True), ([bad, good], True)],
        [([good], True), ([bad], False)],
        [([bad, bad], False), ([bad], False)],
    ]
    episodes = [
        make_episode(group, member, turns, success=success)
        for group, members in enumerate(plays)
        for member, (turns, success) in enumerate(members)
    ]
    metrics = summarise(episodes, samples=2, format_penalty=-1.0)
    n = effective_trials(np.array([2, 1, 0]), np.full(3, 2))
    # Returns 9, 7.5, 9, -1.5, -3, -1.5.
    assert metrics == pytest.approx(
        {
            "eval/success": 0.5,
            "eval/success_ci95": 1.959964
            * math.sqrt(1 / (4 * n) + 1.959964**2 / (4 * n**2))
            / (1 + 1.959964**2 / n),
            "eval/return": 19.5 / 6,
            "eval/valid_rate": 3 / 8,
            "eval/turns": 8 / 6,
            "eval/errors": 0,
            "eval/response_length": (3 * 2 + 5 * 1) / 8,
            "eval/pass_at_1": 0.5,
            "eval/pass_at_2": 2 / 3,
        }
    )


def test_one_sample_has_no_pass_at_k_and_one_problem_no_spread(make_turn, make_episode):
    turn = make_turn([1], [2])
    episodes = [make_episode(g, 0, [turn], success=g == 0) for g in range(4)]
    metrics = summarise(episodes, samples=1, format_penalty=0.0)
    assert not [name for name in metrics if "pass_at" in name]
    assert metrics["eval/success"] == 0.25
    # Wilson, 1 of 4: 0.0456 to 0.6994 (R: prop.test(1, 4, correct = FALSE)).
    assert metrics["eval/success_ci95"] == pytest.approx(0.6994 - 0.25, abs=1e-4)
    alone = summarise(episodes[:1], samples=1, format_penalty=0.0)
    assert alone["eval/success"] == 1 and alone["eval/success_ci95"] == pytest.approx(
        0.7935, abs=1e-4
    )
    assert {name for name in summarise(episodes, samples=4, format_penalty=0.0)} >= {
        f"eval/pass_at_{k}" for k in (1, 2, 4)
    }


@pytest.mark.parametrize(
    "solved, of, low, high",
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_the_literature(solved, of, low, high):
    success_NK = (np.arange(of) < solved)[:, None]
    np.testing.assert_allclose(wilson_interval(success_NK), (low, high), atol=5e-5)


@pytest.mark.medium
@pytest.mark.parametrize("rate", [0.003, 0.05, 0.4, 0.98])
@pytest.mark.parametrize("samples", [1, 4])
def test_success_intervals_cover(rate, samples, make_turn, make_episode):
    """1,000 evaluations of 128 problems of different difficulty."""
    rng = np.random.default_rng(0)
    turn = make_turn([1], [2])
    inside = 0
    for _ in range(1000):
        own = rng.beta(2 * rate, 2 * (1 - rate), 128)
        success_NK = rng.random((128, samples)) < own[:, None]
        p = success_NK.mean()
        low, high = wilson_interval(success_NK)
        half_width = max(high - p, p - low)
        inside += p - half_width <= rate <= p + half_width
    episodes = [make_episode(g, 0, [turn], success=bool(s)) for g, s in enumerate(success_NK[:, 0])]
    found = summarise(episodes, samples=1, format_penalty=0.0)["eval/success_ci95"]
    p, ends = success_NK[:, 0].mean(), wilson_interval(success_NK[:, :1])
    assert found == pytest.approx(max(abs(end - p) for end in ends))
    assert inside >= 930


def test_problems_with_a_broken_episode_have_no_part_in_the_figures(make_turn, make_episode):
    def episode(group, success, error=""):
        turns = [make_turn([1], [2], reward=float(success))]
        return dataclasses.replace(make_episode(group, 0, turns, success=success), error=error)

    sound = [episode(0, True), episode(1, False), episode(2, True)]
    broken = episode(3, False, "PromptError: too long")
    metrics = summarise([*sound, broken], samples=1, format_penalty=0.0)
    assert metrics == summarise(sound, samples=1, format_penalty=0.0) | {"eval/errors": 1}
    assert metrics["eval/success"] == pytest.approx(2 / 3)
    alone = summarise([broken], samples=1, format_penalty=0.0)
    assert alone == {"eval/errors": 1}


TWO_ANSWERS = """
import numpy as np
from ragen_jax.envs.types import Step

class TwoAnswers:
    actions, words, instructions = ("A", "B"), ("A", "B", "right"), "Answer A or B."

    def __init__(self, *, split, known=True):
        self.split, self.known = split, known

    def reset(self, seed):
        return "AB"[np.random.default_rng((seed, len(self.split))).integers(2)], seed

    def render(self, state):
        return state[0]

    def identity(self, state):
        return str(state[1])

    def step(self, state, action, rng):
        right = action == state[0]
        return Step(state, float(right), True, {"success": right} if self.known else {})

    def solve(self, state):
        return (state[0],)

    def explain(self, state, plan):
        return "right"
"""


@pytest.mark.medium
def test_answers_to_other_problems_are_right_by_chance(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "two_answers.py").write_text(TWO_ANSWERS)

    def found(**options):
        config = base.get_config()
        config.env.update(name="two_answers:TwoAnswers", options=options)
        tokenizer = build_tokenizer(("A", "B", "right"))
        return heldout.chance_success(build_tasks(load_config(config), tokenizer, ()))

    metrics = found()
    assert metrics == found()
    assert abs(metrics["eval/chance_success"] - 0.5) < 0.1  # 256 problems
    assert found(known=False) == {}  # success is not defined
