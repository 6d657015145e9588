"""Keys and values of earlier tokens, which new tokens attend to, and how they grow.

Axes: L layers, B rows, N segment rows (B = N * m, row b reads segment row b // m), T new tokens,
S segment positions, K key-value heads, D head width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from ragen_jax.core.stored_programs import storable
from ragen_jax.core.types import Array
from ragen_jax.model.delta_rule import States
from ragen_jax.model.page_kernel import block_size
from ragen_jax.model.quantised import Quantised

KV = jax.Array | Quantised  # keys or values


class PageOfLayers(NamedTuple):
    """Keys and values of all layers, of which `page_kernel.read_page` reads one."""

    k_LNKSD: jax.Array
    v_LNKSD: jax.Array
    layer: Array | int


# Keys or values of all layers: one stacked array, or one array per layer (see Segment). Where
# windowed layers hold their window only, also a stack for each kind (window_cache.py).
Layers = KV | tuple[KV, ...]

LEAST_PAGE = 128  # minimum positions of a segment that a kernel reads
LEAST_PREFIX = 64  # minimum length of a common prefix of prompts that is read in a separate call


@storable
@flax.struct.dataclass
class Segment:
    """Keys and values of earlier tokens, already rotated, for all layers.

    k and v have the form that the model produces: [L, N, K, S, D] if it scans over layers, a tuple
    of L arrays [N, K, S, D] if it runs them one by one (slicing a stack copies it: on CPU a third
    of a decode step). Code that handles them counts axes from the end and maps over the tree.
    This order of axes keeps each head's positions contiguous: on CPU decode attention is ten
    times faster than with [N, S, K, D].
    """

    k: Layers
    v: Layers
    length_N: jax.Array  # [N] int32, positions s < length are real
    # [B] int32: the segment row that each row of new tokens reads; length_N then has B entries.
    # None: row b reads row b // m.
    rows_B: jax.Array | None = None
    # [N] int32: the position of the next token, where images make it less than the number of
    # tokens (positions.py); None: it is `length_N`.
    next_position_N: jax.Array | None = None
    # int16 [N, T, X]: in the result of a program, the experts of the tokens that it read, layer
    # after layer (rollout/routes.py). None in the input of a program, and unless they are kept.
    experts_NTX: jax.Array | None = None
    # int32 [N], the number of tokens in windowed layers, which hold no more than their window
    # (window_cache.py); None: all.
    window_N: jax.Array | None = None
    # The states after the tokens of each row, in a model with linear-attention layers: k and v are
    # then those of its other layers. Of several segments, the last has the state.
    state: States | None = None

    @property
    def next_N(self) -> jax.Array:
        """Return the position of the token after the last, int32 [N]."""
        return self.length_N if self.next_position_N is None else self.next_position_N


def as_segment(
    kept: Sequence[Any], length_N: jax.Array, next_position_N: jax.Array | None = None
) -> Segment:
    """Return the memory of tokens, given their (keys, values) or (keys, values, state)."""
    k, v, *state = kept
    more = {"state": state[0]} if state else {}
    return Segment(k, v, length_N, next_position_N=next_position_N, **more)


def is_page(segment: Segment, rows: int) -> bool:
    """Return whether page_kernel.py reads a segment for a new token in each of `rows` rows.

    The first turn's prompt, which a group shares, and short segments are read by the plain form.
    """
    k = segment.k[0] if isinstance(segment.k, tuple) else segment.k
    own = k.shape[-4] == rows and segment.rows_B is None
    if not own or isinstance(k, Quantised) or k.shape[-2] < LEAST_PAGE:
        return False
    return block_size(k.shape[-2], k.shape[-3] * k.shape[-1] * k.dtype.itemsize) > 0


def append(segment: Segment, k: Layers, v: Layers, count_B: jax.Array, *, capacity: int) -> Segment:
    """Return a longer history, with each row's first `count_B` new tokens after its last position.

    Rows keep their own lengths and write at their own positions (no left padding), so turn t + 1
    continues turn t independently of other rows. A segment shared by a group is repeated here for
    the group's members, once per turn.

    Args:
      segment: N rows; N divides B.
      k, v: keys and values of the new tokens, [.., B, K, T, D] like the segment's.
      count_B: [B] int32, how many of the T new tokens are real.
      capacity: S of the result; may be larger or smaller than the segment's. The caller must make
        sure that every row fits (a write past the end would be dropped).

    Returns:
      `Segment` with B rows.
    """
    B, N = count_B.shape[0], segment.length_N.shape[0]
    T = jax.tree.leaves(k)[0].shape[-2]
    length_B = jnp.repeat(segment.length_N, B // N, total_repeat_length=B)
    # Padding tokens get positions past the end, where a scatter drops them.
    position_BT = length_B[:, None] + jnp.arange(T)
    position_BT = jnp.where(jnp.arange(T) < count_B[:, None], position_BT, capacity)

    def grow(old, new):
        # The rows that made the old cache longer than this may have finished.
        room = jnp.repeat(old[..., :capacity, :], B // N, axis=-4, total_repeat_length=B)
        missing = capacity - room.shape[-2]
        room = jnp.pad(room, [(0, 0)] * (room.ndim - 2) + [(0, missing), (0, 0)])
        return write(room, new, position_BT)

    return Segment(
        k=jax.tree.map(grow, segment.k, k),
        v=jax.tree.map(grow, segment.v, v),
        length_N=length_B + count_B,
    )


def prepend(prefix: Segment, k: Layers, v: Layers) -> tuple[Layers, Layers]:
    """Return keys and values [.., B, K, T, D] after those of a prefix of one row, without padding.

    The prefix is repeated for each row, so that attention reads a single segment: on CPU, a second
    segment costs more than reading the whole rows.
    """

    def join(first, rest):
        first = jnp.broadcast_to(first, (*rest.shape[:-2], first.shape[-2], rest.shape[-1]))
        return jnp.concatenate([first, rest], axis=-2)

    return jax.tree.map(join, (prefix.k, prefix.v), (k, v))


def write(cache: jax.Array, new: jax.Array, position_BT: jax.Array) -> jax.Array:
    """Return a cache's keys or values with new entries written into each row.

    Args:
      cache: [.., B, K, S, D].
      new: [.., B, K, T, D].
      position_BT: int32; entries at positions of S or more are dropped.
    """
    rows_B1 = jnp.arange(position_BT.shape[0])[:, None]
    new = jnp.moveaxis(new, (-4, -2), (0, 1)).astype(cache.dtype)  # [B, T, .., K, D]
    return cache.at[..., rows_B1, :, position_BT, :].set(new, mode="drop")
