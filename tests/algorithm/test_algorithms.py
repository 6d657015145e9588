"""algorithms.py: rewards to advantages, by hand and against loops, for every algorithm."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.algorithm import advantage
from ragen_jax.algorithm.algorithms import ALGORITHMS, Credit, token_advantages
from ragen_jax.core.types import Batch

pytestmark = pytest.mark.fast

PLAIN = Credit(
    name="grpo",
    gamma=1.0,
    lam=1.0,
    bi_level=False,
    turn_gamma=1.0,
    soft_weights=False,
    level="turn",
    normalize="identity",
    grouping="state",
)


def make_batch(rows, T=6, size=None):
    """Build a batch from rows of (episode, group, [(turn, positions, reward)]), padded to `size`
    rows."""
    B = size or len(rows)
    batch = Batch(
        tokens_BT=np.zeros((B, T), np.int32),
        mask_BT=np.zeros((B, T), np.float32),
        logp_BT=np.zeros((B, T), np.float32),
        turn_BT=np.full((B, T), -1, np.int32),
        turn_end_BT=np.zeros((B, T), bool),
        span_BT=np.zeros((B, T), np.int8),
        reward_BT=np.zeros((B, T), np.float32),
        episode_B=np.full(B, -1, np.int32),
        group_B=np.full(B, -1, np.int32),
        weight_B=np.zeros(B, np.float32),
    )
    for b, (episode, group, turns) in enumerate(rows):
        batch.episode_B[b], batch.group_B[b], batch.weight_B[b] = episode, group, 1.0
        for turn, positions, reward in turns:
            batch.mask_BT[b, positions] = 1.0
            batch.turn_BT[b, positions] = turn
            batch.turn_end_BT[b, positions[-1]] = True
            batch.reward_BT[b, positions[-1]] = reward
    return batch


# Two groups of two; episode 0 is split into two rows, row 4 is padding.
ROWS = [
    (0, 0, [(0, [1, 2], 0.5)]),
    (0, 0, [(1, [2, 3], 1.0)]),
    (1, 0, [(0, [1], -0.5), (1, [3, 4], 1.0)]),
    (2, 1, [(0, [1, 2, 3], 2.0)]),
    (3, 1, [(0, [2, 3], -1.0)]),
]
RETURN_GK = np.array([[1.5, 0.5], [2.0, -1.0]], np.float32)


@pytest.fixture
def batch():
    return make_batch(ROWS, size=6)


ALL = np.ones((2, 2), bool)
FIRST_GROUP = np.array([[True, True], [False, False]])  # selects rows 0, 1, 2


def assign(batch, keep=ALL, credit=PLAIN, **arrays):
    found, target = token_advantages(credit, batch, keep, RETURN_GK, **arrays)
    return np.asarray(found), target


def test_group_advantages_lie_on_every_token_of_an_episode(batch):
    found, target = assign(batch)
    std = np.sqrt(0.5)  # std of 1.5 and 0.5, with one degree of freedom
    assert target is None
    np.testing.assert_allclose(found[0, 1:3], 0.5 / std, rtol=1e-5)
    np.testing.assert_allclose(found[1, 2:4], 0.5 / std, rtol=1e-5)
    np.testing.assert_allclose(found[2, [1, 3, 4]], -0.5 / std, rtol=1e-5)
    assert np.array_equal(found != 0, batch.mask_BT > 0)
    assert not assign(batch, FIRST_GROUP)[0][3:].any()


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "raft", "reinforce_plus_plus_baseline"]
)
def test_kl_in_the_reward_lowers_an_episodes_return(batch, name):
    credit = dataclasses.replace(PLAIN, name=name)
    rng = np.random.default_rng(0)
    kl_BT = rng.normal(size=batch.mask_BT.shape).astype(np.float32)  # not zero outside the mask
    lowered = RETURN_GK.astype(float).copy()
    for b in range(5):
        e = batch.episode_B[b]
        lowered[e // 2, e % 2] -= 0.3 * (batch.mask_BT[b] * kl_BT[b]).sum()
    want, _ = token_advantages(credit, batch, ALL, lowered.astype(np.float32))
    found, _ = assign(batch, credit=credit, kl_BT=kl_BT, kl_coef=0.3)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_ppo_by_hand(batch):
    # gamma = lambda = 1: the sum of later rewards minus the value, whitened over kept tokens.
    value_BT = np.full(batch.mask_BT.shape, 0.25, np.float32)
    credit = dataclasses.replace(PLAIN, name="ppo")
    found, target = assign(batch, credit=credit, value_BT=value_BT)
    to_go = np.zeros_like(batch.mask_BT)
    to_go[0, 1:3] = 1.5  # the reward of the second row counts for the first
    to_go[1, 2:4] = 1.0
    to_go[2, 1], to_go[2, 3:5] = 0.5, 1.0
    to_go[3, 1:4] = 2.0
    to_go[4, 2:4] = -1.0
    np.testing.assert_allclose(target, to_go, atol=1e-6)
    inside = batch.mask_BT > 0
    raw = to_go[inside] - 0.25
    np.testing.assert_allclose(found[inside], (raw - raw.mean()) / raw.std(ddof=1), atol=1e-5)


def test_ppo_whitens_over_the_kept_rows_alone(batch):
    value_BT = np.zeros(batch.mask_BT.shape, np.float32)
    found, _ = assign(batch, FIRST_GROUP, dataclasses.replace(PLAIN, name="ppo"), value_BT=value_BT)
    kept = found[:3][batch.mask_BT[:3] > 0]
    assert abs(kept.mean()) < 1e-6 and kept.std(ddof=1) == pytest.approx(1.0, abs=1e-5)
    assert not found[3:].any()


@pytest.mark.medium
def test_ppo_bi_level_and_kl_and_levels(batch):
    rng = np.random.default_rng(1)
    value_BT, kl_BT = rng.normal(size=(2, *batch.mask_BT.shape)).astype(np.float32)
    credit = dataclasses.replace(
        PLAIN, name="ppo", gamma=0.9, lam=0.8, turn_gamma=0.7, bi_level=True
    )
    found, target = assign(batch, credit=credit, value_BT=value_BT, kl_BT=kl_BT, kl_coef=0.1)
    reward = batch.reward_BT - 0.1 * batch.mask_BT * kl_BT
    want, want_target = advantage.bi_level_gae(
        *(reward, value_BT, batch.mask_BT, batch.turn_end_BT),
        gamma=0.9,
        lam=0.8,
        turn_gamma=0.7,
        next_row_B=np.array([1, -1, -1, -1, -1, -1]),
    )
    np.testing.assert_allclose(target, want_target, atol=1e-5)
    want = np.where(batch.mask_BT > 0, advantage.whiten(want, batch.mask_BT), 0)
    np.testing.assert_allclose(found, want, atol=1e-5)

    # All rewards are on the last token of the episode: with gamma = lambda = 1 the target of the
    # first turn of row 2 equals that of the second turn.
    credit = dataclasses.replace(PLAIN, name="ppo", level="episode")
    _, target = assign(batch, credit=credit, value_BT=value_BT)
    np.testing.assert_allclose(target[2, [1, 3, 4]], 0.5, atol=1e-6)


@pytest.mark.medium
def test_normalised_returns_lie_at_the_end_of_an_episode(batch):
    value_BT = np.zeros(batch.mask_BT.shape, np.float32)
    credit = dataclasses.replace(PLAIN, name="ppo", normalize="mean", grouping="batch")
    _, target = assign(batch, credit=credit, value_BT=value_BT)
    mean = RETURN_GK.mean()
    np.testing.assert_allclose(target[0, 1:3], 1.5 - mean, atol=1e-6)
    np.testing.assert_allclose(target[2, [1, 3, 4]], 0.5 - mean, atol=1e-6)
    np.testing.assert_allclose(target[4, 2:4], -1.0 - mean, atol=1e-6)


@pytest.mark.medium
def test_reinforce_plus_plus(batch):
    credit = dataclasses.replace(PLAIN, name="reinforce_plus_plus", gamma=0.5)
    found, target = assign(batch, credit=credit)
    assert target is None
    to_go = np.zeros_like(batch.mask_BT)
    to_go[0, 1:3] = 0.375, 0.75  # 0.5 + 0.5 * 0.5 at the end of the first row
    to_go[1, 2:4] = 0.5, 1.0
    to_go[2, [1, 3, 4]] = -0.5 + 0.25, 0.5, 1.0
    to_go[3, 1:4] = 0.5, 1.0, 2.0
    to_go[4, 2:4] = -0.5, -1.0
    inside = batch.mask_BT > 0
    raw = to_go[inside]
    np.testing.assert_allclose(found[inside], (raw - raw.mean()) / raw.std(ddof=1), atol=1e-5)


# ---- several rows of an episode -----------------------------------------------------------------


def layouts(seed, episodes=4, size=40):
    """Return (whole, cut, place): the same episodes with one row each and split into rows. In the
    order `place`, token i of `cut` is token i of `whole`."""
    rng = np.random.default_rng(seed)
    whole, cut, at_whole, at_cut = [], [], [], []
    for episode in range(episodes):
        turns, t = [], 0
        for turn in range(int(rng.integers(1, 6))):
            start = t + int(rng.integers(1, 4))
            t = start + int(rng.integers(1, 4))
            turns.append((turn, list(range(start, t)), float(rng.normal())))
        whole.append((episode, episode // 2, turns))
        row = []
        for turn, positions, reward in turns:
            if not row or rng.random() < 0.6:
                row, begin = [], positions[0] - int(rng.integers(1, 4))
                cut.append((episode, episode // 2, row))
            row.append((turn, [p - begin for p in positions], reward))
            for p in positions:
                at_whole.append((episode, p))
                at_cut.append((len(cut) - 1, p - begin))
    order = rng.permutation(len(cut)).tolist()
    at_cut = [(order.index(b), t) for b, t in at_cut]
    cut = [cut[b] for b in order]
    batches = make_batch(whole, T=size), make_batch(cut, T=size, size=len(cut) + 2)
    return *batches, tuple(np.array(at_whole).T), tuple(np.array(at_cut).T)


TOKEN_CREDIT = [name for name, algorithm in ALGORITHMS.items() if algorithm.of_tokens]


@pytest.mark.medium
@pytest.mark.parametrize("name, bi_level", [*((n, False) for n in TOKEN_CREDIT), ("ppo", True)])
@pytest.mark.parametrize(
    "level, normalize",
    [("turn", "identity"), ("token", "identity"), ("episode", "identity")] + [("turn", "mean_std")],
)
@pytest.mark.parametrize(
    "gamma, lam, turn_gamma", [(1.0, 1.0, 1.0), (0.9, 0.7, 0.8), (0.5, 0.0, 0.6)]
)
def test_an_episode_in_several_rows_has_the_advantages_of_one_row(
    name, bi_level, level, normalize, gamma, lam, turn_gamma
):
    credit = dataclasses.replace(
        PLAIN,
        **dict(name=name, bi_level=bi_level, level=level, normalize=normalize),
        **dict(gamma=gamma, lam=lam, turn_gamma=turn_gamma),
    )
    for seed in range(4):
        whole, cut, at_whole, at_cut = layouts(seed)
        rng = np.random.default_rng(100 + seed)
        found = []
        per_token = rng.normal(size=(2, len(at_whole[0]))).astype(np.float32)  # value and KL
        return_GK = np.bincount(whole.episode_B, whole.reward_BT.sum(1)).reshape(2, 2)
        for batch, at in ((whole, at_whole), (cut, at_cut)):
            value_BT, kl_BT = np.full((2, *batch.mask_BT.shape), np.nan, np.float32)
            value_BT[at], kl_BT[at] = per_token
            advantage_BT, target_BT = token_advantages(
                *(credit, batch, ALL, return_GK.astype(np.float32)),
                **dict(value_BT=value_BT, kl_BT=kl_BT, kl_coef=0.3),
            )
            found.append([np.asarray(advantage_BT)[at]])
            if target_BT is not None:
                found[-1].append(np.asarray(target_BT)[at])
            assert not np.asarray(advantage_BT)[batch.mask_BT == 0].any()
        assert len(cut.weight_B) - 2 > len(whole.weight_B)
        np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=2e-6)


@pytest.mark.medium
def test_kl_of_later_rows_by_hand():
    """Two turns of one token, each in its own row: rewards 0 and 1, KL 0.2 and 0.5."""
    batch = make_batch([(0, 0, [(0, [1], 0.0)]), (0, 0, [(1, [2], 1.0)])], T=3)
    kl_BT = np.zeros((2, 3), np.float32)
    kl_BT[0, 1], kl_BT[1, 2] = 0.2, 0.5
    for gamma, first in ((1.0, 0.3), (0.5, 0.05)):  # -0.2 + gamma * (1 - 0.5)
        credit = dataclasses.replace(PLAIN, name="ppo", gamma=gamma)
        _, target = token_advantages(
            *(credit, batch, np.ones((1, 1), bool), np.ones((1, 1), np.float32)),
            **dict(value_BT=np.zeros((2, 3), np.float32), kl_BT=kl_BT, kl_coef=1.0),
        )
        np.testing.assert_allclose([target[0, 1], target[1, 2]], [first, 0.5], atol=1e-6)


@pytest.mark.medium
def test_returns_are_compared_with_those_of_the_kept_episodes(batch):
    """With grouping "batch", the mean is over kept episodes; with "state", over the whole group."""
    best_and_worst = np.array([[True, False], [False, True]])  # returns 1.5 and -1
    value_BT = np.zeros(batch.mask_BT.shape, np.float32)
    for grouping, best, worst in (("batch", 1.25, -1.25), ("state", 0.5, -1.5)):
        credit = dataclasses.replace(PLAIN, name="ppo", normalize="mean", grouping=grouping)
        _, target = assign(batch, best_and_worst, credit, value_BT=value_BT)
        np.testing.assert_allclose(target[0, 1:3], best, atol=1e-6)
        np.testing.assert_allclose(target[4, 2:4], worst, atol=1e-6)
    credit = dataclasses.replace(PLAIN, name="dr_grpo", normalize="mean_std", grouping="batch")
    found, _ = assign(batch, best_and_worst, credit)
    std = 2.5 / np.sqrt(2)
    np.testing.assert_allclose(found[0, 1:3], 0.5 / std, rtol=1e-5)
    np.testing.assert_allclose(found[4, 2:4], -1.5 / std, rtol=1e-5)
    assert not found[2:4].any()


def test_soft_weights(batch):
    found, _ = assign(batch)
    soft, _ = assign(batch, credit=dataclasses.replace(PLAIN, soft_weights=True))
    weight = np.array([1 / 3, 1.0])  # stds of 0.707 and 2.121
    np.testing.assert_allclose(soft[:5], found[:5] * weight[batch.group_B[:5]][:, None], rtol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("name", ALGORITHMS)
def test_order_of_rows_and_padding_change_nothing(batch, name):
    rng = np.random.default_rng(2)
    value_BT = rng.normal(size=batch.mask_BT.shape).astype(np.float32)
    credit = dataclasses.replace(PLAIN, name=name)
    found, _ = assign(batch, credit=credit, value_BT=value_BT)
    order = [3, 5, 1, 0, 4, 2]
    mixed = Batch(**{name: x[order] for name, x in batch.arrays.items()})
    other, _ = assign(mixed, credit=credit, value_BT=value_BT[order])
    np.testing.assert_allclose(other, found[order], atol=1e-6)
    short, _ = assign(make_batch(ROWS), credit=credit, value_BT=value_BT[:5])
    np.testing.assert_allclose(short, found[:5], atol=1e-6)
