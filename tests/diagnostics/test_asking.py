"""diagnostics/asking.py: questions, observations and answers, by hand and in SearchQA."""

import dataclasses

import pytest

from ragen_jax.diagnostics.asking import ask_metrics
from ragen_jax.envs.search_qa import SearchQA
from ragen_jax.envs.types import AskingEnvironment

pytestmark = pytest.mark.fast


def episode(make_turn, make_episode, *turns, success=False):
    made = [
        dataclasses.replace(make_turn([1], [2]), message=message, actions=(action,))
        for message, action in turns
    ]
    return dataclasses.replace(make_episode(0, 0, made), success=success)


def asks(action):
    return action.startswith("ask")


def test_by_hand(make_turn, make_episode):
    parts = make_turn, make_episode
    episodes = [
        episode(*parts, ("?", "ask x"), ("A", "ask y"), ("B", "answer"), success=True),
        episode(*parts, ("?", "ask x"), ("A", "ask x"), ("A", "answer")),  # asks twice for A
        episode(*parts, ("?", "answer"), success=True),  # guesses
        # Sees A without a question, and ends before it sees the reply to its own.
        episode(*parts, ("?", "look"), ("A", "ask y")),
        episode(*parts, ("?", "ask x")),
    ]
    episodes[4] = dataclasses.replace(episodes[4], error="x")
    found = ask_metrics(episodes, [("A", "B")] * 5, asks)
    assert found == {
        "eval/ask/questions": 5 / 4,
        "eval/ask/informative": 3 / 5,
        "eval/ask/shown": (1 + 0.5 + 0 + 0.5) / 4,
        "eval/ask/success_shown": 1.0,
        "eval/ask/success_blind": pytest.approx(1 / 3),
        "eval/ask/use": pytest.approx(2 / 3),
    }
    assert ask_metrics(episodes, [()] * 5, asks) == {}
    blind = ask_metrics(episodes[2:3], [("A",)], asks)
    assert "eval/ask/use" not in blind and "eval/ask/informative" not in blind


def test_the_solver_of_search_qa_asks_for_what_is_needed():
    environment = SearchQA(things=20, worlds=4, documents=1)
    assert isinstance(environment, AskingEnvironment)
    for seed in range(20):
        state = environment.reset(seed)
        needed = environment.needed(state)
        plan = environment.solve(state)
        assert len(needed) == 2 == sum(map(environment.asks, plan))
        assert not any(text in environment.render(state) for text in needed)
        shown = set()
        for action in plan[:-1]:
            state = environment.step(state, action).state
            shown |= {text for text in needed if text in environment.render(state)}
        assert shown == set(needed)
