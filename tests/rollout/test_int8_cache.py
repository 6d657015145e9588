"""Keys and values in int8: rounding, attention, and episodes that calls may divide in any way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layer_kinds
import numpy as np
import pytest
from test_slots import HYBRID, collected, played_by

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.attention import WHOLE, attend
from ragen_jax.model.quantised import Quantised, dequantise, quantise
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits, with_cache
from ragen_jax.programs.roofline import Work
from ragen_jax.programs.shapes import bytes_per_chip, cache_struct
from ragen_jax.rollout.sample import DecodeSettings, decode, episode_keys, extend, prefill

TINY = ModelConfig(vocab_size=50, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_width=24)
HALF_LINEAR = functools.partial(layer_kinds.hybrid, every=2)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def numpy_rounded(x):
    """The rounding in NumPy: multiples of a 127th of each vector's largest absolute value."""
    x = np.asarray(x)
    step = np.abs(x).max(-1, keepdims=True).astype(np.float32) / np.float32(127)
    return np.where(step > 0, step * np.rint(x / np.where(step > 0, step, 1)), 0)


def test_each_vector_is_rounded_by_its_own_scale():
    x = random(3, 2, 5, 8) * jnp.asarray([1e-3, 1.0, 1e3])[:, None, None, None]
    x = x.at[0, 0, 0].set(0)
    found = quantise(x)
    assert found.codes.dtype == jnp.int8 and found.scale.shape == (3, 2, 5, 1)
    assert abs(np.asarray(found.codes, int)).max() == 127 and found.shape == x.shape
    np.testing.assert_allclose(dequantise(found, "float32"), numpy_rounded(x), rtol=1e-6)
    assert (abs(dequantise(found, "float32") - x) <= 0.5001 * found.scale).all()
    again = quantise(dequantise(found, "float32"))  # rounded numbers stay as they are
    assert (again.codes == found.codes).all()


@pytest.mark.medium
@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("T, S, rows", [(1, 20, False), (3, 20, True), (3, WHOLE + 40, False)])
def test_attention_reads_the_rounded_numbers(K, T, S, rows):
    """One new token, rows that a call chooses, and a memory that is read in blocks."""
    B, N, H, D = 4, 4 if rows else 2, 4, 8
    q, k, v = (random(B, T, heads, D, seed=i) for i, heads in enumerate((H, K, K)))
    old = random(N, K, S, D, seed=3), random(N, K, S, D, seed=4)
    length_N = jnp.asarray([S, 7, 0, 3][: B if rows else N])
    extra = (length_N, jnp.asarray([2, 0, 1, 1])) if rows else (length_N,)
    found = attend(q, k, v, [(*map(quantise, old), *extra)])
    rounded = [jnp.asarray(numpy_rounded(x)) for x in old]
    np.testing.assert_allclose(found, attend(q, k, v, [(*rounded, *extra)]), atol=2e-6)
    assert abs(found - attend(q, k, v, [(*old, *extra)])).max() > 1e-4  # rounding has an effect


def test_the_model_with_a_plain_cache_is_the_model_itself():
    model = Qwen(TINY)
    on_cpu = dict(cache_kernel="xla", platform="cpu")
    int8 = with_cache(model, cache_dtype="int8", **on_cpu)
    assert with_cache(model, cache_dtype="model", **on_cpu) is model != int8


