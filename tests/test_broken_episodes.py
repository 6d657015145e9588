"""Every figure of a group with broken episodes is computed from its sound members.

Most tests check one property: a group of K members of which n are sound gives the same figures as
the n sound members alone, for any values in the broken members.
"""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.algorithm import advantage, filter, rewards
from ragen_jax.algorithm.algorithms import ALGORITHMS, Credit, token_advantages
from ragen_jax.algorithm.batch import make_batch
from ragen_jax.algorithm.bonus import entropy_weights
from ragen_jax.algorithm.zero_variance import zero_variance_signs
from ragen_jax.configs.base import Filter, Stopping, VarianceRule
from ragen_jax.core.task_shares import Part
from ragen_jax.diagnostics.anatomy import action_metrics, anatomy_metrics, style_metrics
from ragen_jax.diagnostics.intervals import paired_gain
from ragen_jax.diagnostics.rollouts import rollout_metrics, selected_metrics
from ragen_jax.diagnostics.scopes import first_turns
from ragen_jax.diagnostics.stopping import init_stopping, update_stopping
from ragen_jax.rollout.collect import collect_groups, differ_in_reward
from ragen_jax.run.heldout import summarise
from ragen_jax.run.log import eval_line, learning_curve, write_outcomes
from ragen_jax.run.run_files import read_outcomes
from ragen_jax.run.stages import mean_variance
from ragen_jax.run.step import Played
from ragen_jax.update.learner import Outcomes, deal_at_random, filter_metrics
from ragen_jax.update.selection import select_episodes

pytestmark = pytest.mark.fast


def masked(seed, G=5, sound=3, K=5):
    """Return (sound_GK, pick, rng): `sound` of the K members of G groups are sound; pick(x_GK) is
    x of the sound members."""
    rng = np.random.default_rng(seed)
    order_GK = np.argsort(rng.random((G, K)), axis=1)
    sound_GK = order_GK < sound
    return sound_GK, lambda x_GK: np.asarray(x_GK)[sound_GK].reshape(G, sound), rng


def spoiled(x_GK, sound_GK):
    """Return x with NaN in the entries of broken members."""
    return np.where(sound_GK, x_GK, np.nan).astype(np.float32)


RETURNS = {
    "deviations": advantage.deviations,
    "group_relative": advantage.group_relative,
    "dr_grpo": lambda r, **mask: advantage.group_relative(r, normalize_by_std=False, **mask),
    "leave_one_out": advantage.leave_one_out,
    **{
        f"{method} over the {grouping}": lambda r, method=method, grouping=grouping, **mask: (
            rewards.normalize_returns(
                r,
                method=method,
                grouping=grouping,
                environment_G=np.arange(len(r)) % 2,
                keep_GK=np.arange(len(r))[:, None] + 0 * np.nan_to_num(r) < 4,
                **mask,
            )
        )
        for method in rewards.METHODS
        for grouping in rewards.GROUPINGS
    },
    "select_members": lambda r, **mask: filter.select_members(r, top=1, bottom=1, **mask),
}
OF_GROUPS = {
    "sample_variance": advantage.sample_variance,
    "soft_weights": advantage.soft_weights,
    "soft_weights of two": lambda r, **mask: advantage.soft_weights(
        r, environment_G=np.arange(len(r)) % 2, **mask
    ),
    "signs": lambda r, **mask: zero_variance_signs(r, np.nan_to_num(r) > 0, **mask),
    **{
        metric: lambda r, metric=metric, **mask: filter.group_scores(
            r, metric, entropy_GK=r**2, length_GK=3 * r, **mask
        )
        for metric in filter.METRICS
        if metric != "reward_sum"
    },
}


@pytest.mark.medium
@pytest.mark.parametrize("name", [*RETURNS, *OF_GROUPS])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ties=st.booleans())
def test_broken_members_change_no_statistic_of_their_group(name, seed, ties):
    sound_GK, pick, rng = masked(seed)
    x_GK = rng.integers(0, 2, sound_GK.shape) if ties else rng.normal(size=sound_GK.shape)
    function = (RETURNS | OF_GROUPS)[name]
    found = np.asarray(function(spoiled(x_GK, sound_GK), sound_GK=sound_GK))
    want = np.asarray(function(pick(x_GK).astype(np.float32)))
    if name in RETURNS:
        if "over the" not in name:  # the entry of a broken member is never read
            assert not np.nan_to_num(found[~sound_GK], nan=1).any()
        found = pick(found)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.medium
