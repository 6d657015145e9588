"""A corpus on disk: its lines, its texts, BM25 over it, and error messages that name the fault."""

import gzip
import json

import numpy as np
import pytest

from ragen_jax.envs.problems import Draws
from ragen_jax.envs.search_qa import passages
from ragen_jax.envs.search_qa.passages import Passages, read_corpus, write_passages
from ragen_jax.envs.search_qa.retrieve import BM25, Retriever
from ragen_jax.envs.search_qa.words import Words, write_words
from ragen_jax.envs.search_qa.world import make_world

pytest.importorskip("bm25s")
pytestmark = pytest.mark.fast

TEXTS = ['"Title"\nline', "", "\U0001f600 ümläut \x00 end", "a\u2028b <|im_end|>", "x" * 100_000]


def write(path, texts):
    """Write a corpus in the format of wiki-18."""
    lines = [json.dumps({"id": str(i), "contents": t}) + "\n" for i, t in enumerate(texts)]
    data = "".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def stored(folder, texts, *, stem=False):
    """A `Words` index over texts."""
    folder.mkdir(exist_ok=True)
    write_words(folder, write_passages(folder, iter(texts)), stem=stem)
    return Words(folder)


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_texts_come_back(tmp_path, name, chunk, monkeypatch):
    monkeypatch.setattr(passages, "CHUNK", chunk)
    path = write(tmp_path / name, TEXTS)
    chunks = list(write_passages(tmp_path, read_corpus(path)))
    assert [text for one in chunks for text in one] == TEXTS
    assert {len(one) for one in chunks[:-1]} <= {chunk}
    texts = Passages(tmp_path)
    assert list(texts) == TEXTS and len(texts) == 5
    assert texts[1:4] == TEXTS[1:4]
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            texts[outside]


def test_a_corpus_that_is_none(tmp_path):
    path = tmp_path / "corpus.jsonl"
    good = b'{"contents": "a"}\n'
    for line, reason in (
        (b"{", "line 3 is not JSON"),
        (b"\xff", "line 3 is not JSON"),
        (b'{"id": "1", "text": "a"}', "line 3: the field 'contents' must be a text, got None"),
        (b'{"contents": 7}', "line 3: the field 'contents' must be a text, got 7"),
        (b'["a"]', "line 3: the field 'contents' must be a text, got None"),
        (b"[" * 100_000, "line 3 is not JSON"),
    ):
        path.write_bytes(good + b"\n" + line + b"\n" + good)
        with pytest.raises(ValueError, match=f"corpus.jsonl, {reason}"):
            list(read_corpus(path))
    with pytest.raises(ValueError, match="no corpus at .*nowhere.jsonl"):
        list(read_corpus(tmp_path / "nowhere.jsonl"))
    path.write_bytes(b'{"contents": "half \\ud800"}\n')  # half a surrogate pair
    assert list(read_corpus(path)) == ["half \ufffd"]
    path.write_bytes(b"\n")
    with pytest.raises(ValueError, match="at least one text, got none"):
        list(write_passages(tmp_path, read_corpus(path)))


def test_a_compressed_corpus_that_is_cut_off(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.bytes(50).hex() for _ in range(1000)]
    path = write(tmp_path / "corpus.jsonl.gz", texts)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:9], b"no gzip", whole[:-9] + b"\0" * 9):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"corpus\.jsonl\.gz cannot be read after line \d+:"):
            list(read_corpus(path))


def test_texts_that_are_incomplete(tmp_path):
    with pytest.raises(ValueError, match="holds no index .*ragen_jax.retriever build"):
        Passages(tmp_path)
    list(write_passages(tmp_path, iter(TEXTS)))
    (tmp_path / passages.TEXTS).write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"texts\.bin has 3 bytes, but ends\.npy tells of"):
        Passages(tmp_path)


@pytest.mark.medium
@pytest.mark.parametrize("stem", [False, True])
def test_the_same_is_found_as_in_memory(tmp_path, stem, monkeypatch):
    if stem:
        pytest.importorskip("Stemmer")
    monkeypatch.setattr(passages, "CHUNK", 37)  # 405 texts: eleven chunks
    world = make_world(2**60 + 1, 100)
    texts = [*world.passages, "", "the of", *world.passages[:3]]
    ours, theirs = stored(tmp_path, texts, stem=stem), BM25(texts, stem=stem)
    assert isinstance(ours, Retriever) and len(ours) == len(texts) == 405
    draws = Draws(7, 0, 0xB25)
    queries = [*world.things["person"], "born in", "lies works lies", "zzz", "", "\x00", "the"]
    queries += [" ".join(draws.shuffled(texts[i].split())[:4]) for i in range(100)]
    for mine, other in zip(ours.search(queries, 5), theirs.search(queries, 405), strict=True):
        # bm25s rounds differently, so documents with equal scores may change places.
        score = {d.name: d.score for d in other}
        assert len(mine) == min(len(other), 5)
        for place, document in enumerate(mine):
            assert document.text == texts[int(document.name)]
            assert document.score == pytest.approx(score[document.name], rel=1e-5)
            assert document.score == pytest.approx(other[place].score, rel=1e-5)
    assert not list(tmp_path.glob("*.piece.npy"))


def test_a_corpus_without_words(tmp_path):
    assert stored(tmp_path, ["", "a"]).search(["a word", ""], 3) == [[], []]


@pytest.mark.parametrize("name", ["documents.npy", "weights.npy", "starts.npy", "words.txt"])
def test_an_index_that_is_incomplete(tmp_path, name):
    stored(tmp_path, TEXTS)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1])
    with pytest.raises(
        ValueError, match=f"{tmp_path}( holds no index of words|: its files .* agree)"
    ):
        Words(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} holds no index of words .*{name}"):
        Words(tmp_path)
    stored(tmp_path, TEXTS)
    (tmp_path / "bm25.json").write_text("[]")
    with pytest.raises(ValueError, match=f"{tmp_path} holds no index of words"):
        Words(tmp_path)
