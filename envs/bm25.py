"""BM25 as Lucene computes it, by bm25s; shared by environments that search within the process."""

import logging
from types import ModuleType

import numpy as np

# Pyserini's defaults, with which wiki-18 and WebShop are searched.
K1, B = 0.9, 0.4
METHOD = "lucene"


def package() -> ModuleType:
    """Import and return bm25s, without the lines that it logs for every index.

    The import is here because code that only lists environments does not need bm25s.
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def best(scores: np.ndarray, k: int) -> list[int]:
    """Return the indices of the up to k highest scores above 0, highest first.

    Among equal scores the lower index comes first.
    """
    found = np.flatnonzero(scores > 0)
    if len(found) > k:  # keep all ties with the k-th score
        found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
    return found[np.argsort(-scores[found], kind="stable")][:k].tolist()
