"""Collect the groups of a step. Dynamic sampling: play until enough groups are informative.

    round 0   g0 . g2 .      `.`: all members got the same reward, so there is nothing to learn
    round 1   .  g5 g6 g7
    step      g0 g2 g5 g6    the first `wanted` informative groups, in the order played

DAPO (Yu et al., arXiv 2503.14476, section 3.2). Only the task's reward counts: format and length
penalties would also distinguish members that all failed in the same way. A step always has `wanted`
groups, so that its shapes never change. If the rounds do not yield enough informative groups,
uninformative groups fill the step, and the filter drops them. Surplus groups are discarded. In the
next step they would be off-policy, and they would have to be part of the checkpoint. The metrics of
a step cover all groups that were played.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import jax
import numpy as np

from ragen_jax.algorithm.advantage import has_variance
from ragen_jax.algorithm.rewards import broken_episodes, sum_turns
from ragen_jax.core.sharding import place
from ragen_jax.core.stored_programs import StoredProgram
from ragen_jax.core.types import Episode, Metrics
from ragen_jax.rollout.pool import (
    allocation_chances,
    count_solved,
    count_visits,
    draw_seeds,
    play_chances,
)
from ragen_jax.rollout.task import Task


class ProblemState(Protocol):
    """The part of a `TrainState` that depends on the problems played so far."""

    @property
    def seed_cursor(self) -> dict[str, Any]:
        """{task name: uint32, number of environment seeds that were drawn}."""
        ...

    @property
    def streak_P(self) -> dict[str, Any] | None:
        """{task name: int32 [P], visits of each problem of the pool since it last had variance}."""
        ...

    @property
    def tally_P(self) -> dict[str, Any] | None:
        """{task name: float32 [P, 2], `pool.count_solved`}, with collect.allocate."""
        ...


State = TypeVar("State", bound=ProblemState)


@dataclasses.dataclass(frozen=True)
class Collected:
    """The groups of a step, and all N groups that were played for it."""

    episodes: list[Episode]  # group by group, member by member, groups numbered from 0
    played: list[Episode]  # episodes of all N groups, in the order played
    rounds: int
    seeds_N: tuple[int, ...]  # environment seed of each group, in the order played
    informative_N: np.ndarray  # bool
    # bool: whether enough members are sound (their environment did not break) to judge the group
    judged_N: np.ndarray
    cursor: int = 0  # cursor of environment seeds after these groups

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (solved, sound) episodes of each group, int [N]; broken episodes do not count."""
        counts = np.zeros((2, len(self.seeds_N)), int)
        for episode in self.played:
            counts[:, episode.group] += (episode.success and not episode.error, not episode.error)
        return counts[0], counts[1]

    def metrics(self) -> Metrics:
        """Return the collect/* metrics; the ratio is over the groups that could be judged."""
        metrics: Metrics = {"collect/rounds": self.rounds, "collect/groups": len(self.seeds_N)}
        if self.judged_N.any():
            metrics["collect/informative_ratio"] = self.informative_N[self.judged_N].mean()
        return metrics


def collect(
    task: "Task",
    play: "Callable[[Task, list[int], jax.Array], list[Episode]]",
    state: ProblemState,
    step: int,
) -> Collected:
    """Collect a task's groups of a step.

    Args:
      play: (task, seeds_G, key) -> episodes, group by group.
      state: holds the seed cursors and streaks of the problems played so far.
      step: number of the iteration.
    """
    c, key = task.collecting, task.key
    cursor, chance_P = int(state.seed_cursor[task.name]), None
    if c.allocate:
        tally_P2 = jax.device_get((state.tally_P or {})[task.name])
        chance_P = allocation_chances(tally_P2, least=c.explore_least)
    elif c.pool:
        streaks = state.streak_P or {}
        streak_P = jax.device_get(streaks[task.name])
        chance_P = play_chances(streak_P, explore=c.explore, least=c.explore_least)

    def play_round(round_):
        nonlocal cursor
        seeds_G, cursor = draw_seeds(cursor, c.groups, pool=c.pool, seed=c.seed, chance_P=chance_P)
        noise = key
        if c.pool:  # a problem that is played again draws different noise
            noise = jax.random.fold_in(jax.random.fold_in(key, step), round_)
        return play(task, seeds_G, noise)

    collected = collect_groups(
        play_round, differ_in_reward, wanted=c.groups, max_rounds=c.max_rounds
    )
    return dataclasses.replace(collected, cursor=cursor)


