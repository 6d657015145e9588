"""E5, which encodes texts as vectors: BERT's encoder, mean over tokens, normalized to length 1.

For intfloat/e5-base-v2, which made the wiki-18 index, and other models of its shape. Implemented
here because transformers 5 runs BERT only with torch. Source: Wang et al. 2022 (E5) and Devlin et
al. 2019 (BERT, with the exact GELU); tensors have the names of the model's own files.

Axes: B texts, T tokens, D width, H heads.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.core.padding import length_bucket
from ragen_jax.core.sharding import MESH_AXES, place, replicate
from ragen_jax.model import hf
from ragen_jax.model.weights import open_tensors

QUERY, PASSAGE = "query: ", "passage: "  # prefixes of queries and of documents
TEXTS = 32  # texts per call; smaller batches are padded
SHORTEST = 32  # tokens, minimum padded length; longer: powers of two and the halves between


@dataclass(frozen=True)
class Shape:
    """The fields of a config.json that are read."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


class E5:
    """Encoder: texts -> [texts, width] float32 of length 1; see `dense.Encoder`."""

    def __init__(self, path: str | Path, mesh: Mesh, *, prefix: str) -> None:
        """Load a directory, or a model of the Hugging Face hub.

        Args:
          mesh: the texts of a call are split over all its devices.
          prefix: QUERY or PASSAGE.

        Raises:
          ValueError: there is no such model, it is not a BERT, or its files do not fit each other.
        """
        folder = hf.resolve(path)
        self._shape = read_shape(folder)
        self._params = {k: replicate(x, mesh) for k, x in _params(folder, self._shape).items()}
        self._tokenizer = _tokenizer(folder, self._shape)
        self._mesh, self._prefix = mesh, prefix
        self.width = self._shape.hidden_size

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return [texts, width]; longer texts are truncated to the model's number of positions."""
        # The tokenizer rejects lone surrogates, which a query may hold.
        whole = [
            self._prefix + text.encode(errors="replace").decode(errors="replace") for text in texts
        ]
        ids = [encoded.ids for encoded in self._tokenizer.encode_batch(whole)]
        size = -(-TEXTS // self._mesh.size) * self._mesh.size
        found = np.zeros((len(ids), self.width), np.float32)
        # Batch texts by padded length: rounding depends on it.
        lengths = [self._padded(len(one)) for one in ids]
        for length in sorted(set(lengths)):
            same = [i for i, own in enumerate(lengths) if own == length]
            for start in range(0, len(same), size):
                some = same[start : start + size]
                found[some] = self._encode([ids[i] for i in some], size, length)[: len(some)]
        return found

    def _padded(self, length: int) -> int:
        bucket = length_bucket(length, least=SHORTEST, parts=2)
        return min(bucket, self._shape.max_position_embeddings)

    def _encode(self, ids: Sequence[Sequence[int]], size: int, length: int) -> np.ndarray:
        tokens_BT, mask_BT = np.zeros((2, size, length), np.int32)
        mask_BT[:, 0] = 1  # also in padding rows, to avoid dividing by 0
        for row, one in enumerate(ids):
            tokens_BT[row, : len(one)] = one
            mask_BT[row, : len(one)] = 1
        rows = NamedSharding(self._mesh, PartitionSpec(MESH_AXES))
        vectors_BD = encode(self._params, *place((tokens_BT, mask_BT), rows), shape=self._shape)
        return np.asarray(jax.device_put(vectors_BD, NamedSharding(self._mesh, PartitionSpec())))


@functools.partial(jax.jit, static_argnames="shape")
def encode(
    params: Mapping[str, jax.Array], tokens_BT: jax.Array, mask_BT: jax.Array, *, shape: Shape
) -> jax.Array:
    """Return vectors_BD of length 1. mask_BT: 1 at tokens, 0 at padding."""
    heads = shape.num_attention_heads

    def linear(name, x):
        weights_ED = params[f"{name}.weight"]
        return (
            jnp.einsum("btd,ed->bte", x, weights_ED, precision="highest") + params[f"{name}.bias"]
        )

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + shape.layer_norm_eps)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    def attention(layer, x):
        q, k, v = (
            linear(f"{layer}.attention.self.{name}", x).reshape(*x.shape[:2], heads, -1)
            for name in ("query", "key", "value")
        )
        seen_BHTS = (mask_BT == 1)[:, None, None, :]
        score_BHTS = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / q.shape[-1] ** 0.5
        weight_BHTS = jax.nn.softmax(jnp.where(seen_BHTS, score_BHTS, -jnp.inf))
        y = jnp.einsum("bhts,bshd->bthd", weight_BHTS, v, precision="highest").reshape(x.shape)
        return norm(
            f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", y)
        )

    def mlp(layer, x):
        y = jax.nn.gelu(linear(f"{layer}.intermediate.dense", x), approximate=False)
        return norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", y))

    x = (
        params["embeddings.word_embeddings.weight"][tokens_BT]
        + params["embeddings.position_embeddings.weight"][: tokens_BT.shape[1]]
        + params["embeddings.token_type_embeddings.weight"][0]
    )
    x = norm("embeddings.LayerNorm", x)
    for i in range(shape.num_hidden_layers):
        x = mlp(f"encoder.layer.{i}", attention(f"encoder.layer.{i}", x))
    mean_BD = (x * mask_BT[..., None]).sum(1) / mask_BT.sum(1)[:, None]
    return mean_BD / jnp.linalg.norm(mean_BD, axis=-1, keepdims=True)


