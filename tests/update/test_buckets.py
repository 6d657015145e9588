"""update/buckets.py: few padded lengths, and updates that do not depend on how rows are split."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from device_processes import ROOT, on_devices
from one_call_updates import update_critic, update_policy
from random_rows import LOSS, V

from ragen_jax.algorithm.losses import AGGREGATIONS
from ragen_jax.core.padding import length_bucket
from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Batch
from ragen_jax.model import lora
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.update import buckets, critic
from ragen_jax.update.policy import ForwardContext, init_state

T, ROWS = 24, 12
# An optimizer that stores the gradient and changes no parameter.
KEEPING = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)


def episodes_of_a_step(rng, level, ends=0.0):
    """Return the number of tokens of 128 rows of up to five turns. At level 1 the mean reply has
    0.43 of the tokens of the longest; an episode ends after each of the first four turns with
    probability `ends`."""
    replies = np.minimum(rng.geometric(1 / (120 * level), (128, 5)), 400)
    played = np.cumprod(rng.random((128, 4)) >= ends, axis=1)  # 1 if turns 2 to 5 are played
    return 300 + replies[:, 0] + (played * (60 + replies[:, 1:])).sum(1)


def whole(minibatches, length_B, T, *, micro_batch):
    """Replace `buckets.split_by_length`: every row has the batch's length, in the given order."""
    return [[buckets.Piece(rows, T)] for rows in minibatches]


@pytest.fixture(scope="module")
def policy():
    config = ModelConfig(V, 32, 2, 4, 2, 8, 48, tied=False)
    return Qwen(config), init_params(config, jax.random.key(0))


def make_rows(seed=0):
    """Return a batch whose rows end at 5 to T tokens, with advantages and values."""
    rng = np.random.default_rng(seed)
    position = np.arange(T)
    stop = np.linspace(5, T, ROWS).astype(int)[rng.permutation(ROWS)][:, None]
    mask = ((position >= 3) & (position < stop)).astype(np.float32)
    logp = np.where(mask, -np.log(V) + 0.2 * rng.normal(size=mask.shape), 0).astype(np.float32)
    batch = Batch(
        tokens_BT=np.where(position < stop, rng.integers(0, V, mask.shape), 0).astype(np.int32),
        mask_BT=mask,
        logp_BT=logp,
        turn_BT=np.where(mask > 0, 0, -1).astype(np.int32),
        turn_end_BT=np.zeros(mask.shape, bool),
        span_BT=np.zeros(mask.shape, np.int8),
        reward_BT=np.zeros(mask.shape, np.float32),
        episode_B=np.arange(ROWS, dtype=np.int32),
        group_B=np.zeros(ROWS, np.int32),
        weight_B=np.ones(ROWS, np.float32),
    )
    return batch, rng.normal(size=mask.shape).astype(np.float32) * mask


def gradient(policy, mesh, who, loss=LOSS):
    """Return (gradient of a minibatch of ten rows, metrics) of the policy, the critic or an
    adapter."""
    model, params = policy
    batch, numbers = make_rows()
    settings = dict(
        mesh=mesh,
        rng=np.random.default_rng(0),
        minibatches=1,
        micro_batch=4,
        minibatch_rows=ROWS,
        loss_scale=1.0,
        rates=np.ones(1, np.float32),
    )
    rows = np.arange(10)
    with jax.set_mesh(mesh):
        params = shard_params(jax.tree.map(jnp.copy, params), model, mesh)
        if who == "critic":
            state = critic.init_critic(
                critic.backbone_of(params), model.config.width, KEEPING, mesh
            )
            state = state.replace(params=state.params | {"value": state.params["value"] + 0.1})
            value_loss = critic.ValueLoss(0.3, loss.aggregation, loss.norm_length)
            state, metrics = update_critic(
                *(model, KEEPING, value_loss, state, batch, numbers, numbers + 0.2, rows),
                **settings,
            )
        else:
            frozen, trained = None, params
            if who == "adapter":
                frozen = ForwardContext(params, np.float32(2.0))
                key = jax.random.key(3)
                trained = lora.init_adapters(model.config, key, rank=2, targets=("q", "v"))
                trained = lora.place_adapters(
                    jax.tree.map(lambda x: x + 0.05, trained), model, mesh
                )
            reference = jax.tree.map(lambda x: 1.02 * x, params)
            state = init_state(trained, KEEPING, mesh)
            state, metrics = update_policy(
                *(model, KEEPING, loss, state, reference, batch, numbers, rows),
                frozen=frozen,
                **settings,
            )
    same = jax.tree.map(lambda x, y: x.sharding == y.sharding, state.params, state.opt_state)
    assert all(jax.tree.leaves(same))  # the gradient is sharded like the parameters
    return jax.device_get(state.opt_state), metrics


def relative(found, expected):
    """Return the norm of the difference of two gradients, divided by the norm of `expected`."""
    difference = jax.tree.map(np.subtract, found, expected)
    return float(optax.tree.norm(difference) / optax.tree.norm(expected))


