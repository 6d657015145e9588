"""optimize.py: optimizer steps by hand, accumulation against a single pass, plans and updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from shared_rows import NEVER, trees

from ragen_jax.core.sharding import make_mesh
from ragen_jax.update import optimize
from ragen_jax.update.optimize import MinibatchLayout, ParamTransform
from ragen_jax.update.pieces import Piece, Sizes, TokenRows
from ragen_jax.update.state import CriticState

pytestmark = pytest.mark.fast

ADAM = dict(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


# ------------------------------------------------------------------------------ optimizer


def step(optimizer, params, grads, *, rate=1.0, value=0.0):
    """Return (params, metrics) of the optimizer's first step."""
    params, grads = (jax.tree.map(jnp.float32, x) for x in (params, grads))
    opt_state = optimizer.init(params)
    params, _, metrics = optimize.apply_gradient(
        optimizer, jnp.float32(rate), params, opt_state, jnp.float32(value), grads
    )
    return jax.device_get((params, metrics))


@pytest.mark.medium
def test_a_first_step_by_hand():
    """The gradient (3, 4, 0) of norm 5 is clipped to (0.6, 0.8, 0). Both moments of Adam are
    unbiased after one step: the direction is g / (|g| + eps), plus the decay of AdamW."""
    optimizer = optimize.AdamW(**ADAM | dict(eps=0.2, weight_decay=0.1))
    params = {"kernel": np.array([1.0, 2.0]), "scale": np.array([2.0])}
    grads = {"kernel": np.array([3.0, 4.0]), "scale": np.array([0.0])}
    found, metrics = step(optimizer, params, grads, rate=0.5)
    direction = np.array([0.6 / (0.6 + 0.2) + 0.1 * 1.0, 0.8 / (0.8 + 0.2) + 0.1 * 2.0])
    np.testing.assert_allclose(found["kernel"], [1.0, 2.0] - 0.5 * direction, rtol=1e-5)
    np.testing.assert_array_equal(found["scale"], [2.0])
    assert metrics["grad_norm"] == pytest.approx(5.0)  # before clipping
    assert metrics["update_norm"] == pytest.approx(0.5 * np.hypot(*direction), rel=1e-5)
    assert metrics["learning_rate"] == np.float32(0.5) and metrics["skipped"] == 0


def test_a_small_gradient_is_not_scaled():
    optimizer = optimize.AdamW(**ADAM | dict(eps=1.0))
    found, _ = step(optimizer, {"kernel": np.zeros(2)}, {"kernel": np.array([0.3, -0.4])})
    np.testing.assert_allclose(found["kernel"], [-0.3 / 1.3, 0.4 / 1.4], rtol=1e-5)


def test_equal_settings_share_their_programs():
    """An optimizer is a static argument: one that is not equal would recompile every program."""
    before = optimize.apply_gradient._cache_size()
    for settings in (ADAM, ADAM, ADAM | dict(b1=0.8)):
        optimizer = optimize.AdamW(**settings | dict(b2=0.9876))
        step(optimizer, {"kernel": np.ones(3)}, {"kernel": np.ones(3)})
    assert optimize.apply_gradient._cache_size() == before + 2