def test_by_hand():
    """Returns are 1, 0 and, for a broken member, their mean, as `sum_turns` gives it."""
    return_GK = np.array([[1.0, 0.0, 0.5], [2.0, 9.0, 9.0]])
    sound_GK = np.array([[True, True, False], [True, False, False]])
    mask = {"sound_GK": sound_GK}
    np.testing.assert_allclose(filter.group_scores(return_GK, **mask), [0.5, np.nan])  # not 0.25
    np.testing.assert_allclose(advantage.sample_variance(return_GK, **mask), [0.5, 0])
    std = 0.5**0.5
    want = [[0.5 / std, -0.5 / std, 0], [0, 0, 0]]
    np.testing.assert_allclose(advantage.group_relative(return_GK, **mask), want, rtol=1e-5)
    want = [[1, -1, 0], [0, 0, 0]]
    np.testing.assert_allclose(advantage.leave_one_out(return_GK, **mask), want)
    # The sum is scaled to the size of a whole group: 3 * 0.5.
    np.testing.assert_allclose(filter.group_scores(return_GK, "reward_sum", **mask), [1.5, np.nan])
    # The second group has too few sound members. A group of size one needs only its single member.
    found = advantage.comparable_members(sound_GK)
    np.testing.assert_array_equal(found, [[True, True, False], [False] * 3])
    found = advantage.comparable_members(np.array([[True], [False]]))
    np.testing.assert_array_equal(found, [[True], [False]])
    alone = advantage.group_relative(np.array([[3.0], [np.nan]]), sound_GK=[[True], [False]])
    np.testing.assert_allclose(alone, [[3.0], [0.0]], rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("normalize", ["identity", "mean_std"])
def test_no_algorithm_sees_broken_members(name, normalize):
    credit = Credit(
        **dict(name=name, gamma=0.9, lam=0.8, bi_level=False, turn_gamma=1.0, soft_weights=True),
        **dict(level="turn", normalize=normalize, grouping="state"),
    )
    sound_GK, pick, rng = masked(0, G=2)
    return_GK = rng.normal(size=sound_GK.shape).astype(np.float32)
    token_TGK = rng.normal(size=(2, *sound_GK.shape)).astype(np.float32)  # value, KL of one token
    found = []
    for mask_GK in (sound_GK, None):
        select = pick if mask_GK is None else (lambda x: x)
        returns = select(return_GK)
        G, K = returns.shape
        ones = np.ones((G * K, 1), np.float32)
        batch = types.SimpleNamespace(
            mask_BT=ones,
            turn_BT=0 * ones.astype(np.int32),
            turn_end_BT=ones > 0,
            reward_BT=returns.reshape(-1, 1),
            episode_B=np.arange(G * K),
            group_B=np.arange(G * K) // K,
            weight_B=ones[:, 0],
        )
        value_BT, kl_BT = (select(x).reshape(-1, 1) for x in token_TGK)
        advantage_BT, _ = token_advantages.__wrapped__(
            *(credit, batch, np.ones((G, K), bool) if mask_GK is None else mask_GK, returns),
            **dict(value_BT=value_BT, kl_BT=kl_BT, kl_coef=0.3, sound_GK=mask_GK),
        )
        found.append(np.asarray(advantage_BT).reshape(G, K))
    assert not found[0][~sound_GK].any()
    np.testing.assert_allclose(pick(found[0]), found[1], rtol=1e-4, atol=1e-5)


SETTINGS = Filter(
    **dict(strategy="none", value=0.9, metric="reward_variance", mode="linear", keep="largest"),
    **dict(include_zero=False, eps=0.01, loss_scale="linear", at_random=False),
    **dict(top_members=0, bottom_members=0),
)


@pytest.mark.medium
@pytest.mark.parametrize("strategy, value", [("none", 1.0), ("top_p", 0.9), ("top_k", 1.0)])
@pytest.mark.parametrize("mode", filter.MODES)
@pytest.mark.parametrize("include_zero", [True, False])
def test_a_group_with_one_sound_member_is_never_kept(strategy, value, mode, include_zero):
    return_GK = np.array([[1.0, 0.0, 5.0], [1.0, 9.0, 9.0], [1.0, 2.0, 4.0]], np.float32)
    sound_GK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    for members in (0, 1):
        chosen = dataclasses.replace(
            SETTINGS, strategy=strategy, mode=mode, include_zero=include_zero, top_members=members
        )
        score_G, keep_GK, _ = select_episodes(
            *(chosen, (3,), return_GK, return_GK, return_GK),
            **dict(value_E=(value,), sound_GK=sound_GK),
        )
        np.testing.assert_allclose(score_G, [0.5, np.nan, 7 / 3], rtol=1e-6)
        want = [[1, 1, 0], [0] * 3, [1] * 3] if not members else [[1, 0, 0], [0] * 3, [0, 0, 1]]
        np.testing.assert_array_equal(keep_GK, want)


def test_kept_and_scored_are_counted_among_the_sound():
    broken_GK = np.array([[0, 0, 1], [0, 1, 1], [0, 0, 0]], bool)
    outcomes = Outcomes(*np.zeros((3, 3, 3)), broken_GK=broken_GK)
    keep_GK = outcomes.sound_GK & np.array([[True], [True], [False]])
    zero_G = np.array([False, False, True])
    metrics = filter_metrics(np.array([4.0, np.nan, 0.0]), zero_G, keep_GK, outcomes.sound_GK)
    assert metrics == pytest.approx(
        {
            "filter/kept_ratio": 2 / 5,
            "filter/empty": 0.0,
            "filter/score_mean": 2.0,
            "filter/score_max": 4.0,
            "filter/score_std": 2.0,
            "filter/zero_groups": 0.5,
        }
    )
    everything = Outcomes(*np.zeros((3, 2, 2)), broken_GK=np.ones((2, 2), bool))
    lost = filter_metrics(
        np.full(2, np.nan), np.zeros(2, bool), np.zeros((2, 2), bool), everything.sound_GK
    )
    assert lost == {"filter/kept_ratio": 0.0, "filter/empty": 1.0}


def test_the_control_draws_among_groups_with_sound_members():
    sound_GK = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
    keep_GK = sound_GK & np.array([True, False, False, True])[:, None]
    seen = set()
    for step in range(60):
        dealt_GK = deal_at_random(keep_GK, [Part("", 4)], 1, step, member_GK=sound_GK)
        groups = np.flatnonzero(dealt_GK.any(1))
        np.testing.assert_array_equal(dealt_GK[groups], sound_GK[groups])
        seen.add(tuple(groups.tolist()))
    assert seen == {(0, 2), (0, 3), (2, 3)}  # two groups each time, never the second group


def test_halves_for_the_entropy_bonus_are_those_of_scored_groups():
    batch = types.SimpleNamespace(group_B=np.arange(4), mask_BT=np.ones((4, 1)))
    found = entropy_weights("upper_groups", batch, np.array([2.0, np.nan, 1.0, 3.0]), [Part("", 4)])
    assert found[[0, 2, 3], 0].tolist() == [1, 0, 1]  # the upper two of three groups


# ---- metrics of episodes ------------------------------------------------------------------------


@pytest.fixture
def pairs(make_turn, make_episode):
    """make(seed) -> (all episodes, the sound episodes), group by group, with their returns."""

    def make(seed, sound=3, K=5):
        sound_GK, pick, rng = masked(seed, sound=sound, K=K)
        everything, alone = [], []
        for g in range(len(sound_GK)):
            for k in range(K):
                turns = [
                    make_turn(
                        [g, t],
                        rng.integers(0, 9, rng.integers(1, 6)),
                        **dict(reward=float(rng.integers(0, 2)), valid=bool(rng.random() < 0.7)),
                        **dict(
                            reasoning=(0, int(rng.integers(0, 2))), actions=[rng.choice(list("ab"))]
                        ),
                    )
                    for t in range(int(rng.integers(1, 4)))
                ]
                if sound_GK[g, k]:
                    episode = make_episode(g, k, turns, success=bool(rng.random() < 0.5))
                    alone.append(dataclasses.replace(episode, member=len(alone) % sound))
                else:
                    junk = [make_turn([99], [7] * 50, valid=False, reward=-100.0)]
                    episode = make_episode(g, k, turns[:1] + junk)
                    episode = dataclasses.replace(episode, error="Traceback\nValueError: no")
                everything.append(episode)
        return everything, alone

    return make


def returns_of(episodes):
    return rewards.sum_turns([[t.reward for t in e.turns] for e in episodes], episodes)


OPPOSITES = {"a": "b", "b": "a"}
FIGURES = {
    "rollout": rollout_metrics,
    "collect": selected_metrics,
    "anatomy": anatomy_metrics,
    "action": lambda e, r: action_metrics(e, len(r), opposites=OPPOSITES),
    "eval": lambda e, r: {
        name: value
        for name, value in summarise(e, samples=r.shape[1], format_penalty=-0.5).items()
        if name != "eval/pass_at_4"
    },
    "style": lambda e, r: style_metrics(e, {}, lambda ids: ""),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("seed", range(5))
def test_figures_of_episodes_are_those_of_the_sound(pairs, name, seed):
    everything, alone = pairs(seed)
    found = FIGURES[name](everything, returns_of(everything))
    want = FIGURES[name](alone, returns_of(alone))
    assert found.pop(f"{name}/errors", None) in (None, 10) and not want.pop(f"{name}/errors", 0)
    assert found == pytest.approx(want)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_without_a_sound_episode_are_left_out(pairs, name):
    everything, _ = pairs(0)
    broken = [dataclasses.replace(e, error="no") for e in everything]
    found = FIGURES[name](broken, returns_of(broken))
    assert {x.partition("/")[2] for x in found} <= {"errors", "lost_groups", "replies"}


def test_lost_groups_are_counted_and_say_nothing(pairs):
    everything, _ = pairs(1)
    lost = [
        dataclasses.replace(e, error="no") if e.group == 2 and e.member else e for e in everything
    ]
    lost = [dataclasses.replace(e, error="") if (e.group, e.member) == (2, 0) else e for e in lost]
    found = rollout_metrics(lost, returns_of(lost))
    assert found["rollout/lost_groups"] == 1 and found["rollout/errors"] == 12
    classes = anatomy_metrics(lost, returns_of(lost))
    assert sum(classes[f"anatomy/{x}_count"] for x in ("mixed", "solved", "failed", "tied")) == 4


@pytest.mark.medium
def test_the_mean_variance_is_that_of_groups_with_sound_members():
    return_GK = np.array([[1.0, 0.0, 0.5], [2.0, 2.0, 2.0], [0.0, 3.0, 3.0]])
    sound_GK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
    assert mean_variance(return_GK, sound_GK) == pytest.approx((0.5 + 3) / 2)
    assert np.isnan(mean_variance(return_GK, np.zeros((3, 3), bool)))
    config = Stopping(variance=VarianceRule(patience=1, baseline=1))
    state, _ = update_stopping(init_stopping(), config, variance_E=[1.0], kept=1, skipped=0)
    _, fired = update_stopping(state, config, variance_E=[np.nan], kept=1, skipped=0)
    assert not fired


def test_played_knows_its_sound_episodes(pairs):
    everything, _ = pairs(2)
    (sound_GK,) = Played([], [everything], [returns_of(everything)]).sound_E
    np.testing.assert_array_equal(sound_GK, np.reshape([not e.error for e in everything], (5, 5)))


def test_a_prompt_that_broke_is_no_column(pairs, make_turn, make_episode):
    """Only prompts of sound episodes are scored; groups without sound episodes get no number."""
    thinking = make_turn([5], [1, 2], reasoning=(0, 1))
    shown = [make_turn([g], [1, 2], reasoning=(0, 1)) for g in range(3)]
    episodes = [
        dataclasses.replace(make_episode(0, 0, [thinking]), error="no"),
        make_episode(0, 1, [shown[0]]),
        make_episode(2, 0, [shown[2]]),
        make_episode(2, 1, [shown[2]]),
    ]
    found = first_turns([e for e in episodes if not e.error], samples=9)
    assert [p.tolist() for p in found.prompts] == [[0], [2]]
    assert found.group_N.tolist() == [0, 2] and found.prompt_M.tolist() == [1, 0, 1]


@pytest.mark.medium
def test_dynamic_sampling_does_not_judge_what_broke(make_turn, make_episode):
    def play(index):
        """Return four groups: differing rewards, one member lost, equal, differing except for the
        broken episodes."""
        played = []
        for g, (errors, earned) in enumerate(
            [("  ", (0, 1)), (" x", (0, 1)), ("  ", (1, 1)), ("  ", (0, 1))]
        ):
            for k in range(2):
                turn = make_turn([1], [2], reward=float(earned[k]))
                episode = make_episode(g, k, [turn])
                played.append(dataclasses.replace(episode, error=errors[k].strip()))
        return played

    found = collect_groups(play, differ_in_reward, wanted=3, max_rounds=1)
    assert found.informative_N.tolist() == [True, False, False, True]
    assert found.judged_N.tolist() == [True, False, True, True]
    assert found.metrics()["collect/informative_ratio"] == pytest.approx(2 / 3)
    assert [e.seed for e in found.episodes[::2]] == [100, 102, 103]  # the lost group is last


# ---- evaluations --------------------------------------------------------------------------------


def test_a_broken_heldout_episode_is_no_failure(tmp_path, make_turn, make_episode):
    turn = make_turn([1], [2], reward=1.0)
    episodes = [make_episode(g, 0, [turn], success=g < 2) for g in range(4)]
    episodes[3] = dataclasses.replace(episodes[3], error="no")
    metrics = summarise(episodes, samples=1, format_penalty=0.0)
    assert metrics["eval/success"] == pytest.approx(2 / 3) and metrics["eval/errors"] == 1
    # pass@2 counts the two problems with two sound episodes. Both are solved, one in 1 of 2.
    twice = [make_episode(g, k, [turn], success=g + k < 2) for g in range(3) for k in range(2)]
    twice[5] = dataclasses.replace(twice[5], error="no")
    found = summarise(twice, samples=2, format_penalty=0.0)
    assert found["eval/pass_at_2"] == 1.0 and found["eval/success"] == pytest.approx(3 / 5)

    write_outcomes(tmp_path, 0, episodes)
    write_outcomes(tmp_path, 20, [dataclasses.replace(e, error="") for e in episodes])
    everything = [dataclasses.replace(e, error="no") for e in episodes]
    write_outcomes(tmp_path, 40, everything)
    read = read_outcomes(tmp_path)
    np.testing.assert_array_equal(read[0], [1, 1, 0, np.nan])
    assert read[20] == [1, 1, 0, 0] and set(read) == {0, 20}
    gain, half = paired_gain(read[0], [read[20]])
    assert gain == 0 and half == pytest.approx(2.776 * 0.2, abs=1e-3)  # 3 problems, t(4)
    assert "0.667" in learning_curve(tmp_path) and "gained +0.0" in learning_curve(tmp_path)
    row = summarise(everything, samples=1, format_penalty=0.0)
    assert row == {"eval/errors": 4}
    assert eval_line(40, row) == "  eval at step 40: all 4 episodes failed"


def test_no_row_of_a_broken_episode_is_trained_on(make_turn, make_episode):
    episodes = [make_episode(0, k, [make_turn([1], [2, 3])]) for k in range(3)]
    episodes[1] = dataclasses.replace(episodes[1], error="no")
    batch = make_batch(episodes)
    broken_GK = rewards.broken_episodes(episodes)
    outcomes = Outcomes(*np.zeros((3, 1, 3)), broken_GK=broken_GK)
    assert outcomes.sound_GK.reshape(-1)[batch.episode_B].tolist() == [True, False, True]
