"""The two protocols of retrieval servers, as JSON: requests and answers.

ragen       {query, top_k} -> {results: [{id, content, score}]}: one query per request
            (mll-lab-nu/RAGEN, scripts/retrieval/server.py:82-97)
search_r1   {queries, topk, return_scores} -> {result: [[{document, score}]]}: many queries per
            request; a document is {id, contents} or a text (PeterGriffinJin/Search-R1,
            search_r1/search/retrieval_server.py, retrieve_endpoint)

Both are posted to /retrieve, and distinguished by the name of the field that holds the queries.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragen_jax.core import http_json
from ragen_jax.envs.search_qa.retrieve import MAX_QUERY, Document

PROTOCOLS = ("ragen", "search_r1")
PATH = "/retrieve"
HEALTH = "/health"  # GET; only in the ragen protocol
MAX_DOCUMENTS = 50  # per query (RAGEN's own limit: ragen/env/search/retrieval_client.py:92)
MAX_QUERIES = 512  # per request to our server
MAX_VALUES = 40_000  # JSON values in a request to our server; see http_json.parse_json
MAX_LETTERS = 64_000  # characters of all queries of a request to our server, each cut to MAX_QUERY


@dataclass(frozen=True)
class Request:
    """A request to a server."""

    protocol: str
    queries: tuple[str, ...]
    k: int
    scores: bool = True  # whether a search_r1 server is to send scores


def request_fields(protocol: str, queries: Sequence[str], k: int) -> dict[str, Any]:
    """Return the value to post as JSON; a ragen request has one query."""
    if protocol == "ragen":
        (query,) = queries
        return {"query": query, "top_k": k}
    return {"queries": list(queries), "topk": k, "return_scores": True}


def split_queries(queries: Sequence[str], *, most: int, letters: int) -> Iterator[tuple[str, ...]]:
    """Yield the queries in order, in parts of at most `most` queries and `letters` characters.

    A query longer than `letters` is a separate part.
    """
    part: list[str] = []
    size = 0
    for query in queries:
        if part and (len(part) == most or size + len(query) > letters):
            yield tuple(part)
            part, size = [], 0
        part.append(query)
        size += len(query)
    if part:
        yield tuple(part)


def read_request(body: bytes, k: int) -> Request:
    """Parse the body of a request.

    Args:
      k: number of documents if the request does not say.

    Returns:
      The `Request`, its queries cut to MAX_QUERY characters.

    Raises:
      ValueError: it matches neither protocol, or exceeds MAX_QUERIES, MAX_LETTERS or
        MAX_DOCUMENTS.
    """
    fields = _object(http_json.parse_json(body, max_values=MAX_VALUES))
    if "query" in fields:
        wanted = _count(fields, "top_k", "k", default=k)  # server.py:91 accepts "k" as well
        return Request("ragen", _texts([fields["query"]], "query"), wanted)
    if "queries" in fields:
        wanted = _count(fields, "topk", default=k)
        queries = fields["queries"]
        if not isinstance(queries, list) or len(queries) > MAX_QUERIES:
            raise ValueError(f"queries must be a list of at most {MAX_QUERIES} texts")
        texts = _texts(queries, "queries")
        letters = sum(map(len, texts))
        if letters > MAX_LETTERS:
            raise ValueError(
                f"queries must hold at most {MAX_LETTERS} characters together, got {letters}: ask "
                "in several requests"
            )
        scores = bool(fields.get("return_scores", False))
        return Request("search_r1", texts, wanted, scores)
    raise ValueError("a request holds query and top_k, or queries and topk")


def answer_body(request: Request, found: Sequence[Sequence[Document]]) -> bytes:
    """Return the body of the answer to a request."""
    if request.protocol == "ragen":
        (documents,) = found
        results = [{"id": d.name, "content": d.text, "score": d.score} for d in documents]
        return json.dumps({"query": request.queries[0], "results": results}).encode()
    lists = [[_search_r1_document(d, request.scores) for d in one] for one in found]
    return json.dumps({"result": lists}).encode()


def _search_r1_document(document: Document, scores: bool) -> dict[str, Any]:
    shown = {"id": document.name, "contents": document.text}
    return {"document": shown, "score": document.score} if scores else shown


def read_answer(protocol: str, answer: Any, queries: int, k: int) -> list[list[Document]]:
    """Return the documents in an answer (a JSON value) to `queries` queries, at most k for each.

    Raises:
      ValueError: any part of it violates the protocol.
    """
    fields = _object(answer)
    name = "results" if protocol == "ragen" else "result"
    if name not in fields:
        raise ValueError(f"the answer has no field {name!r}, as {protocol} has")
    lists = [fields[name]] if protocol == "ragen" else fields[name]
    if not isinstance(lists, list) or len(lists) != queries:
        raise ValueError(f"{name!r} must hold a list for each of {queries} queries")
    read = _ragen_result if protocol == "ragen" else _search_r1_result
    found = []
    for one in lists:
        if not isinstance(one, list):
            raise ValueError(f"{name!r} must hold lists of documents, got {one!r:.80}")
        found.append([read(entry, i) for i, entry in enumerate(one[:k], start=1)])
    return found


def _ragen_result(entry: Any, place: int) -> Document:
    if not isinstance(entry, dict):
        raise ValueError(f"a result must be an object, got {entry!r:.80}")
    return _document(entry.get("id", place), entry.get("content"), entry.get("score"))


def _search_r1_result(entry: Any, place: int) -> Document:
    if not isinstance(entry, dict) or "document" not in entry:
        raise ValueError(f"a result must hold document and score, got {entry!r:.80}")
    document = entry["document"]
    if isinstance(document, str):
        return _document(place, document, entry.get("score"))
    if not isinstance(document, dict):
        raise ValueError(f"a document must be a text or an object, got {document!r:.80}")
    return _document(document.get("id", place), document.get("contents"), entry.get("score"))


def _document(name: Any, text: Any, score: Any) -> Document:
    if not isinstance(name, (str, int)) or isinstance(name, bool):
        raise ValueError(f"a document's id must be a text or a number, got {name!r:.80}")
    if not isinstance(text, str):
        raise ValueError(f"a document must hold a text, got {text!r:.80}")
    if not isinstance(score, (int, float)) or isinstance(score, bool) or not math.isfinite(score):
        raise ValueError(f"a document's score must be a number, got {score!r:.80}")
    return Document(str(name), text, float(score))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"no JSON object, but {value!r:.80}")
    return value


def _count(fields: dict[str, Any], *names: str, default: int) -> int:
    """Return the first of the fields that is present and not null."""
    for name in names:
        value = fields.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r:.80}")
            if not 1 <= value <= MAX_DOCUMENTS:
                raise ValueError(f"{name} must be from 1 to {MAX_DOCUMENTS}, got {value}")
            return value
    return default


def _texts(values: Sequence[Any], name: str) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise ValueError(f"{name} must hold texts, got {value!r:.80}")
    return tuple(value[:MAX_QUERY] for value in values)
