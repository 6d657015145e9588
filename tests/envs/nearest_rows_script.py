"""Find the nearest rows on a mesh of all devices, and compare with NumPy's exact search.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 \
        python tests/envs/nearest_rows_script.py FILE.npy DTYPE QUERIES K DATA,FSDP,TENSOR

Run by tests/envs/test_search_qa_dense.py in a separate process, because the number of devices is
fixed when JAX starts. Prints one JSON object: devices, the fraction of queries whose K rows equal
NumPy's in its order, and the largest difference of their scores.
"""

import json
import sys

import jax
import numpy as np

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa.dense import load_matrix, nearest
from ragen_jax.envs.search_qa.vectors import open_vectors


def exact(matrix_ND, query_QD, k):
    """(score_QK, row_QK) by NumPy; for equal scores, the lower row comes first."""
    score_QN = query_QD @ matrix_ND.T
    row_QK = np.argsort(-score_QN, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(score_QN, row_QK, 1), row_QK


def main(path, dtype, queries, k, sizes):
    data, fsdp, tensor = map(int, sizes.split(","))
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    vectors = open_vectors(path)
    matrix = load_matrix(vectors, mesh, dtype)
    query_QD = np.random.default_rng(1).standard_normal((int(queries), vectors.width), np.float32)
    score_QK, row_QK = matrix.nearest(query_QD, int(k))
    shards = matrix.matrix_SRD.addressable_shards
    rounded = np.load(path).astype(dtype).astype(np.float32)
    asked = query_QD.astype(dtype).astype(np.float32)
    expected_QK, best_QK = exact(rounded, asked, int(k))
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "parts": len({shard.index[0].start for shard in shards}),
                "same": float((row_QK == best_QK).all(1).mean()),
                "apart": float(np.abs(score_QK - expected_QK).max()),
                "compiled": nearest._cache_size(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
