"""Cross-scoring: log p(reasoning m | prompt n) for every pair, by shared prompts.

Each distinct prompt is read once and its keys and values are shared by all reasonings scored
under it: N * P + M * N * Z tokens of work instead of M * N * (P + Z), and no copy of a prompt's
cache. Log-probabilities are at temperature 1.

Axes: M reasonings, N prompts, P prompt tokens, Z reasoning tokens, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.likelihood import token_logps, vocabulary_statistics
from ragen_jax.model.attention import Segment
from ragen_jax.model.qwen import head
from ragen_jax.sharding import constrain


def cross_score(model, params, prompts, reasonings, *, micro_batch):
    """Sequence log-likelihoods of all reasonings under all prompts (RAGEN-2, section 2.3).

    Args:
      model, params: the policy.
      prompts: N lists of token ids, each ending where a reasoning begins.
      reasonings: M non-empty lists of token ids.
      micro_batch: (prompt, reasoning) rows per device call.

    Returns:
      (score_MN float32: sum over tokens of log p(z_m | x_n), length_M int32: tokens of z_m).

    Raises:
      ValueError: no prompt, no reasoning, or an empty one.
    """
    _check(prompts, reasonings)
    distinct, column_N = _distinct(prompts)
    tokens_NP, length_N = _pad(distinct, 32)
    tokens_MZ, length_M = _pad(reasonings, 16)
    N, M = len(distinct), len(reasonings)
    # Blocks of n prompts and m reasonings. Rounded up, since the numbers change from step to
    # step by a few and each shape is a compilation.
    n = min(-(-N // 8) * 8, micro_batch)
    m = min(-(-M // 16) * 16, max(1, micro_batch // n))
    score_MN = np.zeros((M, N), np.float32)
    # Queue every call before waiting for any. The last block is padded with row 0, so that
    # all calls share one shape.
    pending = []
    for n0 in range(0, N, n):
        prompt = _rows(tokens_NP, length_N, n0, n)
        segment, last_ND = _read_prompts(model, params, *prompt)
        for m0 in range(0, M, m):
            reasoning = _rows(tokens_MZ, length_M, m0, m)
            pending.append((m0, n0, _score(model, params, segment, last_ND, *reasoning)))
    for m0, n0, block_mn in pending:
        block_mn = np.asarray(block_mn)[: M - m0, : N - n0]
        score_MN[m0 : m0 + m, n0 : n0 + n] = block_mn
    return score_MN[:, column_N], length_M


def cross_score_pairs(model, params, prompts, reasonings, *, micro_batch):
    """The naive twin of `cross_score`: a forward pass over prompt + reasoning for every pair."""
    _check(prompts, reasonings)
    pairs = [[*prompt, *reasoning] for reasoning in reasonings for prompt in prompts]
    tokens_BT, length_B = _pad(pairs, 16)
    start_B = np.array([len(prompt) for _ in reasonings for prompt in prompts])
    position_T = np.arange(tokens_BT.shape[1])
    inside_BT = (position_T >= start_B[:, None]) & (position_T < length_B[:, None])
    score_B = np.zeros(len(pairs), np.float32)
    for b in range(0, len(pairs), micro_batch):
        rows = slice(b, b + micro_batch)
        logp = np.asarray(_pair_logps(model, params, tokens_BT[rows]))
        score_B[rows] = (logp * inside_BT[rows]).sum(-1)
    length_M = np.array([len(reasoning) for reasoning in reasonings], np.int32)
    return score_B.reshape(len(reasonings), len(prompts)), length_M


_pair_logps = jax.jit(token_logps, static_argnames="model")


@functools.partial(jax.jit, static_argnames="model")
def _read_prompts(model, params, tokens_NP, length_N):
    hidden, (k, v) = model.apply({"params": params}, tokens_NP, keep_kv=True)
    last_ND = jnp.take_along_axis(hidden, (length_N - 1)[:, None, None], 1)[:, 0]
    return Segment(k=k, v=v, length_N=length_N), last_ND


@functools.partial(jax.jit, static_argnames="model")
def _score(model, params, segment, last_ND, tokens_MZ, length_M):
    """[M, N] scores of one block; rows are prompt by prompt, so that rows share a segment row."""
    N, (M, Z) = last_ND.shape[0], tokens_MZ.shape
    tokens_BZ = constrain(jnp.tile(tokens_MZ, (N, 1)), "rows", None)
    position_BZ = jnp.repeat(segment.length_N, M)[:, None] + jnp.arange(Z)
    hidden, _ = model.apply({"params": params}, tokens_BZ, position_BZ, (segment,))
    # Token 0 is predicted by the prompt's last token, token j by token j - 1.
    before = jnp.concatenate([jnp.repeat(last_ND, M, axis=0)[:, None], hidden[:, :-1]], axis=1)
    logp_BZ, _ = vocabulary_statistics(before, head(params), tokens_BZ, 1.0)
    real_MZ = jnp.arange(Z) < length_M[:, None]
    score_MN = jnp.where(real_MZ, logp_BZ.reshape(N, M, Z), 0.0).sum(-1).T
    return constrain(score_MN, None, None)  # every process reads all of it


def _check(prompts, reasonings):
    if not prompts or not reasonings:
        raise ValueError(
            f"cross-scoring needs prompts and reasonings, got {len(prompts)} and {len(reasonings)}"
        )
    for name, rows in (("prompt", prompts), ("reasoning", reasonings)):
        empty = [i for i, row in enumerate(rows) if len(row) == 0]
        if empty:
            raise ValueError(f"{name} {empty[0]} is empty; leave it out of the scoring")


def _distinct(prompts):
    """(distinct prompts in order of appearance, column_N: which of them each prompt is)."""
    index = {}
    column_N = [index.setdefault(tuple(map(int, prompt)), len(index)) for prompt in prompts]
    return list(index), np.asarray(column_N)


def _pad(rows, multiple):
    """Right-padded int32 [rows, T], T a multiple of `multiple`, and the lengths."""
    length = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), -(-int(length.max()) // multiple) * multiple), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, length


def _rows(tokens, length, start, size):
    """`size` rows from `start` on; past the end the first row is repeated."""
    index = np.arange(start, start + size)
    index = np.where(index < len(tokens), index, 0)
    return tokens[index], length[index]
