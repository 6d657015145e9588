"""The modules that layers consist of: RMSNorm, linear maps, the gated MLP.

Axes: D width, F MLP width.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu": functools.partial(nn.gelu, approximate=True),
}


def with_axes(init: nn.initializers.Initializer, axes: tuple[str, ...]) -> Callable[..., Any]:
    """Return an initialiser that names its parameter's axes, for sharding.

    Typed as Any because it returns a boxed array, which `Module.param` unboxes.
    """
    return nn.with_logical_partitioning(init, axes)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, computed in float32; with `plus_one`, * (1 + scale)."""

    eps: float
    plus_one: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale: jax.Array = self.param("scale", with_axes(first, ("norm",)), (x.shape[-1],))
        if self.plus_one:
            scale = 1 + scale
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        return (x32 * scale).astype(x.dtype)


class Linear(nn.Module):
    """x @ kernel [+ bias], over the last `contract` axes of x; `axes` name the kernel's axes.

    The product is computed on matrices: with a batch axis, XLA's CPU backend is four times slower
    in the backward pass.

    If lora.attach has put lora_a [inputs, r] and lora_b [r, *outputs] next to the kernel,
    (x @ lora_a) @ lora_b is added.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    contract: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner, outer = self.shape[: self.contract], self.shape[self.contract :]
        fan_in = math.prod(inner)
        init = nn.initializers.normal(fan_in**-0.5)
        kernel: jax.Array = self.param("kernel", with_axes(init, self.axes), self.shape)
        rows, x = x.shape[: -self.contract], x.reshape(-1, fan_in)
        y = x @ kernel.astype(x.dtype).reshape(fan_in, -1)
        if self.has_variable("params", "lora_a"):
            a = self.get_variable("params", "lora_a").astype(x.dtype)
            b = self.get_variable("params", "lora_b").astype(x.dtype)
            y = y + (x @ a) @ b.reshape(b.shape[0], -1)
        y = y.reshape(*rows, *outer)
        if self.bias:
            zeros = with_axes(nn.initializers.zeros, self.axes[self.contract :])
            bias: jax.Array = self.param("bias", zeros, outer)
            y = y + bias.astype(x.dtype)
        return y


def gated_mlp(h: jax.Array, F: int, act: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return down(act(gate(h)) * up(h)), [.., D]; called within a compact method."""
    D = h.shape[-1]
    gate = Linear((D, F), ("embed", "mlp"), name="gate")(h)
    up = Linear((D, F), ("embed", "mlp"), name="up")(h)
    return Linear((F, D), ("mlp", "embed"), name="down")(act(gate) * up)
