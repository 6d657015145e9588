"""The HTTP client: hostile responses end in time, in bounded memory, with a one-line error."""

import json
import socket
import threading
import time
import tracemalloc

import pytest
from hostile_servers import HTTPS_WAYS, SOUND_WAYS, WAYS, hostile
from retrieval_servers import serve

from ragen_jax.core import http_json
from ragen_jax.core.http_json import ExchangeError, parse_json, post_json
from ragen_jax.envs.search_qa.remote import RemoteRetriever

pytestmark = pytest.mark.fast

LIMIT_S = 0.5
QUICK = (  # in the default run: responses that once hung or raised past the client
    *("dripped_status_line", "dripped_chunk_size", "endless_trailers", "endless_continue"),
    *("large_empty_lists", "number_of_400_digits", "deep_lists", "redirect_to_file", "binary"),
    *("tls_dripped", "never_accepts", "chunk_negative", "gzip_bomb"),
)
EVERY = [
    pytest.param(way, marks=() if way in QUICK else pytest.mark.long)
    for way in (*WAYS, *HTTPS_WAYS, "never_accepts")
    if way not in SOUND_WAYS
]


@pytest.mark.medium
@pytest.mark.parametrize("way", EVERY)
def test_a_hostile_server_costs_its_time_limit_and_a_line(way):
    with hostile(way) as url:
        remote = RemoteRetriever(url, protocol="search_r1", time_limit=LIMIT_S, tries=1, seed=0)
        start = time.monotonic()
        with pytest.raises(ConnectionError) as caught:
            remote.search(["a"], 1)
        seconds = time.monotonic() - start
    assert seconds < LIMIT_S + 3  # allowance for a busy machine; the rest takes milliseconds
    message = str(caught.value)
    assert message.startswith(f"retriever {url} ") and len(message) < 700, message
    assert message.isprintable()


@pytest.mark.parametrize("way", SOUND_WAYS)
def test_characters_that_are_none_are_replaced(way):
    with hostile(way) as url:
        remote = RemoteRetriever(url, protocol="search_r1", time_limit=10.0, tries=1, seed=0)
        ((found,),) = remote.search(["a"], 1)
    assert "\ufffd" in found.name and found.text.startswith("a") and "\ufffd" in found.text
    (found.name + found.text).encode()
    if way == "lone_surrogates":
        assert found.text == "a \ufffd \U0001f600"  # a surrogate pair is one character


@pytest.mark.medium
def test_a_name_that_is_not_looked_up(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: ended.wait(60))
    start = time.monotonic()
    with pytest.raises(
        ExchangeError, match=r"http://slow\.invalid: TimeoutError.*could not be resolved"
    ):
        post_json("http://slow.invalid", {}, timeout_s=LIMIT_S, max_bytes=1000)
    assert time.monotonic() - start < LIMIT_S + 3
    ended.set()


def test_names_are_looked_up():
    with serve() as (url, _):
        remote = RemoteRetriever(url.replace("127.0.0.1", "localhost"), protocol="ragen", **OPTIONS)
        assert remote.search(["a"], 1)[0][0].text == "1 about a"


OPTIONS = {"time_limit": 10.0, "tries": 1, "seed": 0}


@pytest.mark.medium
@pytest.mark.parametrize("piece", [b"[],", b"{},", b'{"":0},', b'"ab",', b"1.5,", b"[[[["])
def test_values_are_counted_before_they_are_built(piece):
    data = b"[" + piece * (2**20 // len(piece)) + b"0]"
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"more than {http_json.max_values(2**20)} values"):
        parse_json(data, max_values=http_json.max_values(2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**16


def test_an_answer_takes_a_bounded_multiple_of_its_bytes():
    most = 2**20
    count = http_json.max_values(most) // 4
    for data in (
        json.dumps([{"": 0}] * count).encode(),
        json.dumps(["\U0001f600" + "a" * (most - 100)], ensure_ascii=False).encode(),
    ):
        tracemalloc.start()
        parse_json(data, max_values=http_json.max_values(most))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(data) <= most and peak < 12 * most


def test_texts_may_hold_any_number_of_commas_and_brackets():
    value = {"a": '[,{"\\' * 10_000}
    assert parse_json(json.dumps(value).encode(), max_values=3) == value


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "too large: 1e999"),
        (b"[" + b"9" * 301 + b"]", "a number with 301 digits; at most 300"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"a": ', "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_json_that_is_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(data, max_values=10**6)


@pytest.mark.parametrize("url", ["ftp://h", "h:80", "http://", "http://h:0", "http://u:secret@h"])
def test_addresses_that_are_refused(url):
    with pytest.raises(ValueError, match="url must have the form http://HOST:PORT") as caught:
        post_json(url, {}, timeout_s=1.0, max_bytes=1)
    assert "secret" not in str(caught.value)
