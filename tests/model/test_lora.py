"""model/lora.py: attached, merged and saved adapters are the same model and agree with PEFT.

The references come from tests/model/reference/make_lora.py (torch and peft, float32).

Axes: B rows, T tokens, L layers, D width, r rank.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from ragen_jax.core.sharding import MESH_AXES, make_mesh
from ragen_jax.model import hf, lora, qwen
from ragen_jax.model.layout import shard_params
from ragen_jax.model.likelihood import token_logps
from ragen_jax.rollout import sample

REFERENCE = Path(__file__).parent / "reference"
NAMES = ("qwen2_tied", "qwen2_untied")

RANK, SCALE = 3, 1.5
CLOSE = dict(rtol=0, atol=1e-5)  # for log-probs and hidden states of order 1

UNROLLED = qwen.ModelConfig(
    vocab_size=31,
    width=12,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=8,  # not width / heads
    mlp_width=20,
)
SCANNED = dataclasses.replace(UNROLLED, layers=qwen.UNROLLED_LAYERS + 1, tied=False)
REMAT = dataclasses.replace(
    SCANNED, remat=True, family="qwen3", qkv_bias=False, qk_norm=True, tied=True
)

merge = jax.jit(lora.merge)
init_adapters = jax.jit(lora.init_adapters, static_argnames=("config", "rank", "targets"))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BT):
    """(hidden states [B, T, D], log-probs [B, T, V] of the next token)."""
    hidden, _ = model.apply({"params": params}, tokens_BT)
    return hidden, jax.nn.log_softmax(qwen.logits(params, hidden))


def loss(model, params, tokens_BT):
    """A sum of log-probs with weights 1, 2, ..., so that the terms of two tokens do not cancel."""
    logp_BT = token_logps(model, params, tokens_BT)
    return (logp_BT * (1.0 + jnp.arange(logp_BT.size).reshape(logp_BT.shape))).mean()


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=2)
def gradient(model, params, adapters, tokens_BT):
    """Return the gradient of `loss` with respect to the adapters."""
    return loss(model, lora.attach(params, adapters, scale=SCALE), tokens_BT)


def random_like(shapes, seed):
    """Return a tree of normal float32 arrays: default biases, norms and lora_b would hide
    mix-ups."""
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    values = [0.4 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.map(jnp.asarray, jax.tree.unflatten(tree, values))


@functools.cache
def build(config, targets=lora.TARGETS):
    """Return (model, params, adapters), all random."""
    key = jax.random.key(0)
    params = jax.eval_shape(functools.partial(qwen.init_params, config), key)
    fresh = functools.partial(lora.init_adapters, config, rank=RANK, targets=targets)
    return (
        qwen.Qwen(config),
        random_like(params, seed=1),
        random_like(jax.eval_shape(fresh, key), seed=2),
    )


def make_tokens(config, rows=3, length=7):
    return np.random.default_rng(3).integers(0, config.vocab_size, (rows, length), np.int32)


def assert_trees_equal(got, want):
    got, want = flatten_dict(got), flatten_dict(want)
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_array_equal(got[path], want[path], err_msg="/".join(path))


@functools.cache
def fresh_adapters(config):
    return init_adapters(config, jax.random.key(1), rank=RANK, targets=lora.TARGETS)


def of_each(*configs):
    names = {UNROLLED: "unrolled", SCANNED: "scanned", REMAT: "remat"}
    return pytest.mark.parametrize("config", configs, ids=[names[c] for c in configs])


# ---------------------------------------------------------------- new adapters


@of_each(UNROLLED, SCANNED)
def test_fresh_adapters_change_nothing(config):
    model, params, _ = build(config)
    adapters = fresh_adapters(config)
    assert all(np.any(pair["lora_a"]) for pair in adapters["layers"].values())
    tokens_BT = make_tokens(config)
    attached = lora.attach(params, adapters, scale=SCALE)
    found, want = forward(model, attached, tokens_BT), forward(model, params, tokens_BT)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert_trees_equal(merge(params, adapters, scale=SCALE), params)


@of_each(UNROLLED, REMAT)
def test_first_gradient_goes_to_lora_b(config):
    model, params, _ = build(config)
    grads = gradient(model, params, fresh_adapters(config), make_tokens(config))
    for target, pair in grads["layers"].items():
        assert not np.any(pair["lora_a"]), target
        assert all(np.any(layer) for layer in pair["lora_b"]), target


def test_shapes_and_keys():
    config = UNROLLED
    adapters = lora.init_adapters(config, jax.random.key(1), rank=RANK, targets=["o", "q"])
    L, D, H, hd = config.layers, config.width, config.heads, config.head_dim
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), adapters)
    assert shapes["layers"] == {
        "q": {"lora_a": ((L, D, RANK), "float32"), "lora_b": ((L, RANK, H, hd), "float32")},
        "o": {"lora_a": ((L, H * hd, RANK), "float32"), "lora_b": ((L, RANK, D), "float32")},
    }
    # The values of a target depend only on the key, not on the other targets.
    alone = lora.init_adapters(config, jax.random.key(1), rank=RANK, targets=("q",))
    assert_trees_equal(alone["layers"]["q"], adapters["layers"]["q"])
    other = lora.init_adapters(config, jax.random.key(2), rank=RANK, targets=("q",))
    assert np.any(other["layers"]["q"]["lora_a"] != adapters["layers"]["q"]["lora_a"])


def test_fresh_spread():
    # PEFT draws uniformly within 1 / sqrt(inputs), which has variance 1 / (3 inputs).
    wide = dataclasses.replace(UNROLLED, width=48, mlp_width=192)
    adapters = lora.init_adapters(wide, jax.random.key(0), rank=64, targets=("gate", "down"))
    for target, inputs in (("gate", 48), ("down", 192)):
        found = np.var(adapters["layers"][target]["lora_a"]) * 3 * inputs
        np.testing.assert_allclose(found, 1, atol=0.1)  # 6144 draws or more: 5 standard deviations


# ---------------------------------------------------------------- attach and merge


@of_each(UNROLLED, SCANNED)
def test_attach_equals_merge(config):
    model, params, adapters = build(config)
    merged = merge(params, adapters, scale=SCALE)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    tokens_BT = make_tokens(config)
    got = forward(model, lora.attach(params, adapters, scale=SCALE), tokens_BT)
    want = forward(model, merged, tokens_BT)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)
    assert np.abs(got[1] - forward(model, params, tokens_BT)[1]).max() > 0.1


@pytest.mark.parametrize("target", lora.TARGETS)
def test_one_target_by_hand(target):
    """Only this target's lora_b is not 0: W + scale A B on its kernel; attach agrees."""
    model, params, adapters = build(UNROLLED)
    layers = {
        name: pair | {"lora_b": pair["lora_b"] * (name == target)}
        for name, pair in adapters["layers"].items()
    }
    adapters = {"layers": layers}
    a, b = (np.asarray(layers[target][leaf]) for leaf in ("lora_a", "lora_b"))
    product = [x @ y for x, y in zip(a, b.reshape(*b.shape[:2], -1), strict=True)]
    kernel = params["layers"][target]["kernel"]
    changed = kernel + SCALE * np.reshape(product, kernel.shape)

    merged = merge(params, adapters, scale=SCALE)
    np.testing.assert_allclose(merged["layers"][target]["kernel"], changed, **CLOSE)
    merged["layers"][target]["kernel"] = kernel
    assert_trees_equal(merged, params)

    own = params["layers"][target] | {"kernel": changed}
    by_hand = params | {"layers": params["layers"] | {target: own}}
    tokens_BT = make_tokens(UNROLLED)
    attached = lora.attach(params, adapters, scale=SCALE)
    _, got = forward(model, attached, tokens_BT)
    np.testing.assert_allclose(got, forward(model, by_hand, tokens_BT)[1], **CLOSE)
    assert np.abs(got - forward(model, params, tokens_BT)[1]).max() > 1e-2


