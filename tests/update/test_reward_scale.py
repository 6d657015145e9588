"""The size of the rewards, and a constant added to them, decide nothing."""

import dataclasses
import itertools

import numpy as np
import pytest

from ragen_jax.algorithm import advantage, rewards
from ragen_jax.algorithm.algorithms import ALGORITHMS, DISTILL, Credit, token_advantages
from ragen_jax.algorithm.batch import make_batch
from ragen_jax.algorithm.filter import METRICS, STRATEGIES
from ragen_jax.algorithm.zero_variance import zero_variance_signs
from ragen_jax.configs.base import Filter, Stopping
from ragen_jax.diagnostics.anatomy import anatomy_metrics
from ragen_jax.diagnostics.gradients import variance_buckets
from ragen_jax.diagnostics.stopping import init_stopping, update_stopping
from ragen_jax.envs import ENVS
from ragen_jax.rollout.collect import differ_in_reward
from ragen_jax.update.selection import select_episodes
from tests.env_names import OURS

pytestmark = pytest.mark.fast

G, K = 8, 6
FACTORS = (1e-4, 0.02, 0.1, 10.0, 1e4)
SHIFTS = (-3.0, 0.5, 10.0)  # in units of the largest return
VALUES = {"top_k_abs": 3.0, "quarter": 2.0, "min_p": 0.3, "pairs": 2.0}
PLAIN = Credit(
    **dict(name="grpo", gamma=1.0, lam=1.0, bi_level=False, turn_gamma=1.0, soft_weights=False),
    **dict(level="turn", normalize="identity", grouping="state"),
)
HAS_UNIT = ("dr_grpo", "rloo")  # algorithms whose advantages have the unit of the rewards
ENVIRONMENTS = pytest.mark.parametrize("name", OURS)


def play(name, group, member):
    """Return (rewards, success): the expert's moves, some replaced by random moves."""
    env, rng = ENVS[name](split="train"), np.random.default_rng((group, member))
    state, paid, success = env.reset(group), [], False
    for _ in range(4):
        plan = env.solve(state)
        move = plan[0] if plan and rng.random() > 0.1 * group else None
        if move is None:
            move = str(rng.choice(env.actions)) if env.actions else "no idea"
        step = env.step(state, move, rng)
        state, success = step.state, bool(step.info.get("success"))
        paid.append(float(step.reward))
        if step.done:
            break
    return paid, success


@pytest.fixture(scope="module")
def played():
    """Episodes of an environment as (rewards, success), played once: flawless to random groups."""
    stored = {}

    def of(name):
        if name not in stored:
            pairs = itertools.product(range(G), range(K))
            stored[name] = [play(name, g, k) for g, k in pairs]
        return stored[name]

    return of


@pytest.fixture
def scaled_episodes(played, make_turn, make_episode):
    """scaled_episodes(name, factor) -> episodes with rewards times factor."""

    def of(name, factor=1.0):
        return [
            make_episode(
                number // K,
                number % K,
                [make_turn([1, 2], [3, 4], reward=reward * factor) for reward in paid],
                success=success,
            )
            for number, (paid, success) in enumerate(played(name))
        ]

    return of


def returns(episodes):
    return rewards.sum_turns([[turn.reward for turn in e.turns] for e in episodes], episodes)