@pytest.mark.medium
def test_steps_are_those_of_optax():
    """Against optax's own clip, which computes the norm itself, on trees of several shapes."""
    settings = ADAM | dict(weight_decay=0.1, max_grad_norm=3.0)
    reference = optax.chain(
        optax.clip_by_global_norm(3.0),
        optax.adamw(
            0.01,
            b1=settings["b1"],
            b2=settings["b2"],
            eps=settings["eps"],
            weight_decay=0.1,
            mask={"a": {"kernel": True, "bias": False}, "b": {"kernel": True}},
        ),
    )
    optimizer, rng = optimize.AdamW(**settings), np.random.default_rng(0)
    params = {
        "a": {"kernel": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)},
        "b": {"kernel": rng.normal(size=(4, 3))},  # as large as another parameter
    }
    params = jax.tree.map(jnp.float32, params)
    expected = params
    opt_state, expected_state = optimizer.init(params), reference.init(params)
    for size in (10.0, 0.1, 1.0):  # clipped, not clipped, and in between
        drawn = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), params)
        grads = optax.tree.scale(size, drawn)
        updates, expected_state = reference.update(grads, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, opt_state, metrics = optimize.apply_gradient(
            optimizer, jnp.float32(0.01), params, opt_state, jnp.float32(0.0), grads
        )
        assert metrics["update_norm"] == pytest.approx(float(optax.tree.norm(updates)), rel=1e-5)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), params, expected)


def test_a_step_needs_little_memory_besides_its_arguments():
    """The clipped gradient; the step, both moments and the new parameters are written in place."""
    params = {f"kernel_{i}": jax.ShapeDtypeStruct((512, 256), jnp.float32) for i in range(4)}
    optimizer = optimize.AdamW(**ADAM | dict(weight_decay=0.1))
    opt_state, number = jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), "float32")
    lowered = optimize.apply_gradient.lower(optimizer, number, params, opt_state, number, params)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.1 * 4 * 512 * 256 * 4


@pytest.mark.medium
@pytest.mark.parametrize("broken", ["a moment", "weight_decay", "eps", "rate", "value"])
def test_a_step_that_is_not_finite_is_skipped(broken):
    params = {"kernel": jnp.ones((3, 4)), "scale": jnp.ones(2)}
    settings = ADAM | dict(weight_decay=0.1)
    if broken in settings:
        settings[broken] = float("nan")
    optimizer = optimize.AdamW(**settings)
    opt_state = optimizer.init(params)
    if broken == "a moment":
        opt_state = jax.tree.map(lambda x: x * jnp.nan if x.ndim == 2 else x, opt_state)
    before = jax.device_get((params, opt_state))
    rate = jnp.float32(np.nan if broken == "rate" else 1.0)
    value = jnp.float32(np.inf if broken == "value" else 0.5)
    grads = jax.tree.map(lambda x: 0.1 * x, params)
    *after, metrics = optimize.apply_gradient(optimizer, rate, params, opt_state, value, grads)
    assert float(metrics["skipped"]) == 1
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(tuple(after)), strict=True):
        np.testing.assert_array_equal(x, y)


# ------------------------------------------------------------------------------ accumulation


@pytest.mark.parametrize("micro_batches, count", [(1, 1), (4, 1), (4, 3), (4, 4)])
@pytest.mark.parametrize("started", [False, True])
def test_accumulation_is_over_the_first_micro_batches(micro_batches, count, started):
    """Later micro-batches are never read: they would give NaN. All maxima are below 0."""
    x_AB = -1.0 - np.random.default_rng(0).random((micro_batches, 3)).astype(np.float32)
    x_AB[count:] = np.nan

    def function(x_B):
        return {"sum": x_B.sum(), "square": x_B**2}, x_B.max()

    start = {"square": jnp.full(3, 10.0)} if started else None
    sums, largest = optimize.accumulate(function, x_AB, jnp.int32(count), start)
    real_AB = x_AB[:count]
    assert float(sums["sum"]) == pytest.approx(real_AB.sum(), rel=1e-6)
    np.testing.assert_allclose(sums["square"], (real_AB**2).sum(0) + 10 * started, rtol=1e-6)
    assert float(largest) == real_AB.max()