def test_some_targets():
    model, params, adapters = build(UNROLLED, ("o", "up"))
    tokens_BT = make_tokens(UNROLLED)
    _, got = forward(model, lora.attach(params, adapters, scale=SCALE), tokens_BT)
    _, want = forward(model, merge(params, adapters, scale=SCALE), tokens_BT)
    np.testing.assert_allclose(got, want, **CLOSE)
    assert np.abs(got - forward(model, params, tokens_BT)[1]).max() > 1e-2


def test_base_is_shared():
    _, params, adapters = build(UNROLLED)
    attached = flatten_dict(lora.attach(params, adapters, scale=SCALE))
    merged = flatten_dict(lora.merge(params, adapters, scale=SCALE))
    for path, leaf in flatten_dict(params).items():
        assert attached.pop(path) is leaf
        assert merged[path] is leaf or path[-1] == "kernel"
    assert {path[-1] for path in attached} == {"lora_a", "lora_b"}
    assert len(attached) == 2 * len(lora.TARGETS)


def test_sampler_reads_adapters():
    model, params, adapters = build(UNROLLED)
    tokens_NP, length_N = make_tokens(UNROLLED), np.array([7, 2, 5], np.int32)
    attached = lora.attach(params, adapters, scale=SCALE)
    _, logits_NV = sample.prefill(model, attached, tokens_NP, length_N)
    hidden, _ = forward(model, merge(params, adapters, scale=SCALE), tokens_NP)
    want = qwen.logits(params, hidden[np.arange(3), length_N - 1])
    np.testing.assert_allclose(logits_NV, want, **CLOSE)


