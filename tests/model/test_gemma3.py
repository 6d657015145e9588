"""Gemma 3 against transformers: random models, files of the model that sees, refused fields."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import windowed

from ragen_jax.model import config_json, families, hf, lora, qwen
from ragen_jax.model.shape import Layer
from ragen_jax.model.tokenizer import build_tokenizer

FULL, WINDOWED = "full_attention", "sliding_attention"
TOKENIZER = build_tokenizer(())
THETAS = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
}


def text_fields(seed):
    """Return random fields of a Gemma3TextConfig; windows are shorter than the 33 tokens below."""
    draw = np.random.default_rng(seed)
    kv_heads, share = draw.integers(1, 4, 2).tolist()
    layers = (3, qwen.UNROLLED_LAYERS + 3)[seed % 2]
    return dict(
        vocab_size=len(TOKENIZER),
        hidden_size=36,
        intermediate_size=int(draw.integers(30, 50)),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * share,
        num_key_value_heads=kv_heads,
        head_dim=int(draw.choice([10, 16])),
        query_pre_attn_scalar=int(draw.choice([10, 16, 23])),
        rms_norm_eps=float(draw.choice([1e-6, 1e-3])),
        sliding_window=int(draw.choice([1, 4, 17, 32])),
        # Any order, or the published one.
        layer_types=[[FULL, WINDOWED][i] for i in draw.integers(0, 2, layers)]
        if seed < 3
        else None,
        rope_parameters=json.loads(json.dumps(THETAS)),
    )


def spread(torch, model):
    """Draw parameters that make attention and log-probs non-uniform."""
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.3 if p.ndim == 1 else 0.15)


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
    from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    fields = Gemma3TextConfig(**text_fields(seed))
    theirs = Gemma3ForCausalLM(fields).eval()
    spread(torch, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens_BT = np.random.default_rng(seed).integers(0, fields.vocab_size, (3, 33))
    want = logps(torch, theirs, tokens_BT)
    model, params = hf.load_weights(tmp_path / "theirs")
    assert model.config.window == fields.sliding_window
    assert [layer.attention == "full" for layer in model.config.kinds] == [
        kind == FULL for kind in fields.layer_types
    ]
    np.testing.assert_allclose(our_logps(model, params, tokens_BT), want, rtol=0, atol=1e-4)
    hf.save(tmp_path / "ours", model, params, TOKENIZER)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(logps(torch, again, tokens_BT), want)
    # bfloat16, with the same rounded parameters
    low = qwen.Qwen(dataclasses.replace(model.config, dtype="bfloat16"))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    apart = np.abs(our_logps(low, rounded, tokens_BT) - logps(torch, theirs.bfloat16(), tokens_BT))
    assert np.mean(apart) < 2e-2, np.mean(apart)


@pytest.mark.medium
def test_the_language_model_of_a_model_that_sees(tmp_path):
    """It is read from the larger model's files, and saved as a text model."""
    torch = pytest.importorskip("torch")
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(
        text_config=text_fields(4),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    )
    theirs = Gemma3ForConditionalGeneration(config).eval()
    spread(torch, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens_BT = np.random.default_rng(0).integers(8, len(TOKENIZER), (2, 21))
    want = logps(torch, theirs, tokens_BT)
    model, params = hf.load_weights(tmp_path / "theirs")
    assert model.config.vision is None
    np.testing.assert_allclose(our_logps(model, params, tokens_BT), want, rtol=0, atol=1e-4)
    hf.save(tmp_path / "ours", model, params, TOKENIZER)
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["architectures"] == ["Gemma3ForCausalLM"]
    assert hf.model_config(tmp_path / "ours") == model.config


def test_published_files_have_the_published_shapes(tmp_path):
    """They leave out many fields; those of the model that sees, almost all."""
    small = {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    }
    large = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    for name, fields in (("gemma-3-1b", small), ("gemma-3-4b", large)):
        assert config_json.to_config(fields, tmp_path) == families.SHAPES[name]
        assert families.known_shape(f"google/{name}-it") == families.SHAPES[name]


def test_unsupported_fields_are_refused_in_a_line(tmp_path):
    fields = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2}
    for changed, message in (
        ({"layer_types": [FULL, "linear_attention"]}, "layer 1: layer_types 'linear_attention'"),
        ({"layer_types": [FULL]}, "1 kinds of layers for 2 layers"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu'.*'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"sliding_window": 0}, "window 0: windowed layers need at least 1"),
        (
            {"rope_parameters": {WINDOWED: {"rope_type": "linear", "factor": 2.0}}},
            "rope_type of sliding_attention 'linear'",
        ),
    ):
        with pytest.raises(ValueError, match=message) as found:
            config_json.to_config(fields | changed, tmp_path / "config.json")
        assert "\n" not in str(found.value)
    with pytest.raises(
        ValueError, match="attention 'half' of a layer; accepted: full, windowed, linear"
    ):
        Layer("half")


def test_adapters_attach_and_merge_to_the_same_model():
    config = qwen.ModelConfig(40, 24, 5, 4, 2, 8, 20, **windowed(5))
    params = qwen.init_params(config, jax.random.key(0))
    adapters = lora.init_adapters(config, jax.random.key(1), rank=2, targets=lora.TARGETS)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    tokens_BT = np.random.default_rng(0).integers(0, 40, (2, 13))
    model = qwen.Qwen(config)
    plain, attached, merged = (
        our_logps(model, p, tokens_BT)
        for p in (params, *(f(params, adapters, scale=0.5) for f in (lora.attach, lora.merge)))
    )
    np.testing.assert_allclose(attached, merged, rtol=0, atol=1e-5)
    assert np.abs(attached - plain).max() > 0.1
