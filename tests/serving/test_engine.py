"""How the engine groups requests: sessions whose replies end together are served together again."""

import time
import types

import jax
import numpy as np
import pytest

from ragen_jax import serve
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.core.sharding import make_mesh
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.rows import Endings
from ragen_jax.serving import engine as engine_module
from ragen_jax.serving.engine import Engine, Ticket, _Patience


@pytest.mark.fast
def test_a_wait_costs_no_more_than_leaving_early():
    """With r running replies, n ended and chunks of s seconds, a wait of w costs r * w, and leaving
    without the n costs them n * s; the wait ends where the time of all, (r + n) * w, is n * s."""
    for ended, running, seconds in ((64, 0, 1.0), (1, 63, 1.0), (8, 8, 3.0)):
        patience = _Patience.after_chunk(seconds, ended, running, 1)
        assert patience.expected == ended
        assert patience.seconds * (ended + running) == pytest.approx(seconds * ended)
    assert _Patience.after_chunk(1.0, 0, 5, 1) == _Patience(0, 0.0, 1)
    assert _Patience.after_chunk(1.0, 0, 0, 1) == _Patience(0, 0.0, 1)


@pytest.fixture
def make_engine(language_model):
    """make_engine() -> an `Engine` of four slots."""
    config = sokoban.get_config("llm")
    config.model.path, config.model.dtype = str(language_model), "float32"
    policy = serve.of_model(str(language_model), load_config(config))
    return lambda: Engine(
        policy.model,
        policy.params,
        mesh=make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
        slots=4,
        longest_reply=8,
        sampling=Sampling(temperature=1.0),
        endings=Endings((), None),
        key=jax.random.key(0),
    )


@pytest.mark.medium
def test_a_chunk_that_took_an_hour_does_not_make_the_next_request_wait_an_hour(
    make_engine, monkeypatch
):
    """As after a computer has slept, or a program was compiled."""
    decode, slept = engine_module.decode_rows, []

    def sleep(*arguments):
        slept.append(3600.0)
        return decode(*arguments)

    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + sum(slept))
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(engine_module, "decode_rows", sleep)
    engine = make_engine()
    prompt = np.arange(5, dtype=np.int32)
    for future in [engine.submit(Ticket(prompt, 8, (n, 0, 0))) for n in range(4)]:
        future.result()
    monkeypatch.setattr(engine_module, "decode_rows", decode)
    engine.submit(Ticket(prompt, 8, (0, 0, 1))).result(timeout=60)  # the other three stay away
    engine.close()


@pytest.mark.medium
def test_sessions_whose_replies_end_together_share_their_chunks(make_engine, monkeypatch):
    """Four sessions of equally long replies ask one after the other, as threads do: each turn is a
    chunk of all four, except where a session stays away."""
    active, decode = [], engine_module.decode_rows

    def count(cache, rows, *rest):
        active.append(sum(row.tokens_left > 0 for row in rows))
        time.sleep(1.0)  # a chunk takes so long, so that requests arrive in time on any machine
        return decode(cache, rows, *rest)

    monkeypatch.setattr(engine_module, "decode_rows", count)
    engine = make_engine()
    prompt = np.arange(5, dtype=np.int32)
    for turn in range(3):
        asked = []
        for session in range(4):
            asked.append(engine.submit(Ticket(prompt, 8, (session, 0, turn))))
            time.sleep(0.01)
        for future in asked:
            future.result()
    for turn in (3, 4):  # the other three stay away
        engine.submit(Ticket(prompt, 8, (0, 0, turn))).result()
    engine.close()
    assert active == [4, 4, 4, 1, 1]
