"""`narrate`: what the experts say in sentences, and that every fact of it is counted."""

import re

import numpy as np
import pytest
from env_names import OURS

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.bandit import Arm
from ragen_jax.envs.bandit import State as BanditState
from ragen_jax.envs.countdown import Problem
from ragen_jax.envs.countdown.arithmetic import list_operations
from ragen_jax.envs.metamathqa.env import Attempt
from ragen_jax.envs.metamathqa.questions import Question
from ragen_jax.envs.narration import describe_cells, enumerate_words
from ragen_jax.envs.search_qa import Question as SearchQuestion
from ragen_jax.envs.search_qa.env import SearchState
from ragen_jax.envs.search_qa.world import Link
from ragen_jax.envs.types import MultiPlanEnvironment, NarratingEnvironment, SentenceEnvironment

pytestmark = pytest.mark.fast

# Environment and options, a pattern of one fact, and a fact of the same form that is false.
CELL, NUMBER = (r"\([0-9]+,[0-9]+\)", "(19,19)"), (r"[0-9]+(?:\.[0-9]+)?", "987")
CLAIM = (r"The [a-z]+ of \w+ is (?:the )?\w+", "The mayor of Nowhere is Nobody")
LAKE_FACT = (rf"{CELL[0]}|From [^.]+\.", CELL[1])  # a position, or the way to the goal
CASES = [
    ("sokoban", {}, CELL),
    ("sokoban", {"size": (13, 13), "num_boxes": 3, "observation": "both"}, CELL),
    ("sokoban", {"observation": "coordinate"}, CELL),
    ("frozen_lake", {}, LAKE_FACT),
    ("frozen_lake", {"size": (12, 3), "frozen": 0.95, "observation": "coordinate"}, LAKE_FACT),
    ("countdown", {}, NUMBER),
    ("countdown", {"count": (1, 3), "operators": "+-*/", "allow_subset": True}, NUMBER),
    ("bandit", {"arms": 4, "sure": (5, 95), "chance": (5, 95)}, NUMBER),
    ("bandit", {"arms": 3, "pulls": 5, "told": False}, NUMBER),
    ("bandit", {"told": False, "names": "misleading"}, NUMBER),
    ("metamathqa", {"operations": (1, 6)}, NUMBER),
    ("search_qa", {"things": 20}, CLAIM),
    ("search_qa", {"hops": (3, 4)}, CLAIM),
]


def play_some_steps(environment, seed):
    """Return the state of a problem after a few steps of the expert."""
    rng, state = np.random.default_rng(seed), environment.reset(seed)
    for _ in range(seed % 4):
        plan = environment.solve(state)
        step = environment.step(state, plan[0], rng) if plan else None
        if step is None or step.done:
            break
        state = step.state
    return state


def test_environments_that_narrate():
    built = {name: ENVS[name](split="train") for name in OURS}
    narrating = {name for name, e in built.items() if isinstance(e, NarratingEnvironment)}
    assert narrating == {name for name, _, _ in CASES}
    assert narrating == {n for n, e in built.items() if isinstance(e, SentenceEnvironment)}
    assert [n for n, e in built.items() if isinstance(e, MultiPlanEnvironment)] == ["countdown"]


@pytest.mark.parametrize("name, options, fact", CASES)
def test_every_stated_fact_is_counted_and_a_false_one_is_false(name, options, fact):
    environment = make_env(name, **options, split="imitation")
    for seed in range(12):
        state = play_some_steps(environment, seed)
        shown, plan = environment.render(state), environment.solve(state) or ()
        text = environment.narrate(state, plan[:4])
        right, stated = environment.count_grounded(shown, text)
        assert right == stated
        assert stated > 0 or name == "search_qa" and not state.shown  # nothing is known yet
        if "size" not in options:  # `explain` is ambiguous about cells like (1,12)
            explained = environment.explain(state, plan)
            ways = 2 * (name == "frozen_lake")  # the way to the goal is stated only in sentences
            assert (right - ways, stated - ways) == environment.count_grounded(shown, explained)
        assert text == environment.narrate(state, plan[:4])
        facts = environment.narrate(state, ())  # without the plan
        assert text != facts or not plan or name == "countdown" and plan[0].isdigit()
        numbers = list(re.finditer(fact[0], facts))
        assert environment.count_grounded(shown, facts) == (len(numbers), len(numbers))
        for number in numbers:
            false = fact[1] if "From" not in number[0] else "From row 0 to 19: 19 Down."
            wrong = facts[: number.start()] + false + facts[number.end() :]
            assert environment.count_grounded(shown, wrong) == (len(numbers) - 1, len(numbers))


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
def test_what_a_picture_shows_is_counted(name):
    environment = make_env(name, observation="image", split="imitation")
    state = environment.reset(1)
    text = environment.narrate(state, environment.solve(state))
    right, stated = environment.count_grounded(environment.grid_text(state), text)
    assert right == stated >= 2


ROOM = "######\n#__O_#\n#_P__#\n#_OXX#\n######"
LAKE = "P__O\n_O__\n____\n__OG"
ARMS = BanditState((Arm("Red Table", 10, 100), Arm("Blue Window", 100, 25)))
FACTS = (("has", 12), ("gets", 6), ("makes", 2), ("splits", 3), ("gives", 3))
CHAIN = (Link("Marwyn", "birthplace", "Corford"), Link("Corford", "emblem", "owl"))
QUESTION = SearchQuestion("What is the emblem of ...?", ("owl",), "", 0, CHAIN)
STORY = Attempt(Question("Anna has 12 pens. ...", "9", "", facts=FACTS))


