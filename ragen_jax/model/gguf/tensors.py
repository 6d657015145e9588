"""The tensors of a GGUF file: their names, dequantisation and order of rows."""

import math
import re

import numpy as np

from ragen_jax.model.gguf.reader import GGUF
from ragen_jax.model.qwen import ModelConfig

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_DIVISORS = "rope_freqs.weight"  # of the rotary frequencies (Llama 3.1 and later)

# Part of a name in a Hugging Face directory -> part of a name in a GGUF file.
_OUTSIDE = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": HEAD,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensor_name(published: str) -> str:
    """Return the name in a GGUF file of a tensor that a Hugging Face directory calls `published`.

    For example "model.layers.3.mlp.up_proj.weight" is "blk.3.ffn_up.weight".
    """
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", published)
    if not found:
        return _OUTSIDE[published]
    layer, part, kind = found.groups()
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def check_quantisations(file: GGUF) -> None:
    """Raise ValueError if a tensor has a quantisation that the package cannot dequantise."""
    import gguf

    for kind, name in {tensor.tensor_type: name for name, tensor in file.tensors.items()}.items():
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{file.path}: tensor {name} has quantisation {kind.name}, which the package gguf "
                "cannot dequantise; use a file with another quantisation"
            ) from error


def dequantize(file: GGUF, name: str) -> np.ndarray:
    """Return a tensor's float32 values, a matrix as [outputs, inputs].

    Raises:
      ValueError: a value is not finite.
    """
    import gguf

    tensor = file.tensors[name]
    with np.errstate(invalid="ignore", over="ignore"):  # reported below
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{file.path}: tensor {name} holds NaN or infinity; the file is damaged")
    return values


class StoredArray:
    """A tensor for a Hugging Face directory, dequantised when NumPy asks for its values."""

    def __init__(self, file: GGUF, config: ModelConfig, published: str) -> None:
        self.file, self.config, self.published = file, config, published

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        del dtype, copy  # the caller takes float32
        values = dequantize(self.file, tensor_name(self.published))
        part = self.published.split(".")[-2]
        heads = {"q_proj": self.config.heads, "k_proj": self.config.kv_heads}.get(part)
        if self.file.architecture != "llama" or heads is None:
            return values
        return order_by_halves(values, heads)


def order_by_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key matrix, or bias, of architecture llama in Hugging Face's order of rows.

    Rotary positions turn pairs of a head's values: in llama.cpp neighbours, in Hugging Face's
    models values half a head apart. So row 2i + j of a head becomes row i + j * head_dim / 2.
    """
    pairs = values.reshape(heads, -1, 2, math.prod(values.shape[1:]))
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
