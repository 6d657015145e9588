"""collect.py: the groups selected for a step, from handmade episodes and their real scores."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.algorithm.filter import ZERO_SCORE, group_scores
from ragen_jax.algorithm.rewards import add_rewards
from ragen_jax.config.build_learner import build_collecting
from ragen_jax.configs import base
from ragen_jax.rollout.collect import collect, collect_groups, differ_in_reward

pytestmark = pytest.mark.fast


@pytest.fixture
def player(make_turn, make_episode):
    """player(pattern): plays round i as pattern[i], a string with one letter per group: `x` earns
    different rewards, `.` equal rewards. Groups have two members; the sampled token of a group
    is its index among all groups played."""

    def make(pattern):
        before = np.cumsum([0, *map(len, pattern)])

        def play(index):
            assert index == len(play.rounds), "rounds are played in order, each once"
            play.rounds.append(index)
            return [
                make_episode(
                    g,
                    k,
                    [make_turn([1], [before[index] + g], reward=k if letter == "x" else 1.0)],
                )
                for g, letter in enumerate(pattern[index])
                for k in range(2)
            ]

        play.rounds = []
        return play

    return make


def places(found):
    """The index, among all groups played, of each group of the step; checks groups and members."""
    episodes = found.episodes
    assert [(e.group, e.member) for e in episodes] == [
        (g, k) for g in range(len(episodes) // 2) for k in range(2)
    ]
    shown = [int(e.turns[0].sampled[0]) for e in episodes]
    assert shown[::2] == shown[1::2]  # members stay together
    return shown[::2]


@pytest.mark.medium
@pytest.mark.parametrize(
    "pattern, max_rounds, expected, rounds",
    [
        (["x.x.", ".xxx"], 9, [0, 2, 5, 6], 2),  # the example in collect.py
        (["xxxx", "xxxx"], 9, [0, 1, 2, 3], 1),  # the first round is enough
        (["....", ".x..", "x..x", "xxxx"], 9, [5, 8, 11, 12], 4),
        # the round limit: filled up from the earliest groups
        (["x.x.", "...x", "xxxx"], 2, [0, 1, 2, 7], 2),
        (["....", "...."], 2, [0, 1, 2, 3], 2),  # nothing to learn from
        (["..x."], 1, [0, 1, 2, 3], 1),  # a single round stays as it is
    ],
)
def test_groups_of_a_step_by_hand(player, pattern, max_rounds, expected, rounds):
    play = player(pattern)
    found = collect_groups(play, differ_in_reward, wanted=4, max_rounds=max_rounds)
    assert places(found) == expected
    everything = dataclasses.replace(found, episodes=found.played)
    assert places(everything) == list(range(4 * rounds))  # including the dropped groups
    assert found.rounds == len(play.rounds) == rounds
    assert found.informative_N.tolist() == [letter == "x" for letter in "".join(pattern[:rounds])]
    assert found.metrics() == {
        "collect/rounds": rounds,
        "collect/groups": 4 * rounds,
        "collect/informative_ratio": "".join(pattern[:rounds]).count("x") / (4 * rounds),
    }


def test_one_round_comes_back_as_it_was_played(player):
    played = player(["x..x"])(0)
    found = collect_groups(lambda index: played, differ_in_reward, wanted=4, max_rounds=1)
    assert found.episodes == played
    assert found.seeds_N == (100, 101, 102, 103)  # conftest numbers seeds by group


def test_seeds_of_all_groups_are_told_the_dropped_ones_included(player):
    found = collect_groups(player(["x.", ".x"]), differ_in_reward, wanted=2, max_rounds=3)
    assert found.seeds_N == (100, 101, 100, 101)
    assert found.informative_N.tolist() == [True, False, False, True]


def test_the_step_has_equal_groups_for_everything_behind_it(player):
    found = collect_groups(player(["x.x.", ".xxx"]), differ_in_reward, wanted=4, max_rounds=2)
    _, return_GK = add_rewards(make_batch(found.episodes), found.episodes, format_penalty=0.0)
    np.testing.assert_array_equal(return_GK, [[0, 1]] * 4)


@pytest.mark.medium
def test_too_few_groups_and_wrong_judgements_are_refused(player):
    with pytest.raises(ValueError, match=r"4 groups were requested, but 2 round\(s\) played 2"):
        collect_groups(player(["x", "x"]), differ_in_reward, wanted=4, max_rounds=2)
    with pytest.raises(ValueError, match=r"2 groups were played, but scores have shape \(3,\)"):
        collect_groups(player(["xx"]), lambda episodes: [True] * 3, wanted=2, max_rounds=2)


@pytest.mark.medium
def test_a_group_that_only_penalties_tell_apart_is_not_informative(make_turn, make_episode):
    """All members fail, but one reply is too long or not valid. Tested through `collect`."""
    config = base.get_config()
    config.rollout.update(groups=2, group_size=2, max_new_tokens=8)
    config.reward.overlong_buffer = 4
    config.collect.max_rounds = 3

    def play(task, seeds_G, key):
        long, short = make_turn([1], [2] * 8), make_turn([1], [2])
        unreadable = make_turn([1], [2], valid=False)
        solved = make_turn([1], [2], reward=1.0)
        pairs = {0: (long, short), 1: (unreadable, short), 2: (solved, short), 3: (short, short)}
        return [
            make_episode(g, k, [pairs[seed % 4][k]])
            for g, seed in enumerate(seeds_G)
            for k in range(2)
        ]

    task = types.SimpleNamespace(
        name="one",
        collecting=build_collecting(config),
        key=jax.random.key(0),
    )
    state = types.SimpleNamespace(seed_cursor={"one": 0}, streak_P={})
    found = collect(task, play, state, 1)
    assert found.rounds == 3
    assert found.informative_N.tolist() == [False, False, True, False, False, False]
    # The filter sees penalties: without the criterion, groups 0, 1 and 4 would have counted.
    _, return_GK = add_rewards(
        make_batch(found.played),
        found.played,
        format_penalty=-0.1,
        max_length=8,
        overlong_buffer=4,
    )
    differs = np.asarray(group_scores(return_GK)) > ZERO_SCORE
    assert differs.tolist() == [True, True, True, False, True, True]
    assert places(found) == [2, 2] and places(dataclasses.replace(found, episodes=found.played))
