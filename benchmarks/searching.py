"""Time of a search: for words, and for vectors against faiss's flat index on the same cores."""

import os
import tempfile
from pathlib import Path

import jax
import numpy as np

from benchmarks.measure import Row, compare
from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa.dense import load_matrix
from ragen_jax.envs.search_qa.retrieve import BM25
from ragen_jax.envs.search_qa.vectors import open_vectors

PASSAGES, WORDS = 50_000, 100  # number of passages; words of each, as in wiki-18
VOCABULARY = 100_000
QUERIES, QUERY_WORDS = 100, 8
K = 5


def bm25(repeats, *, passages=PASSAGES):
    """BM25 in the same process: 100 single queries of 8 words over 50,000 passages of 100 words."""
    rng = np.random.default_rng(0)
    corpus = _texts(rng, passages, WORDS)
    queries = _texts(rng, QUERIES, QUERY_WORDS)
    index = BM25(corpus, stem=True)
    return [
        Row(
            name=f"{QUERIES} queries over {passages:,} passages",
            work=QUERIES,
            unit="queries",
            **compare(lambda: [index.search([q], K) for q in queries], repeats=repeats),
        )
    ]


def _texts(rng, count, words):
    """Return random texts with the word frequencies of a language: the n-th 1 / n (Zipf)."""
    frequency_V = 1 / np.arange(1, VOCABULARY + 1)
    drawn = rng.choice(VOCABULARY, size=(count, words), p=frequency_V / frequency_V.sum())
    return [" ".join(f"w{n}" for n in row) for row in drawn.tolist()]


def flat_search(repeats, *, rows=100_000, width=768, queries=(1, 8, 32, 128)):
    """Search for the five nearest of 100,000 x 768 vectors, against faiss-cpu's flat index."""
    rng = np.random.default_rng(0)
    matrix_ND = rng.standard_normal((rows, width), np.float32)
    theirs, skipped = _faiss(matrix_ND)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.npy"
        np.save(path, matrix_ND)
        ours = load_matrix(open_vectors(path), make_mesh(data=-1, fsdp=1, tensor=1), "float32")
    found = []
    for count in queries:
        query_QD = rng.standard_normal((count, width), np.float32)
        if theirs is not None:
            _, expected_QK = theirs.search(query_QD, K)
            np.testing.assert_array_equal(ours.nearest(query_QD, K)[1], expected_QK)

        def one(query_QD=query_QD):
            ours.nearest(query_QD, K)

        def other(query_QD=query_QD):
            theirs.search(query_QD, K)

        times = compare(one, other if theirs is not None else None, repeats=repeats)
        found.append(
            Row(
                name=f"{count} queries, {rows:,} x {width}, {jax.device_count()} devices",
                other_name="faiss",
                work=count,
                unit="queries",
                bytes=matrix_ND.nbytes,
                flops=2 * count * matrix_ND.size,
                skipped=skipped,
                **times,
            )
        )
    return found


def _faiss(matrix_ND):
    """Return (faiss's index of the matrix, ""), or (None, reason) if faiss is not installed."""
    try:
        import faiss
    except ImportError:
        return None, "skipped: no faiss; pip install faiss-cpu"
    faiss.omp_set_num_threads(os.cpu_count())  # as XLA does
    index = faiss.IndexFlatIP(matrix_ND.shape[1])
    index.add(matrix_ND)
    return index, ""
