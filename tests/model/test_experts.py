"""Mixtures of experts: against transformers, both forms against a loop, refused fields."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_processes import on_devices
from jax.sharding import AbstractMesh
from layer_kinds import mixture
from safetensors import safe_open

from ragen_jax.config.build_model import build_model, check_layers
from ragen_jax.config.load import load_config
from ragen_jax.configs import base
from ragen_jax.model import config_json, experts, families, hf, lora, qwen
from ragen_jax.model.shape import Experts, Layer
from ragen_jax.model.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer(())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let few tokens run in blocks, too."""
    monkeypatch.setattr(experts, "BLOCK", 2)
    monkeypatch.setattr(experts, "SAVING", 0)


def our_logps(model, params, tokens_BT):
    hidden, _ = jax.jit(model.apply)({"params": params}, tokens_BT)
    return np.asarray(jax.nn.log_softmax(qwen.logits(params, hidden)))


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(4))
def test_random_models_of_transformers(tmp_path, seed):
    """They give the same log-probs here, and our copies of them the same there."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv_heads, share = draw.integers(1, 4, 2).tolist()
    count = (2, 8)[seed % 2]
    fields = Qwen3MoeConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=(2, qwen.UNROLLED_LAYERS + 1)[seed // 2],
        num_attention_heads=kv_heads * share,
        num_key_value_heads=kv_heads,
        head_dim=int(draw.choice([10, 16])),
        num_experts=count,
        num_experts_per_tok=int(draw.integers(1, count)),
        moe_intermediate_size=int(draw.integers(5, 20)),
        norm_topk_prob=bool(seed % 2),
    )
    # A loop over the experts: torch's grouped products need aligned sizes.
    build = functools.partial(AutoModelForCausalLM.from_config, experts_implementation="eager")
    theirs = build(fields).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.3 if p.ndim == 1 else 0.15)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens_BT = draw.integers(0, fields.vocab_size, (3, 33))

    def logps(model):
        with torch.no_grad():
            return model(torch.tensor(tokens_BT)).logits.float().log_softmax(-1).numpy()

    want = logps(theirs)
    model, params = hf.load_weights(tmp_path / "theirs")
    assert model.config.experts == Experts(
        count, fields.num_experts_per_tok, fields.moe_intermediate_size, fields.norm_topk_prob
    )
    for form in experts.FORMS:
        of_form = qwen.Qwen(dataclasses.replace(model.config, expert_form=form))
        np.testing.assert_allclose(our_logps(of_form, params, tokens_BT), want, rtol=0, atol=1e-4)
    hf.save(tmp_path / "ours", model, params, TOKENIZER)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype="auto", experts_implementation="eager"
    )
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(logps(again), want)
    # bfloat16, with the same rounded parameters
    low = qwen.Qwen(dataclasses.replace(model.config, dtype="bfloat16"))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    apart = np.abs(our_logps(low, rounded, tokens_BT) - logps(theirs.bfloat16()))
    assert np.median(apart) < 2e-2, np.median(apart)  # rounding may choose another expert


def in_a_loop(x_ND, index_Nk, weight_Nk, gate_EDF, up_EDF, down_EFD):
    """The definition, one token and one expert at a time."""
    rows = []
    for x, index, weight in zip(x_ND, index_Nk, weight_Nk, strict=True):
        row = jnp.zeros(down_EFD.shape[-1])
        for e, w in zip(index, weight, strict=True):
            if 0 <= e < len(gate_EDF):
                row += w * ((jax.nn.silu(x @ gate_EDF[e]) * (x @ up_EDF[e])) @ down_EFD[e])
        rows.append(row)
    return jnp.stack(rows)


LOADS = "any", "one empty", "one has all", "some elsewhere"


def chosen(rng, N, E, k, load):
    """Return the experts of N tokens."""
    index_Nk = np.stack([rng.permutation(E)[:k] for _ in range(N)])
    if load == "one empty":
        index_Nk = np.stack([rng.permutation(E - 1)[:k] for _ in range(N)])
    elif load == "one has all":
        others = np.delete(np.arange(E), 2)
        index_Nk = np.stack([[2, *rng.permutation(others)[: k - 1]] for _ in range(N)])
    elif load == "some elsewhere":  # those of other devices
        index_Nk = 2 * index_Nk - 2
    return index_Nk


@pytest.mark.parametrize("form", experts.FORMS)
@pytest.mark.parametrize("load", LOADS)
def test_a_form_is_the_sum_over_the_experts_of_each_token(form, load):
    N, D, E, k, F = 7, 6, 4, 2, 5
    rng = np.random.default_rng(0)
    index_Nk = chosen(rng, N, E, k, load)
    args = [
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((N, D), (N, k), (E, D, F), (E, D, F), (E, F, D))
    ]

    def total(function, *args):
        x_ND, weight_Nk, *kernels = args
        y_ND = function(x_ND, index_Nk, weight_Nk, *kernels)
        return (y_ND**2).sum(), y_ND

    of_form = functools.partial(experts.FORMS[form], act=jax.nn.silu)
    (found, wanted) = (
        jax.grad(functools.partial(total, function), argnums=range(5), has_aux=True)(*args)
        for function in (of_form, in_a_loop)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("load", LOADS)
def test_blocks_are_equal_to_wide(load):
    """With adapters, in values and all gradients; the last block of each expert is not full."""
    N, D, E, k, F, r = 150, 16, 8, 3, 12, 2
    rng = np.random.default_rng(1)
    index_Nk = chosen(rng, N, E, k, load)
    kernels = (E, D, F), (E, D, F), (E, F, D)
    adapters = tuple(((E, n, r), (E, r, m)) for _, n, m in kernels)
    shapes = (N, D), (N, k), kernels, adapters
    args = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.5, jnp.float32),
        shapes,
        is_leaf=lambda x: type(x[0]) is int,
    )

    def total(form, x_ND, weight_Nk, kernels, adapters):
        y_ND = form(x_ND, index_Nk, weight_Nk, *kernels, adapters, act=jax.nn.silu)
        return (jnp.sin(y_ND) ** 2).sum(), y_ND

    assert experts.blocks_of(N, k, E, D)[1] == 8
    (found, wanted) = (
        jax.jit(jax.grad(functools.partial(total, form), argnums=range(4), has_aux=True))(*args)
        for form in (experts.blocks, experts.wide)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))


def test_blocks_are_used_where_they_save_products(monkeypatch):
    monkeypatch.undo()
    assert experts.blocks_of(tokens=1024, chosen=2, count=8, width=128) == (39, 64)
    assert experts.blocks_of(tokens=64, chosen=2, count=8, width=128) is None
    assert experts.blocks_of(tokens=4096, chosen=7, count=8, width=128) is None
    # The shape of qwen3-30b-a3b: a block's three matrices and its hidden units in "wide".
    number, block = experts.blocks_of(tokens=4096, chosen=8, count=128, width=2048)
    assert block == 128 and number * 2048 <= 1.5 * 4096 * 128


def test_blocks_suffice_for_any_load():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens, chosen, count, width = rng.integers(1, 40, 4).tolist()
        chosen = min(chosen, count)
        number, block = experts.blocks_of(tokens, chosen, count, width)
        share_E = rng.dirichlet(np.full(count, 0.2))
        load_E = rng.multinomial(tokens * chosen, share_E)
        assert (-(-load_E // block)).sum() <= number
    # One copy more than full blocks, of every expert
    assert experts.blocks_of(6, 2, 4, 2) == (8, 2)


def test_sampling_runs_all_experts_and_training_blocks(monkeypatch):
    """The form that sampling uses must not depend on the number of rows."""
    used = []
    for name, form in list(experts.FORMS.items()):

        def noted(*args, name=name, form=form, **given):
            used.append(name)
            return form(*args, **given)

        monkeypatch.setitem(experts.FORMS, name, noted)
    config, params, *_, tokens_BT = adapted(2)
    for form, sampled in (("blocks", "wide"), ("ragged", "ragged")):
        model = qwen.Qwen(dataclasses.replace(config, expert_form=form))
        for keep_kv, name in ((True, sampled), (False, form)):
            used.clear()
            trace = functools.partial(model.apply, keep_kv=keep_kv)
            jax.eval_shape(trace, {"params": params}, tokens_BT)
            assert used == [name]  # layers of one shape are traced once
    assert experts.best_form("cpu") == "blocks"


def test_the_router_by_hand():
    logits_NE = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4], [0.6, 0.1, 0.1, 0.2]]))
    index_Nk, weight_Nk, probability_NE = experts.route(logits_NE, Experts(4, 2, 1))
    assert index_Nk.tolist() == [[3, 2], [0, 3]]
    np.testing.assert_allclose(weight_Nk, [[4 / 7, 3 / 7], [0.75, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(probability_NE, jnp.exp(logits_NE), rtol=1e-6)
    _, weight_Nk, _ = experts.route(logits_NE, Experts(4, 2, 1, normalized=False))
    np.testing.assert_allclose(weight_Nk, [[0.4, 0.3], [0.6, 0.2]], rtol=1e-6)


@pytest.mark.long
def test_on_eight_devices():
    """With devices along the axis of experts or not; one expert has all tokens, one has none."""
    process = on_devices(8, ["tests/model/experts_on_mesh_script.py"])
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert [x["experts"] for x in found.values()] == [8, 4, 2, 1, 4] * 3
    assert max(x["logp"] for x in found.values()) < 1e-5, found
    assert max(x["gradient"] for x in found.values()) < 1e-5, found


def test_a_mesh_splits_experts_evenly():
    config, shape = base.get_config().model, qwen.ModelConfig(40, 24, 2, 4, 2, 8, 20)
    mesh = AbstractMesh((1, 3, 1, 1), ("data", "expert", "fsdp", "tensor"))
    for one in (shape, dataclasses.replace(shape, **mixture(2))):
        with pytest.raises(ValueError, match="mesh.expert is 3, which must divide .* experts, "):
            build_model(config, one, mesh)


def test_the_load_balancing_loss_by_hand():
    even, skewed = np.full(4, 0.25), np.array([0.7, 0.1, 0.1, 0.1])
    # One layer, rows of one token: two chosen experts of four.
    found = experts.balance(np.array([[[1, 1, 0, 0], [1, 0, 1, 0]]]), np.array([[even, skewed]]))
    np.testing.assert_allclose(found, [1.0, 4 * 0.5 * (0.7 + 0.1)], rtol=1e-6)
    nothing = experts.balance(np.zeros((1, 1, 4)), even[None, None])
    assert nothing.tolist() == [0.0]


def test_load_figures_by_hand():
    even, one, half = [3, 3, 3, 3], [12, 0, 0, 0], [6, 6, 0, 0]
    for count, load, entropy in ((even, 1, 1), (one, 4, 0), (half, 2, 0.5)):
        np.testing.assert_allclose(experts.load_figures(np.array([count])), (load, entropy))
    np.testing.assert_allclose(experts.load_figures(np.array([even, one])), (2.5, 0.5))


def test_the_published_file_has_the_published_shape(tmp_path):
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert config_json.to_config(fields, tmp_path) == families.SHAPES["qwen3-30b-a3b"]
    for changed, message in (
        ({"mlp_only_layers": [7]}, "layer 7: mlp_only_layers True is not supported"),
        ({"decoder_sparse_step": 2}, "layer 0: decoder_sparse_step 2 is not supported"),
        ({"num_experts_per_tok": 129}, "129 experts of a token, of 128 experts"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"moe_intermediate_size": None}, "field 'moe_intermediate_size' is missing"),
    ):
        given = {name: x for name, x in (fields | changed).items() if x is not None}
        with pytest.raises(ValueError, match=message) as found:
            config_json.to_config(given, tmp_path / "config.json")
        assert "\n" not in str(found.value)


def test_layers_that_differ_in_their_mlp_are_refused():
    config = qwen.ModelConfig(40, 24, 2, 4, 2, 8, 20, **mixture(2))
    with pytest.raises(ValueError, match="layer 1: mlp 'dense', but layer 0 has 'experts'"):
        dataclasses.replace(config, kinds=(Layer(mlp="experts"), Layer()))
    with pytest.raises(ValueError, match="experts None of a model whose layers have mlp 'experts'"):
        dataclasses.replace(config, experts=None)


@functools.cache
def adapted(layers):
    """(config, params, adapters of all targets, tokens), all random."""
    config = qwen.ModelConfig(40, 24, layers, 4, 2, 8, 20, **mixture(layers))
    params = qwen.init_params(config, jax.random.key(0))
    adapters = lora.init_adapters(config, jax.random.key(1), rank=2, targets=lora.TARGETS)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), adapters)
    return config, params, moved, rng.integers(0, 40, (2, 13))


@pytest.mark.medium
@pytest.mark.parametrize("form", experts.FORMS)
@pytest.mark.parametrize("layers", [2, qwen.UNROLLED_LAYERS + 1])
def test_adapters_are_merged_into_every_expert(form, layers):
    """The same log-probs and gradients as with merged kernels; the router is as it was."""
    config, params, adapters, tokens_BT = adapted(layers)
    model = qwen.Qwen(dataclasses.replace(config, expert_form=form))

    @functools.partial(jax.grad, has_aux=True)
    def gradient(adapters, join):
        hidden, _ = model.apply({"params": join(params, adapters, scale=0.5)}, tokens_BT)
        logp = jax.nn.log_softmax(qwen.logits(params, hidden))
        return (logp**2).mean(), logp

    (slope, attached), (wanted, merged) = (gradient(adapters, x) for x in (lora.attach, lora.merge))
    np.testing.assert_allclose(attached, merged, rtol=0, atol=1e-5)
    assert np.abs(attached - our_logps(model, params, tokens_BT)).max() > 1e-2
    for target in lora.TARGETS:
        for leaf, x in slope["layers"][target].items():
            assert np.abs(x).max() > 1e-6, (target, leaf)
            np.testing.assert_allclose(
                x, wanted["layers"][target][leaf], rtol=1e-3, atol=1e-6, err_msg=target
            )
    joined = lora.merge(params, adapters, scale=0.5)["layers"]
    assert joined["router"]["kernel"] is params["layers"]["router"]["kernel"]
    gate, pair = params["layers"]["experts"]["gate"], adapters["layers"]["gate"]
    for expert in range(config.experts.count):
        by_hand = gate[1, expert] + 0.5 * pair["lora_a"][1, expert] @ pair["lora_b"][1, expert]
        np.testing.assert_allclose(joined["experts"]["gate"][1, expert], by_hand, atol=1e-6)


def test_new_adapters_of_experts_change_nothing():
    config, params, _, tokens_BT = adapted(2)
    adapters = lora.init_adapters(config, jax.random.key(1), rank=2, targets=("gate", "down"))
    shapes = {leaf: x.shape for leaf, x in adapters["layers"]["down"].items()}
    assert shapes == {"lora_a": (2, 4, 12, 2), "lora_b": (2, 4, 2, 24)}
    spread = np.var(adapters["layers"]["gate"]["lora_a"]) * 3 * 24
    assert 0.8 < spread < 1.2
    model, attached = qwen.Qwen(config), lora.attach(params, adapters, scale=0.5)
    np.testing.assert_array_equal(
        our_logps(model, attached, tokens_BT), our_logps(model, params, tokens_BT)
    )
    with pytest.raises(ValueError, match="the parameters of gate already have adapters"):
        lora.attach(attached, adapters, scale=0.5)


def test_adapters_of_experts_are_saved_by_expert(tmp_path):
    config, _, adapters, _ = adapted(2)
    lora.save_adapter(
        *(tmp_path / "adapter", adapters),
        **dict(config=config, rank=2, alpha=1.0, targets=lora.TARGETS, base_model="base"),
    )
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "numpy") as file:
        names = set(file.keys())
        name = "base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_B.weight"
        np.testing.assert_array_equal(
            file.get_tensor(name), adapters["layers"]["down"]["lora_b"][1, 3].T
        )
    assert len(names) == 2 * 2 * (4 + 3 * 4)  # leaves of the layers' attention and experts
    again, rank, alpha, targets = lora.load_adapter(tmp_path / "adapter", config)
    assert (rank, alpha, targets) == (2, 1.0, lora.TARGETS)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)


def test_a_load_balancing_loss_needs_experts():
    config = base.get_config()
    config.algorithm.balance_coef = 0.01
    dense = qwen.ModelConfig(40, 24, 2, 4, 2, 8, 20)
    with pytest.raises(ValueError, match="balance_coef is 0.01, but the model has no experts"):
        check_layers(load_config(config), dense)
