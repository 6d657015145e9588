"""Rows that share positions: the same losses, gradients and passes as plain rows."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_processes import ROOT, on_devices
from layer_kinds import mixture, windowed
from random_rows import LOSS
from shared_rows import ALWAYS, NEVER, batch_of, one_micro_batch, random_tree, trees
from test_buckets import relative
from vision_model import arrange, load, seen_by, shown

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.losses import AGGREGATIONS, EXACT, KL_KINDS
from ragen_jax.algorithm.objectives import OBJECTIVES
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import kernels, lora, tree_attention
from ragen_jax.model.likelihood import packed_statistics, token_statistics, unpack
from ragen_jax.model.prefix_tree import build_tree, pack
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.update import critic, policy
from ragen_jax.update import trees as update_trees
from ragen_jax.update.micro_batches import build_arrays, split_rows
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.pieces import Grouping, Piece, Sizes, TokenRows, token_rows
from ragen_jax.update.policy import ForwardContext, PolicyLoss

pytestmark = pytest.mark.fast

V, T, ROWS = 30, 40, 12


@pytest.fixture(scope="module")
def model():
    return Qwen(ModelConfig(V, 32, 2, 4, 2, 8, 48, tied=False))


@pytest.fixture(scope="module")
def params(model):
    return init_params(model.config, jax.random.key(0))


def one_tree(batch, attention="xla"):
    """Return (packed rows, entry_BW) of a batch as one tree, with the same shapes for any tree."""
    rows, B = token_rows(batch), len(batch.weight_B)
    grouping = Grouping(B, 1, B, attention)
    tree = build_tree(rows.tokens_BT, rows.count_B, np.arange(B), least_run=2)
    length = -(-B * T // rows.block) * rows.block
    packed_bin = pack(tree, rows.tokens_BT, rows.read_BT)
    sequence = update_trees._sequence(packed_bin, rows, length)
    sizes = Sizes(length, length, T, length // rows.block, trunk=2)
    built = build_arrays(Piece(tree.rows, sizes, (sequence,)), rows, grouping)
    packed, entry_RW = jax.tree.map(lambda x: x[0], (built.packed, built.entry_ARW))
    entry_BW = np.empty((B, T + 1), np.int32)
    entry_BW[tree.rows] = entry_RW[:B]
    return packed, entry_BW


def depth_of(tree):
    """Return the largest number of branch points on a path."""
    deepest, branches = 0, []
    for shared in tree.shared:
        branches = [x for x in branches if x < shared] + ([shared] if shared else [])
        deepest = max(deepest, len(branches))
    return deepest


def pulled(statistics, params, weights):
    """Return the gradient of the sum of statistics times weights."""

    def total(params):
        return sum((w * x).sum() for w, x in zip(weights, statistics(params), strict=True))

    return jax.grad(total)(params)


@pytest.fixture(scope="module")
def gradients(model):
    return gradients_of(model)


def gradients_of(model):
    """Return functions (params, reference, rows, weights) of trees and of plain rows."""

    @jax.jit
    def of_tree(params, reference, packed, entry_BW, weights):
        def read(params):
            other = None if reference is None else (model, reference)
            found = packed_statistics(model, params, packed, temperature=0.8, reference=other)
            return tuple(unpack(x, entry_BW)[:, :T] for x in found)

        return read(params), pulled(read, params, weights)

    @jax.jit
    def of_rows(params, reference, tokens_BT, weights):
        def read(params):
            return token_statistics(model, params, tokens_BT, temperature=0.8, reference=reference)

        return read(params), pulled(read, params, weights)

    return of_tree, of_rows


def compare(gradients, params, seed, count):
    """Return (largest differences of statistics and of gradients, number of trees per depth)."""
    of_tree, of_rows = gradients
    reference = jax.tree.map(lambda x: 1.05 * x, params)
    rng, apart, depths = np.random.default_rng(seed), [0.0, 0.0], {}
    for _ in range(count):
        batch = batch_of(random_tree(rng, ROWS, T, V), rng, T, V)
        weights = [batch.mask_BT * rng.normal(size=(ROWS, T)).astype(np.float32) for _ in range(3)]
        found, gradient = of_tree(params, reference, *one_tree(batch), weights)
        expected, expected_gradient = of_rows(params, reference, batch.tokens_BT, weights)
        for x, y in zip(found, expected, strict=True):
            difference = np.abs(x - y) * batch.mask_BT
            apart[0] = max(apart[0], float(difference.max()))
        apart[1] = max(apart[1], relative(gradient, expected_gradient))
        rows = token_rows(batch)
        depth = depth_of(build_tree(rows.tokens_BT, rows.count_B, np.arange(ROWS), least_run=2))
        depths[depth] = depths.get(depth, 0) + 1
    return apart, depths


@pytest.mark.medium
def test_a_tree_has_the_log_probs_entropies_kl_and_gradients_of_its_rows(gradients, params):
    """Any loss of the rows is a function of these; replies are shared, and some rows are equal."""
    (statistics, gradient), depths = compare(gradients, params, 0, 40)
    assert statistics < 2e-5 and gradient < 1e-5, (statistics, gradient)
    assert len(depths) >= 4, depths


@pytest.mark.medium
@pytest.mark.parametrize("whole", [0, 1 << 30])
def test_blocks_of_queries_are_read_at_once_or_some_at_a_time(model, params, monkeypatch, whole):
    """There are 60 blocks: seven at a time leave four for the last step."""
    blocks, block, heads = 12 * T // 8, 8, 4
    monkeypatch.setattr(tree_attention, "WHOLE_TREE", whole)
    monkeypatch.setattr(tree_attention, "TREE_SCORES", 7 * heads * blocks * block**2)
    (statistics, gradient), _ = compare(gradients_of(model), params, 1, 5)
    assert statistics < 2e-5 and gradient < 1e-5, (statistics, gradient)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("layers", "kinds"),
    [pytest.param(3, windowed(3), marks=pytest.mark.slow), (5, windowed(5)), (2, mixture(2))],
    ids=["windowed", "windowed-scanned", "experts"],
)
def test_trees_of_other_kinds_of_layers(layers, kinds):
    """A window counts positions along a path."""
    model = Qwen(ModelConfig(V, 32, layers, 4, 2, 8, 48, **kinds))
    params = init_params(model.config, jax.random.key(0))
    (statistics, gradient), _ = compare(gradients_of(model), params, 2, 5)
    assert statistics < 2e-5 and gradient < 1e-5, (statistics, gradient)


@pytest.mark.medium
@pytest.mark.parametrize(
    "kinds", [pytest.param({}, marks=pytest.mark.slow), windowed(2)], ids=["full", "windowed"]
)
def test_kernels_read_whole_rows(monkeypatch, kinds):
    """Attention by a kernel unpacks the rows; here splash attention runs without a TPU."""
    splash = functools.partial(kernels.splash, interpret=True)
    monkeypatch.setitem(kernels.KERNELS, "splash", splash)
    config = ModelConfig(V, 64, 2, 2, 1, 64, 48, **kinds)
    params, rng = init_params(config, jax.random.key(0)), np.random.default_rng(0)
    batch = batch_of(random_tree(rng, ROWS, T, V), rng, T, V)
    found = {}
    for kernel in ("xla", "splash"):
        model = Qwen(dataclasses.replace(config, attention=kernel))
        packed, entry_BW = one_tree(batch, kernel)
        assert (packed.tree.keys_BQM is None) == (kernel == "splash")

        def total(params, model=model, packed=packed, entry_BW=entry_BW):
            logp_PE, entropy_PE = packed_statistics(model, params, packed)
            logp_BT = unpack(logp_PE, entry_BW)[:, :T]
            return (batch.logp_BT * logp_BT).sum() + entropy_PE.sum(), logp_BT

        found[kernel] = jax.jit(jax.grad(total, has_aux=True))(params)
    gradient, logp_BT = found["splash"]
    expected, expected_BT = found["xla"]
    np.testing.assert_allclose(logp_BT, expected_BT, atol=2e-5)
    assert relative(gradient, expected) < 1e-5


def test_rows_with_images():
    """Positions follow the rows: an image counts by its longer side, in a trunk or in a branch."""
    seeing = load(ROOT / "tests" / "model" / "reference" / "qwen2_5_vl")
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (56, 84, 3), dtype=np.uint8) for _ in range(3)]
    words = lambda n: rng.integers(0, 40, n).tolist()  # noqa: E731
    trunk = words(5) + shown(seeing, pictures[0]) + words(6)
    branch = trunk + words(4) + shown(seeing, pictures[1]) + words(9)
    rows = [
        (trunk + words(9), pictures[:1]),
        (branch + words(5), pictures[:2]),
        (branch + words(7), pictures[:2]),
        (trunk + shown(seeing, pictures[2]) + words(8), [pictures[0], pictures[2]]),
        (words(12), []),
    ]
    width = max(len(tokens) for tokens, _ in rows)
    arranged = arrange(seeing, rows, width)
    params = seen_by(seeing.params, arranged.images)
    text_BT = (arranged.ids_BT != seeing.image_pad) & (
        np.arange(width) < arranged.length_B[:, None]
    )
    with trees(ALWAYS):
        packed, entry_BW = one_micro_batch(arranged.tokens_BT, text_BT)
    assert packed.tree is not None
    assert packed.tokens_BL.size < 0.8 * arranged.length_B.sum()
    found = packed_statistics(seeing.model, params, packed)
    expected = token_statistics(seeing.model, params, arranged.tokens_BT)
    text_BT[:, 0] = False
    for x, y in zip(found, expected, strict=True):
        x_BT = unpack(x, entry_BW)[:, :width]
        np.testing.assert_allclose(x_BT, y * text_BT, atol=2e-5)


@pytest.mark.slow
def test_five_hundred_trees(gradients, params):
    (statistics, gradient), depths = compare(gradients, params, 1, 500)
    assert statistics < 2e-5 and gradient < 1e-5, (statistics, gradient)
    assert {1, 2, 3, 4, 5, 6} <= depths.keys(), depths


# ------------------------------------------------------------------------------ losses

KINDS = (*KL_KINDS, EXACT)
COSTLY = [(o, a, k) for o in OBJECTIVES for a in AGGREGATIONS for k in KINDS]
OFTEN = [
    ("ppo", "token-mean", "k3"),
    ("gspo", "seq-mean-token-mean", EXACT),
    ("cispo", "token-mean", "k1"),
]


def loss_of_rows(model, loss, params, reference, batch, advantage_BT, bonus_BT):
    """Return the loss of the rows from its definition, with a forward pass over padded rows."""
    mask_BT, exact = batch.mask_BT, loss.kl_kind == EXACT
    logp_BT, entropy_BT, *kl = token_statistics(
        model,
        params,
        batch.tokens_BT,
        temperature=loss.temperature,
        reference=reference if exact else None,
    )
    if not exact:
        ref_BT, _ = token_statistics(
            model, reference, batch.tokens_BT, temperature=loss.temperature
        )
        kl = [losses.kl(logp_BT, ref_BT, loss.kl_kind)]
    clip_c = loss.clip_c if OBJECTIVES[loss.objective].second_clip else None
    task, _ = losses.policy_loss(
        logp_BT,
        batch.logp_BT,
        advantage_BT,
        mask_BT,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        clip_c=clip_c,
        aggregation=loss.aggregation,
        terms=OBJECTIVES[loss.objective].terms,
        weights=losses.minibatch_weights(mask_BT, loss.aggregation, norm_length=loss.norm_length),
    )
    weight_BT = losses.token_weights(mask_BT, loss.aggregation, norm_length=loss.norm_length)
    return (
        task
        + loss.kl_coef * losses.weighted_sum(kl[0], mask_BT, weight_BT)
        - loss.entropy_coef * losses.weighted_sum(entropy_BT * bonus_BT, mask_BT, weight_BT)
    )


def settings_of(objective, aggregation, kind):
    return dataclasses.replace(
        LOSS,
        objective=objective,
        aggregation=aggregation,
        kl_kind=kind,
        clip_c=LOSS.clip_c if OBJECTIVES[objective].second_clip else None,
        norm_length=T,
    )


@pytest.mark.parametrize(
    "objective, aggregation, kind",
    [
        pytest.param(*case, marks=pytest.mark.medium if case in OFTEN else pytest.mark.slow)
        for case in COSTLY
    ],
)
def test_every_loss_is_that_of_the_rows(model, params, objective, aggregation, kind):
    loss = settings_of(objective, aggregation, kind)
    reference = jax.tree.map(lambda x: 1.05 * x, params)
    rng = np.random.default_rng(COSTLY.index((objective, aggregation, kind)))
    of_rows = jax.jit(
        jax.value_and_grad(
            lambda params, *rest: loss_of_rows(model, loss, params, reference, *rest)
        )
    )
    policy_loss = PolicyLoss(model, loss, reference)
    of_tree = jax.jit(
        jax.value_and_grad(lambda params, piece: sum(policy_loss.parts(params, piece)[0].values()))
    )
    for _ in range(3):
        batch = batch_of(random_tree(rng, ROWS, T, V), rng, T, V)
        advantage_BT, bonus_BT = rng.normal(size=(2, ROWS, T)).astype(np.float32)
        packed, entry_BW = one_tree(batch)
        piece = dict(logp=batch.logp_BT, advantage=advantage_BT, mask=batch.mask_BT, bonus=bonus_BT)
        piece["weights"] = losses.minibatch_weights(
            batch.mask_BT, loss.aggregation, norm_length=loss.norm_length
        )
        piece |= {"packed": packed, "entry": entry_BW[:, :T]}
        value, gradient = of_tree(params, piece)
        expected, expected_gradient = of_rows(params, batch, advantage_BT, bonus_BT)
        # The parts of the loss cancel partly.
        assert float(value) == pytest.approx(float(expected), rel=1e-5, abs=1e-5)
        assert relative(gradient, expected_gradient) < 1e-5


# ------------------------------------------------------------------------------ updates


def update_gradient(model, params, mesh, who, form, *, micro_batch=4, seed=0, order=0):
    """Return (gradient of a minibatch, its plan) of the policy, an adapter or the critic.

    Args:
      order: seed of the order in which rows are divided into micro-batches.
    """
    rng = np.random.default_rng(seed)
    rows = random_tree(rng, ROWS, T, V)
    batch = batch_of(rows, rng, T, V)
    numbers = rng.normal(size=(ROWS, T)).astype(np.float32) * batch.mask_BT
    layout = MinibatchLayout(mesh, 1, micro_batch, ROWS)
    args = dict(rng=np.random.default_rng(order))
    balance_coef = 0.5 if model.config.experts else 0.0
    loss = dataclasses.replace(LOSS, norm_length=T, balance_coef=balance_coef)
    with trees(form), jax.set_mesh(mesh):
        if who == "critic":
            value_loss = critic.ValueLoss(0.3, loss.aggregation, T)
            plan = critic.plan_critic(
                value_loss, batch, numbers, numbers + 0.2, np.arange(ROWS), layout, **args
            )
            backbone = critic.backbone_of(params)
            trained = {"backbone": backbone, "value": jnp.full(model.config.width, 0.1)}

            def gradient(grads, arrays, count):
                return critic.critic_gradient(
                    model, value_loss, trained, grads, arrays, count, np.float32(1.0)
                )
        else:
            plan = policy.plan_policy(loss, batch, numbers, np.arange(ROWS), layout, **args)
            trained, frozen = params, None
            if who == "adapter":
                key = jax.random.key(3)
                trained = lora.init_adapters(model.config, key, rank=2, targets=("q", "v"))
                trained = jax.tree.map(lambda x: x + 0.05, trained)
                frozen = ForwardContext(params, np.float32(2.0))
            reference = jax.tree.map(lambda x: 1.02 * x, params)
            scales = np.float32(1.0), np.float32(1.0)

            def gradient(grads, arrays, count):
                return policy.policy_gradient(
                    model, loss, trained, reference, grads, arrays, count, scales, frozen
                )

        grads = jax.tree.map(jnp.zeros_like, trained)
        for pieces in plan.minibatches():
            for arrays, count in pieces:
                grads, *_ = gradient(grads, arrays, count)
        return jax.device_get(grads), plan


def largest_difference(model, params, mesh, who, **settings):
    """Return the relative difference of the gradients of trees and of plain rows."""
    expected, plain = update_gradient(model, params, mesh, who, NEVER, **settings)
    found, plan = update_gradient(model, params, mesh, who, ALWAYS, **settings)
    packed = [piece.trees is not None for pieces in plan.split.pieces for piece in pieces]
    assert all(packed) and not any(p.trees for pieces in plain.split.pieces for p in pieces)
    return relative(found, expected)


@pytest.mark.medium
@pytest.mark.parametrize(
    "who", ["policy", "critic", pytest.param("adapter", marks=pytest.mark.slow)]
)
def test_an_update_has_the_gradient_of_plain_rows(model, params, who):
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    assert largest_difference(model, params, mesh, who) < 1e-5


@pytest.mark.medium
@pytest.mark.parametrize(
    "who", ["policy", *(pytest.param(who, marks=pytest.mark.slow) for who in ("critic", "adapter"))]
)
def test_bfloat16_rounds_trees_as_it_rounds_plain_rows(model, params, who):
    """Both are equally far from the gradient in float32."""
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    rounded = Qwen(dataclasses.replace(model.config, dtype="bfloat16"))
    apart = {ALWAYS: [], NEVER: []}
    for seed in range(4):
        exact, _ = update_gradient(model, params, mesh, who, NEVER, seed=seed)
        for form, found in apart.items():
            gradient, _ = update_gradient(rounded, params, mesh, who, form, seed=seed)
            found.append(relative(gradient, exact))
    print(who, apart)
    assert np.mean(apart[ALWAYS]) < 1.2 * np.mean(apart[NEVER]), apart


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 2, 12])
def test_micro_batches_do_not_change_a_gradient(model, params, micro_batch):
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    assert largest_difference(model, params, mesh, "policy", micro_batch=micro_batch) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    "cases, count", [("few", 7), pytest.param("others", 11, marks=pytest.mark.slow)]
)
def test_on_eight_devices(cases, count):
    process = on_devices(8, [ROOT / "tests" / "update" / "tree_gradients_script.py", cases])
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert len(found) == count and max(found.values()) < 1e-5, found


def test_groups_of_a_prompt_are_trees_and_other_rows_are_not():
    """8 prompts of 100 tokens with 16 replies of 20: a fifth of the positions is computed."""
    rng = np.random.default_rng(0)
    prompts, replies = rng.integers(0, 999, (8, 100)), rng.integers(0, 999, (8, 16, 20))
    rows = np.concatenate([np.repeat(prompts[:, None], 16, 1), replies], axis=2).reshape(128, 120)
    read_BT = np.broadcast_to(np.arange(120) >= 100, (128, 120))
    grouping = Grouping(16, 1, 128, "xla")
    shared = split_rows([np.arange(128)], TokenRows(rows.astype(np.int32), read_BT), grouping)
    assert shared.distinct == 8 * 100 + 128 * 19 and shared.row_positions == 128 * 119
    assert shared.shared == 1 - shared.distinct / shared.row_positions
    assert shared.positions < 1.3 * shared.distinct
    assert all(piece.trees for pieces in shared.pieces for piece in pieces)
    others = rng.integers(0, 999, (128, 120)).astype(np.int32)
    plain = split_rows([np.arange(128)], TokenRows(others, read_BT), grouping)
    assert not any(piece.trees for pieces in plain.pieces for piece in pieces)
    assert plain.shared == 0


def test_few_sizes_serve_many_steps():
    """100 steps whose groups, lengths and kept groups vary run few programs."""
    rng, found = np.random.default_rng(0), set()
    for _ in range(100):
        groups = int(rng.integers(4, 9))
        prompts = rng.integers(0, 999, (groups, 60))
        rows = []
        for prompt in prompts:
            rows += [
                np.concatenate([prompt, rng.integers(0, 999, rng.integers(15, 34))])
                for _ in range(16)
            ]
        batch = batch_of([row.astype(np.int32) for row in rows], rng, 100, 999)
        mask_BT = batch.mask_BT * (np.arange(100) >= 60)
        order = rng.permutation(len(rows))
        split = split_rows(
            np.array_split(order, 4),
            token_rows(batch.replace(mask_BT=mask_BT)),
            Grouping(16, 1, 32, "xla"),
        )
        assert split.token_efficiency > 0.7
        found |= {piece.sizes for pieces in split.pieces for piece in pieces}
    assert len(found) <= 8, found


def test_a_thousand_rows_on_one_trunk():
    """They are split; the trunk is computed again for each part, and counted."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 99, 200)
    rows = np.concatenate([np.tile(trunk, (1000, 1)), rng.integers(0, 99, (1000, 6))], axis=1)
    read_BT = np.broadcast_to(np.arange(206) >= 200, rows.shape)
    split = split_rows(
        [np.arange(1000)], TokenRows(rows.astype(np.int32), read_BT), Grouping(8, 1, 1000, "xla")
    )
    held = [piece.rows for piece in split.pieces[0]]
    assert sorted(np.concatenate(held).tolist()) == list(range(1000))
    sequences = [tree for piece in split.pieces[0] for tree in piece.trees]
    assert max(len(tree.packed.bin.rows) for tree in sequences) == 64
    assert split.distinct == sum(tree.packed.bin.positions for tree in sequences)
    assert split.shared > 0.9


