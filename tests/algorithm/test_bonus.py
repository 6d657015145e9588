"""bonus.py: the tokens with an entropy bonus, and the reward for information."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm.batch import make_batch, take_rows
from ragen_jax.algorithm.bonus import (
    ENTROPY_ON,
    entropy_gate,
    entropy_weights,
    pointwise_information,
    scatter_to_reasoning,
)
from ragen_jax.core.task_shares import Part
from ragen_jax.core.types import Episode, Turn
from ragen_jax.diagnostics.information import information_metrics

pytestmark = pytest.mark.fast


def turn(reasoning, action, length=7):
    return Turn(
        prompt=np.arange(3, dtype=np.int32),
        message="",
        sampled=np.arange(length, dtype=np.int32),
        logp=np.full(length, -0.5, np.float32),
        reasoning=reasoning,
        answer=action,
        actions=(),
        valid=True,
        reward=0.0,
        info={},
    )


@pytest.fixture
def batch():
    """Return four groups of one episode, each of two rows, followed by a padding row."""
    episodes = [
        Episode(g, g, 0, (turn((0, 3), (5, 6)), turn((0, 0), (2, 5))), False) for g in range(4)
    ]
    return take_rows(make_batch(episodes), np.arange(8), size=9)


def where(weights_BT):
    return [np.flatnonzero(row).tolist() for row in weights_BT]


def test_the_bonus_fades_as_information_does():
    share_E = np.array([1.4, 1.0, 0.9, 0.75, 0.5, 0.1, np.nan])
    assert entropy_gate(share_E, 0.5).tolist() == pytest.approx([1, 1, 0.8, 0.5, 0, 0, 1])


def test_where_the_entropy_bonus_lies(batch):
    score_G = np.array([0.3, 2.0, 0.1, 0.2])
    parts = (Part("", 4),)
    assert entropy_weights("all", batch, score_G, parts) is None
    # The prompts have three tokens.
    actions = entropy_weights("actions", batch, score_G, parts)
    assert where(actions) == [[8], [5, 6, 7]] * 4 + [[]] and actions.dtype == np.float32
    upper = entropy_weights("upper_groups", batch, score_G, parts)
    assert upper[:8].min(1).tolist() == upper[:8].max(1).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    lower = entropy_weights("lower_groups", batch, score_G, parts)
    assert (upper[:8] + lower[:8] == 1).all()
    # Half of the groups of each environment.
    two = (Part("a", 2), Part("b", 2))
    by_part = entropy_weights("upper_groups", batch, score_G, two)
    assert by_part[:8, 0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    # Faded to 0.5 in the first environment, to 0.1 in the second.
    faded = entropy_weights("upper_groups", batch, score_G, two, np.array([0.5, 0.1]))
    np.testing.assert_allclose(faded[:8, 0], [0, 0, 0.5, 0.5, 0, 0, 0.1, 0.1], rtol=1e-6)
    faded = entropy_weights("all", batch, score_G, two, np.array([0.5, 0.1]))
    np.testing.assert_allclose(faded[:8], np.repeat([0.5, 0.1], 4)[:, None] + 0 * faded[:8])
    assert faded.shape == batch.mask_BT.shape and faded.dtype == np.float32
    assert set(ENTROPY_ON) == {"all", "actions", "upper_groups", "lower_groups"}


def test_a_value_lies_on_the_tokens_of_its_reasoning(batch):
    value_EU = np.array([[1.0, 9.0], [2.0, 9.0], [-3.0, 9.0], [4.0, 9.0]])
    spread_BT = scatter_to_reasoning(value_EU, batch)
    # The closing token is included; the second turns have no reasoning.
    assert where(spread_BT) == [[3, 4, 5, 6], []] * 4 + [[]]
    assert spread_BT[::2, 3].tolist() == [1.0, 2.0, -3.0, 4.0, 0.0]


def test_the_mean_is_mi_seq():
    rng = np.random.default_rng(0)
    M, N = 12, 4
    score_MN, group_M = rng.normal(-20, 3, (M, N)), np.arange(M) % N
    own_M = score_MN[np.arange(M), group_M]
    found = pointwise_information(own_M, score_MN, group_M)
    by_hand = [
        np.log(np.exp(own) / np.mean(np.exp(row))) for own, row in zip(own_M, score_MN, strict=True)
    ]
    assert found == pytest.approx(by_hand)
    figures = information_metrics(score_MN, np.full(M, 5), group_M)
    assert found.mean() == pytest.approx(figures["mi_seq"])
    assert found.max() <= np.log(N) + 1e-9
    # The prompt of a later turn replaces the first prompt of its group.
    later = pointwise_information(own_M + 5, score_MN, group_M)
    swapped = score_MN.copy()
    swapped[np.arange(M), group_M] += 5
    assert later == pytest.approx(pointwise_information(own_M + 5, swapped, group_M))


@pytest.mark.medium
def test_what_is_paid_pulls_along_the_gradient_of_the_mutual_information():
    """The policy has four reasonings for each of three prompts; all are enumerated."""
    logits_NZ = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))

    def information(logits):
        p = jax.nn.softmax(logits)
        return (p * (jnp.log(p) - jnp.log(p.mean(0)))).sum() / 3

    def surrogate(logits, paid_NZ):
        p = jax.lax.stop_gradient(jax.nn.softmax(logits)) / 3
        return (p * paid_NZ * jax.nn.log_softmax(logits)).sum()

    logp_NZ = np.asarray(jax.nn.log_softmax(logits_NZ), np.float64)
    paid_NZ = np.array(
        [pointwise_information(logp_NZ[n], logp_NZ.T, np.full(4, n)) for n in range(3)]
    )
    paid_NZ -= (np.exp(logp_NZ) / 3 * paid_NZ).sum()  # minus the mean, as in a training step
    found = jax.grad(surrogate)(logits_NZ, jnp.asarray(paid_NZ))
    expected = jax.grad(information)(logits_NZ)
    assert np.asarray(found) == pytest.approx(np.asarray(expected), abs=1e-6)
    assert np.abs(expected).max() > 0.01


@pytest.mark.medium
def test_what_is_paid_to_a_reasoning_is_paid_to_its_end():
    """The policy continues or closes at each of three places, and all its reasonings are
    enumerated. The gradient of the expected reward needs the closing token."""
    logit_T = jnp.asarray([0.3, -0.5, 0.8, 0.1])  # logits of continuing; the last is after the tag
    paid_N = np.array([2.0, -1.0, 0.5])  # rewards of reasonings of one, two and three tokens

    def steps(logit_T, length):
        """Return log-probs of the sampled tokens: the reasoning, the closing token, an answer
        token."""
        on_T, off_T = jax.nn.log_sigmoid(logit_T), jax.nn.log_sigmoid(-logit_T)
        close = off_T[length] if length < 3 else 0.0
        return jnp.stack([0.0, *on_T[1:length], close, on_T[3]])

    def probability(logit_T, length):
        return jnp.exp(steps(logit_T, length)[:-1].sum())

    def expected(logit_T):
        return sum(paid_N[n - 1] * probability(logit_T, n) for n in (1, 2, 3))

    episodes = [
        Episode(0, 0, k, (turn((0, k + 1), (0, 0), length=k + 3),), False) for k in range(3)
    ]
    credit_BT = scatter_to_reasoning(paid_N[:, None], make_batch(episodes))[:, 3:]

    def surrogate(logit_T):
        return sum(
            jax.lax.stop_gradient(probability(logit_T, n))
            * (credit_BT[n - 1, : n + 2] * steps(logit_T, n)).sum()
            for n in (1, 2, 3)
        )

    assert float(sum(probability(logit_T, n) for n in (1, 2, 3))) == pytest.approx(1)
    found, want = jax.grad(surrogate)(logit_T), jax.grad(expected)(logit_T)
    np.testing.assert_allclose(found, want, atol=1e-6)
    assert np.abs(np.asarray(want)[1:3]).min() > 0.01