@of_each(UNROLLED, REMAT)
def test_bfloat16(config):
    model, params, adapters = build(config)
    tokens_BT = make_tokens(config)
    _, exact = forward(model, merge(params, adapters, scale=SCALE), tokens_BT)
    rounded = qwen.Qwen(dataclasses.replace(config, dtype="bfloat16"))
    hidden, logp_BTV = forward(rounded, lora.attach(params, adapters, scale=SCALE), tokens_BT)
    assert hidden.dtype == jnp.bfloat16 and logp_BTV.dtype == jnp.float32
    np.testing.assert_allclose(logp_BTV, exact, atol=0.3)
    for leaf in jax.tree.leaves(gradient(rounded, params, adapters, tokens_BT)):
        assert leaf.dtype == jnp.float32 and np.all(np.isfinite(leaf)) and np.any(leaf)


# ---------------------------------------------------------------- gradients


@of_each(UNROLLED, REMAT)
def test_gradient_by_the_chain_rule(config):
    """With G = dloss/dW at W + s A B: dloss/dA = s G B^T and dloss/dB = s A^T G."""
    model, params, adapters = build(config)
    tokens_BT = make_tokens(config)
    got = gradient(model, params, adapters, tokens_BT)
    through_kernels = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
    full = through_kernels(model, merge(params, adapters, scale=SCALE), tokens_BT)
    assert jax.tree.structure(got) == jax.tree.structure(adapters)
    for target, pair in adapters["layers"].items():
        a = np.asarray(pair["lora_a"])
        b = np.asarray(pair["lora_b"]).reshape(config.layers, RANK, -1)
        g = np.asarray(full["layers"][target]["kernel"]).reshape(*a.shape[:2], -1)
        want = {
            "lora_a": SCALE * g @ b.swapaxes(1, 2),
            "lora_b": (SCALE * a.swapaxes(1, 2) @ g).reshape(pair["lora_b"].shape),
        }
        for leaf in pair:
            size = np.abs(want[leaf]).max()
            found = got["layers"][target][leaf]
            np.testing.assert_allclose(found, want[leaf], rtol=0, atol=1e-5 * max(size, 1))
            assert size > 1e-3


