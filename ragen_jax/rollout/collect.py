"""The groups of a step. Dynamic sampling: play on until enough of them are informative.

    round 0   g0 . g2 .      `.`: the task gave all members the same, so there is nothing to learn
    round 1   .  g5 g6 g7
    step      g0 g2 g5 g6    the first `wanted` informative ones, in the order played

DAPO (Yu et al., arXiv 2503.14476, section 3.2). What counts is the task's own reward: penalties of
format and length tell members apart that all failed alike. A step always has `wanted` groups, so
that its shapes never change: where the rounds do not bring enough, uninformative groups fill it up,
for the filter to drop. What is left over is thrown away, not kept for the next step: it would be
off-policy there and would have to be part of the checkpoint. The figures of a step are of all that
was played.
"""

import dataclasses

import jax
import numpy as np

from ragen_jax.advantage import sample_variance
from ragen_jax.filter import ZERO_SCORE
from ragen_jax.rewards import sum_turns
from ragen_jax.rollout.pool import count_visits, draw_seeds, play_chances
from ragen_jax.sharding import place


@dataclasses.dataclass(frozen=True)
class Collected:
    """The groups of a step, and all that were played for it (N groups)."""

    episodes: list  # of `Episode`, group by group, member by member, groups numbered from 0
    played: list  # the same of all N groups, in the order played
    rounds: int
    seeds_N: tuple[int, ...]  # environment seed of each group played, in order
    informative_N: np.ndarray  # bool
    cursor: int = 0  # of environment seeds, behind them

    def metrics(self):
        """collect/* figures."""
        return {
            "collect/rounds": self.rounds,
            "collect/groups": len(self.seeds_N),
            "collect/informative_ratio": self.informative_N.mean(),
        }


def collect(task, play, state, step):
    """A task's groups of a step.

    Args:
      task: `tasks.Task`.
      play: (task, seeds_G, states_G, key) -> list of `Episode`.
      state: `TrainState`, which says what has been played.
      step: number of the iteration.

    Returns:
      `Collected`.
    """
    c, key = task.config, task.key
    cursor, chance_P = int(state.seed_cursor[task.name]), None
    if c.env.pool:
        streak_P = jax.device_get(state.streak_P[task.name])
        chance_P = play_chances(streak_P, explore=c.collect.explore, least=c.collect.explore_least)

    def play_round(round_):
        nonlocal cursor
        seeds_G, cursor = draw_seeds(
            cursor, c.rollout.groups, pool=c.env.pool, seed=c.seed, chance_P=chance_P
        )
        noise = key
        if c.env.pool:  # the same problem draws other noise when it comes again
            noise = jax.random.fold_in(jax.random.fold_in(key, step), round_)
        return play(task, seeds_G, [task.environment.reset(seed) for seed in seeds_G], noise)

    collected = collect_groups(
        play_round, differ_in_reward, wanted=c.rollout.groups, max_rounds=c.collect.max_rounds
    )
    return dataclasses.replace(collected, cursor=cursor)


def differ_in_reward(episodes):
    """bool [groups]: whether the members of a group earned differently by the task's own reward.

    Args:
      episodes: list of `Episode`, group by group, groups numbered from 0.
    """
    rewards = [[turn.reward for turn in episode.turns] for episode in episodes]
    reward_GK = sum_turns(rewards, episodes[-1].group + 1)
    return np.asarray(sample_variance(reward_GK)) > ZERO_SCORE


def mark_played(state, tasks, collected):
    """The `TrainState` that knows what was played, so that the next step plays what comes then."""
    cursors, streaks = dict(state.seed_cursor), dict(state.streak_P)
    for task, one in zip(tasks, collected, strict=True):
        name = task.name
        cursors[name] = place(np.uint32(one.cursor), cursors[name].sharding)
        if name in streaks:
            before_P = jax.device_get(streaks[name])
            after_P = count_visits(before_P, one.seeds_N, one.informative_N)
            streaks[name] = place(after_P, streaks[name].sharding)
    return state.replace(seed_cursor=cursors, streak_P=streaks)


def collect_groups(play, informative, *, wanted, max_rounds):
    """Plays rounds until `wanted` groups are informative, at most `max_rounds`.

    One round of `wanted` groups comes back as it was played.

    Args:
      play: round index -> list of `Episode`, group by group, groups numbered from 0.
      informative: list of `Episode` of one round -> bool [groups]; with several processes, the same
        in each.
      wanted: groups of the step.
      max_rounds: at least 1.

    Returns:
      `Collected`.

    Raises:
      ValueError: the rounds played fewer than `wanted` groups, or `informative` says something
        about another number of groups than a round has.
    """
    groups, marks = [], []
    rounds = 0
    while rounds < max_rounds and sum(marks) < wanted:
        episodes = play(rounds)
        played = [[] for _ in range(max(episode.group for episode in episodes) + 1)]
        for episode in episodes:
            played[episode.group].append(episode)
        found = np.asarray(informative(episodes), bool)
        if found.shape != (len(played),):
            raise ValueError(f"{len(played)} groups were played, but {found.shape} judged")
        groups += played
        marks += found.tolist()
        rounds += 1
    if len(groups) < wanted:
        raise ValueError(f"{wanted} groups are wanted, but {rounds} round(s) played {len(groups)}")
    by_use = sorted(range(len(groups)), key=lambda n: not marks[n])  # stable: earlier ones first
    return Collected(
        episodes=_numbered(groups[n] for n in sorted(by_use[:wanted])),
        played=_numbered(groups),
        rounds=rounds,
        seeds_N=tuple(group[0].seed for group in groups),
        informative_N=np.array(marks, bool),
    )


def _numbered(groups):
    """The episodes of some groups, which are numbered anew from 0."""
    return [
        dataclasses.replace(episode, group=group)
        for group, members in enumerate(groups)
        for episode in members
    ]