@pytest.mark.medium
@pytest.mark.parametrize("started", [False, True])
def test_a_gradient_is_that_of_the_summed_objective(started):
    rng = np.random.default_rng(1)
    x_ABD = rng.normal(size=(3, 2, 4)).astype(np.float32)
    params = {"w": rng.normal(size=4).astype(np.float32)}

    def objective(params, x_BD):
        y_B = jnp.tanh(x_BD @ params["w"])
        return y_B.sum(), ({"rows": jnp.float32(len(y_B))}, {"largest": y_B.max()})

    total = lambda params: objective(params, x_ABD[:2].reshape(4, 4))[0]  # noqa: E731
    value, expected = jax.value_and_grad(total)(params)
    grads = {"w": jnp.arange(4.0)} if started else None
    found = optimize.add_gradient(objective, params, grads, x_ABD, jnp.int32(2))
    np.testing.assert_allclose(found[0]["w"], expected["w"] + started * np.arange(4), rtol=1e-5)
    assert float(found[1]) == pytest.approx(float(value), rel=1e-5)
    assert float(found[2]["rows"]) == 4
    assert float(found[3]["largest"]) == pytest.approx(np.tanh(x_ABD[:2] @ params["w"]).max())


def test_only_a_single_micro_batch_on_one_device_starts_from_nothing(mesh):
    assert not optimize.needs_start(1, mesh) and optimize.needs_start(2, mesh)
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(4)}
    zeros = optimize.no_gradient(params)
    for x, zero in zip(jax.tree.leaves(params), jax.tree.leaves(zeros), strict=True):
        assert (zero.shape, zero.dtype, zero.sharding) == (x.shape, x.dtype, x.sharding)
        assert not np.asarray(zero, np.float32).any()


# ------------------------------------------------------------------------------ plans


def test_micro_batches_by_hand(mesh):
    """Rows 4, 0 and 2 of two tokens in micro-batches of two rows; the second tokens are needed."""
    x_BT = np.arange(10).reshape(5, 2)
    rows = TokenRows(x_BT.astype(np.int32), np.array([[False, True]] * 5))
    layout = MinibatchLayout(mesh, 1, 2, minibatch_rows=6)
    piece = Piece(np.array([4, 0, 2]), Sizes(length=1, reads=2))
    placed, count = optimize.micro_batches(piece, rows, layout, {"x": x_BT})
    np.testing.assert_array_equal(placed["x"], [[[8, 9], [0, 1]], [[4, 5], [0, 0]], [[0, 0]] * 2])
    packed = placed["packed"]
    np.testing.assert_array_equal(packed.tokens_BL, [[[8], [0]], [[4], [0]], [[0], [0]]])
    np.testing.assert_array_equal(packed.source_PE, [[[0, 1]], [[0, 0]], [[0, 0]]])
    np.testing.assert_array_equal(packed.target_PE, [[[9, 1]], [[5, 0]], [[0, 0]]])
    none = [-1, -1]
    np.testing.assert_array_equal(
        placed["entry"], [[[-1, 0], [-1, 1]], [[-1, 0], none], [none] * 2]
    )
    assert packed.tree is None and count == 2 and count.dtype == np.int32
    empty = dataclasses.replace(piece, rows=np.array([], int))
    assert optimize.micro_batches(empty, rows, layout, {"x": x_BT})[1] == 0


T = 24
LENGTH_B = np.array([3, 20, 5, 24, 2, 9, 17, 4])  # a pass reads all but the last: 8 or 24


def make_plan(mesh, rows=range(8), *, minibatches=2, micro_batch=2, seed=0, **changes):
    """Plan rows in which row b has x = b + 1 on its first LENGTH_B[b] tokens, of which the loss
    includes all but the first."""
    position = np.arange(T)
    mask_BT = ((position > 0) & (position < LENGTH_B[:, None])).astype(np.float32)
    arrays = {"x": (1.0 + np.arange(8, dtype=np.float32))[:, None] * mask_BT, "mask": mask_BT}
    tokens_BT = 100 * np.arange(8, dtype=np.int32)[:, None] + np.arange(T, dtype=np.int32)
    tokens = TokenRows(tokens_BT, mask_BT > 0)
    layout = MinibatchLayout(mesh, minibatches, micro_batch, minibatch_rows=8)
    settings = dict(aggregation="token-mean", norm_length=T) | changes
    rng = np.random.default_rng(seed)
    with trees(NEVER):
        return optimize.plan_minibatches(
            tokens, arrays, np.array([*rows], int), layout, rng=rng, **settings
        )


