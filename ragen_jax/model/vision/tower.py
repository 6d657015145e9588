"""The vision tower of Qwen2.5-VL as a Flax module: pixel patches -> embeddings of image tokens.

A transformer over the patches of an image (arXiv 2502.13923, section 2.1.1). Rotary positions are a
patch's row and column; most layers attend within square windows, a few to the whole image. At the
end each square of `spatial_merge_size` x `spatial_merge_size` patches becomes one token of the
language model. Patches keep the order of images.py: the squares row by row, the patches of a square
consecutively. Windows are index tables, computed from the grid on the host.

Axes: N images of one grid, P patches, C numbers of a patch, D width, H heads, W windows, S patches
of a window, L layers.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ragen_jax.core.sharding import boxed_shardings, constrain
from ragen_jax.core.types import Params
from ragen_jax.model.modules import Linear, RMSNorm
from ragen_jax.model.rotary import rotate
from ragen_jax.model.vision.config import VisionConfig
from ragen_jax.model.vision.images import FILE, Grid, ImageConfig

ROPE_THETA = 1e4
NORM_EPS = 1e-6
QUERIES = 1024  # queries of an image scored at a time in layers that read all patches


# ---------------------------------------------------------------- from the grid, on the host


def check_grid(grid: Grid, merge: int) -> None:
    """Raise ValueError unless a grid is an image's and divides into merged squares."""
    t, h, w = grid
    if t != 1 or h < 1 or w < 1 or h % merge or w % merge:
        raise ValueError(
            f"image grid {tuple(grid)}: expected (1, h, w) with h and w positive multiples of "
            f"the merge size {merge}, as images.preprocess returns (videos are not supported)"
        )


