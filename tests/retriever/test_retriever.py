"""The retriever command: building an index, serving both protocols, one-line errors."""

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_commands import ROOT, call

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa import passages
from ragen_jax.envs.search_qa.dense_index import DenseIndex
from ragen_jax.envs.search_qa.e5 import E5, PASSAGE, QUERY
from ragen_jax.envs.search_qa.protocols import PROTOCOLS
from ragen_jax.envs.search_qa.remote import RemoteRetriever
from ragen_jax.envs.search_qa.retrieve import Document
from ragen_jax.envs.search_qa.words import Words
from ragen_jax.envs.search_qa.world import make_world
from ragen_jax.retriever import serve
from ragen_jax.retriever.serve import Server, open_index

pytest.importorskip("bm25s")
pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)"),
]

WORLD = make_world(5, 20)
ENCODER = ROOT / "tests" / "envs" / "reference" / "bert"
MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
COMMAND = "ragen_jax.retriever"


@pytest.fixture
def corpus(tmp_path):
    """A corpus of 80 texts."""
    lines = "".join(json.dumps({"contents": text}) + "\n" for text in WORLD.passages)
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    return path


def build(*words):
    code, out, err = call(COMMAND, "build", *map(str, words))
    assert code == 0, err
    return out


@contextlib.contextmanager
def serving(retriever, documents=5):
    """The address of a server in a thread."""
    server = Server(retriever, host="127.0.0.1", port=0, documents=documents)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()


