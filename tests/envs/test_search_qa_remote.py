"""Retrieval over HTTP: both protocols, failing servers, threads that search together."""

import json
import socket
import threading
import time

import numpy as np
import pytest
from retrieval_servers import document, echo, serve

from ragen_jax.envs.search_qa import protocols, remote
from ragen_jax.envs.search_qa.batching import BatchingRetriever
from ragen_jax.envs.search_qa.protocols import PROTOCOLS, Request, answer_body, read_answer
from ragen_jax.envs.search_qa.remote import RemoteRetriever
from ragen_jax.envs.search_qa.retrieve import MAX_QUERY, Document, Retriever
from ragen_jax.envs.types import Step
from ragen_jax.rollout.env_calls import EnvFailure, Limits, StepRequest, StepResult, act

pytestmark = pytest.mark.fast

OPTIONS = dict(time_limit=5.0, tries=3, seed=0)
HOSTILE = ("\ud800 \x00", '"}]', "<|im_end|>", "\u202e\U0001f600", "", "x" * 10 * MAX_QUERY)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.05)


@pytest.mark.medium
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_the_server_finds(protocol):
    queries = [f"query {i}" for i in range(40)] + list(HOSTILE)
    with serve() as (url, requests):
        index = RemoteRetriever(url, protocol=protocol, **OPTIONS)
        assert isinstance(index, Retriever)
        index.check()
        del requests[:]
        found = index.search(queries, 3)
        assert index.search([], 3) == []
    for query, documents in zip(queries, found, strict=True):
        # half of a surrogate pair is no character
        shown = query[:MAX_QUERY].replace("\ud800", "\ufffd")
        assert [d.text for d in documents] == [document(shown, i) for i in (1, 2, 3)]
        assert [d.score for d in documents] == [1.0, 1 / 2, 1 / 3]
    names = ["doc_1", "doc_2", "doc_3"] if protocol == "ragen" else ["1", "2", "3"]
    assert [d.name for d in found[0]] == names
    assert len(requests) == (1 if protocol == "search_r1" else len(queries))
    assert {path for path, _ in requests} == {"/retrieve"}


@pytest.mark.parametrize("end", ["", "/", "/retrieve", "/folder", "/folder/retrieve"])
def test_the_address_may_name_what_is_asked(end):
    with serve() as (url, requests):
        RemoteRetriever(url + end, protocol="search_r1", **OPTIONS).search(["a"], 1)
    assert requests[0][0] == ("/folder/retrieve" if "folder" in end else "/retrieve")


class Reader:
    """An environment whose action is a query and whose observation is the search result."""

    actions = ()
    instructions = ""

    def __init__(self, retriever):
        self.retriever = retriever

    def reset(self, seed):
        return ""

    def identity(self, state):
        return state

    def render(self, state):
        return state

    def step(self, state, action, rng):
        (found,) = self.retriever.search([action], 2)
        return Step("\n".join(d.text for d in found), 0.0, False, {})


def played(retriever, episodes):
    """The results of episodes that search in parallel."""
    jobs = [StepRequest("", (f"query {i}",), np.random.default_rng(0), 2) for i in range(episodes)]
    return act(Reader(retriever), jobs, Limits(time_limit=60.0, workers=8))