_has_variance = StoredProgram(has_variance)


def differ_in_reward(episodes: Sequence[Episode]) -> np.ndarray:
    """Return bool [groups]: whether the task's rewards of a group's sound members differ.

    Args:
      episodes: group by group, groups numbered from 0.
    """
    rewards = [[turn.reward for turn in episode.turns] for episode in episodes]
    reward_GK, sound_GK = sum_turns(rewards, episodes), ~broken_episodes(episodes)
    return np.asarray(_has_variance(reward_GK, sound_GK=sound_GK))


def mark_played(state: State, tasks: "Sequence[Task]", collected: Sequence[Collected]) -> State:
    """Return the state with cursors and streaks advanced by the groups that were played."""
    cursors, streaks = dict(state.seed_cursor), dict(state.streak_P or {})
    tallies = dict(state.tally_P or {})
    for task, part in zip(tasks, collected, strict=True):
        name = task.name
        cursors[name] = place(np.uint32(part.cursor), cursors[name].sharding)
        if name in streaks:
            before_P = jax.device_get(streaks[name])
            # A visit whose environment broke gives no information about its problem.
            seeds = [
                seed for seed, judged in zip(part.seeds_N, part.judged_N, strict=True) if judged
            ]
            after_P = count_visits(before_P, seeds, part.informative_N[part.judged_N])
            streaks[name] = place(after_P, streaks[name].sharding)
        if name in tallies:
            before_P2 = jax.device_get(tallies[name])
            after_P2 = count_solved(before_P2, part.seeds_N, *part.counts())
            tallies[name] = place(after_P2, tallies[name].sharding)
    return dataclasses.replace(
        cast(Any, state), seed_cursor=cursors, streak_P=streaks, tally_P=tallies or None
    )


def collect_groups(
    play: Callable[[int], list[Episode]],
    informative: Callable[[list[Episode]], np.ndarray],
    *,
    wanted: int,
    max_rounds: int,
) -> Collected:
    """Play rounds until `wanted` groups are informative, at most `max_rounds` rounds.

    A single round of `wanted` groups is returned as it was played. If too few groups are
    informative, other groups fill the step; groups with fewer than two sound members come last.

    Args:
      play: round index -> episodes, group by group, groups numbered from 0.
      informative: episodes of one round -> bool [groups]; with several processes, the same in each.
      wanted: number of groups of the step.
      max_rounds: at least 1.

    Raises:
      ValueError: the rounds played fewer than `wanted` groups, or the result of `informative` has
        the wrong number of groups.
    """
    groups: list[list[Episode]] = []
    marks: list[bool] = []
    judged: list[bool] = []
    rounds = 0
    while rounds < max_rounds and sum(marks) < wanted:
        episodes = play(rounds)
        count = max(episode.group for episode in episodes) + 1
        played: list[list[Episode]] = [[] for _ in range(count)]
        for episode in episodes:
            played[episode.group].append(episode)
        found = np.asarray(informative(episodes), bool)
        if found.shape != (len(played),):
            raise ValueError(
                f"{len(played)} groups were played, but scores have shape {found.shape}"
            )
        groups += played
        enough = [_sound_enough(group) for group in played]
        judged += enough
        marks += (found & enough).tolist()
        rounds += 1
    if len(groups) < wanted:
        raise ValueError(
            f"{wanted} groups were requested, but {rounds} round(s) played {len(groups)}"
        )
    # The sort is stable: earlier groups first.
    by_use = sorted(range(len(groups)), key=lambda n: (not marks[n], not judged[n]))
    return Collected(
        episodes=_numbered(groups[n] for n in sorted(by_use[:wanted])),
        played=_numbered(groups),
        rounds=rounds,
        seeds_N=tuple(group[0].seed for group in groups),
        informative_N=np.array(marks, bool),
        judged_N=np.array(judged, bool),
    )


def _sound_enough(group: Sequence[Episode]) -> bool:
    """Return whether a group's sound members can be compared (advantage.comparable_members)."""
    return sum(not episode.error for episode in group) >= min(2, len(group))


def _numbered(groups: Iterable[list[Episode]]) -> list[Episode]:
    """Return the episodes of some groups, with the groups renumbered from 0."""
    return [
        dataclasses.replace(episode, group=group)
        for group, members in enumerate(groups)
        for episode in members
    ]
