"""BM25 as Lucene computes it, by bm25s: what environments that search in process share."""

import logging
from types import ModuleType

import numpy as np

# Pyserini's defaults, with which wiki-18 and WebShop are searched.
K1, B = 0.9, 0.4
METHOD = "lucene"


def package() -> ModuleType:
    """bm25s, without the lines that it logs of every index. An environment that is only listed does
    not need it, so it is imported here."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def best(scores: np.ndarray, k: int) -> list[int]:
    """The places of the up to k highest scores above 0, the highest first, of equal ones the
    earlier."""
    found = np.flatnonzero(scores > 0)
    if len(found) > k:  # with all that score as much as the last
        found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
    return found[np.argsort(-scores[found], kind="stable")][:k].tolist()
