"""Why a group of episodes teaches or does not, and what its members do.

Low reward variance has several causes with several treatments, so every group is one of four:

    class    returns of its members       success of its members
    mixed    differ (as the filter sees)  any: it teaches
    solved   equal                        all: too easy
    failed   equal                        none: too hard, or the reward is blind to progress
    tied     equal                        some: suspect reward, which does not tell success

A strategy is all the actions of an episode in order, whatever the turns they were given in.
All of this is NumPy on the host, about finished episodes.
"""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.algorithm.advantage import comparable_members, sample_variance
from ragen_jax.algorithm.filter import ZERO_SCORE
from ragen_jax.algorithm.rewards import success_is_defined
from ragen_jax.core.types import Episode, Metrics, Turn
from ragen_jax.diagnostics.intervals import rate_with_interval
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import IMAGE

CLASSES = ("mixed", "solved", "failed", "tied")


def anatomy_metrics(episodes: Sequence[Episode], return_GK: np.ndarray) -> Metrics:
    """The classes of a step's groups.

    Args:
      episodes: G * K, group by group.
      return_GK: their undiscounted returns, penalties included.

    Members whose environment broke are left out, and so are groups of two or more with fewer than
    two sound members.

    Returns:
      anatomy/<class>, shares of the groups that sum to 1, and anatomy/<class>_count;
      anatomy/failed_differing, the share of groups that failed with more than one strategy:
      where it is near anatomy/failed the policy explores and the reward does not answer, where it
      is far below, the policy does the same thing over and over. {} without any group.

    Raises:
      ValueError: another number of episodes than returns.
    """
    if len(episodes) != return_GK.size:
        raise ValueError(f"{len(episodes)} episodes, but return_GK is {return_GK.shape}")
    sound_GK = np.reshape([not episode.error for episode in episodes], return_GK.shape)
    member_GK = np.asarray(comparable_members(sound_GK))
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
    variance_G = np.asarray(sample_variance(return_GK, sound_GK=member_GK))
    mixed_G = variance_G[judged_G] > ZERO_SCORE
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
    """What the members of a group do differently, and what they undo.

    Args:
      episodes: G * K, group by group.
      groups: G.
      opposites: action -> the action that goes back, where the environment has such
        (`ragen_jax.envs.types.ReversibleEnvironment`).

    Returns:
      action/strategies, distinct strategies of a group, 1 to K; action/strategy_entropy,
      entropy of their frequencies inside a group in nats, at most log K; both means over groups.
      With opposites, and episodes of two actions or more: action/oscillation_rate, the share of
      actions (an episode's last apart) that are followed by their opposite. Of episodes whose
      environment did not break; {} without any.
    """
    listed = [group for group in _groups(episodes, groups) if group]
    if not listed:
        return {}
    counts = [collections.Counter(map(strategy, group)) for group in listed]
    metrics: dict[str, Any] = {  # of Python's floats and NumPy's
        "action/strategies": np.mean([len(count) for count in counts]),
        "action/strategy_entropy": np.mean([_entropy(count) for count in counts]),
    }
    if opposites is not None:
        played = itertools.chain.from_iterable(listed)
        pairs = [pair for episode in played for pair in itertools.pairwise(strategy(episode))]
        if pairs:
            undone = [opposites.get(first) == second for first, second in pairs]
            metrics["action/oscillation_rate"] = np.mean(undone)
    return metrics


def reasoning_metrics(
    episodes: Sequence[Episode],
    grounded: Callable[[str, str], tuple[int, int]],
    text: Callable[[np.ndarray], str],
    transcribe: Callable[[np.ndarray], str] | None = None,
) -> Metrics:
    """Whether what the reasoning says of the state is so.

    Args:
      grounded: an environment's check (`ragen_jax.envs.types.GroundedEnvironment`).
      text: token ids -> text (`chat.Chat.text`).
      transcribe: what an image shows, in words (`DrawingEnvironment`); None: images are not read.

    Returns:
      reasoning/stated, facts stated a turn; reasoning/grounded_rate, the share of all facts
      stated that are so, with its interval over groups; left out where none is stated. Turns
      without reasoning state nothing. Of episodes whose environment did not break; {} without any.
    """
    turns = [(e.group, turn) for e in episodes if not e.error for turn in e.turns]
    if not turns:
        return {}
    # Members of a group say much that is the same: each text is checked once for a state.
    said = collections.Counter(
        (group, _in_words(turn, transcribe), text(turn.sampled[slice(*turn.reasoning)]))
        for group, turn in turns
        if turn.reasoning[1] > turn.reasoning[0]
    )
    right_G, stated_G = np.zeros((2, episodes[-1].group + 1))
    for (group, message, thought), times in said.items():
        right, stated = grounded(message, thought)
        right_G[group] += times * right
        stated_G[group] += times * stated
    metrics = {"reasoning/stated": stated_G.sum() / len(turns)}
    return metrics | rate_with_interval("reasoning/grounded_rate", right_G, stated_G)


def _in_words(turn: Turn, transcribe: Callable[[np.ndarray], str] | None) -> str:
    """The message of a turn, with what its images show in their places."""
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
    """In which of the styles that it was taught an agent thinks.

    Args:
      styles: of an environment (`ragen_jax.envs.styles`); the first that fits a text counts.
      text: token ids -> text (`chat.Chat.text`).

    Returns:
      reasoning/style/<name>: the share of all turns whose reasoning is of that style from its first
      to its last letter, with its interval over groups; reasoning/style/other: of none, such as
      hybrids and replies whose reasoning never ends. Of episodes whose environment did not break.
    """
    count = {name: np.zeros(episodes[-1].group + 1) for name in (*styles, "other")}
    for episode in (e for e in episodes if not e.error):
        for turn in episode.turns:
            thought = text(turn.sampled[slice(*turn.reasoning)])
            closed = turn.reasoning[1] > 0 or turn.valid
            fits = (name for name, style in styles.items() if closed and style.wrote(thought))
            count[next(fits, "other")][episode.group] += 1
    turns_G = np.sum(list(count.values()), axis=0)
    metrics: Metrics = {}
    for name, count_G in count.items():
        metrics |= rate_with_interval(f"reasoning/style/{name}", count_G, turns_G)
    return metrics


def strategy(episode: Episode) -> tuple[str, ...]:
    """All actions of an episode, in order."""
    return tuple(action for turn in episode.turns for action in turn.actions)


def _groups(episodes: Sequence[Episode], groups: int) -> list[Sequence[Episode]]:
    """The episodes of each group whose environment did not break, from a list group by group."""
    size = len(episodes) // groups
    return [
        [episode for episode in episodes[first : first + size] if not episode.error]
        for first in range(0, groups * size, size)
    ]


def _entropy(counts: collections.Counter[tuple[str, ...]]) -> float:
    """Entropy in nats of the frequencies."""
    share = np.array(list(counts.values())) / counts.total()
    return -np.sum(share * np.log(share))