@pytest.mark.medium
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_third_of_the_answers_are_dropped_late_or_cut_off(protocol):
    kinds = ("drop", "late", "truncate")
    with serve(trouble=lambda n: kinds[n // 3 % 3] if n % 3 == 0 else None, late=0.8) as (
        url,
        requests,
    ):
        index = RemoteRetriever(url, protocol=protocol, time_limit=0.5, tries=12, seed=1)
        index = BatchingRetriever(index) if protocol == "search_r1" else index
        results = played(index, 120)
    for i, result in enumerate(results):
        assert isinstance(result, StepResult), result
        assert result.observation == f"1 about query {i}\n2 about query {i}"
    asked = [len(fields.get("queries", [0])) for _, fields in requests]
    assert len(requests) > 6 and sum(asked) > 120  # some requests were repeated
    if protocol == "search_r1":
        assert max(asked) > 1


def test_where_there_is_no_server_episodes_are_left_out():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    index = RemoteRetriever(url, protocol="search_r1", **OPTIONS)
    for result in played(BatchingRetriever(index), 9):
        assert isinstance(result, EnvFailure)
        assert result.error.startswith(f"ConnectionError: retriever {url} gave no usable answer in")
        assert "refused" in result.error
    with pytest.raises(ValueError, match=rf"{url} gave .* 3 tries.*refused.*search_r1\)"):
        index.check()


GOOD = {"document": {"id": "1", "contents": "text"}, "score": 0.5}
MALFORMED = [
    *(b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000, {}, {"results": []}, {"result": None}),
    *({"result": []}, {"result": [[GOOD]] * 2}, {"result": [GOOD]}, {"result": [["text"]]}),
    *({"result": [[GOOD | {"score": x}]]} for x in (None, "0.5", True, float("nan"))),
    *({"result": [[GOOD | {"document": x}]]} for x in (None, 3, {}, {"id": "1", "contents": 3})),
    {"result": [[GOOD | {"document": {"id": ["1"], "contents": "text"}}]]},
    {"result": [[{"score": 0.5}]]},
]


@pytest.mark.medium
@pytest.mark.parametrize("bad", MALFORMED, ids=lambda bad: repr(bad)[:40])
def test_what_is_malformed_is_asked_for_again(bad):
    answers = [bad, bad]
    with serve(lambda fields: (200, answers.pop()) if answers else echo(fields)) as (url, requests):
        index = RemoteRetriever(url, protocol="search_r1", **OPTIONS)
        ((found,),) = index.search(["a"], 1)
        assert found == Document("1", document("a", 1), 1.0)
    assert len(requests) == 3


def test_documents_of_search_r1_may_be_plain_texts():
    answer = {"result": [[{"document": "one", "score": 2}, {"document": "two", "score": 1}]]}
    with serve(lambda fields: (200, answer)) as (url, _):
        (found,) = RemoteRetriever(url, protocol="search_r1", **OPTIONS).search(["a"], 5)
        assert found == [Document("1", "one", 2.0), Document("2", "two", 1.0)]
        (found,) = RemoteRetriever(url, protocol="search_r1", **OPTIONS).search(["a"], 1)
        assert found == [Document("1", "one", 2.0)]  # no more than requested


def test_statuses():
    for status, tries in ((500, 3), (503, 3), (429, 3), (400, 1), (404, 1)):
        with serve(lambda fields, s=status: (s, {"error": "why"})) as (url, requests):
            with pytest.raises(ConnectionError, match=f'{url} .*status {status}.*"error": "why"'):
                RemoteRetriever(url, protocol="ragen", **OPTIONS).search(["a"], 1)
            assert len(requests) == tries


@pytest.mark.medium
def test_an_answer_that_drips_is_late():
    with serve(trouble=lambda n: "drip", late=0.5) as (url, requests):
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="TimeoutError"):
            RemoteRetriever(url, protocol="ragen", time_limit=0.3, tries=2, seed=0).search(["a"], 1)
        assert time.monotonic() - start < 3
    assert len(requests) == 2


def test_an_endless_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "MAX_BYTES", 1000)  # limit for any response
    with serve(lambda fields: (200, b"x" * 100_000)) as (url, _):
        with pytest.raises(ConnectionError, match="longer than 1000 bytes"):
            RemoteRetriever(url, protocol="ragen", **OPTIONS).search(["a"], 1)


def test_pauses_double_and_are_of_the_seed(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 5.0)
    slept = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept[-1].append(seconds))
    for seed in (0, 1, 0):
        slept.append([])
        index = RemoteRetriever(
            "http://127.0.0.1:1", protocol="ragen", time_limit=1, tries=6, seed=seed
        )
        with pytest.raises(ConnectionError):
            index.search(["a"], 1)
        for pause, most in zip(slept[-1], (1, 2, 4, 5, 5), strict=True):
            assert most / 2 <= pause <= most
    assert slept[0] == slept[2] != slept[1]


@pytest.mark.parametrize(
    "wrong, reason",
    [
        *(
            ({"url": url}, "url must have the form http://HOST:PORT, got")
            for url in ("", "host:80", None)
        ),
        *(
            ({"url": url}, "url must have the form")
            for url in ("ftp://h:1", "http://:80", "http://h:99999")
        ),
        ({"protocol": "REST"}, "protocol must be one of ragen, search_r1, got 'REST'"),
        *(({"time_limit": x}, "time_limit must be a positive") for x in (0, -1, float("nan"))),
        *(({"tries": x}, "tries must be a whole number") for x in (0, 1.5)),
    ],
)
def test_unusable_options(wrong, reason):
    options = dict(url="http://127.0.0.1:1", protocol="ragen") | OPTIONS | wrong
    with pytest.raises(ValueError, match=reason):
        RemoteRetriever(options.pop("url"), **options)


