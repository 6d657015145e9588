"""Write small GGUF files as llama.cpp's convert_hf_to_gguf.py does, with the package gguf."""

import dataclasses
import functools
import json
import math

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ragen_jax.model import qwen, rotary, weights

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
WRITTEN = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
READ_ONLY = ("NVFP4", "IQ4_NL")  # the package cannot write them: their blocks are random bytes
# Types with blocks of 256 values.
WIDE_WRITTEN = ("TQ1_0", "TQ2_0")
WIDE_READ_ONLY = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_XS"),
)
WIDE = WIDE_WRITTEN + WIDE_READ_ONLY
TYPES = WRITTEN + READ_ONLY + WIDE

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|eom|>", "<|im_start|>")
ADDED = ("<think>", "</think>", "<tool_call>")


def make_config(family, *, wide=False, **changes):
    """Return a small shape; its rows have 64 values, or 256 if `wide`."""
    config = qwen.ModelConfig(
        vocab_size=0,  # set by `write_gguf`
        width=256 if wide else 64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64 if wide else 16,
        mlp_width=256 if wide else 128,
        rope_theta=5e5,
        norm_eps=1e-5,
        family=family,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_positions=512,
    )
    return dataclasses.replace(config, **changes)


LLAMA3 = {"rope_scaling": rotary.RopeScaling("llama3", 8.0)}
LINEAR = {"rope_scaling": rotary.RopeScaling("linear", 4.0)}
MODELS = {  # name -> family, changes
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tied": False}),
    "llama-3.1": ("llama", LLAMA3),
    "llama-linear": ("llama", {**LINEAR, "tied": False}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tied": False}),
    "qwen3": ("qwen3", {"heads": 8}),  # heads that are not width / heads wide
    "qwen3-untied": ("qwen3", {"tied": False}),
}


# ---------------------------------------------------------------- tokenizers


@functools.cache
def trained_vocabulary(text, size):
    """Return (tokens in the order of their ids, merges) of byte-level BPE trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(tokens), tuple(" ".join(pair) for pair in model["merges"])


def tokenizer_fields(
    pre="qwen2",
    text="the box is here, the player is there",
    size=300,
    special=SPECIAL,
    template=CHATML,
):
    """Return the keys tokenizer.* of a file with plain, special, added and two unused tokens.

    Args:
      text, size: text on which the plain tokens are trained, and their number.
      special: tokens that begin and end a text (the first two) and others.
    """
    tokens, merges = trained_vocabulary(text, size)
    everything = (*tokens, *special, *ADDED, "[PAD0]", "[PAD1]")
    types = [NORMAL] * len(tokens) + [CONTROL] * len(special) + [USER_DEFINED] * len(ADDED)
    first = len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(everything),
        "tokenizer.ggml.token_type": types + [UNUSED] * 2,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.eom_token_id": first + 2,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.chat_template": template,
    }


# ---------------------------------------------------------------- weights


def random_weights(config, seed=0):
    """Return {name in a Hugging Face directory: float32 array}, matrices as [outputs, inputs]."""
    rng, found = np.random.default_rng(seed), {}
    for leaf in weights.plan(config):
        for name in leaf.names:
            shape = leaf.tensor_shape
            scale, offset = (1 / math.sqrt(shape[-1]), 0) if len(shape) > 1 else (0.2, 1)
            values = scale * rng.standard_normal(shape) + (offset if "norm" in name else 0)
            found[name] = values.astype(np.float32)
    return found


def quantize(values, kind, seed=0):
    """Return the bytes of a matrix in a quantisation, random bytes if the package cannot write."""
    kind = gguf.GGMLQuantizationType[kind]
    if kind.name not in READ_ONLY + WIDE_READ_ONLY:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (values.size // block, size), np.uint8)
    while True:
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(gguf.quants.dequantize(blocks, kind)).all(-1)
        if not bad.any():
            return blocks.reshape(values.shape[0], -1)
        blocks[bad] = rng.integers(0, 256, (bad.sum(), size), np.uint8)


def permute(rows, heads):
    """Order the rows of architecture llama's queries or keys as llama.cpp's converter does."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def rope_divisors(config):
    """Return the frequency divisors of Llama 3.1 as llama.cpp's converter computes them."""
    scaling, divisors = config.rope_scaling, []
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    for i in range(0, config.head_dim, 2):
        length = 2 * math.pi * config.rope_theta ** (i / config.head_dim)
        if length < high:
            divisors.append(1.0)
        elif length > low:
            divisors.append(scaling.factor)
        else:
            smooth = (scaling.original_max_positions / length - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(divisors, np.float32)


@dataclasses.dataclass(frozen=True)
class Written:
    """A written file: its path, its shape, and the weights that a reader should find."""

    path: object
    config: qwen.ModelConfig
    weights: dict  # name in a Hugging Face directory -> float32 array


def write_gguf(
    path, config, *, kind="Q8_0", fields=None, tensors=None, tokenizer=None, seed=0, **options
):
    """Write a file with random weights.

    Args:
      kind: quantisation of the matrices; vectors are in float32.
      fields: keys that differ; None removes a key.
      tensors: tensors that differ, by their names in the file; None removes a tensor.
      options: of the package's GGUFWriter.
    """
    tokenizer = tokenizer_fields() if tokenizer is None else tokenizer
    rows = len(tokenizer["tokenizer.ggml.tokens"])
    config = dataclasses.replace(config, vocab_size=rows)
    writer = gguf.GGUFWriter(path, config.family, **options)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(rows)
    if config.head_dim * config.heads != config.width:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.family == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    scaling, found = config.rope_scaling, {}
    if scaling and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling:
        found["rope_freqs.weight"] = (rope_divisors(config), None)
    change_fields(writer, tokenizer | (fields or {}))
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.family], config.layers)
    held = {}
    for number, (name, values) in enumerate(random_weights(config, seed).items()):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        raw = quantize(values, kind, seed + number) if values.ndim > 1 else values
        raw_type = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        held[name] = np.asarray(gguf.quants.dequantize(raw, raw_type), np.float32)
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if config.family == "llama" and heads:
            raw = permute(raw, heads)
        found[stored] = (raw, raw_type)
    for name, tensor in (found | (tensors or {})).items():
        if tensor is not None:
            values, raw_type = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, config, held)


def change_fields(writer, fields):
    """Set keys of a file that is not written yet; None removes a key."""
    for key, value in fields.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            if type(value) is int and value >= 0:
                kind = gguf.GGUFValueType.UINT32  # as llama.cpp expects
            writer.add_key_value(key, value, kind)
