"""Repeated tokens in replies: immediate repeats, repeated n-grams, copies of a prompt.

Axes: R replies, T tokens of the longest reply, W n-grams of a reply.
"""

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 64  # longest unit of an immediate repeat, in tokens
BASE = np.uint64(0x9E3779B97F4A7C15)  # an odd constant with evenly spread bits


def longest_repeats(replies: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the longest immediate repeat of each reply.

    A repeat is a unit of at most MAX_PERIOD tokens that occurs at least twice in direct succession;
    its length covers all copies, and the beginning of a further copy.

    Args:
      replies: token ids of each reply.

    Returns:
      (length_R, flood_R): int [R], the tokens of the longest repeat (0: none), and those of the
      longest run of a single token (1 if no token is repeated; 0 for an empty reply).
    """
    ids_RT = _pad(replies)
    size_R = np.array([len(ids) for ids in replies], np.int64)
    length_R, flood_R = np.zeros_like(size_R), np.minimum(size_R, 1)
    for period in range(1, min(MAX_PERIOD, ids_RT.shape[1] // 2) + 1):
        same_RT = ids_RT[:, period:] == ids_RT[:, :-period]
        rows = np.flatnonzero(np.count_nonzero(same_RT, axis=1) >= period)
        if not len(rows):
            continue
        run = _longest_run(same_RT[rows])
        found = np.where(run >= period, run + period, 0)
        length_R[rows] = np.maximum(length_R[rows], found)
        if period == 1:
            flood_R[rows] = np.maximum(flood_R[rows], found)
    return length_R, flood_R


def repeated_ngrams(replies: Sequence[np.ndarray], n: int) -> np.ndarray:
    """Return the fraction of each reply's n-grams that occurred earlier in it; 0 if it has none.

    Args:
      replies: token ids of each reply.

    Returns:
      float64 [R].
    """
    ids_RT = _pad(replies)
    count_R = np.maximum([len(ids) - n + 1 for ids in replies], 0)
    if ids_RT.shape[1] < n:
        return np.zeros(len(replies))
    hash_RW = np.sort(hash_ngrams(ids_RT, n), axis=1)
    # Those that reach into the padding differ from all others, since its ids differ.
    repeated_R = np.count_nonzero(hash_RW[:, 1:] == hash_RW[:, :-1], axis=1)
    return repeated_R / np.maximum(count_R, 1)


def copied_ngrams(
    replies: Sequence[np.ndarray], prompts: Sequence[np.ndarray], n: int
) -> tuple[int, int]:
    """Return (number of the replies' n-grams that are in their prompts, number of all n-grams).

    Args:
      replies: token ids of each reply.
      prompts: token ids of each reply's prompt.
    """
    rows: dict[bytes, int] = {}  # members of a group have the same prompt
    prompt_R = [rows.setdefault(prompt.tobytes(), len(rows)) for prompt in prompts]
    unique = {row: prompt for row, prompt in zip(prompt_R, prompts, strict=True)}
    own = _row_hashes(replies, np.array(prompt_R, np.uint64), n)
    given = _row_hashes([unique[row] for row in range(len(rows))], np.arange(len(rows)), n)
    return int(np.isin(own, given).sum()), len(own)


def _row_hashes(texts: Sequence[np.ndarray], row_R: np.ndarray, n: int) -> np.ndarray:
    """Return hashes of all n-grams of the texts, together with the number of their row."""
    hash_RW = hash_ngrams(_pad(texts), n)
    with np.errstate(over="ignore"):
        hash_RW += row_R.astype(np.uint64)[:, None] * BASE
    count_R = np.array([len(ids) - n + 1 for ids in texts])
    return hash_RW[np.arange(hash_RW.shape[1]) < count_R[:, None]]


def hash_ngrams(ids: np.ndarray, n: int) -> np.ndarray:
    """Return a hash of each n-gram along the last axis.

    Args:
      ids: int [..., T].

    Returns:
      uint64 [..., T - n + 1]; empty along the last axis if T < n.
    """
    windows = max(ids.shape[-1] - n + 1, 0)
    found = np.zeros((*ids.shape[:-1], windows), np.uint64)
    unsigned = ids.astype(np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(n):
            found = found * BASE + unsigned[..., offset : offset + windows]
            found ^= found >> np.uint64(29)
    return found


def _pad(replies: Sequence[np.ndarray]) -> np.ndarray:
    """Return int64 [R, T], padded by ids that differ from every other id of the row."""
    width = max((len(ids) for ids in replies), default=0)
    padded_RT = np.tile(-1 - np.arange(width, dtype=np.int64), (len(replies), 1))
    for row, ids in enumerate(replies):
        padded_RT[row, : len(ids)] = ids
    return padded_RT


def _longest_run(true_RT: np.ndarray) -> np.ndarray:
    """Return the length of the longest run of True in each row: int64 [R]."""
    place_T = np.arange(1, true_RT.shape[1] + 1)
    last_false_RT = np.maximum.accumulate(np.where(true_RT, 0, place_T), axis=1)
    return (place_T - last_false_RT).max(axis=1)