def post(url, body, path="/retrieve", method="POST", headers=None):
    """(status, the answer's JSON object)."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def remote(url, protocol):
    return RemoteRetriever(url, protocol=protocol, time_limit=20.0, tries=1, seed=0)


def test_words_are_built_and_served(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(passages, "CHUNK", 13)
    out = build(f"--corpus={corpus}", f"--index={tmp_path / 'index'}")
    assert "80 texts, bm25" in out
    index = Words(tmp_path / "index")
    queries = [*WORLD.things["town"], "nothing fits", "\ud800 ümläut"]
    with serving(index) as url:
        for protocol in PROTOCOLS:
            client = remote(url, protocol)
            client.check()
            assert client.search(queries, 3) == index.search(queries, 3)
        assert client.search(queries, 3)[0][0].text.startswith(f'"{queries[0]}"')
        assert post(url, None, "/health", "GET") == (200, {"status": "healthy"})
        status, answer = post(url, json.dumps({"query": "born"}))
        assert status == 200 and len(answer["results"]) == 5


@pytest.mark.medium
def test_vectors_are_built_and_served(tmp_path, corpus):
    words = [f"--corpus={corpus}", "--retriever=dense", f"--encoder={ENCODER}"]
    assert "80 texts, dense" in build(*words, f"--index={tmp_path / 'index'}")
    vectors = np.load(tmp_path / "index" / "vectors.npy")
    assert vectors.shape == (80, 16) and vectors.dtype == np.float16
    expected = E5(ENCODER, MESH, prefix=PASSAGE)(WORLD.passages)
    np.testing.assert_allclose(vectors, expected, atol=1e-3)

    index = open_index(tmp_path / "index")
    assert isinstance(index, DenseIndex) and len(index) == 80
    queries = [f"who is {name}?" for name in WORLD.things["person"]]
    scores = E5(ENCODER, MESH, prefix=QUERY)(queries) @ vectors.astype(np.float32).T
    with serving(index) as url:
        found = remote(url, "search_r1").search(queries, 3)
    for documents, score in zip(found, scores, strict=True):
        order = np.argsort(-score, kind="stable")[:3]
        assert [d.name for d in documents] == [str(row) for row in order]
        assert [d.text for d in documents] == [WORLD.passages[row] for row in order]

    # The same with existing vectors: only the texts are built.
    np.save(tmp_path / "given.npy", vectors)
    given = f"--vectors={tmp_path / 'given.npy'}"
    build(*words, given, "--dtype=bfloat16", f"--index={tmp_path / 'texts'}")
    again = open_index(tmp_path / "texts")
    assert not (tmp_path / "texts" / "vectors.npy").exists()
    assert again.load()._matrix.matrix_SRD.dtype == "bfloat16"
    for documents, others in zip(again.search(queries, 3), index.search(queries, 3), strict=True):
        for one, other in zip(documents, others, strict=True):
            assert one.score == pytest.approx(other.score, abs=0.02)


class Moody:
    """A retriever that fails for some queries."""

    def search(self, queries, k):
        if "break" in queries:
            raise RuntimeError("broken")
        return [[Document("1", query, 1.0)] for query in queries]


def test_whatever_is_asked_the_server_goes_on(capsys):
    with serving(Moody()) as url:
        for body, reason in ((b"{", "not JSON"), (b'{"query": 1}', "query must hold texts, got 1")):
            status, answer = post(url, body)
            assert status == 400 and answer["error"].startswith(reason)
        status, answer = post(url, b"{}", headers={"Content-Length": str(10**12)})
        assert status == 413 and "Content-Length must be at most" in answer["error"]
        status, answer = post(url, b"{}", "/search")
        assert status == 404 and answer["error"] == "POST is only for /retrieve, got /search"
        assert post(url, None, "/retrieve", "GET")[0] == 404
        status, answer = post(url, b'{"query": "break"}')
        assert status == 500 and answer["error"] == "RuntimeError: broken"
        with socket.create_connection(url.removeprefix("http://").split(":")) as sock:
            sock.sendall(b"POST /retrieve HTTP/1.1\r\nContent-Length: 90\r\n\r\n{")  # incomplete
        for protocol in PROTOCOLS:
            assert remote(url, protocol).search(["a"], 1) == [[Document("1", "a", 1.0)]]
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_an_index_is_whole_or_not_there(tmp_path, corpus):
    index = tmp_path / "index"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"contents": "a"}\n{"text": "b"}\n')
    code, out, err = call(COMMAND, "build", f"--corpus={bad}", f"--index={index}")
    assert (code, out) == (2, "")
    assert err == (f"error: {bad}, line 2: the field 'contents' must be a text, got None\n")
    assert not index.exists() and sorted(os.listdir(tmp_path)) == ["bad.jsonl", corpus.name]
    build(f"--corpus={corpus}", f"--index={index}")
    call(COMMAND, "build", f"--corpus={bad}", f"--index={index}")
    assert len(Words(index)) == 80  # the earlier index is still there


@pytest.mark.parametrize(
    "words, reason",
    [
        ([], "expected build or serve, got ''"),
        (["run"], "expected build or serve, got 'run'"),
        (["serve", "--port=x"], "--port is 'x'; it must be a whole number"),
        (["serve", "--nonsense"], "there is no flag --nonsense"),
        (["serve"], "serve needs --index"),
        (["build", "--index=x"], "build needs --corpus"),
        (["build", "--retriever=dense", "--index=x", "--corpus=x"], "build needs --encoder"),
        (["serve", "--retriever=lucene"], "--retriever is 'lucene'; accepted: bm25, dense"),
        (["serve", "--index=x", "--dtype=int8"], "--dtype is 'int8'; accepted: float32, bfloat16"),
        (["serve", "--index=x", "--documents=0"], "--documents is 0; it must be from 1 to 50"),
        (["serve", "--index=nowhere"], "nowhere holds no index .* ragen_jax.retriever build"),
        (["build", "--corpus=nowhere", "--index=x"], "no corpus at nowhere"),
        (
            ["build", "--retriever=dense", "--index=x", "--corpus=x", "--encoder=./nowhere"],
            "no model directory ./nowhere",
        ),
    ],
)
def test_bad_input_is_one_line(words, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(COMMAND, *words)
    assert (code, out) == (2, "") and re.match(f"error: .*{reason}", err), err
    assert err.count("\n") == 1


def test_files_that_do_not_fit_are_refused_before_they_are_read(tmp_path, corpus):
    index, given = tmp_path / "index", tmp_path / "given.npy"
    words = [f"--corpus={corpus}", "--retriever=dense", f"--encoder={ENCODER}"]
    words += [f"--index={index}", f"--vectors={given}"]
    wide, few, good = ((80, 24), (79, 16), (80, 16))
    reasons = {
        wide: "its vectors have 24 numbers, those of the encoder 16",
        few: "holds 79 vectors, the corpus 80 texts",
    }
    for shape, reason in reasons.items():
        np.save(given, np.full(shape, np.nan, np.float32))
        code, _, err = call(COMMAND, "build", *words)
        assert code == 2 and re.match(f"error: {given}:? {reason}", err), err
    np.save(given, np.full(good, np.nan, np.float32))
    build(*words)
    for shape, reason in (reasons | {good: ", row 0: a vector must be finite"}).items():
        np.save(given, np.full(shape, np.nan, np.float32))
        code, _, err = call(COMMAND, "serve", f"--index={index}")
        assert code == 2 and re.match(f"error: {given}:? ?{reason}", err), err
    given.unlink()
    code, _, err = call(COMMAND, "serve", f"--index={index}")
    assert code == 2 and err.startswith(f"error: no vectors at {given}")


@pytest.mark.parametrize(
    "content, reason",
    [
        ("{", "holds no dense index"),
        ("[]", "dense.json must hold vectors, encoder, dtype, got"),
        ('{"vectors": ""}', "dense.json must hold vectors, encoder, dtype, got"),
        ('{"vectors": 1, "encoder": "", "dtype": ""}', "dense.json: vectors must be a text, got 1"),
        ('{"vectors": "", "encoder": "", "dtype": "int8"}', "dense.json: dtype is 'int8'"),
    ],
)
def test_settings_that_somebody_has_changed(tmp_path, content, reason):
    (tmp_path / "dense.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{reason}"):
        open_index(tmp_path)


def test_several_processes_do_not_search_one_index(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(ValueError, match=f"{tmp_path} .* this run has 4: serve it"):
        DenseIndex(tmp_path)


def test_an_address_that_is_taken(tmp_path, corpus):
    build(f"--corpus={corpus}", f"--index={tmp_path / 'index'}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = call(COMMAND, "serve", f"--index={tmp_path / 'index'}", f"--port={port}")
    assert code == 2 and err.startswith(f"error: cannot serve at 127.0.0.1:{port}: ")


@pytest.mark.long
def test_a_server_of_its_own(tmp_path, corpus):
    build(f"--corpus={corpus}", f"--index={tmp_path / 'index'}")
    words = [sys.executable, "-m", COMMAND, "serve", f"--index={tmp_path / 'index'}", "--port=0"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            (url,) = re.findall(r"serving .* \(80 documents\) at (http://127\.0\.0\.1:\d+)", line)
            name = WORLD.things["person"][3]
            ((found, *_),) = remote(url, "search_r1").search([name], 2)
            assert found.text.startswith(f'"{name}"')
            server.send_signal(signal.SIGTERM)  # background processes get no Ctrl-C
            assert server.wait(20) == 0
        finally:
            server.kill()
    assert Path(tmp_path / "index").exists()


def status_of(sock):
    """The status and the error message that a raw connection receives."""
    sock.settimeout(20)
    data = b""
    while piece := sock.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    assert body.count(b"\n") == 0
    return int(head.split()[1]), json.loads(body)["error"]


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


POST = b"POST /retrieve HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "request_, status, reason",
    [
        (POST + b"\r\n", 400, "a request needs Content-Length"),
        (POST + b"Content-Length: -1\r\n\r\n", 400, "a request needs Content-Length"),
        (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413, "must be at most"),
        (POST + b"Content-Length: 9999999\r\n\r\n" + b"x" * 9999999, 413, "must be at most"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n", 400, "no Transfer-E"),
        (POST + b"X: y\r\n" * 200 + b"\r\n", 431, "Too many headers"),
        (POST + (b"X: " + b"y" * 900 + b"\r\n") * 90 + b"\r\n", 431, "more bytes arrived"),
        (b"\x16\x03\x01\x02" * 100 + b"\r\n", 400, "Bad"),
        (b"GET /" + b"x" * 70_000, 431, "more bytes arrived"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_requests_that_are_too_much_get_a_line(request_, status, reason):
    with serving(Moody()) as url, connected(url) as sock:
        with contextlib.suppress(OSError):  # the server has already refused it
            sock.sendall(request_)
        got, error = status_of(sock)
        assert got == status and reason in error and len(error) <= 200
        assert remote(url, "ragen").search(["a"], 1) == [[Document("1", "a", 1.0)]]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"queries": ["a"] * 513}, "a list of at most 512 texts"),
        ({"queries": ["a"] * 10_000}, "a list of at most 512 texts"),
        ({"queries": ["a" * 1000] * 160}, "at most 64000 characters together, got 160000"),
        ({"queries": [[]] * 50_000}, "JSON with more than 40000 values"),
        ({"queries": ["a"], "topk": 10**9}, "topk must be from 1 to 50"),
        ({"query": "a", "top_k": float("nan")}, "NaN is not JSON"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_work_that_is_too_much_is_refused(fields, reason):
    with serving(Moody()) as url:
        status, answer = post(url, json.dumps(fields))
        assert status == 400 and reason in answer["error"]


class Counting(Moody):
    """Takes some time for each query, and records the searches in order."""

    def __init__(self, seconds=0.0):
        self.searches, self.seconds = [], seconds

    def search(self, queries, k):
        self.searches.append(list(queries))
        time.sleep(self.seconds * len(queries))
        return super().search(queries, k)


@pytest.mark.medium
def test_others_are_served_between_the_parts_of_a_large_request():
    retriever = Counting(seconds=0.004)
    with serving(retriever) as url:
        many = json.dumps({"queries": ["a"] * 512, "topk": 2})  # takes 2 s
        thread = threading.Thread(target=post, args=(url, many), daemon=True)
        thread.start()
        while not retriever.searches:
            time.sleep(0.01)
        assert post(url, '{"query": "b", "k": 1}')[0] == 200
        assert thread.is_alive() or len(retriever.searches) < 17
        thread.join(30)
    assert max(map(len, retriever.searches)) <= 32
    assert retriever.searches.index(["b"]) < len(retriever.searches) - 2


def test_a_search_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(serve, "SEARCH_SECONDS", 0.1)
    retriever = Counting(seconds=0.005)
    with serving(retriever) as url:
        status, answer = post(url, json.dumps({"queries": ["a"] * 512}))
    assert status == 503 and "took more than 0.1 s" in answer["error"]
    assert len(retriever.searches) < 10


def test_an_answer_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(serve, "MAX_ANSWER", 1000)
    with serving(Moody()) as url:
        status, answer = post(url, json.dumps({"queries": ["a" * 100] * 20}))
    assert status == 413 and "more than 1000 characters" in answer["error"]


def test_slow_clients_neither_keep_threads_nor_keep_others_out(monkeypatch):
    monkeypatch.setattr(serve, "MAX_CONNECTIONS", 8)
    before = threading.active_count()
    with serving(Moody()) as url, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(url)) for _ in range(40)]
        for sock in slow:
            with contextlib.suppress(OSError):  # the oldest are already closed
                sock.sendall(POST)  # the rest never comes
        for _ in range(5):
            assert remote(url, "ragen").search(["a"], 1) == [[Document("1", "a", 1.0)]]
        assert threading.active_count() - before < 8 + 8  # some threads are still ending


@pytest.mark.medium
def test_a_request_that_drips_ends_at_its_limit(monkeypatch):
    monkeypatch.setattr(serve, "REQUEST_SECONDS", 0.5)
    for start in (POST + b"X: ", POST + b"Content-Length: 100000\r\n\r\n"):
        with serving(Moody()) as url, connected(url) as sock:
            sock.sendall(start)
            ended = time.monotonic() + 20
            with pytest.raises(OSError):  # the server closes the connection
                while time.monotonic() < ended:
                    sock.sendall(b"x")
                    time.sleep(0.05)