def rows_of(plan):
    return [sorted(int(row) for piece in cut for row in piece.rows) for cut in plan.split.pieces]


def test_a_minibatch_is_whole_micro_batches(mesh):
    layouts = [MinibatchLayout(mesh, 1, micro, rows) for rows, micro in ((7, 3), (6, 3), (1, 4))]
    assert [layout.grouping.micro_batches for layout in layouts] == [3, 2, 1]


@pytest.mark.parametrize(
    "rows, sizes", [(range(8), [3, 3, 2]), ([6, 1, 3, 0], [2, 1, 1]), ([5, 2], [1, 1]), ([], [])]
)
def test_fewer_rows_make_smaller_minibatches_not_fewer_updates(mesh, rows, sizes):
    """Holds if there are at least as many rows as minibatches."""
    plan = make_plan(mesh, rows, minibatches=3)
    assert list(map(len, rows_of(plan))) == sizes
    assert sorted(sum(rows_of(plan), [])) == sorted(rows)  # each row appears once
    assert np.isnan(plan.split.token_efficiency) == (not sizes)


def test_the_generator_alone_decides_the_order(mesh):
    orders = {seed: rows_of(make_plan(mesh, seed=seed)) for seed in range(4)}
    assert all(rows_of(make_plan(mesh, seed=seed)) == order for seed, order in orders.items())
    assert len({str(order) for order in orders.values()}) > 1


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_weights_are_of_the_whole_minibatch(mesh, aggregation):
    """Weights do not depend on the piece, the micro-batch, or the rows of other minibatches."""
    plan = make_plan(mesh, aggregation=aggregation)
    lengths = set()
    for rows, pieces in zip(rows_of(plan), plan.minibatches(), strict=True):
        tokens = (LENGTH_B[rows] - 1).sum()
        weight = 1 / tokens if aggregation == "token-mean" else 1 / len(rows)
        seen = 0
        for arrays, count in pieces:
            mask = np.asarray(arrays["mask"], bool)
            lengths.add(mask.shape[-1])
            assert mask[count:].sum() == 0
            np.testing.assert_allclose(np.asarray(arrays["weights"].loss_BT)[mask], weight)
            np.testing.assert_allclose(np.asarray(arrays["weights"].mean_BT)[mask], 1 / tokens)
            seen += mask.sum()
        assert seen == tokens
    assert lengths == {9, 25}


# ------------------------------------------------------------------------------ updates


def gradient_of(scale=1.0):
    """Return a gradient function for the mean of x * kernel over a minibatch's tokens, with
    metrics."""

    def objective(params, piece):
        x_MT = scale * piece["x"] * piece["mask"]
        value = jnp.sum(piece["weights"].loss_BT * x_MT * params["kernel"])
        return value, ({"tokens": piece["mask"].sum()}, {"largest": x_MT.max()})

    def gradient(state, grads, arrays, count, minibatch):
        return optimize.add_gradient(objective, state.params, grads, arrays, count)

    return gradient


def mean_x(rows):
    return np.average(1.0 + np.array(rows), weights=LENGTH_B[rows] - 1)


def start_at(kernel):
    params = {"kernel": jnp.float32(kernel)}
    return CriticState(params, optax.sgd(1.0).init(params))


RATES = np.array([0.5, 0.25, 9.0], np.float32)  # the plan has no third minibatch


