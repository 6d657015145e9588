"""Dynamic sampling: play on until enough groups of a step are informative.

    round 0   g0 . g2 .      `.`: all members earned the same, so a group-relative advantage is 0
    round 1   .  g5 g6 g7
    step      g0 g2 g5 g6    the first `wanted` informative ones, in the order played

DAPO (Yu et al., arXiv 2503.14476, section 3.2). A step always has `wanted` groups, so that its
shapes never change: where the rounds do not bring enough, uninformative groups fill it up, for the
filter to drop. What is left over is thrown away, not kept for the next step: it would be off-policy
there and would have to be part of the checkpoint.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Collected:
    """The groups of a step, and all that were played for it (N groups)."""

    episodes: list  # of `Episode`, group by group, member by member, groups numbered from 0
    rounds: int
    seeds_N: tuple[int, ...]  # environment seed of each group played, in order
    informative_N: np.ndarray  # bool

    def metrics(self):
        """collect/* figures."""
        return {
            "collect/rounds": self.rounds,
            "collect/groups": len(self.seeds_N),
            "collect/informative_ratio": self.informative_N.mean(),
        }


def collect_groups(play, informative, *, wanted, max_rounds):
    """Plays rounds until `wanted` groups are informative, at most `max_rounds`.

    One round of `wanted` groups comes back as it was played. Where several environments train
    together, collect each one's groups by itself.

    Args:
      play: round index -> list of `Episode`, group by group, groups numbered from 0.
      informative: list of `Episode` of one round -> bool [groups], whether a group's score is
        above 0; with several processes, the same in each.
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
    chosen = sorted(by_use[:wanted])
    return Collected(
        episodes=[
            dataclasses.replace(episode, group=group)
            for group, n in enumerate(chosen)
            for episode in groups[n]
        ],
        rounds=rounds,
        seeds_N=tuple(group[0].seed for group in groups),
        informative_N=np.array(marks, bool),
    )
