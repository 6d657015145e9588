"""Library attention kernels against the plain form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from ragen_jax.config import build_model
from ragen_jax.model import kernels
from ragen_jax.model.attention import attend
from ragen_jax.model.qwen import SHAPES
from ragen_jax.sharding import make_mesh


def qkv(T, H, K, D):
    return [jax.random.normal(jax.random.key(i), (2, T, n, D)) for i, n in enumerate((H, K, K))]


@pytest.mark.parametrize(("T", "H", "K", "D"), [(150, 4, 2, 64), (128, 2, 2, 128)])
def test_splash(T, H, K, D):
    q, k, v = qkv(T, H, K, D)
    got = kernels.splash(q, k, v, interpret=True)
    assert np.abs(got - attend(q, k, v, ())).max() < 1e-5


def test_splash_gradient():
    args = qkv(128, 2, 1, 64)

    def of(f):
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=(0, 1, 2))(*args)

    got = of(lambda *args: kernels.splash(*args, interpret=True))
    for a, b in zip(got, of(lambda *args: attend(*args, ())), strict=True):
        assert np.abs(b).max() > 0.1
        assert np.abs(a - b).max() < 1e-4


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
    want = dataclasses.replace(shape, dtype="bfloat16", attention="xla", remat=True)
    assert build_model(config, shape, mesh).config == want
    config.model.attention = "splash"
    with pytest.raises(ValueError, match="config.model.attention is 'splash'.*cpu.*auto, xla"):
        build_model(config, shape, mesh)