@pytest.mark.medium
@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_updates_by_hand(mesh, micro_batch):
    """The objective is linear: each minibatch moves the kernel by its rate times its mean x."""
    plan = make_plan(mesh, micro_batch=micro_batch)
    first, second = map(mean_x, rows_of(plan))
    state, history = optimize.run_updates(gradient_of(), optax.sgd(1.0), start_at(2.0), plan, RATES)
    assert float(state.params["kernel"]) == pytest.approx(2 - 0.5 * first - 0.25 * second, rel=1e-5)
    assert [x["loss"] for x in history] == pytest.approx(
        [2 * first, (2 - 0.5 * first) * second], rel=1e-5
    )
    rows = rows_of(plan)
    assert [x["tokens"] for x in history] == [(LENGTH_B[x] - 1).sum() for x in rows]
    assert [x["largest"] for x in history] == [1 + max(x) for x in rows]
    assert [x["learning_rate"] for x in history] == [0.5, 0.25]
    assert [x["grad_norm"] for x in history] == pytest.approx([first, second], rel=1e-5)


def test_a_skipped_minibatch_leaves_the_others(mesh):
    plan = make_plan(mesh)
    first, second = rows_of(plan)
    plan.arrays["x"][first[0], 1] = np.inf
    state, history = optimize.run_updates(gradient_of(), optax.sgd(1.0), start_at(2.0), plan, RATES)
    assert [x["skipped"] for x in history] == [1, 0]
    assert float(state.params["kernel"]) == pytest.approx(2 - 0.25 * mean_x(second), rel=1e-5)


@pytest.mark.medium
def test_a_transform_runs_once_a_minibatch(mesh):
    """The pieces read kernel ** 2: by the chain rule the gradient is 2 kernel times theirs."""
    plan, calls = make_plan(mesh, micro_batch=1), []

    def forward(params):
        calls.append("forward")
        return {"kernel": params["kernel"] ** 2}

    def backward(params, grads):
        calls.append("backward")
        return {"kernel": 2 * params["kernel"] * grads["kernel"]}

    state, history = optimize.run_updates(
        gradient_of(),
        optax.sgd(1.0),
        start_at(3.0),
        plan,
        RATES,
        transform=ParamTransform(forward, backward),
    )
    kernel, losses = 3.0, []
    for rows, rate in zip(rows_of(plan), RATES, strict=False):
        losses.append(kernel**2 * mean_x(rows))
        kernel -= rate * 2 * kernel * mean_x(rows)
    assert calls == ["forward", "backward"] * 2
    assert float(state.params["kernel"]) == pytest.approx(kernel, rel=1e-5)
    assert [x["loss"] for x in history] == pytest.approx(losses, rel=1e-5)


def test_no_rows_change_nothing(mesh):
    state = start_at(2.0)
    found, history = optimize.run_updates(
        gradient_of(), optax.sgd(1.0), state, make_plan(mesh, []), RATES
    )
    assert found is state and history == []


def test_metrics_of_an_iteration_by_hand():
    history = [
        {"loss": np.float32(1.0), "skipped": 1.0, "tokens": 5.0},
        {"loss": np.float32(4.0), "skipped": 1.0, "tokens": 8.0},
    ]
    found = optimize.averaged(history, prefix="critic", sums=("skipped", "tokens"))
    expected = {"critic/loss": 2.5, "critic/skipped": 2.0, "critic/tokens": 13.0}
    assert found == expected | {"critic/count": 2}
    assert optimize.averaged(history, prefix="update")["update/tokens"] == 6.5
    assert optimize.averaged([], prefix="update") == {"update/count": 0}


def test_a_plan_is_not_changed_in_place(mesh):
    """The plan's rows are read again when old log-probs are recomputed (reading.py)."""
    plan = make_plan(mesh)
    before = dataclasses.replace(plan, arrays={k: v.copy() for k, v in plan.arrays.items()})
    for pieces in plan.minibatches():
        list(pieces)
    assert plan.arrays.keys() == before.arrays.keys()
    for name, array in before.arrays.items():
        np.testing.assert_array_equal(plan.arrays[name], array)
