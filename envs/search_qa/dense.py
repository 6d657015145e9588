"""Dense retrieval on the mesh: a matrix over all devices, one product with it, the best rows.

The search is exact: no approximation, no clusters (a flat inner-product index in faiss's terms).
Each device holds a part of the rows and finds its best rows block by block; then the best rows of
all devices are compared.

Axes: N documents, D width of a vector, Q queries, K documents found, S blocks per device, R rows
per block.
"""

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.core.sharding import MESH_AXES
from ragen_jax.envs.search_qa.retrieve import MAX_QUERY, Document
from ragen_jax.envs.search_qa.vectors import Vectors
from ragen_jax.envs.types import Resident

DTYPES = ("float32", "bfloat16")  # accepted dtypes of the matrix
BLOCK = 16_384  # maximum rows whose scores are in memory at a time
QUERIES = 32  # queries per product; padded to this number, so that it is compiled once
PIECE = 65_536  # rows read at a time


class Encoder(Protocol):
    """Texts -> vectors of width D."""

    width: int

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return [texts, D] float32; a text's vector does not depend on the other texts."""
        ...


def layout(rows: int, mesh: Mesh) -> tuple[int, int]:
    """Return (S, R): blocks per device, rows per block. Devices x S x R is at least `rows`."""
    local = -(-rows // mesh.size)
    blocks = -(-local // BLOCK)
    return blocks, -(-local // blocks)


def matrix_struct(rows: int, width: int, dtype: str, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Return shape and sharding of a matrix: [devices * S, R, D], the first axis over devices."""
    blocks, size = layout(rows, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(MESH_AXES))
    return jax.ShapeDtypeStruct((mesh.size * blocks, size, width), dtype, sharding=sharding)


@functools.partial(jax.jit, static_argnames=("mesh", "rows", "k"))
def nearest(
    matrix_SRD: jax.Array, query_QD: Any, *, mesh: Mesh, rows: int, k: int
) -> tuple[jax.Array, jax.Array]:
    """Return the rows with the largest inner products: (score_QK float32, row_QK int32).

    Best first; among equal scores the lower row comes first. The result is replicated.

    Args:
      matrix_SRD: as in `matrix_struct`; padding after the first `rows` rows is ignored.
      query_QD: in any dtype; multiplied in the matrix's dtype, summed in float32.
      k: at most `rows`.
    """
    blocks, size = layout(rows, mesh)
    query_QD = query_QD.astype(matrix_SRD.dtype)

    def on_device(matrix_SRD, query_QD):
        first = jax.lax.axis_index(MESH_AXES) * blocks * size

        def update_best(best, block):
            start, matrix_RD = block
            score_QR = jax.lax.dot_general(
                query_QD,
                matrix_RD,
                (((1,), (1,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST,  # by default a TPU multiplies in bfloat16
                preferred_element_type=jnp.float32,
            )
            row_R = start + jnp.arange(size)
            score_QR = jnp.where(row_R < rows, score_QR, -jnp.inf)
            score_QK, index_QK = jax.lax.top_k(score_QR, min(k, size))
            return merge(best, (score_QK, start + index_QK)), None

        nothing = (jnp.full((len(query_QD), k), -jnp.inf), jnp.full((len(query_QD), k), rows))
        starts_S = first + size * jnp.arange(blocks)
        return jax.lax.scan(update_best, nothing, (starts_S, matrix_SRD))[0]

    def merge(*found):
        """Return the k best of several sorted lists. top_k prefers the earlier of equal scores,
        and earlier lists hold lower rows."""
        score_QN, row_QN = (jnp.concatenate(parts, 1) for parts in zip(*found, strict=True))
        score_QK, index_QK = jax.lax.top_k(score_QN, k)
        return score_QK, jnp.take_along_axis(row_QN, index_QK, 1)

    everywhere, in_parts = PartitionSpec(), PartitionSpec(None, MESH_AXES)
    found = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(MESH_AXES), everywhere),
        out_specs=(in_parts, in_parts),
        check_vma=False,
    )(matrix_SRD, query_QD)
    found = jax.lax.with_sharding_constraint(found, NamedSharding(mesh, everywhere))
    return merge(found)


@dataclass(frozen=True)
class Matrix:
    """The vectors of a corpus on a mesh.

    matrix_SRD: as in `matrix_struct`
    rows: number of vectors, without the padding
    lock: held during a product: products of two threads could deadlock on each other's devices
    """

    matrix_SRD: jax.Array
    rows: int
    mesh: Mesh
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def width(self) -> int:
        return self.matrix_SRD.shape[-1]

    def nearest(self, query_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (score_QK, row_QK) of any number of queries; K is the lesser of k and all rows.

        If the mesh spans several processes, all of them must call this with the same queries.
        """
        k = min(k, self.rows)
        scores, rows = [np.zeros((0, k), np.float32)], [np.zeros((0, k), np.int32)]
        for start in range(0, len(query_QD), QUERIES):
            part = np.asarray(query_QD[start : start + QUERIES], np.float32)
            filled = np.zeros((QUERIES, self.width), np.float32)
            filled[: len(part)] = part
            with self.lock:
                found = nearest(self.matrix_SRD, filled, mesh=self.mesh, rows=self.rows, k=k)
                score_QK, row_QK = (np.asarray(x)[: len(part)] for x in found)
            scores.append(score_QK)
            rows.append(row_QK)
        return np.concatenate(scores), np.concatenate(rows)


def resident(rows: int, width: int, dtype: str, mesh: Mesh, k: int) -> Resident:
    """Return a matrix's use of the devices, and the program that searches it for k documents."""
    matrix = matrix_struct(rows, width, dtype, mesh)
    device_elements = math.prod(matrix.sharding.shard_shape(matrix.shape))
    return Resident(
        name="retrieve",
        function=nearest,
        arguments=(matrix, jax.ShapeDtypeStruct((QUERIES, width), jnp.float32)),
        keywords={"mesh": mesh, "rows": rows, "k": min(k, rows)},
        rows=QUERIES,
        flops=2.0 * QUERIES * device_elements,
        helps=("dtype=bfloat16 of the index",) if dtype == "float32" else (),
    )


def load_matrix(vectors: Vectors, mesh: Mesh, dtype: str) -> Matrix:
    """Load a file's vectors onto the mesh, device by device.

    Host memory holds one device's part at a time; each process reads only the parts of its own
    devices.

    Raises:
      ValueError: the dtype is not accepted, or a vector is not finite.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    struct = matrix_struct(vectors.rows, vectors.width, dtype, mesh)
    parts = []
    for device, index in struct.sharding.addressable_devices_indices_map(struct.shape).items():
        blocks = range(*index[0].indices(struct.shape[0]))
        part = _read(vectors, blocks, struct)
        parts.append(jax.block_until_ready(jax.device_put(part, device)))
    matrix = jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, parts)
    return Matrix(matrix, vectors.rows, mesh)


def _read(vectors: Vectors, blocks: range, struct: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the blocks of one device, [S, R, D], with zeros after the last row."""
    _, size, width = struct.shape
    part = np.zeros((len(blocks) * size, width), struct.dtype)
    first = blocks.start * size
    stop = min(first + len(part), vectors.rows)
    for start in range(first, stop, PIECE):
        piece = np.asarray(vectors.read(start, min(start + PIECE, stop)))
        finite_R = np.isfinite(piece).all(1)
        if not finite_R.all():
            row = start + int(finite_R.argmin())
            raise ValueError(f"{vectors.path}, row {row}: a vector must be finite")
        part[start - first : start - first + len(piece)] = piece
    return part.reshape(len(blocks), size, width)


def check_fit(vectors: Vectors, width: int, texts: Sequence[str]) -> None:
    """Raise ValueError unless the vectors match an encoder of this width and the texts."""
    if width != vectors.width:
        raise ValueError(
            f"{vectors.path}: its vectors have {vectors.width} numbers, those of the encoder "
            f"{width}; they must be made by the same encoder"
        )
    if len(texts) != vectors.rows:
        raise ValueError(
            f"{vectors.path} holds {vectors.rows} vectors, the corpus {len(texts)} texts; they "
            "must be of the same corpus"
        )


class DenseRetriever:
    """A retriever: documents whose vectors have the largest inner products with a query's vector.

    matrix, encode and texts must pass `check_fit`; the texts are in the order of the matrix's rows.
    """

    def __init__(self, matrix: Matrix, encode: Encoder, texts: Sequence[str]) -> None:
        self._matrix, self._encode, self._texts = matrix, encode, texts

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Return the k nearest documents to each query; among equals, the earlier first."""
        if not queries:
            return []
        vectors = self._encode([query[:MAX_QUERY] for query in queries])
        found = zip(*self._matrix.nearest(vectors, k), strict=True)
        return [
            [
                Document(str(row), self._texts[row], float(score))
                for score, row in zip(score_K, row_K.tolist(), strict=True)
            ]
            for score_K, row_K in found
        ]
