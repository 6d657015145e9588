"""Whether a group of episodes has a learning signal, why, and how its members act.

Low reward variance has several causes with different treatments, so every group is in one of four
classes:

    class    returns of its members       success of its members
    mixed    differ (as in the filter)    any: the group has a learning signal
    solved   equal                        all: too easy
    failed   equal                        none: too hard, or the reward is blind to progress
    tied     equal                        some: suspect reward, which does not reflect success

A strategy is the sequence of all actions of an episode, regardless of the turns. Everything here is
NumPy on the host and reads finished episodes.
"""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.algorithm.advantage import comparable_members, has_variance
from ragen_jax.algorithm.rewards import success_is_defined
from ragen_jax.core.stored_programs import StoredProgram
from ragen_jax.core.types import Episode, Metrics, Turn
from ragen_jax.diagnostics.intervals import rate_with_interval
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import IMAGE

CLASSES = ("mixed", "solved", "failed", "tied")

_comparable_members = StoredProgram(comparable_members)
_has_variance = StoredProgram(has_variance)


def anatomy_metrics(episodes: Sequence[Episode], return_GK: np.ndarray) -> Metrics:
    """Return the distribution of a step's groups over the classes.

    Args:
      episodes: G * K episodes, group by group.
      return_GK: their undiscounted returns, penalties included.

    Members whose environment broke are left out, and so are groups of two or more with fewer than
    two sound members.

    Returns:
      anatomy/<class>, fractions of the groups that sum to 1, and anatomy/<class>_count;
      anatomy/failed_differing, the fraction of groups that failed with more than one strategy. If
      it is near anatomy/failed, the policy explores but the reward does not respond; if it is far
      below, the policy repeats the same actions. {} without any group.

    Raises:
      ValueError: the numbers of episodes and returns differ.
    """
    if len(episodes) != return_GK.size:
        raise ValueError(f"{len(episodes)} episodes, but return_GK is {return_GK.shape}")
    sound_GK = np.reshape([not episode.error for episode in episodes], return_GK.shape)
    member_GK = np.asarray(_comparable_members(sound_GK))
    judged_G = np.any(member_GK, axis=1).tolist()
    if not any(judged_G):
        return {}
    groups = [
        group
        for group, judged in zip(_groups(episodes, len(return_GK)), judged_G, strict=True)
        if judged
    ]
    success_G = np.full(len(groups), np.nan)  # undefined: groups without variance are tied
    if success_is_defined(episodes):
        success_G = np.array([np.mean([episode.success for episode in group]) for group in groups])
    mixed_G = np.asarray(_has_variance(return_GK, sound_GK=member_GK))[judged_G]
    class_G = np.select(
        [mixed_G, success_G == 1, success_G == 0], ["mixed", "solved", "failed"], "tied"
    )
    differing_G = np.array([len(set(map(strategy, group))) > 1 for group in groups])
    metrics = {f"anatomy/{name}": np.mean(class_G == name) for name in CLASSES}
    metrics |= {f"anatomy/{name}_count": np.sum(class_G == name) for name in CLASSES}
    metrics["anatomy/failed_differing"] = np.mean((class_G == "failed") & differing_G)
    return metrics


def action_metrics(
    episodes: Sequence[Episode], groups: int, *, opposites: Mapping[str, str] | None = None
) -> Metrics:
    """Return how much the actions differ within groups, and how often actions are undone.

    Args:
      episodes: G * K episodes, group by group.
      groups: G.
      opposites: action -> the action that undoes it, if the environment has such actions
        (`ragen_jax.envs.types.ReversibleEnvironment`).

    Returns:
      action/strategies, number of distinct strategies of a group, 1 to K; action/strategy_entropy,
      entropy of their frequencies inside a group in nats, at most log K; both are means over
      groups. With opposites, and episodes of two actions or more: action/oscillation_rate, the
      fraction of actions (except an episode's last) that are followed by their opposite. Episodes
      whose environment broke are left out; {} if no episode is left.
    """
    nonempty = [group for group in _groups(episodes, groups) if group]
    if not nonempty:
        return {}
    counts = [collections.Counter(map(strategy, group)) for group in nonempty]
    metrics: dict[str, Any] = {  # values are Python or NumPy floats
        "action/strategies": np.mean([len(count) for count in counts]),
        "action/strategy_entropy": np.mean([_entropy(count) for count in counts]),
    }
    if opposites is not None:
        played = itertools.chain.from_iterable(nonempty)
        pairs = [pair for episode in played for pair in itertools.pairwise(strategy(episode))]
        if pairs:
            undone = [opposites.get(first) == second for first, second in pairs]
            metrics["action/oscillation_rate"] = np.mean(undone)
    return metrics


