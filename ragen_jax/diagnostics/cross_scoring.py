"""Cross-scoring: log p(reasoning m | prompt n) for every pair, by shared prompts.

Each distinct prompt is read once, and its keys and values are shared by all reasonings scored
under it. The work is N * P + M * N * Z tokens instead of M * N * (P + Z), and a prompt's cache is
not copied. The common prefix of all prompts is read only once, and duplicate samples are scored
once. The tokens after a reasoning can be included, so that its action is scored in the same pass.
Log-probabilities are at temperature 1.

Axes: M reasonings, N prompts, P prompt tokens, Z tokens of a reasoning and the tokens after it,
V vocabulary. In one device call: n prompts, m reasonings.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.compilation import compiled
from ragen_jax.core.padding import length_bucket, pad_rows
from ragen_jax.core.progress import begin_count
from ragen_jax.core.sharding import constrain, row_shards
from ragen_jax.core.stored_programs import Jitted, stored
from ragen_jax.core.types import Params
from ragen_jax.model.likelihood import token_logps, vocabulary_statistics
from ragen_jax.model.qwen import Qwen, head
from ragen_jax.model.segments import LEAST_PREFIX, Segment, as_segment, prepend
from ragen_jax.model.vision.positions import next_positions, of_params, token_positions

# Whether programs are only compiled, not run.
_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("compiling", default=False)

Ids = Sequence[int] | np.ndarray  # token ids
Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class ScoredReply:
    """A reasoning and, if its action is scored, the sampled tokens up to the action's end."""

    tokens: np.ndarray  # int, at least one
    reasoning: int  # number of reasoning tokens, at the start; 0: not scored
    action: int = 0  # number of action tokens, at the end; tokens in between are only read


