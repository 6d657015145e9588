"""Choose the environment seeds of a rollout: new seeds, or a finite pool that is repeated.

The pool of a run is its first P seeds. Every epoch visits each of them once, in a new random order.
A visit may skip a problem that has been uninformative lately, as in GRESO (Zheng et al.,
arXiv 2506.02177), or whose success is nearly certain, as in VIP (`allocation_chances`). The cursor
counts seeds used or, with a pool, visits. The checkpoint holds the cursor, the streaks and any
tallies, so that a resumed run draws the same problems as an uninterrupted run.

Axis: P problems of the pool.
"""

from collections.abc import Iterable

import numpy as np

from ragen_jax.core.randomness import Purpose, philox


def draw_seeds(
    cursor: int, groups: int, *, pool: int, seed: int, chance_P: np.ndarray | None = None
) -> tuple[list[int], int]:
    """Draw the seeds of one rollout, all different.

    Args:
      cursor: the cursor that the last `draw_seeds` returned, 0 at first.
      groups: number of seeds; at most `pool`, unless that is 0.
      pool: P; 0: seeds are never used twice.
      seed: seed of the run.
      chance_P: `play_chances` or `allocation_chances`, or None: every visit plays its problem.

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
            # A rollout that continues into the next epoch may visit a problem a second time.
            if passed_over or first + problem in drawn:
                continue
            drawn.append(first + problem)
            if len(drawn) == groups:
                return drawn, cursor


def _epoch(seed: int, epoch: int, pool: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (order in which an epoch visits the problems, uniform [0, 1) number of each problem).

    They are computed from raw Philox words, which never change between versions of NumPy.
    """
    words = philox(Purpose.POOL, seed, epoch).random_raw(2 * pool)
    word_P, other_P = words.reshape(2, pool)
    return np.argsort(word_P, kind="stable"), (other_P >> np.uint64(11)) * 2.0**-53


def play_chances(streak_P: np.ndarray, *, explore: float, least: float) -> np.ndarray:
    """Return the probability that a visit plays its problem: max(explore ** streak, least).

    GRESO's public code begins with explore = 0.5 and least = 0.01 and counts solved and failed
    groups separately. It moves `explore` by 0.01 per step, between 0.05 and 0.95, towards a
    fraction of 0.25 of groups without variance. Here `explore` is constant, and the same for both.

    Args:
      streak_P: int, consecutive uninformative visits up to now.
      explore, least: above 0, at most 1.

    Returns:
      float64 [P]; 1 for a problem that was not played yet or whose last visit was informative.
    """
    return np.maximum(np.float64(explore) ** np.asarray(streak_P), least)


def allocation_chances(tally_P2: np.ndarray, *, least: float) -> np.ndarray:
    """Return the probability that a visit plays its problem: max(2 sqrt(p (1 - p)), least).

    With a fixed number of rollouts, the variance of the gradient is smallest if a problem that is
    solved with probability p gets rollouts in proportion to sqrt(p (1 - p)), the std of its reward
    (VIP, Nguyen et al., arXiv 2602.01601). VIP varies the size of a group and predicts p by a
    Gaussian process. Here groups keep their size, a problem is visited more or less often, and
    p = (solved + 1) / (played + 2) over its last visits.

    Args:
      tally_P2: float32, solved and played episodes, as in `count_solved`.
      least: above 0, at most 1.

    Returns:
      float64 [P]; 1 for a problem that was not played yet.
    """
    solved_P, played_P = np.asarray(tally_P2, np.float64).T
    p_P = (solved_P + 1) / (played_P + 2)
    return np.maximum(2 * np.sqrt(p_P * (1 - p_P)), least)


def init_tallies(pool: int) -> np.ndarray:
    """Return the tallies before any visit: float32 [P, 2] zeros."""
    return np.zeros((pool, 2), np.float32)


def count_solved(
    tally_P2: np.ndarray, seeds: Iterable[int], solved: Iterable[int], played: Iterable[int]
) -> np.ndarray:
    """Return the tallies after some visits.

    Args:
      tally_P2: float32, solved and played episodes of each problem. A visit counts half as much as
        the next visit of the same problem, since the policy changes.
      seeds, solved, played: seed and numbers of episodes of each group, in order.

    Returns:
      float32 [P, 2].
    """
    tally_P2 = np.array(tally_P2, np.float32)
    for seed, *counts in zip(seeds, solved, played, strict=True):
        problem = seed & 0xFFFFFFFF
        tally_P2[problem] = tally_P2[problem] / 2 + counts
    return tally_P2


def init_streaks(pool: int) -> np.ndarray:
    """Return the streaks before any visit: int32 [P] zeros."""
    return np.zeros(pool, np.int32)


def count_visits(
    streak_P: np.ndarray, seeds: Iterable[int], informative: Iterable[bool]
) -> np.ndarray:
    """Return the streaks after some visits.

    Args:
      streak_P: int [P].
      seeds: the seeds that were played, in order; a seed may occur several times.
      informative: bool for each seed, whether its group's returns differed.

    Returns:
      int32 [P]: reset to 0 by an informative visit, increased by 1 by any other visit.
    """
    streak_P = np.array(streak_P, np.int32)
    for seed, useful in zip(seeds, informative, strict=True):
        problem = seed & 0xFFFFFFFF
        streak_P[problem] = 0 if useful else streak_P[problem] + 1
    return streak_P
