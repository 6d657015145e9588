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
from ragen_jax.update import buckets, critic, optimize
from ragen_jax.update.micro_batches import build_arrays
from ragen_jax.update.pieces import Grouping, Piece, Sizes, Split, TokenRows
from ragen_jax.update.policy import ForwardContext, init_state

T, ROWS = 24, 12
# An optimizer that stores the gradient and changes no parameter.
KEEPING = optax.GradientTransformationExtraArgs(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None, **_: (jax.tree.map(jnp.zeros_like, grads), grads),
)


def episodes_of_a_step(rng, level, ends=0.0):
    """Return the number of tokens of 128 rows of up to five turns. At level 1 the mean reply has
    0.43 of the tokens of the longest; an episode ends after each of the first four turns with
    probability `ends`."""
    replies = np.minimum(rng.geometric(1 / (120 * level), (128, 5)), 400)
    played = np.cumprod(rng.random((128, 4)) >= ends, axis=1)  # 1 if turns 2 to 5 are played
    return 300 + replies[:, 0] + (played * (60 + replies[:, 1:])).sum(1)


def whole(minibatches, rows, grouping, *, alike=False):
    """Replace `split_rows`: every row has the batch's length, in the given order."""
    sizes = Sizes(T, grouping.shard_rows * T)
    pieces = [[Piece(chosen, sizes)] for chosen in minibatches]
    positions = sum(piece.positions(grouping) for cut in pieces for piece in cut)
    real = sum(int(rows.count_B[chosen].sum()) for chosen in minibatches)
    return Split(pieces, positions, real, real)


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
        patch.setattr(optimize, "split_rows", whole)
        expected, before = gradient(policy, mesh, who, loss)
    for name in metrics.keys() - {"update/real_share", "update/positions"}:
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
        most = int(rng.choice([1, buckets.LENGTHS]))
        found = buckets.choose_bucket_lengths(longest, most)
        assert 1 <= len(found) <= most and list(found) == sorted(set(found.tolist()))
        assert longest.max() <= found[-1]
        assert set(found.tolist()) <= set(map(length_bucket, longest))


def test_lengths_by_hand():
    # 40 micro-batches end at 100 and ten at 1,000: they are 112 and 1,024 positions wide.
    found = buckets.choose_bucket_lengths(np.array([100] * 40 + [1000] * 10))
    assert found.tolist() == [112, 1024]
    # Another length would save 1 of 100 positions.
    assert buckets.choose_bucket_lengths(np.array([1024] * 19 + [800])).tolist() == [1024]
    assert buckets.choose_bucket_lengths(np.array([3])).tolist() == [8]


def rows_of_lengths(length_B, *, sampled=1):
    """Return rows of different tokens whose last tokens are needed."""
    position, last = np.arange(max(length_B)), np.array(length_B)[:, None]
    tokens_BT = np.arange(last.size)[:, None] * len(position) + position
    read_BT = (position < last) & (position >= last - sampled) & (position > 0)
    return TokenRows(tokens_BT.astype(np.int32), read_BT)


def test_a_split_by_hand():
    rows, grouping = rows_of_lengths([11, 31, 10, 32, 13], sampled=4), Grouping(2, 1, 6, "xla")
    split = buckets.split_by_length([np.array([0, 1, 2]), np.array([3, 4])], rows, grouping)
    # Sorted by length, the first minibatch reads 30, 10 | 9 positions and the second 31, 12. Two
    # rows have at most 8 predictions, of 2 x 32 and 2 x 16 positions.
    found = [[(piece.rows.tolist(), piece.sizes) for piece in cut] for cut in split.pieces]
    long, short = Sizes(32, 8), Sizes(16, 4)
    assert found == [[([1, 0], long), ([2], short)], [([3, 4], long)]]
    # Two micro-batches of 2 x 32 positions, one of 2 x 16.
    assert (
        split.positions == 2 * 64 + 32 and split.token_efficiency == (30 + 10 + 9 + 31 + 12) / 160
    )
    assert split.shared == 0
    none = buckets.split_by_length([], rows, grouping)
    assert none.pieces == [] and np.isnan(none.token_efficiency)


def test_some_rows_of_a_piece_have_its_shapes():
    """A pass over some rows of a step runs the programs of a pass over all rows."""
    rng = np.random.default_rng(0)
    read_BT = (rng.random((12, 40)) < 0.5) & (np.arange(40) > 0)
    rows, grouping = TokenRows(np.zeros((12, 40), np.int32), read_BT), Grouping(4, 2, 12, "xla")
    ((piece, *_),) = buckets.split_by_length([np.arange(12)], rows, grouping).pieces
    for chosen in ([0, 5, 7], [3], range(12)):
        some = piece.of_rows(np.array(chosen))
        built = build_arrays(some, rows, grouping)
        assert built.packed.source_PE.shape == (3, 2, piece.sizes.reads)
        assert built.count == -(-len(some.rows) // 4)


def test_rows_are_read_up_to_the_token_before_the_last_needed():
    read_BT = np.zeros((3, 6), bool)
    read_BT[0, 2:4] = read_BT[0, 5] = read_BT[1, 1] = True
    assert TokenRows(np.zeros((3, 6), np.int32), read_BT).count_B.tolist() == [5, 1, 0]


@pytest.mark.parametrize(
    "ends, padded, least, most",
    [(0.0, (0.5, 0.6), 0.865, 8), (0.1, (0.45, 0.55), 0.84, 12), (0.3, (0.35, 0.45), 0.825, 12)],
)
def test_the_papers_lengths_need_few_programs_and_little_padding(ends, padded, least, most):
    """200 steps whose replies grow and shrink: check the lengths in use and the token
    efficiency."""
    rng, grouping = np.random.default_rng(0), Grouping(4, 1, 32, "xla")
    found, shares, before = set(), [], []
    for step in range(200):
        length_B = episodes_of_a_step(rng, 1 + 0.3 * np.sin(step / 30), ends)
        minibatches = np.array_split(rng.permutation(128), 4)
        split = buckets.split_by_length(minibatches, rows_of_lengths(length_B), grouping)
        lengths = {piece.sizes.length for pieces in split.pieces for piece in pieces}
        assert len(lengths) <= 8
        found |= lengths
        shares.append(split.token_efficiency)
        before.append(length_B.sum() / (128 * length_bucket(length_B.max())))
    assert padded[0] < np.mean(before) < padded[1]  # efficiency of one length per step
    assert np.mean(shares) >= least
    assert len(found) <= most, sorted(found)
