"""Draw tokens from logits by Gumbel noise (Maddison et al. 2014, arXiv 1411.0030).

The largest of logits plus independent Gumbel noise is a draw from their softmax. Most of the time
of a draw would go into noise, so that it is made in two steps: a block of tokens by the blocks'
log-sums of exponentials, then a token of the block. With 49,152 tokens, 448 numbers are drawn
instead of 49,152, with the tiny agent's 281 tokens 41.

Axes: B rows, V vocabulary, N blocks of C tokens.
"""

import jax
import jax.numpy as jnp

SMALL = 128  # vocabularies below this are drawn in one step
LARGE = 4096  # vocabularies from this on have larger blocks
BLOCK, LARGE_BLOCK = 32, 256  # tokens of a block


def truncate(logits_BV: jax.Array, *, top_k: int, top_p: float, min_p: float) -> jax.Array:
    """Set logits outside the kept set to -inf (Holtzman 2020; min-p: Nguyen 2024).

    Three filters apply in this order, each to the tokens kept by the filter before: the `top_k`
    largest (0: all), the shortest prefix of the sorted tokens with probability mass `top_p`
    (1: all), tokens at least `min_p` times as likely as the most likely token (0: all).
    """
    kept = logits_BV
    if top_k:
        kth = jax.lax.top_k(kept, min(top_k, kept.shape[-1]))[0][..., -1:]
        kept = jnp.where(kept < kth, -jnp.inf, kept)
    if top_p < 1:
        order = jnp.argsort(-kept, axis=-1)
        p = jax.nn.softmax(jnp.take_along_axis(kept, order, -1))
        inside = jnp.cumsum(p, -1) - p < top_p  # the mass before a token, so the first is kept
        rank = jnp.argsort(order, axis=-1)
        kept = jnp.where(jnp.take_along_axis(inside, rank, -1), kept, -jnp.inf)
    if min_p:
        kept = jnp.where(kept < kept.max(-1, keepdims=True) + jnp.log(min_p), -jnp.inf, kept)
    return kept


def noise(keys_B: jax.Array, index: jax.Array | int, count: int) -> jax.Array:
    """Return standard Gumbel noise [B, count] for drawing token `index`.

    In JAX's default mode no value is above 16: tokens rarer than 1e-7 would be drawn too rarely.

    Args:
      index: token index in the reply, a single number or one per row.
    """

    def draw(key, index):
        return jax.random.gumbel(jax.random.fold_in(key, index), (count,), mode="high")

    return jax.vmap(draw, in_axes=(0, 0 if jnp.ndim(index) else None))(keys_B, index)


def draw_tokens(
    scaled_BV: jax.Array, keys_B: jax.Array, index: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Draw token `index` of each row; return (token_B, logp_B).

    Args:
      scaled_BV: logits divided by the temperature; -inf: never drawn.
      keys_B: the result of `sample.episode_keys`.
      index: as in `noise`.
    """
    B, V = scaled_BV.shape
    if V < SMALL:
        return choose(scaled_BV, noise(keys_B, index, V))
    C = BLOCK if V < LARGE else LARGE_BLOCK
    N = -(-V // C)
    padded_BV = jnp.pad(scaled_BV, ((0, 0), (0, N * C - V)), constant_values=-jnp.inf)
    blocks_BNC = padded_BV.reshape(B, N, C)
    sums_BN = jax.nn.logsumexp(blocks_BNC, axis=-1)
    noise_BX = noise(keys_B, index, N + C)
    block_B, logp_of_block_B = choose(sums_BN, noise_BX[:, :N])
    block_BC = jnp.take_along_axis(blocks_BNC, block_B[:, None, None], axis=1)[:, 0]
    place_B, logp_in_block_B = choose(block_BC, noise_BX[:, N:])
    return block_B * C + place_B, logp_of_block_B + logp_in_block_B


def choose(scaled_BV: jax.Array, noise_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw a token in each row by its Gumbel noise; return (token_B, logp_B)."""
    V = scaled_BV.shape[1]
    perturbed_BV = scaled_BV + noise_BV
    # Two steps instead of argmax, for speed: on CPU, XLA's argmax runs element by element and fuses
    # the logarithms of the noise into its loop.
    best_BV = perturbed_BV == perturbed_BV.max(-1, keepdims=True)
    token_B = jnp.where(best_BV, jnp.arange(V), V - 1).min(-1)
    logp_B = jnp.take_along_axis(jax.nn.log_softmax(scaled_BV), token_B[:, None], -1)[:, 0]
    return token_B, logp_B