@pytest.mark.long
@pytest.mark.parametrize(
    "layers, kinds",  # one by one, or as a scan
    [
        *((2, None), (40, layer_kinds.windowed), (2, layer_kinds.mixture), (40, HALF_LINEAR)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((40, None), (2, layer_kinds.windowed)),
                *((40, layer_kinds.mixture), (2, HALF_LINEAR)),
            )
        ),
    ],
)
def test_a_row_read_in_pieces_is_the_row_read_at_once(layers, kinds):
    """Prefill, extend and decode see the same numbers, whichever of them computed them.

    In deep models, float rounding moves a few numbers to other codes.
    """
    fields = kinds(layers) if kinds else {}
    config = dataclasses.replace(TINY, layers=layers, cache_dtype="int8", **fields)
    model, params = Qwen(config), init_params(config, jax.random.key(1))
    tokens_NP = np.random.default_rng(0).integers(0, 50, (2, 9)).astype(np.int32)
    segment, found = prefill(model, params, tokens_NP, np.array([9, 6], np.int32))
    assert {x.dtype.name for x in jax.tree.leaves(segment.k)} == {"int8", "float32"}
    keys = episode_keys(jax.random.key(0), [1, 2], [0, 0], 0)
    replies = decode(
        *(model, params, segment, found, keys, np.full(2, 5, np.int32), np.float32(1)),
        settings=DecodeSettings(max_tokens=5, stop_ids=()),
    )
    more = np.array([[3, 4, 5]] * 2, np.int32)
    more[:, 0] = np.asarray(replies.tokens_BT)[:, -1]
    rows, close = np.arange(2, dtype=np.int32), 1e-5 if layers == 2 else 2e-4
    three = np.full(2, 3, np.int32)
    _, last = extend(model, params, segment, replies.reply, rows, more, three, capacity=20)
    for row, length in enumerate((9, 6)):
        sampled = np.asarray(replies.tokens_BT[row])
        whole = np.concatenate([tokens_NP[row, :length], sampled, more[row, 1:]])
        hidden, _ = model.apply({"params": params}, jnp.asarray(whole[None]))
        every = jax.nn.log_softmax(logits(params, hidden[0]))
        own = every[length - 1 : length + 4][np.arange(5), sampled]
        np.testing.assert_allclose(replies.logp_BT[row], own, atol=close)
        np.testing.assert_allclose(jax.nn.log_softmax(last[row]), every[-1], atol=close)


@pytest.mark.long
def test_slots_and_lock_step_play_the_same_episodes():
    model, params, task = played_by("frozen_lake", "full")
    plain = collected(model, params, task)
    theirs = collected(model, params, task, cache_dtype="int8")
    gaps = []
    for served in (dict(chunk=5), dict(slots=8, chunk=12)):
        ours = collected(model, params, task, cache_dtype="int8", **served)
        for a, b, c in zip(ours, theirs, plain, strict=True):
            for one, other, exact in zip(a.turns, b.turns, c.turns, strict=False):
                assert one.sampled.tolist() == other.sampled.tolist()
                np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
                if one.sampled.tolist() != exact.sampled.tolist():
                    break
                gaps.append(abs(one.logp - exact.logp).max())
    assert 1e-4 < max(gaps) < 0.3  # the log-probs are those of the rounded cache


@pytest.mark.long
def test_a_hybrid_in_lock_step_is_close_to_the_exact_one():
    """Its full layers' keys and values are rounded, the states of the others are not."""
    model, params, task = played_by("frozen_lake", "full", **dict(HYBRID))
    exact, rounded = (collected(model, params, task, cache_dtype=x) for x in ("model", "int8"))
    gaps = []
    for a, b in zip(exact, rounded, strict=True):
        for one, other in zip(a.turns, b.turns, strict=False):
            if one.sampled.tolist() != other.sampled.tolist():
                break
            gaps.append(abs(one.logp - other.logp).max())
    assert len(gaps) > 30 and 1e-4 < max(gaps) < 0.3


def test_a_cache_has_the_bytes_that_preflight_counts():
    config = dataclasses.replace(TINY, head_dim=64, dtype="bfloat16")
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    counted = {}
    for cache_dtype in ("model", "int8"):
        model = with_cache(
            Qwen(config), cache_dtype=cache_dtype, cache_kernel="xla", platform="cpu"
        )
        cache = cache_struct(model, params, mesh, 3, 20)
        counted[cache_dtype] = bytes_per_chip((cache.k, cache.v))
        assert counted[cache_dtype] == Work(model.config).cache_bytes(3 * 20)
    assert counted["int8"] / counted["model"] == (64 + 4) / (2 * 64)
    assert isinstance(cache.k, tuple) and isinstance(cache.k[0], Quantised)
