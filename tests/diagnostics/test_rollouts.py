"""rollout/* and collect/* figures if the environment does not report which episodes succeed."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.algorithm.rewards import success_is_defined
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.diagnostics.anatomy import anatomy_metrics
from ragen_jax.diagnostics.rollouts import cut_off_metrics, rollout_metrics, selected_metrics
from ragen_jax.run.heldout import summarise

pytestmark = pytest.mark.fast

RETURNS = np.array([[0.0, 0.0], [1.0, 1.0]])


@pytest.fixture
def episodes(make_turn, make_episode):
    """Two groups of two episodes of two turns, with the given last infos."""

    def make(*infos, success=(False,) * 4):
        turns = [make_turn([3], [4, 5]) for _ in infos]
        last = [dataclasses.replace(t, info=i) for t, i in zip(turns, infos, strict=True)]
        return [
            make_episode(i // 2, i % 2, [turns[i], last[i]], success=success[i])
            for i in range(len(infos))
        ]

    return make


UNDEFINED = {"success": False, SUCCESS_UNDEFINED: True}


@pytest.mark.medium
def test_figures_of_success_are_left_out_where_it_is_undefined(episodes):
    played = episodes(*[UNDEFINED] * 4)
    assert not success_is_defined(played)
    figures = rollout_metrics(played, RETURNS) | selected_metrics(played, RETURNS)
    figures |= summarise(played, samples=2, format_penalty=0.0)
    assert not [name for name in figures if "success" in name or "pass_at" in name]
    assert {"rollout/return", "collect/return", "eval/return", "eval/valid_rate"} <= set(figures)
    found = anatomy_metrics(played, RETURNS)
    assert found["anatomy/tied"] == 1.0 and found["anatomy/failed"] == 0.0


def test_an_episode_that_is_told_defines_success(episodes):
    """The other episodes may not have ended; many environments report success only at the end."""
    played = episodes(
        UNDEFINED, {"success": True}, UNDEFINED, UNDEFINED, success=(False, True, False, False)
    )
    assert success_is_defined(played)
    assert rollout_metrics(played, RETURNS)["rollout/success"] == 0.25
    assert selected_metrics(played, RETURNS)["collect/success"] == 0.25
    assert summarise(played, samples=2, format_penalty=0.0)["eval/success"] == 0.25


@pytest.mark.medium
def test_an_info_without_a_word_of_success_counts_as_failure(episodes):
    played = episodes({}, {}, {}, {})
    assert success_is_defined(played) and success_is_defined([])
    assert rollout_metrics(played, RETURNS)["rollout/success"] == 0.0
    assert anatomy_metrics(played, RETURNS)["anatomy/failed"] == 1.0


def test_broken_episodes_say_nothing_of_success(episodes):
    *sound, last = episodes(UNDEFINED, UNDEFINED, UNDEFINED, {"error": "gone"})
    broken = dataclasses.replace(last, error="gone")
    idle = episodes({}, {}, {}, {})  # without an action
    assert not success_is_defined([*sound, broken, *idle])
    assert not success_is_defined([*sound, broken])
    assert success_is_defined([broken])


def test_replies_that_are_cut_off(make_turn, make_episode):
    long, valid = make_turn([1], [2, 3, 4], valid=False), make_turn([1], [2, 3, 4])
    short = make_turn([1], [2], valid=False)
    episodes = [make_episode(0, 0, [long, valid]), make_episode(0, 1, [short, long])]
    assert cut_off_metrics(episodes, 3) == {"rollout/cut_off_rate": 0.5}
    assert cut_off_metrics(episodes, 4) == {"rollout/cut_off_rate": 0.0}
    broken = [dataclasses.replace(episode, error="x") for episode in episodes]
    assert cut_off_metrics(broken, 3) == {}
