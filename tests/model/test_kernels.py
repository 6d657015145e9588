"""Library attention kernels against the plain implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import windowed

from ragen_jax.config.build_model import build_model
from ragen_jax.configs import base
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import kernels
from ragen_jax.model.attention import attend
from ragen_jax.model.families import SHAPES
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.model.segments import Segment


def qkv(T, H, K, D):
    return [jax.random.normal(jax.random.key(i), (2, T, n, D)) for i, n in enumerate((H, K, K))]


@pytest.mark.parametrize(("T", "H", "K", "D"), [(150, 4, 2, 64), (128, 2, 2, 128)])
@pytest.mark.parametrize("window", [None, 1, 70])
def test_splash(T, H, K, D, window):
    q, k, v = qkv(T, H, K, D)
    got = kernels.splash(q * D**-0.5, k, v, window=window, interpret=True)
    assert np.abs(got - attend(q, k, v, (), window=window)).max() < 1e-5


def test_splash_gradient():
    args = qkv(128, 2, 1, 64)

    def of(f):
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=(0, 1, 2))(*args)

    got = of(lambda q, k, v: kernels.splash(q / 8, k, v, interpret=True))
    for a, b in zip(got, of(lambda *args: attend(*args, ())), strict=True):
        assert np.abs(b).max() > 0.1
        assert np.abs(a - b).max() < 1e-4


@pytest.mark.parametrize("kernel", ["xla", "splash"])
def test_queries_in_bfloat16_are_rounded_once(kernel, monkeypatch):
    """At head size 128, whose square root is no power of two. Queries that were scaled after
    rounding, and so rounded twice, gave errors of 0.0075 here instead of 0.0061."""
    splash = functools.partial(kernels.splash, interpret=True)
    monkeypatch.setitem(kernels.KERNELS, "splash", splash)
    q, k, v = (np.asarray(x, np.float64) for x in qkv(128, 2, 2, 128))
    q *= 8  # large scores distinguish the keys
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * 128**-0.5
    scores = np.where(np.tril(np.ones((128, 128), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    scale = 128**-0.5 if kernel in kernels.SCALED_QUERIES else 1.0
    low = (jnp.asarray(x, jnp.float32).astype(jnp.bfloat16) for x in (q * scale, k, v))
    found = np.asarray(attend(*low, (), kernel=kernel), np.float64)
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.0068


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        (2, {"qkv_bias": True, "qk_norm": False}),
        (2, {"qkv_bias": False, "qk_norm": True}),
        (3, windowed(3)),
        pytest.param(5, windowed(5), marks=pytest.mark.long),
    ],
    ids=["bias", "norm", "windowed", "windowed-scanned"],
)
def test_a_model_scales_its_queries_once(monkeypatch, layers, kinds):
    """Checked with the kernel that takes scaled queries and with the plain implementation."""
    monkeypatch.setitem(
        kernels.KERNELS, "splash", functools.partial(kernels.splash, interpret=True)
    )
    config = ModelConfig(
        vocab_size=30,
        width=64,
        layers=layers,
        heads=2,
        kv_heads=1,
        head_dim=64,
        mlp_width=48,
        **kinds,
    )
    params = jax.tree.map(lambda x: 3.0 * x, init_params(config, jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, 30, (2, 9))
    plain, own = (
        jax.jit(
            Qwen(dataclasses.replace(config, attention=kernel)).apply, static_argnames="keep_kv"
        )
        for kernel in ("xla", "splash")
    )
    want, kv = plain({"params": params}, tokens, keep_kv=True)
    found, _ = own({"params": params}, tokens)
    np.testing.assert_allclose(found, want, atol=1e-4)
    # With a cache, every kernel falls back to the plain implementation.
    memory = (Segment(*kv, length_N=np.full(2, 9, np.int32)),)
    new, positions = tokens[:, :3], np.broadcast_to(9 + np.arange(3), (2, 3))
    want, _ = plain({"params": params}, new, positions, memory)
    found, _ = own({"params": params}, new, positions, memory)
    np.testing.assert_array_equal(found, want)


def test_splash_becomes_a_tpu_kernel():
    shapes = [jax.ShapeDtypeStruct((2, 200, n, 64), jnp.bfloat16) for n in (4, 2, 2)]
    lowered = jax.jit(kernels.splash).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs an NVIDIA GPU")
def test_cudnn():
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(160, 4, 2, 64))
    got = kernels.cudnn(q, k, v).astype(jnp.float32)
    assert np.abs(got - attend(q, k, v, ()).astype(jnp.float32)).max() < 0.05


def test_best_kernel():
    assert kernels.best_kernel("tpu", "bfloat16", 128) == "splash"
    assert kernels.best_kernel("tpu", "float32", 24) == "xla"
    assert kernels.best_kernel("gpu", "bfloat16", 64) == "cudnn"
    assert kernels.best_kernel("gpu", "float32", 64) == "xla"
    assert kernels.best_kernel("cpu", "bfloat16", 64) == "xla"


def test_config_chooses_the_kernel():
    config = base.get_config()
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices("cpu")[:1])
    shape = SHAPES["qwen2.5-0.5b"]
    config.model.update(dtype="bfloat16", remat=True)
    want = dataclasses.replace(
        shape, dtype="bfloat16", attention="xla", remat=True, expert_form="blocks"
    )
    assert build_model(config.model, shape, mesh).config == want
    config.model.attention = "splash"
    with pytest.raises(ValueError, match="config.model.attention is 'splash'.*cpu.*auto, xla$"):
        build_model(config.model, shape, mesh)
