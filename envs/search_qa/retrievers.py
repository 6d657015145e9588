"""The retrievers that the option `retriever` names, each opened once a process.

RETRIEVERS  name -> what it needs, and what opens it
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_jax.envs.files import json_rows, json_value
from ragen_jax.envs.search_qa.protocols import PROTOCOLS
from ragen_jax.envs.search_qa.remote import Remote
from ragen_jax.envs.search_qa.retrieve import BM25, Retriever
from ragen_jax.envs.search_qa.together import Together
from ragen_jax.envs.search_qa.words import Words

# Options that say where documents come from; each retriever needs some of them.
SOURCES = ("corpus", "index", "url")

# Of a server: seconds of a try (as ragen/env/search/retrieval_client.py:38 has it), and tries.
TIME_LIMIT, TRIES = 30.0, 8


@dataclass(frozen=True)
class Opener:
    """How a retriever is opened.

    needs: the options of SOURCES that it is given, all of them
    open: these as keywords -> the retriever; ValueError where they cannot be used
    """

    needs: tuple[str, ...]
    open: Callable[..., Retriever]


def open_bm25(corpus: str) -> BM25:
    """BM25 over stems of English words, of a corpus file that fits in memory."""
    return BM25(load_corpus(corpus), stem=True)


def open_words(index: str) -> Retriever:
    """BM25 over an index on disk."""
    return Words(index)


def open_dense(index: str) -> Retriever:
    """Vectors over all devices; the queries of several episodes are one product."""
    from ragen_jax.envs.search_qa.dense_index import DenseIndex  # all else does without devices

    return Together(DenseIndex(index))


def open_server(protocol: str, url: str) -> Retriever:
    """A server of a protocol, which must answer now."""
    server = Remote(url, protocol=protocol, time_limit=TIME_LIMIT, tries=TRIES, seed=0)
    server.check()
    # One request holds all queries of search_r1; those of ragen go side by side.
    return Together(server) if protocol == "search_r1" else server


RETRIEVERS: dict[str, Opener] = {
    "bm25": Opener(("corpus",), open_bm25),
    "bm25_index": Opener(("index",), open_words),
    "dense": Opener(("index",), open_dense),
    **{name: Opener(("url",), functools.partial(open_server, name)) for name in PROTOCOLS},
}


def check_sources(retriever: str, **sources: str | None) -> None:
    """Raises ValueError for a retriever that there is not, one of SOURCES that is no text, that it
    does not have, or that it needs and is not given."""
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
    """The retriever of that name over these sources: the same object every time.

    Args:
      retriever: a key of RETRIEVERS. sources: SOURCES, those that it does not need None.

    Raises:
      ValueError: as `check_sources`, or a source that cannot be used.
    """
    check_sources(retriever, **sources)
    return _opened(retriever, *(sources[name] for name in RETRIEVERS[retriever].needs))


@functools.lru_cache(maxsize=4)
def _opened(retriever: str, *needed: str) -> Retriever:
    opener = RETRIEVERS[retriever]
    return opener.open(**dict(zip(opener.needs, needed, strict=True)))


def load_corpus(path: str | Path) -> list[str]:
    """The documents of a file, in its order.

    Either a JSON list of texts (its name ends with .json: the form that the released server reads),
    or one JSON object a line with the text `contents` (wiki-18.jsonl).

    Raises:
      ValueError: the file is missing, of another format, or empty.
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
