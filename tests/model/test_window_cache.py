"""Caches that hold windows only: the model's logits over turns, and their bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import windowed

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.qwen import UNROLLED_LAYERS, ModelConfig, Qwen, init_params, logits
from ragen_jax.model.shape import Layer
from ragen_jax.programs.roofline import Work
from ragen_jax.programs.shapes import bytes_per_chip, cache_struct
from ragen_jax.rollout.sample import DecodeSettings, decode, episode_keys, extend, prefill

V, MEMBERS, TOKENS = 40, 2, 4
WINDOW = 6  # longer than some prompts and turns, shorter than others
SHAPE = ModelConfig(V, 16, 3, 4, 2, 8, 24)


def windowed_model(layers, **changes):
    config = dataclasses.replace(SHAPE, layers=layers, **windowed(layers, WINDOW))
    config = dataclasses.replace(config, **changes)
    return Qwen(config), init_params(config, jax.random.key(layers))


@functools.partial(jax.jit, static_argnums=0)
def last_logits(model, params, ids_T, last):
    hidden, _ = model.apply({"params": params}, ids_T[None])
    return logits(params, hidden[0, last])


def after(model, params, ids):
    return last_logits(model, params, np.array([*ids, *(0,) * (64 - len(ids))]), len(ids) - 1)


@pytest.mark.medium
@pytest.mark.parametrize(
    "everywhere, layers",  # one by one, or as a scan
    [
        *((False, 3), (True, UNROLLED_LAYERS + 2)),
        pytest.param(True, 3, marks=pytest.mark.slow),
        pytest.param(False, UNROLLED_LAYERS + 2, marks=pytest.mark.slow),
    ],
)
def test_turns_over_windows_are_turns_over_everything(layers, everywhere):
    """Prompts of a group, shorter and longer than the window, and two more turns."""
    kinds = {"kinds": (Layer("windowed"),) * layers} if everywhere else {}
    model, params = windowed_model(layers, **kinds)
    rng = np.random.default_rng(0)
    length_N = np.array([11, 3, 7], np.int32)
    tokens_NP = rng.integers(0, V, (3, 12)).astype(np.int32)
    segment, found = prefill(model, params, tokens_NP, length_N)
    rows = [tokens_NP[b // MEMBERS, : length_N[b // MEMBERS]].tolist() for b in range(6)]
    assert segment.window_N.tolist() == np.minimum(length_N, WINDOW).tolist()
    for n, row in enumerate(rows[::MEMBERS]):
        np.testing.assert_allclose(found[n], after(model, params, row), atol=2e-5)
    kept = np.arange(6)
    for turn, news in enumerate(([2, 8, 3, 1, 5, 9], [7, 2, 8, 1])):
        B = len(kept)
        keys = episode_keys(jax.random.key(1), list(range(B)), [0] * B, turn)
        reply = decode(
            *(model, params, segment, found, keys, np.full(B, TOKENS, np.int32)),
            *(np.float32(1.0),),
            settings=DecodeSettings(max_tokens=TOKENS, stop_ids=(1,)),
        )
        for b, row in enumerate(rows):
            for token, logp in zip(
                *(x[b, : reply.count_B[b]].tolist() for x in (reply.tokens_BT, reply.logp_BT)),
                strict=True,
            ):
                wanted = jax.nn.log_softmax(after(model, params, row))[token]
                assert abs(wanted - logp) < 2e-5
                row.append(token)
        # Some rows end; the others read the last token and an observation.
        kept = np.arange(B)[turn : B - turn]
        rows = [rows[b] for b in kept]
        tokens_BE = rng.integers(0, V, (len(kept), 10)).astype(np.int32)
        tokens_BE[:, 0] = [row[-1] for row in rows]
        count_B = np.array(news[: len(kept)], np.int32)
        segment, found = extend(
            *(model, params, segment, reply.reply, kept, tokens_BE, count_B), capacity=48
        )
        rows = [
            [*row, *x[1:n].tolist()] for row, x, n in zip(rows, tokens_BE, count_B, strict=True)
        ]
        assert segment.length_N.tolist() == [len(row) for row in rows]
        for b, row in enumerate(rows):
            np.testing.assert_allclose(found[b], after(model, params, row), atol=2e-5)
        # A windowed layer holds no more than its window.
        sizes = {x.shape[-2] for x in jax.tree.leaves(segment.k)}
        assert sizes == ({WINDOW} if everywhere else {48, WINDOW})


@pytest.mark.parametrize("layers", [3, UNROLLED_LAYERS + 2])
@pytest.mark.parametrize("cache_dtype", ["model", "int8"])
def test_preflight_counts_the_bytes_of_windows(layers, cache_dtype):
    model, params = windowed_model(layers, cache_dtype=cache_dtype)
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    whole, held = (
        cache_struct(model, params, mesh, 3, 20, windows=windows) for windows in (False, True)
    )
    work = Work(model.config)
    assert bytes_per_chip((whole.k, whole.v)) == work.cache_bytes(3 * 20)
    assert bytes_per_chip((held.k, held.v)) == pytest.approx(work.held_bytes(3, 20))
    assert work.held_bytes(3, 5) == work.cache_bytes(15)
    full = layers // 3
    part = (full * 20 + (layers - full) * WINDOW) / (layers * 20)
    assert work.held_bytes(3, 20) == pytest.approx(part * work.cache_bytes(60))
    longer = Work(dataclasses.replace(model.config, window=20))  # no position is dropped
    assert work.decode(3, 20, 4).bytes < longer.decode(3, 20, 4).bytes
    short = jnp.minimum(20, WINDOW) + 5
    flops = 4 * 4 * 8 * 3 * 3 * (full * 25 + (layers - full) * int(short))
    plain = longer.decode(3, 20, 4).flops - 4 * 4 * 8 * 3 * 3 * layers * 25
    assert work.decode(3, 20, 4).flops == pytest.approx(plain + flops)
