"""The kernel for pages of a cache against the plain form, as a program without a TPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layer_kinds
import numpy as np
import pytest

from ragen_jax.config.build import build_meshes
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.model import attention, page_kernel
from ragen_jax.model.attention import PageOfLayers, Segment, attend, is_page
from ragen_jax.model.page_kernel import block_size, read_page
from ragen_jax.model.quantised import quantise
from ragen_jax.model.qwen import UNROLLED_LAYERS, ModelConfig, Qwen, init_params, with_cache

TINY = ModelConfig(vocab_size=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=24)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernel without a TPU, in blocks of 32 positions."""
    monkeypatch.setattr(page_kernel, "LONGEST", 32)
    monkeypatch.setattr(attention, "read_page", functools.partial(read_page, interpret=True))


def numpy_softmax(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[-1])
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ v


def test_each_row_reads_its_positions_of_a_layer(interpreted):
    (L, B, K, Q, S, D), lengths = (3, 5, 2, 3, 96, 8), [96, 0, 13, 32, 33]
    q = random(B, K, Q, D)
    k, v = random(L, B, K, S, D, seed=1), random(L, B, K, S, D, seed=2)
    top, total, out = read_page(q, k, v, 1, jnp.asarray(lengths), interpret=True)
    for row, length in enumerate(lengths):
        if not length:
            assert (top[row] == -1e30).all() and not total[row].any() and not out[row].any()
            continue
        for head in range(K):
            expected = numpy_softmax(
                *(np.asarray(q[row, head], np.float64),),
                *(np.asarray(x[1, row, head, :length], np.float64) for x in (k, v)),
            )
            np.testing.assert_allclose(out[row, head] / total[row, head], expected, atol=1e-6)


@pytest.mark.parametrize("K", [1, 2])
def test_attention_over_pages_is_the_plain_form(interpreted, K):
    B, H, D, lengths = 4, 4, 8, jnp.asarray([64, 7, 0, 40])
    q, k, v = (random(B, 1, heads, D, seed=i) for i, heads in enumerate((H, K, K)))
    pages = [tuple(random(2, B, K, S, D, seed=S + i) for i in range(2)) for S in (64, 96)]
    reply = random(B, K, 5, D, seed=8), random(B, K, 5, D, seed=9), jnp.full(B, 3)
    plain = [(k[1], v[1], lengths) for k, v in pages]
    found = attend(q, k, v, [*((PageOfLayers(*kv, 1), lengths) for kv in pages), reply])
    np.testing.assert_allclose(found, attend(q, k, v, [*plain, reply]), atol=1e-5)
    # Scores of hundreds, which only their common maximum keeps finite.
    found = attend(200 * q, k, v, [*((PageOfLayers(*kv, 1), lengths) for kv in pages), reply])
    np.testing.assert_allclose(found, attend(200 * q, k, v, [*plain, reply]), atol=1e-3)


@pytest.mark.medium
@pytest.mark.parametrize("layers", [2, UNROLLED_LAYERS + 1])
def test_a_model_reads_pages_by_the_kernel(interpreted, monkeypatch, layers):
    """One by one, and in a scan over the layers."""
    monkeypatch.setattr(attention, "LEAST_PAGE", 32)
    calls = []

    def counted(*args):
        calls.append(len(args))
        return read_page(*args, interpret=True)

    monkeypatch.setattr(attention, "read_page", counted)
    config = dataclasses.replace(TINY, layers=layers)
    params = init_params(config, jax.random.key(0))
    tokens_BP = np.random.default_rng(0).integers(0, 50, (3, 64)).astype(np.int32)
    _, (k, v) = Qwen(config).apply({"params": params}, tokens_BP, keep_kv=True)
    page = Segment(k, v, jnp.asarray([64, 20, 33]))
    found = []
    for kernel in ("xla", "pages"):
        model = Qwen(dataclasses.replace(config, cache_kernel=kernel))
        run = jax.jit(lambda *args, model=model: model.apply({"params": params}, *args)[0])
        found.append(run(np.array([[1], [2], [3]]), page.next_N[:, None], (page,)))
        assert bool(calls) == (kernel == "pages")
    np.testing.assert_allclose(*found, atol=1e-5)


def test_what_the_kernel_reads():
    assert block_size(896, 4096) == 224 and block_size(1024, 2048) == 512
    assert block_size(300, 256) == 300 and block_size(1030, 256) == 0
    k = jnp.zeros((3, 2, 128, 8))
    assert is_page(Segment((k,), (k,), jnp.zeros(3)), 3)
    assert not is_page(Segment((k,), (k,), jnp.zeros(3)), 6)  # shared by a group
    assert not is_page(Segment((k[:, :, :64],), (k,), jnp.zeros(3)), 3)
    assert not is_page(Segment((quantise(k),), (k,), jnp.zeros(3)), 3)


def test_where_it_cannot_run_is_said_in_a_line():
    with pytest.raises(ValueError, match="'pages', but the model's heads have 8 numbers, not a"):
        with_cache(Qwen(TINY), cache_dtype="model", cache_kernel="pages")
    wide = dataclasses.replace(TINY, head_dim=128, layers=3, **layer_kinds.windowed(3))
    with pytest.raises(ValueError, match="reads all positions, but the model has windowed layers"):
        with_cache(Qwen(wide), cache_dtype="model", cache_kernel="pages")
    config = sokoban.get_config()
    config.rollout.cache_kernel = "pages"
    with pytest.raises(ValueError, match="'pages', a kernel for TPUs, but sampling runs on cpu"):
        build_meshes(load_config(config))
