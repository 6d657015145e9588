"""batch.py and rewards.py: episodes as rows, rewards on turn ends, returns by group."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.algorithm.batch import make_batch, take_rows
from ragen_jax.algorithm.rewards import add_rewards, next_rows, place_returns, turn_reward

pytestmark = pytest.mark.fast


@pytest.fixture
def episodes(make_turn, make_episode):
    """Return a group of two: a full-history episode (one row) and a single-turn episode (two
    rows)."""
    full = [
        make_turn([1, 2], [3, 4], logp=[-0.1, -0.2], reward=0.5),
        make_turn([1, 2, 3, 4, 5], [6], logp=[-0.3], reward=-0.25, valid=False),
    ]
    single = [
        make_turn([1, 2], [7], logp=[-0.4], reward=0.0, valid=False),
        make_turn([8, 9], [1, 1], logp=[-0.5, -0.6], reward=10.0),
    ]
    return [make_episode(0, 0, full), make_episode(0, 1, single)]


def test_rows_by_hand(episodes):
    batch = make_batch(episodes)
    np.testing.assert_array_equal(
        batch.tokens_BT, [[1, 2, 3, 4, 5, 6], [1, 2, 7, 0, 0, 0], [8, 9, 1, 1, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.mask_BT, [[0, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]]
    )
    np.testing.assert_array_equal(
        batch.logp_BT,
        np.float32([[0, 0, -0.1, -0.2, 0, -0.3], [0, 0, -0.4, 0, 0, 0], [0, 0, -0.5, -0.6, 0, 0]]),
    )
    np.testing.assert_array_equal(
        batch.turn_BT,
        [[-1, -1, 0, 0, -1, 1], [-1, -1, 0, -1, -1, -1], [-1, -1, 1, 1, -1, -1]],
    )
    np.testing.assert_array_equal(
        batch.turn_end_BT, [[0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    )
    np.testing.assert_array_equal(batch.reward_BT, np.zeros((3, 6)))
    np.testing.assert_array_equal(batch.episode_B, [0, 1, 1])
    np.testing.assert_array_equal(batch.group_B, [0, 0, 0])
    np.testing.assert_array_equal(batch.weight_B, [1, 1, 1])
    assert {name: str(x.dtype) for name, x in batch.arrays.items()} == {
        **dict.fromkeys(["tokens_BT", "turn_BT", "episode_B", "group_B"], "int32"),
        **dict.fromkeys(["mask_BT", "logp_BT", "reward_BT", "weight_B"], "float32"),
        "turn_end_BT": "bool",
        "span_BT": "int8",
    }


def test_a_row_holds_the_group_of_its_episode(episodes):
    moved = [dataclasses.replace(episodes[0], group=4), dataclasses.replace(episodes[1], group=2)]
    np.testing.assert_array_equal(make_batch(moved).group_B, [4, 2, 2])


def test_a_turn_that_does_not_extend_starts_a_row_that_later_turns_extend(make_turn, make_episode):
    turns = [
        make_turn([1], [2]),
        make_turn([1, 3, 9, 9], [4]),  # differs from the sampled tokens
        make_turn([1, 3, 9, 9, 4, 5], [6]),
        make_turn([1, 3, 9, 9], [6]),  # shorter than its row
    ]
    batch = make_batch([make_episode(0, 0, turns)])
    np.testing.assert_array_equal(
        batch.tokens_BT,
        [[1, 2, 0, 0, 0, 0, 0], [1, 3, 9, 9, 4, 5, 6], [1, 3, 9, 9, 6, 0, 0]],
    )
    np.testing.assert_array_equal(
        batch.turn_BT,
        [[-1, 0, -1, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1, 2], [-1, -1, -1, -1, 3, -1, -1]],
    )
    np.testing.assert_array_equal(batch.episode_B, [0, 0, 0])


@pytest.fixture
def windowed(make_turn, make_episode):
    """Return four turns in a window of two. Token 1 opens a prompt, 10 + i is message i right after
    it, 20 + i is message i elsewhere."""
    turns = [
        make_turn([1, 10], [2, 3], reward=1.0),
        make_turn([1, 10, 2, 3, 21], [4], reward=2.0),
        make_turn([1, 11, 4, 22], [5, 6], reward=4.0),
        make_turn([1, 12, 5, 6, 23], [7], reward=8.0),
    ]
    return make_episode(0, 0, turns)


def test_rows_of_a_window_by_hand(windowed):
    batch = make_batch([windowed])
    np.testing.assert_array_equal(
        batch.tokens_BT, [[1, 10, 2, 3, 21, 4], [1, 11, 4, 22, 5, 6], [1, 12, 5, 6, 23, 7]]
    )
    # Each reply is trained in the row where it was sampled; in the next row it is only context.
    np.testing.assert_array_equal(
        batch.turn_BT, [[-1, -1, 0, 0, -1, 1], [-1, -1, -1, -1, 2, 2], [-1, -1, -1, -1, -1, 3]]
    )
    np.testing.assert_array_equal(batch.mask_BT, batch.turn_BT >= 0)
    np.testing.assert_array_equal(
        batch.turn_end_BT, [[0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]]
    )
    np.testing.assert_array_equal(batch.episode_B, [0, 0, 0])
    np.testing.assert_array_equal(batch.group_B, [0, 0, 0])


@pytest.mark.medium
def test_rewards_of_a_window_by_hand(windowed):
    batch, return_GK = add_rewards(make_batch([windowed]), [windowed], format_penalty=-1.0)
    np.testing.assert_array_equal(return_GK, [[15.0]])
    arrays = batch.turn_BT, batch.turn_end_BT, batch.episode_B
    np.testing.assert_array_equal(
        batch.reward_BT, [[0, 0, 0, 1, 0, 2], [0, 0, 0, 0, 0, 4], [0, 0, 0, 0, 0, 8]]
    )
    np.testing.assert_array_equal(next_rows(batch.turn_BT, batch.episode_B), [1, 2, -1])
    np.testing.assert_array_equal(
        place_returns(np.full(3, 15.0), *arrays),
        [[0] * 6, [0] * 6, [0, 0, 0, 0, 0, 15]],
    )


def test_episodes_never_share_a_row(make_turn, make_episode):
    # The prompt of the second episode happens to extend the first episode's row.
    first, second = make_turn([1], [2]), make_turn([1, 2, 3], [4])
    batch = make_batch([make_episode(0, 0, [first]), make_episode(0, 1, [second])])
    np.testing.assert_array_equal(batch.tokens_BT, [[1, 2, 0, 0], [1, 2, 3, 4]])


def test_length_pads_on_the_right_and_refuses_longer_rows(episodes):
    plain, padded = make_batch(episodes), make_batch(episodes, length=9)
    for name, x in vars(plain).items():
        wide = getattr(padded, name)
        if name.endswith("_BT"):
            assert wide.shape == (3, 9)
            np.testing.assert_array_equal(wide[:, :6], x)
            np.testing.assert_array_equal(wide[:, 6:], -1 if name == "turn_BT" else 0)
        else:
            np.testing.assert_array_equal(wide, x)
    assert make_batch(episodes, length=6).tokens_BT.shape == (3, 6)
    with pytest.raises(ValueError, match="a row has 6 tokens, but the batch's length is 5"):
        make_batch(episodes, length=5)
    with pytest.raises(ValueError, match="at least one episode"):
        make_batch([])


def test_take_rows_pads_with_rows_that_weigh_nothing(episodes):
    batch, _ = add_rewards(make_batch(episodes), episodes, format_penalty=-1.0)
    taken = take_rows(batch, np.array([2, 0]), size=4)
    for name, x in batch.arrays.items():
        found = getattr(taken, name)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found[:2], x[[2, 0]])
        padding = -1 if name in ("turn_BT", "episode_B", "group_B") else 0
        np.testing.assert_array_equal(found[2:], np.full((2, *x.shape[1:]), padding))
    empty = take_rows(batch, np.array([], int), size=2)
    assert empty.weight_B.tolist() == [0, 0] and not empty.mask_BT.any()
    with pytest.raises(ValueError, match="3 rows do not fit a batch of 2"):
        take_rows(batch, np.array([0, 1, 2]), size=2)


# ---- rewards ------------------------------------------------------------------------------------


def test_rewards_lie_on_turn_ends_with_the_penalty_of_invalid_replies(episodes):
    batch, return_GK = add_rewards(make_batch(episodes), episodes, format_penalty=-1.0)
    np.testing.assert_array_equal(
        batch.reward_BT,
        np.float32([[0, 0, 0, 0.5, 0, -1.25], [0, 0, -1, 0, 0, 0], [0, 0, 0, 10, 0, 0]]),
    )
    np.testing.assert_array_equal(return_GK, [[-0.75, 9.0]])
    assert batch.reward_BT.dtype == return_GK.dtype == np.float32


def test_the_given_batch_keeps_its_zero_rewards(episodes):
    batch = make_batch(episodes)
    add_rewards(batch, episodes, format_penalty=-1.0)
    assert not batch.reward_BT.any()


def test_returns_by_group_and_member(make_turn, make_episode):
    # Member k of group g earns 10 g + k, half of it in each of two turns.
    played = [
        make_episode(g, k, [make_turn([1], [2], reward=(10 * g + k) / 2)] * 2)
        for g in range(2)
        for k in range(3)
    ]
    _, return_GK = add_rewards(make_batch(played), played, format_penalty=-0.1)
    np.testing.assert_array_equal(return_GK, [[0, 1, 2], [10, 11, 12]])
    # Each group has a different penalty.
    played = [make_episode(g, 0, [make_turn([1], [2], valid=False)] * 2) for g in range(3)]
    _, return_GK = add_rewards(make_batch(played), played, format_penalty=np.array([-1, 0, -0.5]))
    np.testing.assert_array_equal(return_GK, [[-2], [0], [-1]])


def test_rewards_of_an_episode_add_up_to_its_return(episodes):
    batch, return_GK = add_rewards(make_batch(episodes), episodes, format_penalty=-0.5)
    sums = np.zeros(2)
    np.add.at(sums, batch.episode_B, batch.reward_BT.sum(1))
    np.testing.assert_allclose(sums, return_GK.reshape(-1), rtol=1e-6)


def test_turn_reward_by_hand(make_turn):
    assert turn_reward(make_turn([1], [2], reward=2.0), format_penalty=-0.5) == 2.0
    assert turn_reward(make_turn([1], [2], reward=2.0, valid=False), format_penalty=-0.5) == 1.5


@pytest.mark.parametrize("groups", [[0, 0, 1], [0, 1, 0, 1], [0, 0, 2, 2], [1, 1, 0, 0]])
def test_groups_that_are_unequal_or_out_of_order_are_refused(make_turn, make_episode, groups):
    played = [make_episode(g, 0, [make_turn([1], [2])]) for g in groups]
    match = f"{len(groups)} episodes do not form {max(groups) + 1} groups of equal size"
    with pytest.raises(ValueError, match=match):
        add_rewards(make_batch(played), played, format_penalty=-0.1)
