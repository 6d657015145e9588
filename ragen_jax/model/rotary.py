"""Rotary positions (RoFormer, arXiv 2104.09864): frequencies, their scaling, and the rotation.

Axes: B rows, T tokens, H heads, D head width.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the lengths of pre-training.

    linear: every frequency is divided by `factor`. llama3: a frequency that turns fewer than
    `low_freq_factor` times within the original length is divided, a frequency that turns more
    than `high_freq_factor` times is kept, and in between the two are mixed linearly.
    """

    kind: str  # linear | llama3
    factor: float
    low_freq_factor: float = 1.0  # used by llama3 only, like the next two fields
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rotary scaling {self.kind!r}; accepted: linear, llama3")
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(f"{self}: needs factor > 0 and low_freq_factor < high_freq_factor")


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Return the float32 frequencies [head_dim / 2] of the rotary embedding, in radians a position.

    Args:
      head_dim, theta, scaling: see `ModelConfig`.
    """
    frequency = theta ** (-jnp.arange(0, head_dim // 2, dtype=jnp.float32) / (head_dim // 2))
    if scaling is not None:
        kept = 0.0
        if scaling.kind == "llama3":
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            turns = scaling.original_max_positions * frequency / (2 * math.pi)
            kept = jnp.clip((turns - low) / (high - low), 0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency


def rotary_angles(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    section: Sequence[int] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine [B, T, 1, head_dim / 2] of the rotary embedding (RoFormer), float32.

    Args:
      positions: int32 [B, T], or [3, B, T]: the first section[0] frequencies turn with the first
        position, the next section[1] with the second, the others with the third (arXiv 2409.12191).
      head_dim, theta, scaling, section: see `ModelConfig`.
    """
    frequency = rotary_frequencies(head_dim, theta, scaling)
    if positions.ndim == 3:
        position = jnp.moveaxis(positions[np.repeat(np.arange(3), section)], 0, -1)[..., None, :]
    else:
        position = positions[..., None, None]
    angle = position.astype(jnp.float32) * frequency
    angles = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    angles = jax.lax.platform_dependent(angles, cpu=_compute_once, default=lambda x: x)
    cos, sin = jnp.split(angles, 2, axis=-1)
    return cos, sin


def _compute_once(x: jax.Array) -> jax.Array:
    """Return x, the result of a product, which XLA does not compute again wherever it is read.

    XLA's CPU backend fuses cosine and sine into every loop that reads them, once for each head of
    each layer; there, `optimization_barrier` does not prevent it. The product with the identity
    matrix is exact.
    """
    return jnp.matmul(x, jnp.eye(x.shape[-1], dtype=x.dtype), precision=jax.lax.Precision.HIGHEST)


def rotate(x_BTHD: jax.Array, angles: Sequence[jax.Array]) -> jax.Array:
    """Apply the rotary embedding, halves convention (RoFormer, arXiv 2104.09864), in float32.

    Angles for fewer numbers than a head has turn the first of them.
    """
    cos, sin = angles
    turned = 2 * cos.shape[-1]
    if turned < x_BTHD.shape[-1]:
        first = rotate(x_BTHD[..., :turned], angles)
        return jnp.concatenate([first, x_BTHD[..., turned:]], -1)
    a, b = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTHD.dtype)