def test_sentences_by_hand():
    sokoban, lake = make_env("sokoban"), make_env("frozen_lake")
    room, place = sokoban.parse(ROOM), lake.parse(LAKE)
    assert sokoban.narrate(room, ("Down", "Right")) == (
        "The player is at (2,2), the boxes at (3,3) and (3,4), the targets at (1,3) and (3,2). "
        "The plan is Down, Right."
    )
    assert lake.narrate(place, ("Down",)) == (
        "The player is at (0,0), the goal at (3,3), holes at (0,3), (1,1) and (3,2). From row 0 to "
        "3: 3 Down. From column 0 to 3: 3 Right. The plan is Down."
    )
    assert lake.narrate(lake.parse("_G_\n__P"), ()) == (
        "The player is at (1,2), the goal at (0,1). From row 1 to 0: 1 Up. From column 2 to 1: 1 "
        "Left."
    )
    assert ", a hole at (0,1). From" in lake.narrate(lake.parse("PO\n_G"), ())
    assert "From row 0 to 0: no move. From column 0 to 1:" in lake.narrate(lake.parse("PG"), ())
    countdown = make_env("countdown")
    assert countdown.narrate(Problem((44, 19, 35), 60), ("44-19+35",)) == (
        "The numbers are 44, 19 and 35; the target is 60. 44-19=25. 25+35=60."
    )
    assert countdown.narrate(Problem((7,), 7), ("7",)) == "The number is 7; the target is 7."
    assert make_env("bandit").narrate(ARMS, ("Blue Window",)) == (
        "The Red Table pays 0.10 with chance 1.00, expected 0.10. "
        "The Blue Window pays 1.00 with chance 0.25, expected 0.25. Choose Blue Window."
    )
    pulled = BanditState(ARMS.arms, ((1, 0), (0, 10), (None, 0), (1, 100)))
    assert make_env("bandit", pulls=5, told=False).narrate(pulled, ("Blue Window",) * 2) == (
        "The Red Table was pulled 1 time, mean 0.10. "
        "The Blue Window was pulled 2 times, mean 0.50. Choose Blue Window."
    )
    assert make_env("metamathqa").narrate(STORY, ("9",)) == (
        "At first Anna has 12. Anna gets 6 more: 12+6=18. A friend makes them 2 times as many: "
        "18*2=36. Anna splits them into 3 equal parts and keeps one: 36/3=12. Anna gives 3 away: "
        "12-3=9."
    )


def test_sentences_about_what_was_found():
    search = make_env("search_qa")
    first = SearchState(QUESTION)
    second = SearchState(QUESTION, "Marwyn", "Marwyn was born in Corford.")
    third = SearchState(QUESTION, "Corford", "The emblem of Corford is the owl.")
    assert search.narrate(first, search.solve(first)) == (
        "The next thing to find is the birthplace of Marwyn."
    )
    assert search.narrate(second, search.solve(second)) == (
        "The birthplace of Marwyn is Corford. The next thing to find is the emblem of Corford."
    )
    assert search.narrate(third, search.solve(third)) == (
        "The emblem of Corford is the owl. The answer is owl."
    )
    assert search.narrate(first, ()) == "The answer is not known yet."


def test_a_question_of_a_file_has_only_its_answer():
    environment = make_env("metamathqa")
    state = Attempt(Question("What is 1/2 + 1/4?", "3/4", ""))
    assert environment.narrate(state, ("3/4",)) == "The answer is 3/4."
    assert environment.narrate(state, ()) == "The answer follows."


def test_lists():
    assert enumerate_words(["a"]) == "a" and enumerate_words(["a", "b", "c"]) == "a, b and c"
    assert enumerate_words([]) == ""
    assert describe_cells([(1, 2), (3, 14)]) == "(1,2) and (3,14)"


def test_countdown_shows_several_solutions_and_narrates_each():
    environment = make_env("countdown", split="imitation")
    problem = Problem((44, 19, 35), 60)
    plans = [environment.sample_plan(problem, np.random.default_rng(i)) for i in range(40)]
    # All orders of the two operations, with 44 and 35 in either order.
    assert set(plans) == {("44-19+35",), ("35-19+44",), ("44+35-19",), ("35+44-19",)}
    assert min(plans.count(plan) for plan in set(plans)) > 2
    assert plans[7] == environment.sample_plan(problem, np.random.default_rng(7))
    for plan in set(plans):
        assert environment.step(problem, *plan).info["success"]
        operations = "".join(f" {operation}." for operation in list_operations(*plan))
        assert environment.narrate(problem, plan).endswith(f"target is 60.{operations}")
    assert environment.sample_plan(Problem((1, 2), 50), np.random.default_rng(0)) is None
    every = make_env("countdown", operators="+-*/")
    assert every.sample_plan(Problem((3, 3, 8, 8), 24), np.random.default_rng(0)) == ("8/(3-8/3)",)
    few = make_env("countdown", allow_subset=True)
    assert few.sample_plan(Problem((7, 5, 7), 7), np.random.default_rng(0)) == ("7",)
