"""Where documents come from: whatever answers queries, and BM25 in process.

Retriever   what SearchQA asks of one
Document    what it gives
BM25        the words that query and document share, weighed by how rare they are
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ragen_jax.envs import bm25

MAX_QUERY = 1000  # characters of a query that are searched for


@dataclass(frozen=True, slots=True)
class Document:
    """A document that was found.

    name: its place in the corpus, or what a server calls it
    score: the higher the better; its unit is the retriever's
    """

    name: str
    text: str
    score: float


@runtime_checkable
class Retriever(Protocol):
    """What answers queries."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The up to k best documents for each of the queries, the best first.

        An empty list where nothing fits. The same queries lead to the same documents, whichever
        others are asked with them. Raises ConnectionError where no answer can be had.
        """
        ...


class BM25:
    """The documents of a corpus that share words with a query (Lucene's variant of BM25, bm25s).

    A word is two or more letters or digits, in lower case; English stop words are left out.
    """

    def __init__(self, corpus: Sequence[str], *, stem: bool) -> None:
        """Builds the index: seconds for 50,000 passages.

        Args:
          corpus: the documents' texts, at least one. They are shown as they are.
          stem: whether English endings are cut off first (Snowball), so that "born" and "borns"
            are one word; not for invented names, which it would mix up.

        Raises:
          ValueError: an empty corpus, or a package that is missing.
        """
        self._split = splitter(stem)
        if not corpus:
            raise ValueError("a corpus must hold at least one document, got none")
        self._corpus = corpus
        self._index = bm25.package().BM25(k1=bm25.K1, b=bm25.B, method=bm25.METHOD)
        tokens = self._split(corpus)
        # An index over no word at all cannot be built: it has one that no query holds.
        if not any(tokens):
            tokens = [["\x00"], *tokens[1:]]
        self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """The up to k documents that share most with each query; of equal ones the earlier."""
        return [self._search(words, k) for words in self._split([q[:MAX_QUERY] for q in queries])]

    def _search(self, words: list[str], k: int) -> list[Document]:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        return [Document(str(i), self._corpus[i], float(scores[i])) for i in bm25.best(scores, k)]


def splitter(stem: bool) -> Callable[[Sequence[str]], list[list[str]]]:
    """What splits texts into the words that `BM25` counts.

    Raises ValueError where a package is missing.
    """
    check_installed(stem)
    stemmer = None
    if stem:
        import Stemmer  # ty: ignore[import-not-found] compiled, with no types beside it

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
    """Raises ValueError where a package of the index is not there."""
    for module, package in (("bm25s", "bm25s"), *([("Stemmer", "PyStemmer")] if stem else [])):
        if importlib.util.find_spec(module) is None:
            raise ValueError(
                f"search_qa needs {package} to search in process: pip install 'ragen_jax[search]'"
            )
