"""Corrections of reasoning-gym's scores, on cases worked out by hand."""

import math
from fractions import Fraction

import pytest

pytest.importorskip("reasoning_gym")

from ragen_jax.envs.reasoning_gym_tasks import ReasoningGym
from ragen_jax.envs.reasoning_gym_tasks.judge import RIGHT_OR_NOTHING, correct_score

pytestmark = pytest.mark.fast


@pytest.mark.medium
def test_coin_flip_is_right_within_a_ten_thousandth():
    """Heads in n fair flips, counted independently here; at 200 seeds of each split."""
    for split in ("train", "eval"):
        env = ReasoningGym(task="coin_flip", split=split)
        for seed in range(200):
            problem = env.reset(seed)
            facts = problem.entry["metadata"]
            n, k = facts["num_trials"], facts["k_heads"]
            ways = range(k, n + 1) if facts["problem_type"] == "at_least" else [k]
            exact = Fraction(sum(math.comb(n, i) for i in ways), 2**n)
            for said in ("0", "1", "0.", "0.5", "1/2", ".25", "0.1", "0.0", f"{float(exact):.1f}"):
                near = abs(Fraction(said) - exact) <= Fraction(1, 10_000)
                step = env.step(problem, said)
                assert step.info["success"] == near and step.reward == near, (said, exact)
            for said in (str(exact), f"{float(exact):.10f}", f" {float(exact):.5f} "):
                assert env.step(problem, said).reward == 1.0, (said, exact)


@pytest.mark.parametrize(
    "said, score",
    [
        ("0.375", 1),
        ("3/8", 1),
        ("0.3751", 1),
        ("0.37509", 1),
        ("0.3752", 0),
        ("0.37", 0),
        ("0", 0),
        ("0.", 0),
        ("0.3", 0),
        ("1", 0),
        ("37.5", 0),
        ("it is 0.375", 0),
        ("1/0", 0),
        ("", 0),
        ("9" * 5000, 0),
    ],
)
def test_a_probability_by_hand(said, score):
    entry = {"answer": "0.375", "metadata": {"rational": {"numerator": 3, "denominator": 8}}}
    assert correct_score("coin_flip", said, entry, 1.0) == score


@pytest.mark.parametrize(
    "right, said, share",
    [
        ("24", "it is 24", 2 / 8),
        ("24", "(24)", 2 / 4),
        ("24", "24.", 2 / 3),
        ("-24", "it is -24", 3 / 9),
        ("red", "It is red.", 3 / 10),
        ("1", "10", 0),
        ("1", "21", 0),
        ("24", "-24", 0),
        ("24", "24.5", 0),
        ("24", "1,24", 0),
        ("24", "24/5", 0),
        ("24", "5/24", 0),
        ("24", "24 25", 0),  # names two answers
        ("24", "23 24", 0),
        ("red", "redder", 0),
        ("red", "colored", 0),
        ("1 2", "3 1 2", 0),
        ("1 2", "row 1 2", 3 / 7),
        ("24", "the answer to the question that is asked is 24", 0),  # 2/46 is below 0.05
    ],
)
def test_a_text_that_contains_the_right_answer(right, said, share):
    paid = len(right) / len(said)
    found = correct_score("leg_counting", said, {"answer": right, "metadata": {}}, paid)
    assert found == pytest.approx(share)


def test_scores_that_any_text_is_paid_are_nothing():
    entry = {"answer": "5", "metadata": {}}
    for score in (0.0, 0.01, 0.02, 0.05):
        assert correct_score("tower_of_hanoi", "x", entry, score) == 0.0
    for score in (0.051, 0.5, 1.0):
        assert correct_score("tower_of_hanoi", "x", entry, score) == score


def test_right_or_nothing():
    entry = {"answer": "5", "metadata": {}}
    for task in RIGHT_OR_NOTHING:
        assert correct_score(task, "x", entry, 0.99) == 0.0
        assert correct_score(task, "x", entry, 1.0) == 1.0


def test_moves_are_not_read_out_of_prose():
    entry = {"answer": "A \u2192 B", "metadata": {}}
    for said in ("A \u2192 B", "a, b", "AB", "A -> B"):
        assert correct_score("quantum_lock", said, entry, 1.0) == 1.0
    for said in ("A: Add 3 (when any), B", "A \u2192 B!x", "press A then B", "A1B"):
        assert correct_score("quantum_lock", said, entry, 1.0) == 0.0
    assert correct_score("sokoban", "UDL R", entry, 1.0) == 1.0
    assert correct_score("sokoban", "Up, Down", entry, 1.0) == 0.0


@pytest.mark.parametrize("said, score", [("", 1), ('""', 1), ("''", 1), ("none", 0), ("x", 0)])
def test_an_equation_without_a_solution(said, score):
    assert correct_score("polynomial_equations", said, {"answer": "", "metadata": {}}, 1.0) == score
    assert (
        correct_score("polynomial_equations", said, {"answer": "0.5", "metadata": {}}, 0.0) == 0.0
    )
