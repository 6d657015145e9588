"""Qwen3.5 against transformers: random models, files of the model that sees, refused fields."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import hybrid

from ragen_jax.model import config_json, families, hf, qwen, weights
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.tokenizer import build_tokenizer

REFERENCE = Path(__file__).parent / "reference" / "qwen3_5_deep"
FULL, LINEAR = "full_attention", "linear_attention"
TOKENIZER = build_tokenizer(())


def text_fields(seed):
    """Return random fields of a Qwen3_5TextConfig."""
    draw = np.random.default_rng(seed)
    kv_heads, share, key_heads, more = draw.integers(1, 4, 4).tolist()
    # The last has no pattern that repeats.
    layers = (qwen.UNROLLED_LAYERS, 2 * qwen.UNROLLED_LAYERS, qwen.UNROLLED_LAYERS + 1)[seed % 3]
    return dict(
        vocab_size=len(TOKENIZER),
        hidden_size=36,
        intermediate_size=int(draw.integers(30, 50)),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * share,
        num_key_value_heads=kv_heads,
        head_dim=16,
        rms_norm_eps=float(draw.choice([1e-6, 1e-3])),
        tie_word_embeddings=bool(seed % 2),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * more,
        linear_key_head_dim=int(draw.integers(5, 12)),
        linear_value_head_dim=int(draw.integers(5, 12)),
        linear_conv_kernel_dim=int(draw.choice([2, 4])),
        # The published order, or any.
        layer_types=None if seed % 3 < 2 else [[FULL, LINEAR][i % 2] for i in range(layers)],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": float(draw.choice([0.25, 0.5, 1.0])),
            # Of text, all three positions are equal.
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    )


def spread(torch, model):
    """Draw parameters that make attention and log-probs non-uniform, and some states last.

    In bfloat16, deeper models with larger matrices are farther from themselves in float32.
    """
    scale = 0.24 * len(model.config.get_text_config().layer_types) ** -0.5
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.3 if p.ndim == 1 else scale)
            if name.endswith(("A_log", "dt_bias")):
                p.normal_(-1.0, 1.0)


def logps(torch, model, tokens_BT):
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens_BT)).logits.float().log_softmax(-1).numpy()


def our_logps(model, params, tokens_BT):
    hidden, _ = jax.jit(model.apply)({"params": params}, tokens_BT)
    return np.asarray(jax.nn.log_softmax(qwen.logits(params, hidden)))


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(5))
def test_random_models_of_transformers(tmp_path, seed):
    """They give the same log-probs here, and our copies of them the same there."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    fields = Qwen3_5TextConfig(**text_fields(seed))
    theirs = Qwen3_5ForCausalLM(fields).eval()
    spread(torch, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    # Longer than a chunk, and no multiple of one.
    length = (33, 150, 69, 69, 33)[seed]
    tokens_BT = np.random.default_rng(seed).integers(0, fields.vocab_size, (3, length))
    want = logps(torch, theirs, tokens_BT)
    model, params = hf.load_weights(tmp_path / "theirs")
    assert [layer.attention == "full" for layer in model.config.kinds] == [
        kind == FULL for kind in fields.layer_types
    ]
    np.testing.assert_allclose(our_logps(model, params, tokens_BT), want, rtol=0, atol=1e-4)
    hf.save(tmp_path / "ours", model, params, TOKENIZER)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(again) is type(theirs)
    stored, given = again.state_dict(), theirs.state_dict()
    assert stored.keys() == given.keys()
    assert all(torch.equal(x, given[name]) for name, x in stored.items())
    np.testing.assert_allclose(logps(torch, again, tokens_BT), want, rtol=0, atol=5e-6)
    # bfloat16, with the same rounded parameters
    low = qwen.Qwen(dataclasses.replace(model.config, dtype="bfloat16"))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    apart = np.abs(our_logps(low, rounded, tokens_BT) - logps(torch, theirs.bfloat16(), tokens_BT))
    assert np.mean(apart) < 2e-2, np.mean(apart)


@pytest.mark.medium
def test_the_language_model_of_a_model_that_sees(tmp_path):
    """It is read from the larger model's files, and saved as a text model."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = dict(
        depth=1,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        patch_size=4,
        out_hidden_size=36,
        num_position_embeddings=16,
    )
    config = Qwen3_5Config(text_config=text_fields(1), vision_config=vision)
    config.tie_word_embeddings = True
    theirs = Qwen3_5ForConditionalGeneration(config).eval()
    spread(torch, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens_BT = np.random.default_rng(0).integers(8, len(TOKENIZER), (2, 21))
    want = logps(torch, theirs, tokens_BT)
    model, params = hf.load_weights(tmp_path / "theirs")
    assert model.config.vision is None
    np.testing.assert_allclose(our_logps(model, params, tokens_BT), want, rtol=0, atol=1e-4)
    hf.save(tmp_path / "ours", model, params, TOKENIZER)
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["architectures"] == ["Qwen3_5ForCausalLM"]
    assert hf.model_config(tmp_path / "ours") == model.config


def test_a_stored_model_of_transformers():
    """The same without torch, in a deeper model and with padding."""
    model, params = hf.load_weights(REFERENCE)
    arrays = np.load(REFERENCE / "logps.npz")
    logp_BT = np.asarray(token_logps(model, params, arrays["tokens_BT"]))
    real_BT = np.arange(logp_BT.shape[1]) < arrays["length_B"][:, None]
    np.testing.assert_allclose(logp_BT * real_BT, arrays["logp_BT"], rtol=0, atol=5e-5)
    # Positions with a jump: they turn a part of each head, in the full layers alone.
    positions = np.broadcast_to(arrays["position_T"], logp_BT.shape)
    hidden, _ = model.apply({"params": params}, arrays["tokens_BT"], positions)
    jumped = np.asarray(jax.nn.log_softmax(qwen.logits(params, hidden)))[:, :-1]
    picked = np.take_along_axis(jumped, arrays["tokens_BT"][:, 1:, None], -1)[..., 0]
    want_BT = arrays["jump_logp_BT"][:, 1:]
    np.testing.assert_allclose(picked * real_BT[:, 1:], want_BT, rtol=0, atol=5e-5)
    assert np.abs(want_BT - arrays["logp_BT"][:, 1:]).max() > 1e-2


def test_unsupported_fields_are_refused_in_a_line(tmp_path):
    fields = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4}
    for changed, message in (
        ({"layer_types": [LINEAR, "sliding_attention"]}, "layer 1: layer_types 'sliding_attention"),
        ({"layer_types": [LINEAR]}, "1 kinds of layers for 4 layers"),
        ({"layer_types": [FULL] * 4}, "delta DeltaHeads.* of a model whose layers have attention"),
        ({"linear_num_value_heads": 24}, "24 value heads of linear attention cannot share 16 key"),
        ({"linear_conv_kernel_dim": 1}, "a convolution of 1 positions; accepted: at least 2"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.05}}, "rotary_dim 12|accepted: even"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ):
        if "partial" in str(changed):
            fields = fields | {"head_dim": 20}  # 1 number
        with pytest.raises(ValueError, match=message) as found:
            config_json.to_config(fields | changed, tmp_path / "config.json")
        assert "\n" not in str(found.value)


def test_published_files_have_the_published_shapes(tmp_path):
    """They have the fields of the text model in a text_config, and those of the tower elsewhere."""
    text = {
        "attention_bias": False,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": ([LINEAR] * 3 + [FULL]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    fields = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 12, "hidden_size": 768},
    }
    assert config_json.to_config(fields, tmp_path) == families.SHAPES["qwen3.5-0.8b"]
    assert families.known_shape("Qwen/Qwen3.5-9B") == families.SHAPES["qwen3.5-9b"]
    for name, billions in (("0.8b", 0.75), ("2b", 1.88), ("4b", 4.21), ("9b", 8.95), ("27b", 26.9)):
        leaves = weights.plan(families.SHAPES[f"qwen3.5-{name}"])
        size = sum(math.prod(leaf.shape) for leaf in leaves)
        assert size / 1e9 == pytest.approx(billions, abs=0.01), name


def test_a_shape_is_written_and_read():
    config = qwen.ModelConfig(40, 24, 8, 4, 2, 8, 20, **hybrid(8))
    fields = config_json.from_config(config, "float32")
    assert config_json.to_config(fields, "config.json") == config
    assert families.family_of(config).architecture == "Qwen3_5ForCausalLM"
