"""The retrievers that the option `retriever` names, each opened once per process.

RETRIEVERS  name -> the options it needs, and the function that opens it
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_jax.envs.files import json_rows, json_value
from ragen_jax.envs.search_qa.batching import BatchingRetriever
from ragen_jax.envs.search_qa.protocols import PROTOCOLS
from ragen_jax.envs.search_qa.remote import RemoteRetriever
from ragen_jax.envs.search_qa.retrieve import BM25, Retriever
from ragen_jax.envs.search_qa.words import Words

# Options that give the source of documents; each retriever needs some of them.
SOURCES = ("corpus", "index", "url")

# For a server: seconds per try (as in ragen/env/search/retrieval_client.py:38), number of tries.
TIME_LIMIT, TRIES = 30.0, 8


@dataclass(frozen=True)
class Opener:
    """How to open a retriever.

    needs: the options of SOURCES that it needs, all of them
    open: takes these as keywords, returns the retriever; raises ValueError if they are unusable
    """

    needs: tuple[str, ...]
    open: Callable[..., Retriever]


def open_bm25(corpus: str) -> BM25:
    """Return BM25 over stems of English words, for a corpus file that fits in memory."""
    return BM25(load_corpus(corpus), stem=True)


def open_words(index: str) -> Retriever:
    """Return BM25 over an index on disk."""
    return Words(index)


def open_dense(index: str) -> Retriever:
    """Return dense retrieval over all devices; queries of several episodes share one product."""
    from ragen_jax.envs.search_qa.dense_index import DenseIndex  # only this needs devices

    return BatchingRetriever(DenseIndex(index))


def open_server(protocol: str, url: str) -> Retriever:
    """Return a client of a server that speaks `protocol` and must answer now."""
    server = RemoteRetriever(url, protocol=protocol, time_limit=TIME_LIMIT, tries=TRIES, seed=0)
    server.check()
    # A search_r1 request holds many queries; ragen requests, with one query each, run in parallel.
    return BatchingRetriever(server) if protocol == "search_r1" else server


RETRIEVERS: dict[str, Opener] = {
    "bm25": Opener(("corpus",), open_bm25),
    "bm25_index": Opener(("index",), open_words),
    "dense": Opener(("index",), open_dense),
    **{name: Opener(("url",), functools.partial(open_server, name)) for name in PROTOCOLS},
}


def check_sources(retriever: str, **sources: str | None) -> None:
    """Raise ValueError for an unknown retriever, a source that is not a text, a source that the
    retriever does not use, or a missing source that it needs."""
    if not isinstance(retriever, str) or retriever not in RETRIEVERS:
        known = ", ".join(map(repr, RETRIEVERS))
        raise ValueError(f"retriever must be one of {known}, got {retriever!r}")
    needs = RETRIEVERS[retriever].needs
    for name, value in sources.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{name} must be a text or None, got {value!r}")
        if value is None and name in needs:
            raise ValueError(
                f"questions of a file (path) are searched for by retriever={retriever!r}, which "
                f"needs {name}, got None"
            )
        if value is not None and name not in needs:
            raise ValueError(
                f"{name} must be None with retriever={retriever!r}, which needs "
                f"{', '.join(needs)}; got {value!r}"
            )


def open_retriever(retriever: str, **sources: str | None) -> Retriever:
    """Return the retriever of that name over these sources: the same object every time.

    Args:
      retriever: a key of RETRIEVERS.
      sources: the options of SOURCES; those that it does not need are None.

    Raises:
      ValueError: as `check_sources`, or a source is unusable.
    """
    check_sources(retriever, **sources)
    return _open(retriever, *(sources[name] for name in RETRIEVERS[retriever].needs))


@functools.lru_cache(maxsize=4)
def _open(retriever: str, *needed: str) -> Retriever:
    opener = RETRIEVERS[retriever]
    return opener.open(**dict(zip(opener.needs, needed, strict=True)))


def load_corpus(path: str | Path) -> list[str]:
    """Return the documents of a file, in its order.

    The file is a JSON list of texts if its name ends with .json (the format that the released
    server reads), or else JSON Lines with the text `contents` (wiki-18.jsonl).

    Raises:
      ValueError: the file is missing, has another format, or is empty.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    if Path(path).suffix == ".json":
        texts = _list_of_texts(path)
    else:
        texts = [_contents(path, index, row) for index, row in enumerate(json_rows(path))]
    if not texts:
        raise ValueError(f"{path} holds no documents")
    return texts


def _list_of_texts(path: str | Path) -> list[str]:
    texts = json_value(path)
    if not isinstance(texts, list):
        raise ValueError(f"{path} must hold a list of texts, got {ascii(texts)[:60]}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"item {index} of {path} must be a text, got {ascii(text)[:60]}")
    return texts


def _contents(path: str | Path, index: int, row: Any) -> str:
    if not isinstance(row, dict) or "contents" not in row:
        raise ValueError(f"row {index} of {path} lacks the field contents: {ascii(row)[:60]}")
    if not isinstance(row["contents"], str):
        shown = ascii(row["contents"])[:60]
        raise ValueError(f"field contents of row {index} of {path} must be a text: {shown}")
    return row["contents"]
