"""Which environment seeds a rollout plays: fresh ones, or a finite pool again and again.

The pool of a run is its first P seeds. Every epoch visits each of them once, in an order of its
own; a visit may pass a problem over that has taught nothing lately, as GRESO does (Zheng et al.,
arXiv 2506.02177). The cursor counts seeds used or, with a pool, visits; with it and the streaks in
the checkpoint a resumed run draws what it would have drawn.

Axis: P problems of the pool.
"""

from collections.abc import Iterable

import numpy as np

from ragen_jax.core.randomness import Purpose, philox


def draw_seeds(
    cursor: int, groups: int, *, pool: int, seed: int, chance_P: np.ndarray | None = None
) -> tuple[list[int], int]:
    """The seeds of one rollout, all different.

    Args:
      cursor: what `draw_seeds` returned last, 0 at first.
      groups: how many seeds; at most `pool`, if there is one.
      pool: P; 0: seeds are never used twice.
      seed: of the run.
      chance_P: `play_chances`, or None: every visit plays.

    Returns:
      (`groups` seeds, new cursor).

    Raises:
      ValueError: more groups than problems.
    """
    first = seed << 32
    if not pool:
        return [first + cursor + group for group in range(groups)], cursor + groups
    if groups > pool:
        raise ValueError(f"rollout.groups is {groups}, but env.pool has only {pool} problems")
    drawn = []
    while True:
        epoch, start = divmod(cursor, pool)
        order_P, uniform_P = _epoch(seed, epoch, pool)
        for problem in order_P[start:].tolist():
            cursor += 1
            passed_over = chance_P is not None and uniform_P[problem] >= chance_P[problem]
            # A rollout that reaches into the next epoch may meet a problem that it has already.
            if passed_over or first + problem in drawn:
                continue
            drawn.append(first + problem)
            if len(drawn) == groups:
                return drawn, cursor


def _epoch(seed: int, epoch: int, pool: int) -> tuple[np.ndarray, np.ndarray]:
    """(order in which an epoch visits the problems, uniform [0, 1) number of each), from raw
    Philox words, which never change between versions of NumPy."""
    words = philox(Purpose.POOL, seed, epoch).random_raw(2 * pool)
    word_P, other_P = words.reshape(2, pool)
    return np.argsort(word_P, kind="stable"), (other_P >> np.uint64(11)) * 2.0**-53


def play_chances(streak_P: np.ndarray, *, explore: float, least: float) -> np.ndarray:
    """How likely a visit plays its problem: max(explore ** streak, least).

    GRESO's public code begins with explore = 0.5 and least = 0.01, counts solved and failed groups
    apart, and moves `explore` by 0.01 a step, between 0.05 and 0.95, towards a share of 0.25 of
    groups without variance. Here it stays as given, one number for both.

    Args:
      streak_P: int, uninformative visits in a row up to now.
      explore, least: above 0, at most 1.

    Returns:
      float64 [P]; 1 for a problem not played yet, and for one whose last visit was informative.
    """
    return np.maximum(np.float64(explore) ** np.asarray(streak_P), least)


def init_streaks(pool: int) -> np.ndarray:
    """int32 [P] zeros: no problem has been visited."""
    return np.zeros(pool, np.int32)


def count_visits(
    streak_P: np.ndarray, seeds: Iterable[int], informative: Iterable[bool]
) -> np.ndarray:
    """The streaks after some visits.

    Args:
      streak_P: int [P].
      seeds: those that were played, in order; one may occur again.
      informative: bool for each, whether its group's returns differed.

    Returns:
      int32 [P]: 0 after an informative visit, one more after any other.
    """
    streak_P = np.array(streak_P, np.int32)
    for seed, useful in zip(seeds, informative, strict=True):
        problem = seed & 0xFFFFFFFF
        streak_P[problem] = 0 if useful else streak_P[problem] + 1
    return streak_P