# ------------------------------------------------------------------------------ files


def read_shape(folder: Path) -> Shape:
    """Return the `Shape` of a model directory, from its config.json alone.

    Raises:
      ValueError: there is no config.json, or it describes no supported BERT.
    """
    file = folder / "config.json"
    fields = hf.read_json(file)
    if fields.get("model_type") != "bert":
        raise ValueError(f"{file}: model_type is {fields.get('model_type')!r}; E5 is a bert")
    for name, value in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
        if fields.get(name, value) != value:
            raise ValueError(f"{file}: {name} is {fields[name]!r}; accepted: {value}")
    missing = [name for name in Shape.__dataclass_fields__ if name not in fields]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    return Shape(**{name: fields[name] for name in Shape.__dataclass_fields__})


def _expected(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return {tensor: its shape in the file}; matrices are [outputs, inputs]."""
    D, E = shape.hidden_size, shape.intermediate_size
    expected = {
        "embeddings.word_embeddings.weight": (shape.vocab_size, D),
        "embeddings.position_embeddings.weight": (shape.max_position_embeddings, D),
        "embeddings.token_type_embeddings.weight": (shape.type_vocab_size, D),
        "embeddings.LayerNorm.weight": (D,),
        "embeddings.LayerNorm.bias": (D,),
    }
    for i in range(shape.num_hidden_layers):
        layer = f"encoder.layer.{i}"
        for name, outputs, inputs in (
            *((f"attention.self.{name}", D, D) for name in ("query", "key", "value")),
            ("attention.output.dense", D, D),
            ("intermediate.dense", E, D),
            ("output.dense", D, E),
        ):
            expected[f"{layer}.{name}.weight"] = (outputs, inputs)
            expected[f"{layer}.{name}.bias"] = (outputs,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            expected[f"{layer}.{name}.weight"] = expected[f"{layer}.{name}.bias"] = (D,)
    return expected


def _params(folder: Path, shape: Shape) -> dict[str, np.ndarray]:
    """Return the tensors of a model's files as float32, without the pooler's."""
    params = {}
    with open_tensors(folder) as tensors:
        # If saved with another head, the names have the prefix "bert.".
        plain = {name.removeprefix("bert."): (name, file) for name, file in tensors.items()}
        for name, expected in _expected(shape).items():
            if name not in plain:
                raise ValueError(f"{folder} has no tensor {name}, which its config.json promises")
            tensor = plain[name][1].get_tensor(plain[name][0])
            if tensor.shape != expected:
                raise ValueError(
                    f"{folder}: tensor {name} has shape {list(tensor.shape)}, config.json promises "
                    f"{list(expected)}"
                )
            params[name] = tensor.astype(np.float32)
    return params


def _tokenizer(folder: Path, shape: Shape) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no {file}; an encoder must hold config.json, weights, tokenizer.json")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer: {error}") from None
    if tokenizer.get_vocab_size() > shape.vocab_size:
        raise ValueError(
            f"{file} has {tokenizer.get_vocab_size()} ids, the model's embedding only "
            f"{shape.vocab_size} rows (vocab_size)"
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(shape.max_position_embeddings)
    return tokenizer
