"""Sources of documents: the interface of retrievers, and BM25 within the process.

Retriever   the interface that SearchQA needs
Document    a result
BM25        scores the words that query and document share, weighted by their rarity
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ragen_jax.envs import bm25

MAX_QUERY = 1000  # characters of a query that are used


@dataclass(frozen=True, slots=True)
class Document:
    """A document that was found.

    name: its position in the corpus, or its name on a server
    score: higher is better; the unit depends on the retriever
    """

    name: str
    text: str
    score: float


@runtime_checkable
class Retriever(Protocol):
    """An object that answers queries."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Return the up to k best documents for each query, best first.

        The list is empty if nothing fits. The result for a query does not depend on the other
        queries. Raises ConnectionError if there is no answer.
        """
        ...


class BM25:
    """Retriever of documents that share words with a query (Lucene's variant of BM25, bm25s).

    A word is two or more letters or digits, in lower case; English stop words are left out.
    """

    def __init__(self, corpus: Sequence[str], *, stem: bool) -> None:
        """Build the index; it takes seconds for 50,000 passages.

        Args:
          corpus: the documents' texts, at least one. They are shown unchanged.
          stem: whether to strip English endings (Snowball), so that "born" and "borns" are the
            same word; not for invented names, which it would conflate.

        Raises:
          ValueError: the corpus is empty, or a package is missing.
        """
        self._split = splitter(stem)
        if not corpus:
            raise ValueError("a corpus must hold at least one document, got none")
        self._corpus = corpus
        self._index = bm25.package().BM25(k1=bm25.K1, b=bm25.B, method=bm25.METHOD)
        tokens = self._split(corpus)
        # bm25s cannot index a corpus without any word: add a word that no query holds.
        if not any(tokens):
            tokens = [["\x00"], *tokens[1:]]
        self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Return the up to k best documents for each query; among equals, the earlier first."""
        return [self._search(words, k) for words in self._split([q[:MAX_QUERY] for q in queries])]

    def _search(self, words: list[str], k: int) -> list[Document]:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        return [Document(str(i), self._corpus[i], float(scores[i])) for i in bm25.best(scores, k)]


def splitter(stem: bool) -> Callable[[Sequence[str]], list[list[str]]]:
    """Return the function that splits texts into the words that `BM25` counts.

    Raises ValueError if a package is missing.
    """
    check_installed(stem)
    stemmer = None
    if stem:
        import Stemmer

        stemmer = Stemmer.Stemmer("english")

    def split(texts):
        return bm25.package().tokenize(
            list(texts),
            stopwords="english",
            stemmer=stemmer,
            return_ids=False,
            show_progress=False,
        )

    return split


def check_installed(stem: bool) -> None:
    """Raise ValueError if a package that the index needs is missing."""
    for module, package in (("bm25s", "bm25s"), *([("Stemmer", "PyStemmer")] if stem else [])):
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"search_qa needs {package} to search in process: pip install 'ragen_jax[search]'"
            )