def select(return_GK, task_return_GK=None, **settings):
    chosen = dataclasses.replace(Filter(), **settings)
    rng = np.random.default_rng(0)
    length_GK, entropy_GK = rng.integers(1, 9, (G, K)), rng.random((G, K))
    score_G, keep_GK, zero_G = select_episodes(
        *(chosen, (G // 2, G // 2), return_GK, length_GK, entropy_GK),
        **dict(value_E=(chosen.value,) * 2, task_return_GK=task_return_GK),
    )
    return np.asarray(keep_GK), np.asarray(zero_G)


def selections():
    for strategy, metric in itertools.product(STRATEGIES, METRICS):
        for keep in ("largest", "smallest"):
            yield dict(strategy=strategy, metric=metric, keep=keep, value=VALUES.get(strategy, 0.7))


def test_pairs_have_variance():
    """Of groups that nobody, somebody and everybody solved, pairs are taken from the second."""
    return_GK = np.zeros((G, K), np.float32)
    for group, solved in enumerate((0, 1, 6, 5, 3, 6, 0, 2)):
        return_GK[group, :solved] = 1.0
    chosen = Filter(
        strategy="pairs", value=1.0, metric="reward_mean", include_zero=True, loss_scale="none"
    )
    _, keep_GK, _ = select_episodes(chosen, (G,), return_GK, return_GK, None, value_E=(1.0,))
    assert np.flatnonzero(np.asarray(keep_GK).all(1)).tolist() == [1, 3]


@pytest.mark.medium
@ENVIRONMENTS
def test_no_selection_depends_on_the_size(name, scaled_episodes):
    base_GK = returns(scaled_episodes(name))
    scaled = [returns(scaled_episodes(name, factor)) for factor in FACTORS]
    shifted = [base_GK + shift * (abs(base_GK).max() or 1.0) for shift in SHIFTS]
    for settings in selections():
        want_GK, want_zero_G = select(base_GK, **settings)
        # A constant changes the sum and the mean, by which two metrics rank.
        changes_mean = settings["metric"] in ("reward_sum", "reward_mean")
        for return_GK in scaled + ([] if changes_mean else shifted):
            keep_GK, zero_G = select(return_GK, **settings)
            np.testing.assert_array_equal(keep_GK, want_GK, err_msg=str(settings))
            np.testing.assert_array_equal(zero_G, want_zero_G, err_msg=str(settings))


@pytest.mark.medium
@pytest.mark.parametrize("soft_weights", [False, True])
@pytest.mark.parametrize("normalize", rewards.METHODS)
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != DISTILL])
def test_no_advantage_depends_on_the_size(algorithm, normalize, soft_weights, scaled_episodes):
    settings = dict(name=algorithm, normalize=normalize, soft_weights=soft_weights)
    credit = dataclasses.replace(PLAIN, **settings)
    keeps_unit = algorithm in HAS_UNIT and normalize not in rewards.SCALED
    for name in ("sokoban", "bandit", "countdown"):
        found = {}
        for factor in (1.0, *FACTORS):
            episodes = scaled_episodes(name, factor)
            batch, return_GK = rewards.add_rewards(
                make_batch(episodes), episodes, format_penalty=0.0
            )
            # A critic learns the unit of the rewards, unless they are normalised.
            unit = 1.0 if normalize in rewards.SCALED else factor
            value_BT = unit * np.random.default_rng(1).normal(size=batch.mask_BT.shape)
            advantage_BT, _ = token_advantages(
                *(credit, batch, np.ones((G, K), bool), return_GK),
                **dict(value_BT=value_BT, environment_G=np.repeat([0, 1], G // 2)),
            )
            found[factor] = np.asarray(advantage_BT) / (factor if keeps_unit else 1.0)
        assert np.abs(found[1.0]).max() > 0
        for factor in FACTORS:
            np.testing.assert_allclose(found[factor], found[1.0], rtol=1e-3, atol=1e-4)


@pytest.mark.medium
@ENVIRONMENTS
def test_no_group_advantage_depends_on_a_constant(name, scaled_episodes):
    return_GK = returns(scaled_episodes(name))
    unit = abs(return_GK).max() or 1.0
    want_GK = relative(return_GK)
    for shift in SHIFTS:
        shifted_GK = return_GK + np.float32(shift * unit)
        np.testing.assert_allclose(relative(shifted_GK), want_GK, rtol=1e-3, atol=1e-3)


def relative(return_GK):
    eps = advantage.STD_EPS * advantage.reward_unit(return_GK)
    return np.asarray(advantage.group_relative(return_GK, eps=eps))


@pytest.mark.medium
@ENVIRONMENTS
def test_no_verdict_depends_on_the_size(name, scaled_episodes):
    def verdicts(factor):
        episodes = scaled_episodes(name, factor)
        return_GK = returns(episodes)
        success_GK = np.reshape([e.success for e in episodes], (G, K))
        variance_G = np.asarray(advantage.sample_variance(return_GK))
        unit_G = np.asarray(advantage.reward_unit(return_GK))
        return {
            "varied": differ_in_reward(episodes).tolist(),
            "signs": np.asarray(zero_variance_signs(return_GK, success_GK)).tolist(),
            "anatomy": anatomy_metrics(episodes, return_GK),
            "buckets": variance_buckets(variance_G, buckets=3, unit_G=unit_G).tolist(),
            "fired": fired_steps(variance_G),
        }

    want = verdicts(1.0)
    for factor in FACTORS:
        assert verdicts(factor) == want


def fired_steps(variance_G):
    """Return the steps at which the variance rule fires while the variance fades."""
    settings, state, steps = Stopping(), init_stopping(), []
    for step in range(30):
        faded = variance_G.mean() * (1.0 if step < 12 else 0.05)
        state, fired = update_stopping(
            state, settings, variance_E=[faded], kept=1.0, skipped=0, labels=("",)
        )
        steps += [step for rule in fired if rule.rule == "variance"]
    return steps


# ---- the tolerance of the threshold -------------------------------------------------------------

RETURN_GK = np.array([[0, 1] * 3, [1] * 5 + [0], [1] * 6, [0] * 6] * 2, np.float32)
PENALTY_GK = np.array([[0] * 6, [-0.1] * 3 + [0] * 3] * 4, np.float32)


@pytest.mark.parametrize("factor", (1.0, 0.1, 0.02))
def test_small_rewards_keep_the_same_groups(factor):
    """Rewards of 0.02 kept no group while the tolerance was the paper's 0.01."""
    keep_GK, _ = select(factor * RETURN_GK)
    assert keep_GK.all(1).tolist() == [True, True, False, False] * 2
    paper_GK, _ = select(factor * RETURN_GK, eps=0.01)
    assert paper_GK.any() == (factor == 1.0)


@pytest.mark.parametrize("strategy, mode, kept", [("top_p", "linear", 0), ("top_p", "softmax", 4)])
def test_a_step_without_task_variance_is_rejected(strategy, mode, kept):
    task_return_GK = np.ones((G, K), np.float32)
    settings = dict(strategy=strategy, mode=mode)
    keep_GK, _ = select(10 + PENALTY_GK, task_return_GK, **settings)
    assert keep_GK.any(1).sum() == kept
    # One group whose task rewards vary is enough, in its environment alone.
    task_return_GK[0, 0] = 0.0
    keep_GK, _ = select(task_return_GK + PENALTY_GK, task_return_GK, **settings)
    assert keep_GK[:4].any() and keep_GK[4:].any() == (mode == "softmax")
    # The paper's code looks at the total variance instead.
    penalised = np.full((G, K), 1.0, np.float32) + 10 * PENALTY_GK
    keep_GK, _ = select(penalised, np.ones((G, K)), eps=0.01)
    assert keep_GK.any()
