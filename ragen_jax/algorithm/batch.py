"""Convert episodes to rows of tokens.

    turn 0          turn 1 (full history)           turn 1 (single turn)
    [prompt reply]  [prompt reply | obs reply]      [prompt reply] [prompt' reply']
     mask 0  1        0     1       0    1            0      1      0       1

A turn whose prompt extends the current row continues that row; any other turn starts a new row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import ACTION, REASONING, Batch, Episode


def make_batch(episodes: Sequence[Episode], *, length: int | None = None) -> Batch:
    """Lay episodes out as rows.

    Args:
      episodes: at least one; each row gets the group of its episode.
      length: T of the result (default: the longest row); a longer row raises.

    Returns:
      `Batch` of NumPy arrays without padding rows; reward_BT is zero until rewards.add_rewards.

    Raises:
      ValueError: no episode, or a row longer than `length`.
    """
    if not episodes:
        raise ValueError("make_batch needs at least one episode, got none")
    rows = []  # (episode index, [(turn index, Turn)]); the last turn contains all tokens
    for index, episode in enumerate(episodes):
        tokens = None
        for turn_index, turn in enumerate(episode.turns):
            extends = (
                tokens is not None
                and len(turn.prompt) >= len(tokens)
                and np.array_equal(turn.prompt[: len(tokens)], tokens)
            )
            if not extends:
                rows.append((index, []))
            rows[-1][1].append((turn_index, turn))
            tokens = np.concatenate([turn.prompt, turn.sampled])

    longest = max(len(turns[-1][1].prompt) + len(turns[-1][1].sampled) for _, turns in rows)
    T = longest if length is None else length
    if longest > T:
        raise ValueError(f"a row has {longest} tokens, but the batch's length is {T}")
    B = len(rows)
    batch = Batch(
        tokens_BT=np.zeros((B, T), np.int32),
        mask_BT=np.zeros((B, T), np.float32),
        logp_BT=np.zeros((B, T), np.float32),
        turn_BT=np.full((B, T), -1, np.int32),
        turn_end_BT=np.zeros((B, T), bool),
        span_BT=np.zeros((B, T), np.int8),
        reward_BT=np.zeros((B, T), np.float32),
        episode_B=np.array([index for index, _ in rows], np.int32),
        group_B=np.array([episodes[index].group for index, _ in rows], np.int32),
        weight_B=np.ones(B, np.float32),
    )
    kept = [turn.experts for _, turns in rows for _, turn in turns if turn.experts is not None]
    if kept:
        experts_BTX = np.full((B, T, kept[0].shape[1]), -1, np.int16)
        batch = dataclasses.replace(batch, experts_BTX=experts_BTX)
    for b, (_, turns) in enumerate(rows):
        for turn_index, turn in turns:
            start, stop = len(turn.prompt), len(turn.prompt) + len(turn.sampled)
            batch.tokens_BT[b, :start] = turn.prompt
            batch.tokens_BT[b, start:stop] = turn.sampled
            batch.mask_BT[b, start:stop] = 1.0
            batch.logp_BT[b, start:stop] = turn.logp
            batch.turn_BT[b, start:stop] = turn_index
            batch.turn_end_BT[b, stop - 1] = True
            for span, (first, last) in ((REASONING, turn.reasoning), (ACTION, turn.answer)):
                batch.span_BT[b, start + first : start + last] = span
            if batch.experts_BTX is not None and turn.experts is not None:
                batch.experts_BTX[b, stop - 1 - len(turn.experts) : stop - 1] = turn.experts
    return batch


def take_rows(batch: Batch, rows_B: np.ndarray, *, size: int) -> Batch:
    """Return the batch of the given rows, padded to `size` rows of weight 0.

    Raises:
      ValueError: more rows than `size`.
    """
    if len(rows_B) > size:
        raise ValueError(f"{len(rows_B)} rows do not fit a batch of {size}")
    fill = {"turn_BT": -1, "episode_B": -1, "group_B": -1, "experts_BTX": -1}

    def take(name, x):
        out = np.full((size, *x.shape[1:]), fill.get(name, 0), x.dtype)
        out[: len(rows_B)] = x[rows_B]
        return out

    return Batch(**{name: take(name, x) for name, x in batch.arrays.items()})