def product_sizes(jaxpr):
    """Yield the number of elements of each matrix product in a jaxpr, at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.size
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from product_sizes(inner)


@of_each(UNROLLED, SCANNED, REMAT)
def test_gradient_forms_no_kernel(config):
    """Only adapters get gradients: no product has the size of a kernel."""
    model, params, adapters = build(config)
    tokens_BT = make_tokens(config)
    kernels = {params["layers"][target]["kernel"][0].size for target in lora.TARGETS}

    def sizes(transform):
        def objective(adapters):
            return loss(model, transform(params, adapters, scale=SCALE), tokens_BT)

        return set(product_sizes(jax.make_jaxpr(jax.grad(objective))(adapters).jaxpr))

    assert kernels <= sizes(lora.merge)  # merging computes gradients of whole kernels
    assert not kernels & sizes(lora.attach)


# ---------------------------------------------------------------- on a mesh


def test_placed_like_the_kernels():
    """q [L, D, H, hd] is split by fsdp and tensor; the single head of k cannot be split by
    tensor."""
    mesh = AbstractMesh((2, 2, 3), MESH_AXES)
    found = lora.adapter_shardings(UNROLLED, build(UNROLLED)[2], mesh)["layers"]
    specs = {target: {leaf: pair[leaf].spec for leaf in pair} for target, pair in found.items()}
    fsdp, tensor = ("fsdp",), ("tensor",)
    assert specs == {
        "q": {"lora_a": P(None, fsdp, None), "lora_b": P(None, None, tensor, None)},
        "k": {"lora_a": P(None, fsdp, None), "lora_b": P(None, None, None, None)},
        "v": {"lora_a": P(None, fsdp, None), "lora_b": P(None, None, None, None)},
        "o": {"lora_a": P(None, tensor, None), "lora_b": P(None, None, fsdp)},
        "gate": {"lora_a": P(None, fsdp, None), "lora_b": P(None, None, None)},
        "up": {"lora_a": P(None, fsdp, None), "lora_b": P(None, None, None)},
        "down": {"lora_a": P(None, None, None), "lora_b": P(None, None, fsdp)},
    }


def test_on_a_mesh():
    mesh = make_mesh(data=1, fsdp=-1, tensor=1)
    model, params, adapters = build(UNROLLED)
    tokens_BT = make_tokens(UNROLLED)
    _, want = forward(model, lora.attach(params, adapters, scale=SCALE), tokens_BT)
    placed = jax.device_put(adapters, lora.adapter_shardings(UNROLLED, adapters, mesh))
    with jax.set_mesh(mesh):
        params = shard_params(params, model, mesh)
        _, got = forward(model, lora.attach(params, placed, scale=SCALE), tokens_BT)
    np.testing.assert_allclose(got, want, **CLOSE)


# ---------------------------------------------------------------- wrong arguments

ACCEPTED = "accepted: q, k, v, o, gate, up, down"


@pytest.mark.parametrize(
    "targets, message",
    [(("q", "q_proj"), "unknown targets q_proj"), ((), "no targets"), (("embed",), "embed")],
)
def test_wrong_targets(tmp_path, targets, message):
    _, params, adapters = build(UNROLLED)
    with pytest.raises(ValueError, match=f"{message}.*{ACCEPTED}"):
        lora.init_adapters(UNROLLED, jax.random.key(0), rank=RANK, targets=targets)
    with pytest.raises(ValueError, match=f"{message}.*{ACCEPTED}"):
        save(tmp_path / "x", UNROLLED, adapters, targets=targets)
    other = {"layers": {target: adapters["layers"]["q"] for target in targets}}
    for function in (lora.attach, lora.merge):
        with pytest.raises(ValueError, match=f"{message}.*{ACCEPTED}"):
            function(params, other, scale=SCALE)
    with pytest.raises(ValueError, match=f"{message}.*{ACCEPTED}"):
        lora.adapter_shardings(UNROLLED, other, make_mesh(data=-1, fsdp=1, tensor=1))


@pytest.mark.parametrize("rank", [0, -1, 2.0])
def test_wrong_rank(tmp_path, rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not an integer of at least 1"):
        lora.init_adapters(UNROLLED, jax.random.key(0), rank=rank, targets=("q",))
    with pytest.raises(ValueError, match=f"rank {rank} is not an integer of at least 1"):
        save(tmp_path / "x", UNROLLED, build(UNROLLED)[2], rank=rank)


@pytest.mark.parametrize("function", [lora.attach, lora.merge])
def test_adapters_of_another_model(function):
    _, params, adapters = build(UNROLLED)
    pair = adapters["layers"]["o"]
    turned = {"layers": {"o": pair | {"lora_b": pair["lora_b"][:, :, :-1]}}}
    with pytest.raises(ValueError, match=r"o/lora_b has shape \(2, 3, 11\).*\(2, 3, 12\)"):
        function(params, turned, scale=SCALE)
    with pytest.raises(ValueError, match="parameters of q already have adapters"):
        function(lora.attach(params, adapters, scale=SCALE), adapters, scale=SCALE)


def test_attached_parameters_are_not_a_model_to_save(tmp_path, tokenizer):
    model, params, adapters = build(UNROLLED, ("up",))
    attached = lora.attach(params, adapters, scale=SCALE)
    with pytest.raises(ValueError, match="not the model's: layers/up/lora_a, layers/up/lora_b"):
        hf.save(tmp_path / "x", model, attached, tokenizer)


# ---------------------------------------------------------------- saved and loaded


def save(path, config, adapters, **changes):
    settings = dict(rank=RANK, alpha=6, targets=lora.TARGETS, base_model="org/base") | changes
    lora.save_adapter(path, adapters, config=config, **settings)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "adapter", UNROLLED, build(UNROLLED)[2])
    return tmp_path / "adapter"


def edit_config(directory, **fields):
    file = directory / lora.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_weights(directory, change):
    """Rewrite the weights after `change(dict of arrays)`."""
    tensors = load_file(directory / lora.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / lora.WEIGHTS)


@of_each(UNROLLED, SCANNED)
@pytest.mark.parametrize("targets, alpha", [(lora.TARGETS, 6), (("down", "q", "o"), 2.5)])
def test_round_trip(tmp_path, config, targets, alpha):
    _, _, adapters = build(config, targets)
    path = tmp_path / "a" / "b"
    save(path, config, adapters, targets=targets, alpha=alpha)
    got, *settings = lora.load_adapter(path, config)
    assert_trees_equal(got, adapters)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
    assert settings == [RANK, alpha, tuple(t for t in lora.TARGETS if t in targets)]
    assert json.loads((path / lora.CONFIG).read_text())["base_model_name_or_path"] == "org/base"
    assert [x.name for x in path.parent.iterdir()] == ["b"]  # no temporary directory left
    assert len({x.stat().st_mode for x in path.iterdir()}) == 1


def test_save_replaces_a_save_and_nothing_else(saved):
    newer = random_like(build(UNROLLED)[2], seed=7)
    save(saved, UNROLLED, newer)
    assert_trees_equal(lora.load_adapter(saved, UNROLLED)[0], newer)
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt"):
        save(saved, UNROLLED, build(UNROLLED)[2])
    assert_trees_equal(lora.load_adapter(saved, UNROLLED)[0], newer)
    assert [x.name for x in saved.parent.iterdir()] == ["adapter"]


def test_save_rejects_other_adapters(tmp_path):
    _, _, adapters = build(UNROLLED, ("q", "o"))
    with pytest.raises(ValueError, match="have the targets q, o; expected q, up"):
        save(tmp_path / "x", UNROLLED, adapters, targets=("q", "up"))
    with pytest.raises(ValueError, match=r"q/lora_a has shape \(2, 12, 3\); rank 4.*\(2, 12, 4\)"):
        save(tmp_path / "x", UNROLLED, adapters, targets=("q", "o"), rank=4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("disk", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_dtypes_on_disk(saved, disk):
    edit_weights(saved, lambda t: t.update({name: x.astype(disk) for name, x in t.items()}))
    want = jax.tree.map(lambda x: np.asarray(x).astype(disk).astype(np.float32), build(UNROLLED)[2])
    assert_trees_equal(lora.load_adapter(saved, UNROLLED)[0], want)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'.*'LORA'"),
        ({"use_dora": True}, "use_dora True"),
        ({"use_rslora": True}, "use_rslora True"),
        ({"bias": "all"}, "bias 'all'.*'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"layers_to_transform": [1]}, r"layers_to_transform \[1\]"),
        ({"something_new": "on"}, "something_new 'on'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules lm_head; accepted.*q_proj"),
        ({"target_modules": ".*_proj"}, r"target_modules \.\*_proj; accepted: a list of q_proj"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"lora_alpha": None}, "field lora_alpha is missing"),
        ({"r": 0}, "rank 0 is not an integer"),
    ],
)
def test_unsupported_adapter(saved, fields, message):
    edit_config(saved, **fields)
    with pytest.raises(ValueError, match=message):
        lora.load_adapter(saved, UNROLLED)


def test_wrong_tensors(saved):
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    with pytest.raises(ValueError, match=r"0.self_attn.q_proj.lora_A.* \(3, 12\).*rank 4.*\(4, 12"):
        edit_config(saved, r=4)
        lora.load_adapter(saved, UNROLLED)
    edit_config(saved, r=RANK)
    edit_weights(saved, lambda t: t.update({name: t[name][:, 1:]}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(3, 19\).*\(3, 20\)"):
        lora.load_adapter(saved, UNROLLED)
    edit_weights(saved, lambda t: t.update({name: np.full((3, 20), np.nan, np.float32)}))
    with pytest.raises(ValueError, match=f"tensor {name} holds NaN"):
        lora.load_adapter(saved, UNROLLED)
    edit_weights(saved, lambda t: t.update({name: np.zeros((3, 20), np.int32)}))
    with pytest.raises(ValueError, match=f"{name} is I32; accepted: F32"):
        lora.load_adapter(saved, UNROLLED)
    edit_weights(saved, lambda t: t.update({"more.weight": t.pop(name)}))
    with pytest.raises(ValueError, match=f"1 missing tensors: {name}"):
        lora.load_adapter(saved, UNROLLED)
    edit_weights(saved, lambda t: t.update({name: t["more.weight"]}))
    with pytest.raises(ValueError, match="1 unexpected tensors: more.weight"):
        lora.load_adapter(saved, UNROLLED)


@pytest.mark.parametrize("file", [lora.CONFIG, lora.WEIGHTS])
def test_missing_and_torn_files(saved, file):
    content = (saved / file).read_bytes()
    (saved / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=file):
        lora.load_adapter(saved, UNROLLED)
    (saved / file).unlink()
    with pytest.raises(ValueError, match=f"adapter has no {file}"):
        lora.load_adapter(saved, UNROLLED)


# ---------------------------------------------------------------- PEFT


@pytest.mark.parametrize("name", NAMES)
def test_written_by_peft(tmp_path, name):
    model, params = hf.load_weights(REFERENCE / name)
    directory = REFERENCE / f"lora_{name}"
    adapters, rank, alpha, targets = lora.load_adapter(directory, model.config)
    assert (rank, alpha, targets) == (4, 8, lora.TARGETS)
    want = np.load(directory / "logits.npz")
    for transform in (lora.attach, merge):
        adapted = transform(params, adapters, scale=alpha / rank)
        hidden, _ = forward(model, adapted, want["tokens_BT"])
        got = qwen.logits(adapted, hidden)
        np.testing.assert_allclose(got, want["logits_BTV"], rtol=0, atol=1e-4)
    hidden, _ = forward(model, params, want["tokens_BT"])
    assert np.abs(qwen.logits(params, hidden) - want["logits_BTV"]).max() > 0.1

    save(tmp_path / "again", model.config, adapters, rank=rank)
    theirs = load_file(directory / lora.WEIGHTS)
    ours = load_file(tmp_path / "again" / lora.WEIGHTS)
    assert ours.keys() == theirs.keys()
    for tensor in theirs:
        np.testing.assert_array_equal(ours[tensor], theirs[tensor])


@pytest.mark.parametrize("name", NAMES)
def test_peft_opens_it(tmp_path, name):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, params = hf.load_weights(REFERENCE / name)
    targets = ("q", "o", "down") if name == "qwen2_tied" else lora.TARGETS
    fresh = init_adapters(model.config, jax.random.key(0), rank=RANK, targets=targets)
    adapters = random_like(fresh, seed=5)
    path = tmp_path / "adapter"
    save(path, model.config, adapters, targets=targets, alpha=SCALE * RANK, base_model=name)

    shutil.copytree(REFERENCE / name, tmp_path / name)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    theirs = peft.PeftModel.from_pretrained(base, path).eval()
    tokens_BT = make_tokens(model.config)
    with torch.no_grad():
        want = theirs(torch.tensor(tokens_BT, dtype=torch.long)).logits.numpy()
    hidden, _ = forward(model, lora.attach(params, adapters, scale=SCALE), tokens_BT)
    np.testing.assert_allclose(qwen.logits(params, hidden), want, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- a model with vision

SEES = "qwen2_5_vl"


def test_modules_of_a_model_that_sees_are_named_as_peft_finds_them(tmp_path):
    model, _ = hf.load_weights(REFERENCE / SEES)
    settings = dict(rank=2, targets=("q",))
    adapters = random_like(init_adapters(model.config, jax.random.key(0), **settings), 5)
    save(tmp_path / "adapter", model.config, adapters, **settings)
    tensors = load_file(tmp_path / "adapter" / lora.WEIGHTS)
    first = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    assert first in tensors and len(tensors) == 2 * model.config.layers
    description = json.loads((tmp_path / "adapter" / lora.CONFIG).read_text())
    assert description["exclude_modules"] == lora.TOWER_MODULES

    def published(tensors):  # the names of older versions of transformers
        for name in list(tensors):
            tensors[name.replace("language_model.", "")] = tensors.pop(name)

    for change in (lambda _: None, published):
        edit_weights(tmp_path / "adapter", change)
        found, rank, _, targets = lora.load_adapter(tmp_path / "adapter", model.config)
        assert (rank, targets) == (2, ("q",))
        jax.tree.map(np.testing.assert_array_equal, found, adapters)


def test_a_tower_s_adapters_are_of_its_shapes_and_refused_where_they_cannot_be(tmp_path):
    model, _ = hf.load_weights(REFERENCE / SEES)
    key, settings = jax.random.key(0), dict(rank=2, targets=lora.TARGETS)
    adapters = lora.init_adapters(model.config, key, **settings, tower=True)
    language = lora.init_adapters(model.config, key, **settings)
    jax.tree.map(np.testing.assert_array_equal, adapters["layers"], language["layers"])
    tower = hf.load_tower(REFERENCE / SEES)
    merged = lora.merge(tower.params, random_like(adapters["tower"], 3), scale=SCALE)
    for target in lora.TARGETS:
        moved = merged["layers"][target]["kernel"] - tower.params["layers"][target]["kernel"]
        assert np.all(np.abs(moved).max(axis=tuple(range(1, moved.ndim))) > 1e-3)
    with pytest.raises(ValueError, match="PEFT's format cannot hold adapters of a vision tower"):
        save(tmp_path / "adapter", model.config, adapters, rank=2)
    with pytest.raises(ValueError, match="family 'qwen2' has no vision tower"):
        lora.init_adapters(UNROLLED, key, **settings, tower=True)


def test_peft_opens_that_of_a_model_that_sees(tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForImageTextToText

    model, params = hf.load_weights(REFERENCE / SEES)
    adapters = random_like(
        init_adapters(model.config, jax.random.key(0), rank=RANK, targets=lora.TARGETS), seed=5
    )
    path = tmp_path / "adapter"
    save(path, model.config, adapters, alpha=SCALE * RANK, base_model=SEES)
    base = AutoModelForImageTextToText.from_pretrained(REFERENCE / SEES)
    theirs = peft.PeftModel.from_pretrained(base, path).eval()
    tokens_BT = make_tokens(model.config) % 20
    with torch.no_grad():
        want = theirs(torch.tensor(tokens_BT, dtype=torch.long)).logits.numpy()
    hidden, _ = forward(model, lora.attach(params, adapters, scale=SCALE), tokens_BT)
    np.testing.assert_allclose(qwen.logits(params, hidden), want, rtol=0, atol=1e-4)
