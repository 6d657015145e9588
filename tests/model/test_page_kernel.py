"""The kernels for pages of a cache against the plain form, as programs without a TPU or GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layer_kinds
import numpy as np
import pytest

from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.model import attention, page_kernel, page_kernel_gpu, segments
from ragen_jax.model.attention import attend
from ragen_jax.model.page_kernel import block_size, read_on_tpu, read_page
from ragen_jax.model.page_kernel_gpu import read_on_gpu
from ragen_jax.model.quantised import quantise
from ragen_jax.model.qwen import UNROLLED_LAYERS, ModelConfig, Qwen, init_params, with_cache
from ragen_jax.model.segments import PageOfLayers, Segment, is_page

TINY = ModelConfig(
    vocab_size=50, width=16, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=24
)


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.fixture(params=[read_on_tpu, read_on_gpu])
def kernel(request, monkeypatch):
    """Each kernel without its device, in blocks of 32 positions."""
    monkeypatch.setattr(page_kernel, "LONGEST", 32)
    monkeypatch.setattr(page_kernel_gpu, "BLOCK", 32)
    monkeypatch.setattr(page_kernel_gpu, "PROGRAMS", 24)
    kernel = functools.partial(request.param, interpret=True)
    monkeypatch.setattr(attention, "read_page", functools.partial(read_page, kernel=kernel))
    return kernel


def numpy_softmax(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[-1])
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ v


def test_each_row_reads_its_positions_of_a_layer(kernel):
    (L, B, K, Q, S, D), lengths = (3, 5, 2, 3, 96, 16), [96, 0, 13, 32, 33]
    q = random(B, K, Q, D)
    k, v = random(L, B, K, S, D, seed=1), random(L, B, K, S, D, seed=2)
    top, total, out = read_page(q, k, v, 1, jnp.asarray(lengths), kernel=kernel)
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
def test_attention_over_pages_is_the_plain_form(kernel, K):
    B, H, D, lengths = 4, 4, 16, jnp.asarray([64, 7, 0, 40])
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
def test_a_model_reads_pages_by_the_kernel(kernel, monkeypatch, layers):
    """One by one, and in a scan over the layers."""
    monkeypatch.setattr(segments, "LEAST_PAGE", 32)
    calls = []

    def counted(*args):
        calls.append(len(args))
        return read_page(*args, kernel=kernel)

    monkeypatch.setattr(attention, "read_page", counted)
    config = dataclasses.replace(TINY, layers=layers)
    params = init_params(config, jax.random.key(0))
    tokens_BP = np.random.default_rng(0).integers(0, 50, (3, 64)).astype(np.int32)
    _, (k, v) = Qwen(config).apply({"params": params}, tokens_BP, keep_kv=True)
    page = Segment(k, v, jnp.asarray([64, 20, 33]))
    found = []
    for name in ("xla", "pages"):
        model = Qwen(dataclasses.replace(config, cache_kernel=name))
        run = jax.jit(lambda *args, model=model: model.apply({"params": params}, *args)[0])
        found.append(run(np.array([[1], [2], [3]]), page.next_N[:, None], (page,)))
        assert bool(calls) == (name == "pages")
    np.testing.assert_allclose(*found, atol=1e-5)


@pytest.mark.medium
def test_a_program_for_a_gpu_has_the_kernel_for_gpus():
    """Lowered as far as Triton, for which no GPU is needed; TPUs: preflight's tests."""
    config = dataclasses.replace(TINY, head_dim=128, dtype="bfloat16", cache_kernel="pages")
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    cache = jax.ShapeDtypeStruct((2, 3, 2, 896, 128), jnp.bfloat16)
    page = Segment(cache, cache, jax.ShapeDtypeStruct((3,), jnp.int32))
    new = jax.ShapeDtypeStruct((3, 1), jnp.int32)

    def step(params, tokens, page):
        return Qwen(config).apply({"params": params}, tokens, page.next_N[:, None], (page,))[0]

    traced = jax.jit(step).trace(params, new, page)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 2 and "tpu_custom_call" not in text  # one in each layer


def test_what_the_kernel_reads():
    assert block_size(896, 4096) == 224 and block_size(1024, 2048) == 512
    assert block_size(300, 256) == 300 and block_size(1030, 256) == 0
    k = jnp.zeros((3, 2, 128, 8))
    assert is_page(Segment((k,), (k,), jnp.zeros(3)), 3)
    assert not is_page(Segment((k,), (k,), jnp.zeros(3)), 6)  # shared by a group
    assert not is_page(Segment((k[:, :, :64],), (k,), jnp.zeros(3)), 3)
    assert not is_page(Segment((quantise(k),), (k,), jnp.zeros(3)), 3)


def test_where_it_cannot_run_is_said_in_a_line():
    pages = dict(cache_dtype="model", cache_kernel="pages")
    with pytest.raises(ValueError, match="the model's heads have 16 numbers, not a multiple of 1"):
        with_cache(Qwen(TINY), **pages, platform="tpu")
    assert with_cache(Qwen(TINY), **pages, platform="gpu").config.cache_kernel == "pages"
    odd = dataclasses.replace(TINY, head_dim=24)
    with pytest.raises(ValueError, match="the model's heads have 24 numbers, not a power of two"):
        with_cache(Qwen(odd), **pages, platform="gpu")
    wide = dataclasses.replace(TINY, head_dim=128, layers=3, **layer_kinds.windowed(3))
    with pytest.raises(ValueError, match="reads all positions, but the model has windowed layers"):
        with_cache(Qwen(wide), **pages, platform="tpu")
    config = sokoban.get_config()
    config.rollout.cache_kernel = "pages"
    with pytest.raises(ValueError, match="for TPUs and GPUs, but sampling runs on cpu"):
        build_meshes(load_config(config))