@pytest.mark.parametrize("rows", [[[5]], [[5], [6]], [[5, 6]], [[5, 6], [5, 6]], [[5], [5, 6, 7]]])
def test_rows_of_one_token_and_single_rows(model, params, rows):
    tokens_BT = np.zeros((len(rows), 4), np.int32)
    mask_BT = np.zeros((len(rows), 4), np.float32)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row)] = row
        mask_BT[b, 1 : len(row)] = 1
    whole = TokenRows(tokens_BT, mask_BT > 0)
    for form in (ALWAYS, NEVER):
        with trees(form):
            grouping = Grouping(2, 1, 2, "xla")
            split = split_rows([np.arange(len(rows))], whole, grouping)
        found_BT = np.zeros(tokens_BT.shape, np.float32)
        for piece in split.pieces[0]:
            built = build_arrays(piece, whole, grouping)
            packed = jax.tree.map(lambda x: x[0], built.packed)
            logp_PE, _ = packed_statistics(model, params, packed)
            padded_APE = np.zeros((grouping.micro_batches, *logp_PE.shape), np.float32)
            padded_APE[0] = logp_PE
            built.to_rows(padded_APE, found_BT)
        expected_BT, _ = token_statistics(model, params, tokens_BT)
        np.testing.assert_allclose(found_BT, expected_BT * mask_BT, atol=1e-5)