def reasoning_metrics(
    episodes: Sequence[Episode],
    count_grounded: Callable[[str, str], tuple[int, int]],
    text: Callable[[np.ndarray], str],
    transcribe: Callable[[np.ndarray], str] | None = None,
) -> Metrics:
    """Return how much the reasoning states about the state, and how much of it is true.

    Args:
      count_grounded: an environment's check (`ragen_jax.envs.types.GroundedEnvironment`).
      text: token ids -> text (`chat.Chat.text`).
      transcribe: image -> description in words (`DrawingEnvironment`); None: images are ignored.

    Returns:
      reasoning/stated, number of stated facts per turn; reasoning/grounded_rate, the fraction of
      all stated facts that are true, with its interval over groups (left out if no fact is
      stated). A turn without reasoning has no stated facts. Episodes whose environment broke are
      left out; {} if no episode is left.
    """
    turns = [(e.group, turn) for e in episodes if not e.error for turn in e.turns]
    if not turns:
        return {}
    # Members of a group often write the same text: each text is checked once per state.
    counts = collections.Counter(
        (group, _describe_turn(turn, transcribe), text(turn.sampled[slice(*turn.reasoning)]))
        for group, turn in turns
        if turn.reasoning[1] > turn.reasoning[0]
    )
    right_G, stated_G = np.zeros((2, episodes[-1].group + 1))
    for (group, message, thought), times in counts.items():
        right, stated = count_grounded(message, thought)
        right_G[group] += times * right
        stated_G[group] += times * stated
    metrics = {"reasoning/stated": stated_G.sum() / len(turns)}
    return metrics | rate_with_interval("reasoning/grounded_rate", right_G, stated_G)


def _describe_turn(turn: Turn, transcribe: Callable[[np.ndarray], str] | None) -> str:
    """Return the message of a turn, with each image replaced by its description."""
    message = turn.message
    if transcribe is None:
        return message
    for image in turn.images:
        message = message.replace(IMAGE, transcribe(image), 1)
    return message


def style_metrics(
    episodes: Sequence[Episode],
    styles: Mapping[str, Style],
    text: Callable[[np.ndarray], str],
) -> Metrics:
    """Return how often the agent uses each of the reasoning styles that it was trained on.

    Args:
      styles: an environment's styles (`ragen_jax.envs.styles`); the first that fits a text counts.
      text: token ids -> text (`chat.Chat.text`).

    Returns:
      reasoning/style/<name>: the fraction of all turns whose complete reasoning is in that style,
      with its interval over groups; reasoning/style/other: the fraction in no style, such as
      hybrids and replies whose reasoning never ends. Episodes whose environment broke are left
      out.
    """
    count = {name: np.zeros(episodes[-1].group + 1) for name in (*styles, "other")}
    for episode in (e for e in episodes if not e.error):
        for turn in episode.turns:
            thought = text(turn.sampled[slice(*turn.reasoning)])
            closed = turn.reasoning[1] > 0 or turn.valid
            matching_styles = (
                name for name, style in styles.items() if closed and style.matches(thought)
            )
            count[next(matching_styles, "other")][episode.group] += 1
    turns_G = np.sum(list(count.values()), axis=0)
    metrics: Metrics = {}
    for name, count_G in count.items():
        metrics |= rate_with_interval(f"reasoning/style/{name}", count_G, turns_G)
    return metrics


def strategy(episode: Episode) -> tuple[str, ...]:
    """Return all actions of an episode, in order."""
    return tuple(action for turn in episode.turns for action in turn.actions)


def _groups(episodes: Sequence[Episode], groups: int) -> list[Sequence[Episode]]:
    """Split a list of episodes into groups, without the episodes whose environment broke."""
    size = len(episodes) // groups
    return [
        [episode for episode in episodes[first : first + size] if not episode.error]
        for first in range(0, groups * size, size)
    ]


def _entropy(counts: collections.Counter[tuple[str, ...]]) -> float:
    """Return the entropy of the frequencies, in nats."""
    share = np.array(list(counts.values())) / counts.total()
    return -np.sum(share * np.log(share))
