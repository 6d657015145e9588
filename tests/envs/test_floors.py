"""No environment pays answers that need no reading: benchmarks/floors.py on fewer problems."""

import re
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from benchmarks import floors
from ragen_jax.envs import ENVS
from ragen_jax.envs.reasoning_gym_tasks import ReasoningGym, judge, package
from ragen_jax.envs.types import Step

TASKS = sorted(set(package.load().DATASETS) - set(package.REFUSED))
ENVIRONMENTS = sorted(set(ENVS) - set(floors.FOREIGN))
PAGE = Path(__file__).parents[2] / "docs/floors.md"

UNEARNED = 0.1  # highest reward of a wrong answer; few problems are played here
PARTLY_RIGHT = {"deepcoder": 0.3}  # a program that passes some of the tests is paid for these
NOTHING = ("", ".", "x", "0", "I do not know", "[]", "[[]]", "{}", "None", "the")


def played(task, problems=20):
    return [(env, env.reset(seed)) for env in [ReasoningGym(task=task)] for seed in range(problems)]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_no_task_pays_an_answer_that_is_not_right(task):
    floor = floors.measure_task(task, problems=20, seconds=6.0)
    assert floor.unearned[1] <= UNEARNED, floor


@pytest.mark.long
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_environment_pays_an_answer_that_is_not_right(name):
    floor = floors.measure_environment(name, problems=20, seconds=6.0)
    assert floor.unearned[1] <= PARTLY_RIGHT.get(name, UNEARNED), floor
    assert floor.success[1] < 0.5, floor


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_no_task_pays_for_any_text(task):
    """Not even a hundredth: a text that is right for no problem earns 0 for every problem."""
    for env, problem in played(task, problems=5):
        right = problem.entry["answer"]
        for text in NOTHING:
            step = env.step(problem, text)
            assert step.reward == 0 or floors._is_same(text, right), (text, right)


def test_a_task_that_pays_zero_is_found(monkeypatch):
    """The package's uncorrected coin_flip is found."""
    found = floors.measure_task("coin_flip", problems=20)
    assert found.success[1] < 0.2 and found.unearned[1] <= UNEARNED
    monkeypatch.setattr(judge, "correct_score", lambda task, answer, entry, score: score)
    found = floors.measure_task("coin_flip", problems=20)
    assert found.success[0] == "'0'" and found.success[1] > 0.8
    assert found.unearned == found.success


@pytest.mark.parametrize(
    "task, answer, least",
    [
        ("rectangle_count", "'5'", 0.2),  # pays for a nearby number
        ("prime_factorization", "its first number", 0.3),  # pays for a number as its own factor
        # pays for the words in the given order
        ("word_sorting", "what follows its last colon", 0.2),
        ("course_schedule", "the 2 most frequent answers", 0.3),  # pays for "True False"
        ("tsumego", "its last quotation", 0.04),  # pays for any text of the right form
    ],
)
def test_part_payments_for_nothing_are_found(monkeypatch, task, answer, least):
    assert floors.measure_task(task, problems=20).unearned[1] < least / 2
    monkeypatch.setattr(judge, "correct_score", lambda task, answer, entry, score: score)
    found = floors.measure_task(task, problems=20)
    assert found.unearned[1] >= least, (answer, found)


class Echo:
    """Pays a reply that repeats the question or is empty."""

    actions, instructions = (), ""

    def reset(self, seed):
        return seed

    def render(self, state):
        return f"What is {state} + 1?"

    def solve(self, state):
        return (str(state + 1),)

    def step(self, state, action, rng):
        right = action == str(state + 1) or self.pays(state, action)
        return Step(state, float(right), True, {"success": right})

    def pays(self, state, action):
        return self.render(state) in action


class Silence(Echo):
    def pays(self, state, action):
        return not action


class Honest(Echo):
    def pays(self, state, action):
        return False


def test_a_new_environment_that_pays_for_nothing_is_found():
    found = floors.measure_answers("echo", [Echo()], 30, 5.0)
    assert found.unearned == ("the question", 1.0) and found.problems == 30
    found = floors.measure_answers("silence", [Silence()], 30, 5.0)
    assert found.unearned == ("''", 1.0) and found.success == ("''", 1.0)
    found = floors.measure_answers("honest", [Honest()], 30, 5.0)
    assert found.unearned[1] == 0.0 and found.success[1] == pytest.approx(1 / 30)


class Lever(Honest):
    """Its first action always wins."""

    actions = ("pull", "wait")

    def step(self, state, action, rng):
        return Step(state, float(action == "pull"), action == "pull", {"success": action == "pull"})


def test_an_action_that_always_wins_is_found():
    found = floors.measure_actions("lever", [Lever()], 30, 5.0, budget=3)
    assert found.success == ("always pull", 1.0) and found.score == ("always pull", 1.0)


class Fragile(Honest):
    """Raises for one answer, and for the problem of seed 3."""

    def reset(self, seed):
        if seed == 3:
            raise RuntimeError("no problem 3")
        return super().reset(seed)

    def step(self, state, action, rng):
        if action == "True":
            raise ValueError("this answer breaks it")
        return super().step(state, action, rng)


def test_an_episode_whose_environment_raises_is_broken_and_counted(monkeypatch, capsys):
    found = floors.measure_answers("fragile", [Fragile()], 10, 5.0)
    honest = floors.measure_answers("honest", [Honest()], 10, 5.0)
    # The problem cannot begin: one broken episode. On each other problem, one answer breaks.
    assert found.problems == 9 and len(found.errors) == 1 + 9
    assert found.episodes % 9 == 1 and found.success[1] == pytest.approx(1 / 9)
    assert honest.errors == () and honest.success[1] == pytest.approx(1 / 10)
    monkeypatch.setattr(floors, "measure_environment", lambda name: found)
    floors.main(["countdown"])
    printed = capsys.readouterr()
    assert "| `fragile` | 9 |" in printed.out and "failed" not in printed.out
    line = f"10 of {found.episodes} episodes of fragile failed; the first: "
    assert printed.err.splitlines() == [line + "RuntimeError: no problem 3"]


class BrokenLever(Lever):
    def step(self, state, action, rng):
        if action == "pull":
            raise ValueError("the lever broke")
        return super().step(state, action, rng)


def test_an_action_that_breaks_the_environment_is_left_out():
    found = floors.measure_actions("lever", [BrokenLever()], 4, 5.0, budget=3)
    # "wait" never wins; "all in turn" and "always pull" break in every episode.
    assert found.problems == 4 and found.episodes == 16 and len(found.errors) >= 8
    assert found.success == ("always wait", 0.0)


def test_the_page_has_every_task_and_environment():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE.read_text(), re.M)
    assert sorted(name for name, _ in rows) == sorted([*TASKS, *ENVIRONMENTS])
    for name, cells in rows:
        problems, success, _, _, _, unearned, _ = cells.split(" | ")
        assert int(problems) >= 20 and 0 <= float(success) <= 0.7, name
        assert float(unearned) <= PARTLY_RIGHT.get(name, 0.05), name
