"""BM25: scores by hand, ties, and arbitrary queries."""

import math

import numpy as np
import pytest

from ragen_jax.envs.bm25 import K1, B
from ragen_jax.envs.search_qa.retrieve import BM25, MAX_QUERY, Document, Retriever

pytest.importorskip("bm25s")
pytestmark = pytest.mark.fast

CORPUS = (
    "Ashford\nAshford lies in Valia. The mayor of Ashford is Marwyn.",
    "Valia\nThe capital of Valia is Ashford.",
    "Marwyn\nMarwyn was born in Corton.",
    "Corton\nCorton lies in Valia.",
)


def lucene(corpus, query):
    """BM25 of each document by the formula (Lucene's: Kamphuis et al. 2020)."""
    documents = [text.split() for text in corpus]
    mean = np.mean([len(words) for words in documents])
    scores = np.zeros(len(documents))
    for term in query.split():
        df = sum(term in words for words in documents)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for i, words in enumerate(documents):
            tf = words.count(term)
            scores[i] += idf * tf / (tf + K1 * (1 - B + B * len(words) / mean))
    return scores


def test_the_document_about_it_is_first():
    index = BM25(CORPUS, stem=False)
    assert isinstance(index, Retriever)
    for name in ("Ashford", "Valia", "Marwyn", "Corton"):
        ((first, *_),) = index.search([name], 2)
        assert first.text.startswith(name)
        assert CORPUS[int(first.name)] == first.text


def test_scores_are_those_of_the_formula():
    corpus = ("xx yy zz", "xx xx yy", "zz zz", "yy ww ww ww ww")
    index = BM25(corpus, stem=False)
    for query in ("xx", "xx zz", "ww yy", "yy yy"):
        expected = lucene(corpus, query)
        (found,) = index.search([query], 4)
        assert len(found) == np.count_nonzero(expected)
        for document in found:
            assert document.score == pytest.approx(expected[int(document.name)], rel=1e-5)
        assert [d.score for d in found] == sorted((d.score for d in found), reverse=True)


def test_equal_documents_come_in_their_order():
    index = BM25(["same text"] * 9 + ["other text", "same same text"], stem=False)
    for k in (1, 3, 10, 50):
        (found,) = index.search(["same"], k)
        expected = ["10", *map(str, range(9))][:k]
        assert [document.name for document in found] == expected


def test_queries_do_not_see_each_other():
    index = BM25(CORPUS, stem=False)
    queries = ["Ashford mayor", "", "Corton", "nothing of it"]
    together = index.search(queries, 3)
    assert together == [index.search([query], 3)[0] for query in queries]
    assert together == BM25(list(CORPUS), stem=False).search(queries, 3)
    assert index.search([], 3) == []


@pytest.mark.parametrize(
    "query",
    ["", " ", "?", "the of", "x" * 10**6, "\ud800", "\x00", "[]", "absent", "\n" * 50, "\u202e"],
)
def test_a_query_that_fits_nothing_finds_nothing(query):
    for stem in (False, True):
        assert BM25(CORPUS, stem=stem).search([query], 5) == [[]]


def test_no_more_is_read_than_is_searched_for():
    index = BM25(CORPUS, stem=False)
    assert index.search(["x " * MAX_QUERY + "Ashford"], 5) == [[]]


def test_endings_are_cut_where_that_is_asked_for():
    corpus = ("He invents machines.", "A cat.")
    assert BM25(corpus, stem=False).search(["machine"], 2) == [[]]
    ((found,),) = BM25(corpus, stem=True).search(["inventing machine"], 2)
    assert isinstance(found, Document) and found.name == "0"


def test_documents_may_hold_anything():
    corpus = ["", "<|im_end|>", "?", "\ud800 word", "a"]
    index = BM25(corpus, stem=False)
    assert [d.name for d in index.search(["im_end"], 5)[0]] == ["1"]
    assert [d.text for d in index.search(["word"], 5)[0]] == ["\ud800 word"]
    assert BM25(["", "?"], stem=False).search(["anything"], 5) == [[]]
    with pytest.raises(ValueError, match="a corpus must hold at least one document, got none"):
        BM25([], stem=False)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs bm25s .*pip install 'ragen_jax\[search\]'"):
        BM25(CORPUS, stem=False)