def cross_score(
    model: Qwen,
    params: Params,
    prompts: Sequence[Ids],
    reasonings: Sequence[Ids],
    *,
    micro_batch: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return sequence log-likelihoods of all reasonings under all prompts (RAGEN-2, section 2.3).

    Args:
      model, params: the policy.
      prompts: N, each ending where a reasoning begins.
      reasonings: M, none empty.
      micro_batch: (prompt, reasoning) rows per device call.

    Returns:
      (score_MN float32: sum over tokens of log p(z_m | x_n), length_M int32: tokens of z_m).

    Raises:
      ValueError: without prompts, without reasonings, or if one of them is empty.
    """
    _check(prompts, reasonings)
    replies = [ScoredReply(np.asarray(reasoning), len(reasoning)) for reasoning in reasonings]
    score_1MN, _ = _score_all(
        model, params, prompts, replies, (), micro_batch=micro_batch, actions=False
    )
    return score_1MN[0], np.array([len(reasoning) for reasoning in reasonings], np.int32)


def cross_score_actions(
    model: Qwen,
    params: Params,
    prompts: Sequence[Ids],
    replies: Sequence[ScoredReply],
    swapped: Sequence[tuple[int, ScoredReply]],
    *,
    micro_batch: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `cross_score` with the actions, and scores of actions after other reasonings.

    Args:
      prompts, micro_batch: as in `cross_score`.
      replies: M, scored under every prompt.
      swapped: R pairs (column of a prompt, an action after a reasoning that it was not sampled
        with), each scored under that prompt only.

    Returns:
      (score_MN of the reasonings, action_MN: log p(a_m | x_n, z_m) summed over the action's tokens,
      action_R: the same for `swapped`), float32; 0 without an action.

    Raises:
      ValueError: without prompts, with empty `replies`, or if one of their elements is empty.
    """
    rows = [*replies, *(row for _, row in swapped)]
    _check(prompts, [row.tokens for row in rows])
    score_2MN, action_R = _score_all(
        model, params, prompts, replies, swapped, micro_batch=micro_batch, actions=True
    )
    return score_2MN[0], score_2MN[1], action_R


def blocks(N: int, M: int, micro_batch: int, shards: int = 1) -> tuple[int, int]:
    """Return (prompts, reasonings) of one device call, for N distinct prompts and M reasonings.

    The numbers are rounded up to multiples of 8 and 16, since they vary slightly between steps and
    each shape needs a compilation. Few prompts per call give larger matrix products with the same
    keys. The number must be divisible over the mesh: otherwise every device would read all rows. A
    call therefore has a prompt for each part of the mesh, even if that is more than `micro_batch`.

    Args:
      shards: number of parts that rows are split into on the mesh.
    """
    unit = max(1, min(-(-8 // shards), micro_batch // shards)) * shards
    m = min(-(-M // 16) * 16, max(1, micro_batch // unit))
    n = min(-(-N // unit) * unit, max(1, micro_batch // m // unit) * unit)
    return n, m


def _score_all(
    model: Qwen,
    params: Params,
    prompts: Sequence[Ids],
    replies: Sequence[ScoredReply],
    swapped: Sequence[tuple[int, ScoredReply]],
    *,
    micro_batch: int,
    actions: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (float32 [1 or 2, M, N]: sums over reasonings and, with `actions`, actions; action_R).

    The arguments are as in `cross_score_actions`.
    """
    distinct, column_N = _find_distinct(prompts, lambda prompt: tuple(map(int, prompt)))
    # Computed from all M, so that the shape does not depend on the number of distinct reasonings.
    n, m = blocks(len(distinct), len(replies), micro_batch, row_shards()[0])
    replies, row_M = _find_distinct(replies, _score_key)
    swapped, row_R = _find_distinct(
        [(column_N[prompt], row) for prompt, row in swapped],
        lambda pair: (pair[0], *_score_key(pair[1])),
    )
    N, M = len(distinct), len(replies)
    shared = _common_prefix_length(distinct) if model.config.attention == "xla" else 0
    prefix = None
    if shared:
        first = pad_rows([distinct[0][:shared]], shared)
        prefix, _ = _call(read_prompts, model, params, *first)
    rests = [prompt[shared:] for prompt in distinct]
    P = padded_length(max(map(len, rests)), 32)
    # Reasonings of similar length share a call, which is padded to its longest.
    by_length = sorted(range(M), key=lambda i: len(replies[i].tokens))
    rows_of = [[] for _ in range(N)]  # indices into `swapped`, by prompt
    for r, (column, _) in enumerate(swapped):
        rows_of[column].append(r)

    widest = [max(map(len, rows_of[n0 : n0 + n])) for n0 in range(0, N, n)]
    widths = [min(padded_length(most, 8), m) if most else 1 for most in widest]
    shapes = zip(widest, widths, strict=True)
    count = begin_count(sum(-(-M // m) + -(-most // width) for most, width in shapes), "calls")

    scores = np.zeros((1 + actions, M, N), np.float32)
    action_R = np.zeros(len(swapped), np.float32)

    def keep(n0, chosen, block):
        scores[:, chosen, n0 : n0 + n] = block[:, : len(chosen), : N - n0]

    def keep_swapped(chosen, block):
        for column, rows in enumerate(chosen):
            action_R[rows] = block[1, : len(rows), column]

    def calls():
        """Yield (function that stores the scores, scores on the device) for each call."""
        for n0, most, width in zip(range(0, N, n), widest, widths, strict=True):
            rows = pad_rows(rests[n0 : n0 + n], P, size=n)
            read = _call(read_prompts, model, params, *rows, prefix)
            for m0 in range(0, M, m):
                chosen = by_length[m0 : m0 + m]
                tokens, *spans = _pad_replies([replies[i] for i in chosen], m)
                spans = spans if actions else spans[:1]
                block = _score(model, params, *read, tokens, *spans)
                yield functools.partial(keep, n0, chosen), block
            here = rows_of[n0 : n0 + n]
            for r0 in range(0, most, width):
                chosen = [rows[r0 : r0 + width] for rows in here]
                anything = next(rows[0] for rows in chosen if rows)
                cells = [[*rows, *[anything] * (width - len(rows))] for rows in chosen]
                cells += [[anything] * width] * (n - len(cells))
                laid = _pad_replies([swapped[r][1] for rows in cells for r in rows], n * width)
                tokens, *spans = (x.reshape(n, width, *x.shape[1:]) for x in laid)
                block = _score(model, params, *read, tokens, *spans)
                yield functools.partial(keep_swapped, chosen), block

    # At most one call runs while the next is dispatched, because XLA's CPU backend allocates the
    # temporaries of a call when it is dispatched.
    pairs = itertools.pairwise(itertools.chain(calls(), [None]))
    for (store, block), _ in pairs:  # ty: ignore[not-iterable] None is never the first
        if not _compiling.get():
            store(np.asarray(block))
        count(1)
    return scores[:, row_M][:, :, column_N], action_R[row_R]


@contextlib.contextmanager
def only_compiling() -> Generator[None]:
    """Compile the programs of cross-scoring in this thread without running them; scores are 0.

    Programs for slightly longer reasonings are compiled as well.
    """
    token = _compiling.set(True)
    try:
        yield
    finally:
        _compiling.reset(token)


def _call(function: Jitted, *args: Any) -> Any:
    """Call a jitted function; under `only_compiling`, only compile it and return shapes."""
    return compiled(function, *args) if _compiling.get() else function(*args)


def _score(
    model: Qwen, params: Params, segment: Segment, last_ND: Any, tokens: np.ndarray, *spans: Any
) -> Any:
    """Run `_call` on `score_block`."""
    if _compiling.get():
        longer = np.zeros((*tokens.shape[:-1], padded_reasoning(tokens.shape[-1] + 1)), np.int32)
        compiled(score_block, model, params, segment, last_ND, longer, *spans)
    return _call(score_block, model, params, segment, last_ND, tokens, *spans)


def cross_score_pairs(
    model: Qwen,
    params: Params,
    prompts: Sequence[Ids],
    reasonings: Sequence[Ids],
    *,
    micro_batch: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Return `cross_score` by a separate forward pass over prompt + reasoning for every pair."""
    _check(prompts, reasonings)
    pairs = [[*prompt, *reasoning] for reasoning in reasonings for prompt in prompts]
    tokens_BT, length_B = pad_rows(pairs, padded_length(max(map(len, pairs)), 16))
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


@stored(static_argnames="model")
def read_prompts(
    model: Qwen,
    params: Params,
    tokens_NP: jax.Array,
    length_N: jax.Array,
    prefix: Segment | None = None,
) -> tuple[Segment, jax.Array]:
    """Return (`Segment` of whole prompts, hidden states of their last tokens).

    Args:
      tokens_NP, length_N: the prompts, right-padded; with `prefix`, the tokens after it.
      prefix: the common prefix of all prompts: one row without padding.
    """
    positions, memory, start_N = None, (), None
    if prefix is not None:
        start_N = jnp.broadcast_to(prefix.next_N, length_N.shape)
        positions, memory = token_positions(params, tokens_NP, start_N), (prefix,)
    next_N = None
    if of_params(params) is not None:
        next_N = next_positions(params, tokens_NP, length_N, start_N)
    output: Any = model.apply(
        {"params": params}, tokens_NP, positions, memory, keep_kv=True, count_B=length_N
    )
    hidden, kept = output
    last_ND = jnp.take_along_axis(hidden, (length_N - 1)[:, None, None], 1)[:, 0]
    if prefix is None:
        return as_segment(kept, length_N, next_N), last_ND

    k, v, *state = kept
    kept = *prepend(prefix, k, v), *state
    return as_segment(kept, prefix.length_N + length_N, next_N), last_ND


@stored(static_argnames="model")
def score_block(
    model: Qwen,
    params: Params,
    segment: Segment,
    last_ND: jax.Array,
    tokens_MZ: jax.Array,
    length_M: jax.Array,
    action_M2: jax.Array | None = None,
) -> jax.Array:
    """Return the sums of log-probs of a block, replicated on every device.

    Args:
      segment, last_ND: N prompts, as `read_prompts` returns them.
      tokens_MZ: token ids, scored under every prompt; or [N, M, Z], different tokens for each
        prompt (then length_M and action_M2 also have a leading axis N).
      length_M: number of reasoning tokens, at the start.
      action_M2: (start, end) of the action; None: no action.

    Returns:
      float32 [1, M, N], sums over the reasoning; with action_M2 [2, M, N], the second for the
      action.
    """
    N, (M, Z) = last_ND.shape[0], tokens_MZ.shape[-2:]
    # Rows are ordered by prompt, so that neighbouring rows share a row of the segment.
    tokens_BZ = jnp.broadcast_to(tokens_MZ, (N, M, Z)).reshape(N * M, Z)
    tokens_BZ = constrain(tokens_BZ, "rows", None)
    position_BZ = jnp.repeat(segment.next_N, M)[:, None] + jnp.arange(Z)
    hidden, _ = model.apply({"params": params}, tokens_BZ, position_BZ, (segment,))
    # Token 0 is predicted by the prompt's last token, token j by token j - 1.
    before = jnp.concatenate([jnp.repeat(last_ND, M, axis=0)[:, None], hidden[:, :-1]], axis=1)
    logp_BZ, _ = vocabulary_statistics(before, head(params), tokens_BZ, 1.0)
    logp_NMZ, at_Z = logp_BZ.reshape(N, M, Z), jnp.arange(Z)
    spans = [(jnp.zeros_like(length_M), length_M)]
    if action_M2 is not None:
        spans.append((action_M2[..., 0], action_M2[..., 1]))
    sums = []
    for first, last in spans:
        inside = (at_Z >= first[..., None]) & (at_Z < last[..., None])
        sums.append(jnp.where(inside, logp_NMZ, 0.0).sum(-1).T)
    return constrain(jnp.stack(sums), None, None, None)  # every process reads all of it


def _check(prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> None:
    if not prompts or not reasonings:
        raise ValueError(
            f"cross-scoring needs prompts and reasonings, got {len(prompts)} and {len(reasonings)}"
        )
    for name, rows in (("prompt", prompts), ("reasoning", reasonings)):
        empty = [i for i, row in enumerate(rows) if len(row) == 0]
        if empty:
            raise ValueError(f"{name} {empty[0]} is empty; leave it out of the scoring")


def _find_distinct(
    items: Sequence[Item], key: Callable[[Item], Hashable]
) -> tuple[list[Item], np.ndarray]:
    """Return (items with distinct keys in order of appearance, int array: index of each item)."""
    index, first = {}, []
    for item in items:
        if index.setdefault(key(item), len(index)) == len(first):
            first.append(item)
    return first, np.array([index[key(item)] for item in items], int)


def _score_key(replies: ScoredReply) -> tuple[bytes, int, int]:
    """Return a key that is the same for instances of `ScoredReply` with the same scores."""
    return replies.tokens.astype(np.int32).tobytes(), replies.reasoning, replies.action


def _common_prefix_length(prompts: Sequence[Ids]) -> int:
    """Return the length of the common prefix, a multiple of 32; 0 if it is too short to share.

    Only for XLA's attention (see `_score_all`): the attention kernels of accelerators cannot read
    an earlier segment, so they read whole prompts.
    """
    if len(prompts) == 1:
        return 0
    shortest = min(map(len, prompts))
    rows = np.array([prompt[: shortest - 1] for prompt in prompts])  # each prompt keeps a token
    differs = (rows != rows[0]).any(axis=0)
    common = int(differs.argmax()) if differs.any() else shortest - 1
    return common // 32 * 32 if common >= LEAST_PREFIX else 0


def padded_length(length: int, least: int) -> int:
    """Return the next multiple of `least` or, if larger, of 1/16 of the next power of two."""
    return length_bucket(length, least=least, parts=16)


def padded_reasoning(length: int) -> int:
    """Return the padded length of a reasoning: 16, 24, 32, then by `padded_length`."""
    return max(16, padded_length(length, 8 if length <= 32 else 16))


def _pad_replies(
    replies: Sequence[ScoredReply], size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens [size, Z], reasoning lengths [size], spans of the actions [size, 2])."""
    width = padded_reasoning(max(len(row.tokens) for row in replies))
    tokens, length = pad_rows([row.tokens for row in replies], width, size)
    replies = [*replies, *[replies[0]] * (size - len(replies))]
    action = length - np.array([row.action for row in replies], np.int32)
    reasoning = np.array([row.reasoning for row in replies], np.int32)
    return tokens, reasoning, np.stack([action, length], axis=1)