def gradients_apart(policy, mesh, monkeypatch, who, loss=LOSS):
    """Return the largest difference from the gradient of rows that are not split by length."""
    found, metrics = gradient(policy, mesh, who, loss)
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "split_by_length", whole)
        expected, before = gradient(policy, mesh, who, loss)
    for name in metrics.keys() - {"update/real_share"}:
        if name.endswith("fraction"):  # a token at the edge of a clip may be on either side of it
            continue
        assert metrics[name] == pytest.approx(before[name], rel=1e-5, abs=1e-6), name
    assert metrics.get("update/real_share", 1) > before.get("update/real_share", 0)
    return relative(found, expected)


def one_device():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    "who", ["policy", *(pytest.param(who, marks=pytest.mark.slow) for who in ("critic", "adapter"))]
)
def test_cutting_changes_no_gradient(policy, monkeypatch, who):
    assert gradients_apart(policy, one_device(), monkeypatch, who) < 1e-6


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("aggregation", sorted({*AGGREGATIONS} - {LOSS.aggregation}))
@pytest.mark.parametrize("who", ["policy", "critic"])
def test_nor_does_it_with_other_aggregations(policy, monkeypatch, who, aggregation):
    loss = dataclasses.replace(LOSS, aggregation=aggregation, objective="gspo")
    assert gradients_apart(policy, one_device(), monkeypatch, who, loss) < 1e-6


@pytest.mark.slow
def test_nor_on_several_devices():
    process = on_devices(4, [ROOT / "tests" / "update" / "bucket_gradients_script.py"])
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert len(found) == 6 and max(found.values()) < 1e-6, found


def test_lengths_are_few_enough_and_hold_every_row():
    rng = np.random.default_rng(0)
    for _ in range(50):
        longest = rng.integers(1, 3000, rng.integers(1, 40))
        T = length_bucket(longest.max()) if rng.random() < 0.7 else int(longest.max())
        found = buckets.choose_bucket_lengths(longest, T)
        assert 1 <= len(found) <= buckets.LENGTHS and list(found) == sorted(set(found.tolist()))
        assert longest.max() <= found[-1] <= T
        assert set(found.tolist()) <= {T, *map(length_bucket, longest)}


def test_lengths_by_hand():
    # 40 micro-batches end at 100 and ten at 1,000: they are 112 and 1,024 positions wide.
    assert buckets.choose_bucket_lengths(np.array([100] * 40 + [1000] * 10), 1024).tolist() == [
        112,
        1024,
    ]
    # Another length would save 1 of 100 positions.
    assert buckets.choose_bucket_lengths(np.array([1024] * 19 + [800]), 1024).tolist() == [1024]
    assert buckets.choose_bucket_lengths(np.array([3]), 5).tolist() == [5]


def test_a_cut_by_hand():
    length_B = np.array([10, 30, 9, 31, 12])
    first, second = buckets.split_by_length(
        [np.array([0, 1, 2]), np.array([3, 4])], length_B, 32, micro_batch=2
    )
    # Sorted by length, the first minibatch is 30, 10 | 9 and the second 31, 12.
    assert [(piece.rows.tolist(), piece.length) for piece in first] == [([1, 0], 32), ([2], 16)]
    assert [(piece.rows.tolist(), piece.length) for piece in second] == [([3, 4], 32)]
    # Two micro-batches of 2 x 32 positions, one of 2 x 16.
    share = buckets.token_efficiency([first, second], length_B, micro_batch=2)
    assert share == length_B.sum() / (2 * 64 + 32)
    assert buckets.split_by_length([], length_B, 32, micro_batch=2) == []
    assert np.isnan(buckets.token_efficiency([], length_B, micro_batch=2))


def test_rows_end_with_their_last_sampled_token():
    batch, _ = make_rows()
    mask = np.zeros((3, 6), np.float32)
    mask[0, 2:4] = mask[0, 5] = mask[1, 1] = 1
    assert buckets.row_lengths(batch.replace(mask_BT=mask)).tolist() == [6, 2, 0]


@pytest.mark.parametrize(
    "ends, padded, least, most",
    [(0.0, (0.5, 0.6), 0.865, 8), (0.1, (0.45, 0.55), 0.84, 12), (0.3, (0.35, 0.45), 0.825, 12)],
)
def test_the_papers_lengths_need_few_programs_and_little_padding(ends, padded, least, most):
    """200 steps whose replies grow and shrink: check the lengths in use and the token
    efficiency."""
    rng = np.random.default_rng(0)
    met, shares, before = set(), [], []
    for step in range(200):
        length_B = episodes_of_a_step(rng, 1 + 0.3 * np.sin(step / 30), ends)
        T = length_bucket(length_B.max())
        minibatches = np.array_split(rng.permutation(128), 4)
        cuts = buckets.split_by_length(minibatches, length_B, T, micro_batch=4)
        lengths = {piece.length for pieces in cuts for piece in pieces}
        assert len(lengths) <= 8
        met |= lengths
        shares.append(buckets.token_efficiency(cuts, length_B, micro_batch=4))
        before.append(length_B.sum() / (128 * T))
    assert padded[0] < np.mean(before) < padded[1]  # efficiency of one length per step
    assert np.mean(shares) >= least
    assert len(met) <= most, sorted(met)