def patch_positions(grid: Grid, merge: int) -> np.ndarray:
    """Return the row and column of each patch, int32 [P, 2], in the order of patches.

    Raises:
      ValueError: see `check_grid`.
    """
    check_grid(grid, merge)
    _, h, w = grid
    place = np.indices((h, w), np.int32).reshape(2, h // merge, merge, w // merge, merge)
    return place.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


def windows(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign patches to windows.

    Windows tile the image from the upper left corner; those at the right and lower edges may be
    smaller.

    Args:
      grid: grid of the image.
      merge: patches along a side of a merged square.
      side: merged squares along a side of a window.

    Returns:
      (patch_WS int32: the patches of every window, in order, then zeros; real_WS bool: False for
      padding; place_P int32: index of each patch in the flattened patch_WS).

    Raises:
      ValueError: see `check_grid`.
    """
    square_P2 = patch_positions(grid, merge) // (merge * side)
    across = -(-grid[2] // (merge * side))
    window_P = square_P2[:, 0] * across + square_P2[:, 1]
    count_W = np.bincount(window_P)
    order_P = np.argsort(window_P, kind="stable").astype(np.int32)
    real_WS = np.arange(count_W.max()) < count_W[:, None]
    patch_WS = np.zeros(real_WS.shape, np.int32)
    patch_WS[real_WS] = order_P
    place_P = np.zeros(len(order_P), np.int32)
    place_P[order_P] = np.flatnonzero(real_WS)
    return patch_WS, real_WS, place_P


# ---------------------------------------------------------------- attention


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, real: np.ndarray | None = None) -> jax.Array:
    """Return softmax attention [..., Q, H, d] over k, v [..., K, H, d].

    `real`, [..., K], is False for padding (None: no padding). Scores are float32; the result has
    the dtype of v.
    """
    score = jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=jnp.float32)
    score = score * q.shape[-1] ** -0.5
    if real is not None:
        score = jnp.where(real[..., None, None, :], score, -jnp.inf)  # no window is empty
    weight = jax.nn.softmax(score, -1).astype(v.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weight, v)


def attend_to_all(q_NPHD: jax.Array, k_NPHD: jax.Array, v_NPHD: jax.Array) -> jax.Array:
    """Return attention of every patch to its whole image, `QUERIES` at a time: [N, P, H, D]."""

    def one(q_NHD):
        return _attend(q_NHD[:, None], k_NPHD, v_NPHD)[:, 0]

    if q_NPHD.shape[1] <= QUERIES:
        return _attend(q_NPHD, k_NPHD, v_NPHD)
    out = jax.lax.map(one, jnp.swapaxes(q_NPHD, 0, 1), batch_size=QUERIES)
    return jnp.swapaxes(out, 0, 1)


def attend_in_windows(
    q_NPHD: jax.Array,
    k_NPHD: jax.Array,
    v_NPHD: jax.Array,
    patch_WS: np.ndarray,
    real_WS: np.ndarray,
    place_P: np.ndarray,
) -> jax.Array:
    """Return attention of patches within windows, [N, P, H, D]; the tables are from `windows`."""
    N, P, H, D = q_NPHD.shape
    q, k, v = (x[:, patch_WS] for x in (q_NPHD, k_NPHD, v_NPHD))  # [N, W, S, H, D]
    return _attend(q, k, v, real_WS).reshape(N, -1, H, D)[:, place_P]


# ---------------------------------------------------------------- the module


class VisionBlock(nn.Module):
    """A layer. Its carry is x_NPD; `whole` is whether it reads the whole image."""

    config: VisionConfig
    grid: Grid

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: tuple[jax.Array, jax.Array], whole: jax.Array
    ) -> tuple[jax.Array, None]:
        c = self.config
        D, H, F = c.hidden_size, c.num_heads, c.intermediate_size
        hd = D // H

        def project(name):
            axes = ("embed", "heads", "head")
            y = Linear((D, H, hd), axes, bias=True, name=name)(h)
            return constrain(y, "rows", None, "heads", None)

        h = RMSNorm(NORM_EPS, name="attention_norm")(x)
        q, k, v = rotate(project("q"), angles), rotate(project("k"), angles), project("v")
        side = c.window_size // (c.patch_size * c.spatial_merge_size)
        patch_WS, real_WS, place_P = windows(self.grid, c.spatial_merge_size, side)
        within = functools.partial(
            attend_in_windows, patch_WS=patch_WS, real_WS=real_WS, place_P=place_P
        )
        a = jax.lax.cond(whole, attend_to_all, within, q, k, v)
        axes = ("heads", "head", "embed")
        x = x + Linear((H, hd, D), axes, contract=2, bias=True, name="o")(a)
        x = constrain(x, "rows", None, None)

        h = RMSNorm(NORM_EPS, name="mlp_norm")(x)
        gate = Linear((D, F), ("embed", "mlp"), bias=True, name="gate")(h)
        up = Linear((D, F), ("embed", "mlp"), bias=True, name="up")(h)
        x = x + Linear((F, D), ("mlp", "embed"), bias=True, name="down")(nn.silu(gate) * up)
        return constrain(x, "rows", None, None), None


class VisionTower(nn.Module):
    """Map pixel patches of images of one grid to the embeddings of their tokens."""

    config: VisionConfig
    remat: bool = False  # recompute each layer's activations in the backward pass

    if TYPE_CHECKING:  # Linen gives a module the hash of its fields, which checkers do not see

        def __hash__(self) -> int: ...

    @nn.compact
    def __call__(self, pixels_NPC: jax.Array, grid: Grid) -> jax.Array:
        """Run the tower.

        Args:
          pixels_NPC: float32 patches from `images.preprocess`, of one or more images of this grid.
          grid: (1, h, w), static under jit.

        Returns:
          [N, P / spatial_merge_size ** 2, out_hidden_size] in the config's dtype.

        Raises:
          ValueError: patches that do not fit this grid or config.
        """
        c = self.config
        check_grid(grid, c.spatial_merge_size)
        expected = (grid[1] * grid[2], c.patch_numbers)
        if pixels_NPC.shape[1:] != expected:
            raise ValueError(
                f"pixel patches have shape {pixels_NPC.shape}; grid {tuple(grid)} and "
                f"vision_config need [images, {expected[0]}, {expected[1]}]"
            )
        N, P, C = pixels_NPC.shape
        x = constrain(pixels_NPC.astype(c.dtype), "rows", None, None)
        x = Linear((C, c.hidden_size), ("patch", "embed"), name="patch")(x)
        x = constrain(x, "rows", None, None)

        quarter = c.hidden_size // c.num_heads // 4
        frequency = ROPE_THETA ** (-np.arange(quarter) / quarter)
        # The first half of the angles turns with the row, the second with the column.
        angle = patch_positions(grid, c.spatial_merge_size)[:, :, None] * frequency
        angle_P1F = jnp.asarray(angle.reshape(P, 1, 2 * quarter), jnp.float32)
        whole_L = jnp.zeros(c.depth, bool).at[jnp.array(c.fullatt_block_indexes, int)].set(True)
        block = nn.remat(VisionBlock, prevent_cse=False) if self.remat else VisionBlock
        layers: Any = nn.scan(  # Any: nn.scan is typed as VisionBlock but takes stacked flags
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, 0),
            length=c.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        angles = jnp.cos(angle_P1F), jnp.sin(angle_P1F)
        x, _ = layers(c, tuple(grid), name="layers")(x, angles, whole_L)

        x = RMSNorm(NORM_EPS, name="merge_norm")(x)
        D = c.hidden_size * c.spatial_merge_size**2
        x = x.reshape(N, -1, D)
        x = Linear((D, D), ("embed", "mlp"), bias=True, name="merge_hidden")(x)
        x = nn.gelu(x, approximate=False)
        shape = (D, c.out_hidden_size)
        x = Linear(shape, ("mlp", "embed"), bias=True, name="merge_out")(x)
        return constrain(x, "rows", None, None)


def _init(config: VisionConfig, key: jax.Array) -> Params:
    """Return new parameters with named axes."""
    merge = config.spatial_merge_size
    pixels = jnp.zeros((1, merge**2, config.patch_numbers))
    return VisionTower(config).init(key, pixels, (1, merge, merge))["params"]


def init_params(config: VisionConfig, key: jax.Array) -> Params:
    """Return new parameters of a tower on the default device: a plain nested dict of float32."""
    return nn.unbox(_init(config, key))


def param_shardings(config: VisionConfig, mesh: Mesh) -> Params:
    """Return a NamedSharding for every parameter of a tower, by the rules of core/sharding.py."""
    return boxed_shardings(
        jax.eval_shape(functools.partial(_init, config), jax.random.key(0)), mesh
    )


# ---------------------------------------------------------------- with a language model


@dataclasses.dataclass(frozen=True)
class Tower:
    """A frozen vision tower of a language model, and its image preprocessing settings.

    Raises:
      ValueError: the two have different patch sizes.
    """

    model: VisionTower
    params: Params
    images: ImageConfig

    def __post_init__(self) -> None:
        c, i = self.model.config, self.images
        for ours, theirs in (
            ("patch_size", "patch_size"),
            ("temporal_patch_size", "temporal_patch_size"),
            ("merge_size", "spatial_merge_size"),
        ):
            if getattr(i, ours) != getattr(c, theirs):
                raise ValueError(
                    f"{FILE}: {ours} {getattr(i, ours)}, but config.json's vision_config has "
                    f"{theirs} {getattr(c, theirs)}; expected the same value: the files must "
                    "belong to one model"
                )


@functools.partial(jax.jit, static_argnums=(0, 3))
def see(model: VisionTower, params: Params, pixels_NPC: jax.Array, grid: Grid) -> jax.Array:
    """Return image embeddings [N, tokens, out_hidden_size], replicated on every device.

    See `VisionTower.__call__`.
    """
    embed_NID: Any = model.apply({"params": params}, jnp.asarray(pixels_NPC), grid)
    return constrain(embed_NID, None, None, None)
