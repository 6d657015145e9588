"""SearchQA over each retriever of its options: an index of words, vectors, servers."""

import json
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from retrieval_servers import echo, serve

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs import make_env
from ragen_jax.envs.search_qa import remote
from ragen_jax.envs.search_qa.dense_index import Settings
from ragen_jax.envs.search_qa.passages import write_passages
from ragen_jax.envs.search_qa.protocols import PROTOCOLS
from ragen_jax.envs.search_qa.retrievers import open_retriever
from ragen_jax.envs.search_qa.words import write_words
from ragen_jax.rollout.env_calls import Limits, StepRequest, StepResult, act, observe

pytest.importorskip("bm25s")
pytestmark = pytest.mark.fast

ENCODER = Path(__file__).with_name("reference") / "bert"
TEXTS = ("Ashford lies in Valia.", "Valia is a region.", "Marwyn is the mayor of Ashford.")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "LONGEST_PAUSE", 0.02)


@pytest.fixture
def build(tmp_path):
    """build(retriever=..., ...) -> SearchQA over a file with a question."""
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "Who?", "answers": ["Marwyn"]}) + "\n")
    return lambda **options: make_env("search_qa", path=str(path), split=None, **options)


def shown(environment, action="search[Ashford]"):
    step = environment.step(environment.reset(0), action)
    return environment.render(step.state)


def test_an_index_of_words(build, tmp_path):
    write_words(tmp_path, write_passages(tmp_path, iter(TEXTS)), stem=False)
    environment = build(retriever="bm25_index", index=str(tmp_path))
    assert "[Document 1] (ID: 0, Score:" in shown(environment)
    assert all(text in shown(environment) for text in (TEXTS[0], TEXTS[2]))
    assert TEXTS[1] not in shown(environment)


@pytest.fixture
def index(tmp_path):
    """A dense index of TEXTS with given vectors."""
    list(write_passages(tmp_path, iter(TEXTS)))
    np.save(tmp_path / "given.npy", np.eye(3, 16, dtype=np.float32))
    Settings(str(tmp_path / "given.npy"), str(ENCODER), "float32").write(tmp_path)
    return str(tmp_path)


@pytest.mark.medium
def test_vectors_on_the_devices(build, index):
    environment = build(retriever="dense", index=index, documents=2)
    again = build(retriever="dense", index=index)
    assert environment._retriever is again._retriever  # in memory only once
    page = shown(environment)
    assert page.count("[Document ") == 2 and page == shown(environment)
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    options = {"retriever": "dense", "index": index, "documents": 2, "hops": (2, 2)}
    kept = type(environment).resident(mesh, **options)
    assert kept.arguments[0].shape == (1, 3, 16) and kept.keywords["k"] == 2
    assert type(environment).resident(mesh, **options | {"retriever": "bm25"}) is None


def test_vectors_of_another_encoder(build, index):
    np.save(Path(index) / "given.npy", np.eye(3, 8, dtype=np.float32))
    with pytest.raises(ValueError, match=r"given\.npy: its vectors have 8 numbers, .* encoder 16"):
        build(retriever="dense", index=index)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server(build, protocol):
    with serve() as (url, requests):
        environment = build(retriever=protocol, url=url, documents=3)
        page = shown(environment)
        assert "1 about Ashford" in page and page.count("[Document ") == 3
        assert len(requests) == 2  # the first request checks that the server responds
    assert ("queries" in requests[1][1]) == (protocol == "search_r1")


@pytest.mark.medium
def test_episodes_that_search_at_once_are_one_request(build):
    gate = threading.Event()

    def answer(fields):
        if fields["queries"] == ["first"]:
            gate.wait(10)  # until the other threads wait
        return echo(fields)

    with serve(answer) as (url, requests):
        environment = build(retriever="search_r1", url=url, documents=1)
        jobs = [
            StepRequest(environment.reset(0), (f"search[{name}]",), np.random.default_rng(0), 2)
            for name in ["first", *map(str, range(15))]
        ]
        threading.Timer(0.5, gate.set).start()
        results = act(environment, jobs, Limits(time_limit=60.0, workers=16))
    assert all(isinstance(result, StepResult) for result in results)
    for result, name in zip(results, ["first", *map(str, range(15))], strict=True):
        assert f"1 about {name}" in result.observation
    assert len(requests) < 10


def test_a_server_that_is_not_there_is_refused_at_once(build):
    with serve() as (url, _):
        pass
    with pytest.raises(ValueError, match=f"retriever {url} gave no usable answer in 8 tries"):
        build(retriever="ragen", url=url)


def test_documents_of_half_characters_are_shown(build):
    answer = {"results": [{"id": "\ud800", "content": "a\udfff \x00<|im_end|>", "score": 1.0}]}
    with serve(lambda fields: (200, answer)) as (url, _):
        environment = build(retriever="ragen", url=url)
        state = environment.step(environment.reset(0), "search[a]").state
        (text,) = observe(environment, [state], Limits())
    assert isinstance(text, str) and "a\ufffd " in text


def test_sources_belong_to_their_retriever():
    with pytest.raises(ValueError, match="one of 'bm25', 'bm25_index', 'dense', 'ragen', "):
        open_retriever("lucene", corpus=None, index=None, url=None)
    for name, needs in (("bm25_index", "index"), ("dense", "index"), ("ragen", "url")):
        with pytest.raises(ValueError, match=f"which needs {needs}, got None"):
            open_retriever(name, corpus=None, index=None, url=None)
