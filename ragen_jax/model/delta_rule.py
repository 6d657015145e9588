"""Linear attention by the gated delta rule (Gated Delta Networks, arXiv 2412.06464).

A head keeps a matrix S [K, V] instead of the keys and values of all earlier tokens. A token with
key k, query q (both of unit length, q divided by sqrt K), value v, decay 0 < a <= 1 and rate
0 < b < 1 changes it, and reads it:

    S <- a S;    S <- S + b k (v - S' k)';    result = S' q

Queries, keys and values go through a causal convolution of a few positions first, whose last inputs
are the other part of a layer's state. The result is normalised and gated for each head.

Several tokens are computed in chunks, in which the rule is a triangular system (arXiv 2406.06484,
section 3.2, with decays as in 2412.06464, section 3.3); one token is computed by the rule itself.
All of this is in float32, with exact products: states add up over thousands of tokens.

Axes: B rows, T tokens, N chunks of C tokens, D width, G key heads, H value heads, K and V widths of
keys and values, W positions and X channels of the convolution.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from ragen_jax.core.sharding import constrain, spec
from ragen_jax.model.modules import ACTIVATIONS, Linear, RMSNorm, gated_mlp, with_axes
from ragen_jax.model.shape import DeltaHeads, ModelConfig

CHUNK = 64  # tokens of a chunk, at most
NORM_EPS = 1e-6  # of the lengths of queries and keys

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@flax.struct.dataclass
class State:
    """What a linear-attention layer keeps of the tokens so far; rows are the axis of a `Segment`.

    A model has one per layer, or one whose arrays are stacked over its linear-attention layers.
    """

    memory: Any  # S, float32 [.., B, H, K, V]
    inputs: Any  # the last inputs of the convolution, [.., B, 1, W - 1, X]


# The states of a model: one stacked over the layers, or one per layer, like `attention.Layers`.
States = State | tuple[State, ...]


def empty_state(heads: DeltaHeads, rows: int, dtype: Any) -> State:
    """Return the state before the first token."""
    memory = jnp.zeros((rows, heads.value_heads, heads.key_dim, heads.value_dim), jnp.float32)
    return State(memory, jnp.zeros((rows, 1, heads.taps - 1, heads.channels), dtype))


def repeat_rows(state: Any, rows: int) -> Any:
    """Return states of `rows` rows, of which those that share one follow each other."""

    def repeat(x):
        more = rows // x.shape[-4]
        return x if more == 1 else jnp.repeat(x, more, axis=-4)

    return jax.tree.map(repeat, state)


def convolve(
    x_BTX: jax.Array, kernel_XW: jax.Array, before_BWX: jax.Array, count_B: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return (causal convolution of each channel, the inputs to continue it after `count_B`)."""
    T, W = x_BTX.shape[1], kernel_XW.shape[1]
    inputs = jnp.concatenate([before_BWX.astype(x_BTX.dtype), x_BTX], axis=1)
    kernel_XW = kernel_XW.astype(x_BTX.dtype)
    taps = [inputs[:, w : w + T] * kernel_XW[:, w] for w in range(W)]
    y_BTX = functools.reduce(jnp.add, taps)
    if count_B is None:
        return y_BTX, inputs[:, T:]
    last_BW = count_B[:, None] + jnp.arange(W - 1)
    return y_BTX, jnp.take_along_axis(inputs, last_BW[..., None], axis=1)


def gated_delta_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    log_decay_BTH: jax.Array,
    rate_BTH: jax.Array,
    memory_BHKV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (results [B, T, H, V], S after the last token); see the module. All are float32.

    On a mesh, each device runs the rule for its rows and heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    args = q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, rate_BTH, memory_BHKV
    if mesh.empty:
        return _run_rule(*args)
    tokens = ("rows", None, "heads", None)
    axes = tokens, tokens, tokens, tokens[:3], tokens[:3], ("rows", "heads", None, None)
    specs = tuple(spec(names, x.shape, mesh) for names, x in zip(axes, args, strict=True))
    return jax.shard_map(
        _run_rule, in_specs=specs, out_specs=(specs[2], specs[5]), check_vma=False
    )(*args)