# ------------------------------------------------------------------------------ protocols


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_requests_and_answers_are_read_as_they_are_written(protocol):
    queries = HOSTILE[1:2] if protocol == "ragen" else HOSTILE[1:]
    body = json.dumps(protocols.request_fields(protocol, queries, 4)).encode()
    request = protocols.read_request(body, k=9)
    queries = tuple(query[:MAX_QUERY] for query in queries)
    assert request == Request(protocol, queries, 4)
    found = [[Document("7", text, -0.25), Document("8", "", 1e-9)] for text in queries]
    answer = json.loads(answer_body(request, found))
    assert read_answer(protocol, answer, len(queries), 4) == found


def test_requests_may_leave_out_the_number():
    assert protocols.read_request(b'{"query": "a"}', k=9).k == 9
    assert protocols.read_request(b'{"query": "a", "k": 2}', k=9).k == 2
    request = protocols.read_request(b'{"queries": ["a"], "topk": null}', k=9)
    assert (request.k, request.scores) == (9, False)
    body = answer_body(request, [[Document("7", "text", 1.0)]])
    assert body == b'{"result": [[{"id": "7", "contents": "text"}]]}'


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"{", "not JSON"),
        (b"3", "no JSON object"),
        (b"{}", "holds query and top_k, or queries and topk"),
        (b'{"query": 3}', "query must hold texts, got 3"),
        (b'{"queries": "a"}', "queries must be a list"),
        (b'{"queries": ["a", null]}', "queries must hold texts, got None"),
        (b'{"query": "a", "top_k": 0}', "top_k must be from 1 to 50, got 0"),
        (b'{"query": "a", "top_k": 51}', "top_k must be from 1 to 50, got 51"),
        (b'{"query": "a", "top_k": "5"}', "top_k must be a whole number, got '5'"),
    ],
)
def test_requests_that_are_none(body, reason):
    with pytest.raises(ValueError, match=reason):
        protocols.read_request(body, k=5)


# ------------------------------------------------------------------------------ together


class Slow:
    """Finds the query itself; the first search waits until the other searches have arrived."""

    def __init__(self, threads):
        self.batches, self.others = [], threading.Barrier(threads)

    def search(self, queries, k):
        self.batches.append(len(queries))
        if len(self.batches) == 1:
            self.others.wait(10)
            time.sleep(0.2)
        if len(queries) > 1 and "bad" in queries:
            raise ConnectionError("all of them")
        if "bad" in queries:
            raise ConnectionError("only this one")
        return [[Document(str(k), query, 1.0)] for query in queries]


def searched(slow, queries, counts):
    """The results of threads that search at the same time, the first one before all others."""
    together, results = BatchingRetriever(slow), {}

    def search(i):
        if i:
            slow.others.wait(10)
        try:
            results[i] = together.search([queries[i]], counts[i])
        except ConnectionError as error:
            results[i] = str(error)

    threads = [threading.Thread(target=search, args=(i,)) for i in range(len(queries))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[i] for i in range(len(queries))]


def test_queries_that_come_meanwhile_are_one_search():
    slow = Slow(10)
    found = searched(slow, [f"q{i}" for i in range(10)], [2] * 10)
    assert found == [[[Document("2", f"q{i}", 1.0)]] for i in range(10)]
    assert slow.batches[0] == 1 and sum(slow.batches) == 10 and len(slow.batches) <= 4


def test_other_numbers_of_documents_are_other_searches():
    found = searched(Slow(6), ["a"] * 6, [1, 2, 1, 2, 1, 2])
    assert found == [[[Document(k, "a", 1.0)]] for k in "121212"]


def test_a_query_that_fails_fails_alone():
    found = searched(Slow(6), ["a", "b", "bad", "c", "d", "e"], [1] * 6)
    assert found.pop(2) == "only this one"
    assert [one[0][0].text for one in found] == list("abcde")