def _run_rule(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    log_decay_BTH: jax.Array,
    rate_BTH: jax.Array,
    memory_BHKV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    T = q_BTHK.shape[1]
    if T == 1:
        args = (x[:, 0] for x in (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, rate_BTH))
        out_BHV, memory_BHKV = one_token(*args, memory_BHKV)
        return out_BHV[:, None], memory_BHKV
    C = min(CHUNK, 1 << (T - 1).bit_length())

    def chunks(x):
        """Return [N, B, H, C, ..]; tokens past the last change nothing."""
        x = jnp.pad(x, [(0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(x.shape[0], -1, C, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    q, k, v, log_decay, rate = map(chunks, (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, rate_BTH))
    since = jnp.cumsum(log_decay, axis=-1)  # log of the decay since the chunk's start
    causal = jnp.tril(jnp.ones((C, C), bool))
    between = jnp.exp(jnp.where(causal, since[..., :, None] - since[..., None, :], -jnp.inf))
    k_rated = k * rate[..., None]
    system = _product("...ik,...jk->...ij", k_rated, k) * between  # below a diagonal of ones
    # What each token writes is `written - read S` for the S before the chunk.
    known = jnp.concatenate([v * rate[..., None], k_rated * jnp.exp(since)[..., None]], axis=-1)
    solved = jax.lax.linalg.triangular_solve(
        system, known, left_side=True, lower=True, unit_diagonal=True
    )
    written, read = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = _product("...ik,...jk->...ij", q, k) * between
    q_decayed = q * jnp.exp(since)[..., None]
    k_left = k * jnp.exp(since[..., -1:] - since)[..., None]
    whole = jnp.exp(since[..., -1])[..., None, None]

    def run(S, chunk):
        q_decayed, k_left, scores, written, read, whole = chunk
        new = written - _product("bhck,bhkv->bhcv", read, S)
        out = _product("bhck,bhkv->bhcv", q_decayed, S) + _product("bhij,bhjv->bhiv", scores, new)
        return S * whole + _product("bhck,bhcv->bhkv", k_left, new), out

    parts = q_decayed, k_left, scores, written, read, whole
    if q.shape[0] == 1:
        memory_BHKV, out = run(memory_BHKV, jax.tree.map(lambda x: x[0], parts))
        out = out[None]
    else:
        memory_BHKV, out = jax.lax.scan(run, memory_BHKV, parts)
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [B, N, C, H, V]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :T], memory_BHKV


def one_token(
    q_BHK: jax.Array,
    k_BHK: jax.Array,
    v_BHV: jax.Array,
    log_decay_BH: jax.Array,
    rate_BH: jax.Array,
    memory_BHKV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (results [B, H, V], S) after one token, by the rule itself."""
    S = memory_BHKV * jnp.exp(log_decay_BH)[..., None, None]
    known = (S * k_BHK[..., None]).sum(-2)
    S = S + k_BHK[..., None] * ((v_BHV - known) * rate_BH[..., None])[..., None, :]
    return (S * q_BHK[..., None]).sum(-2), S


class LinearBlock(nn.Module):
    """A layer with linear attention and a dense MLP, whose carry is x."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, state: State | None, count_B: jax.Array | None
    ) -> tuple[jax.Array, State]:
        """Run the layer; return (x, the state after each row's first `count_B` tokens).

        Args:
          state: before the first of the tokens; None: they are the first. A state of fewer rows is
            shared by as many rows in order.
          count_B: int32; None: all tokens.
        """
        c = self.config
        norm = functools.partial(RMSNorm, c.norm_eps, c.norm_plus_one)
        o, state = self._attend(norm(name="attention_norm")(x), state, count_B)
        x = constrain(x + o, "rows", None, None)
        x = x + gated_mlp(norm(name="mlp_norm")(x), c.mlp_width, ACTIVATIONS[c.activation])
        return constrain(x, "rows", None, None), state

    def _attend(
        self, h: jax.Array, state: State | None, count_B: jax.Array | None
    ) -> tuple[jax.Array, State]:
        c = self.config
        heads = c.delta
        assert heads is not None
        (B, T, D), G, H = h.shape, heads.key_heads, heads.value_heads
        K, V, X = heads.key_dim, heads.value_dim, heads.channels
        if state is None:
            state = empty_state(heads, B, h.dtype)
        state = repeat_rows(state, B)

        def constant(name, init, shape, axes):
            value: jax.Array = self.param(name, with_axes(init, axes), shape)
            return value

        kernel_XW = constant(
            *("delta_conv", nn.initializers.normal(heads.taps**-0.5)),
            *((X, 1, heads.taps), ("channels", None, None)),
        )[:, 0]
        log_rate_H = constant("delta_log_decay", _log_decay, (H,), ("heads",))
        bias_H = constant("delta_decay_bias", _decay_bias, (H,), ("heads",))

        mixed_BTX = Linear((D, X), ("embed", "channels"), name="delta_qkv")(h)
        mixed_BTX, inputs = convolve(mixed_BTX, kernel_XW, state.inputs[:, 0], count_B)
        q, k, v = jnp.split(nn.silu(mixed_BTX), [G * K, 2 * G * K], axis=-1)
        q, k = (_unit(x.reshape(B, T, G, K)) for x in (q, k))
        q, k = (jnp.repeat(x, H // G, axis=2) for x in (q * K**-0.5, k))
        v = v.reshape(B, T, H, V).astype(jnp.float32)
        q, k, v = (constrain(x, "rows", None, "heads", None) for x in (q, k, v))
        rate = Linear((D, H), ("embed", "heads"), name="delta_b")(h)
        rate = jax.nn.sigmoid(rate.astype(jnp.float32))
        decay = Linear((D, H), ("embed", "heads"), name="delta_a")(h).astype(jnp.float32)
        log_decay = -jnp.exp(log_rate_H) * jax.nn.softplus(decay + bias_H)
        if count_B is not None:  # tokens past the last leave the state as it is
            real = (jnp.arange(T) < count_B[:, None])[..., None]
            rate, log_decay = jnp.where(real, rate, 0.0), jnp.where(real, log_decay, 0.0)
        out, memory = gated_delta_rule(q, k, v, log_decay, rate, state.memory)
        out = RMSNorm(c.norm_eps, name="delta_norm")(out.astype(h.dtype))
        gate = Linear((D, H, V), ("embed", "heads", "head"), name="delta_z")(h)
        out = (out * nn.silu(gate.astype(jnp.float32))).astype(h.dtype)
        o = Linear((H, V, D), ("heads", "head", "embed"), contract=2, name="delta_o")(out)
        return o, State(memory, inputs[:, None])


def _unit(x: jax.Array) -> jax.Array:
    """Return vectors of unit length, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + NORM_EPS)


def _log_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draw the logarithm of factors from 1 to 16 (arXiv 2405.21060)."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _decay_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Draw biases b with log softplus(b) uniform from log 0.001 to log 0.1 (arXiv 2405.21060)."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))
