"""Choose the reasonings and prompts to cross-score, and compute the figures from the scores.

Two scopes (RAGEN-2, section 2.3): *first turn*, every group's first prompt against reasonings
spread evenly over groups and members; *trajectory*, one uniformly drawn turn of each of S
episodes, so that reasonings and prompts are from the same S turns.

A later turn's prompt shows more than the observations: the turn number and, with history, the
agent's earlier replies. Further forms of the trajectory scope remove this information: *within
depth* compares a reasoning only with prompts of the same turn index, *stripped* scores it under
prompts whose earlier replies have no reasonings, and the last form does both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.types import Episode, Metrics, Params, Turn
from ragen_jax.diagnostics.cross_scoring import Ids, cross_score
from ragen_jax.diagnostics.flow import score_flow
from ragen_jax.diagnostics.information import information_metrics, within_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals, log_margin
from ragen_jax.diagnostics.permutation import retrieval_p
from ragen_jax.model.qwen import Qwen
from ragen_jax.rollout.chat import Chat

FORMS = (
    "first_turn",
    "trajectory",
    "trajectory_within_depth",
    "trajectory_stripped",
    "trajectory_stripped_within_depth",
)
SCOPES = FORMS[:2]  # the paper's scopes; zscores.py averages their std over steps

# (prompts, reasonings) -> (score_MN, length_M), as `cross_score` returns them
Scorer = Callable[[Sequence[Ids], Sequence[Ids]], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class ScopeSizes:
    """Numbers of samples to score."""

    first_turn_samples: int  # maximum number of reasonings of the first-turn scope
    trajectory_samples: int  # S, number of episodes of the trajectory scope; 1: left out
    # (prompt, reasoning) rows per device call; not read by `scope_metrics`, whose scorer decides
    micro_batch: int = 0


@dataclasses.dataclass(frozen=True)
class ScopeKey:
    """Seed of the random draws and permutations of a set of episodes."""

    seed: int  # seed of the run
    step: int  # number of the iteration
    environment: int = 0  # number of the environment within the run

    def generator(self, purpose: Purpose, *words: int) -> np.random.Generator:
        """Return the random generator of a purpose."""
        return generator(purpose, self.seed, self.step, self.environment, *words)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Cross scores: log-likelihoods of reasonings under prompts."""

    score_MN: np.ndarray  # float32, log p(reasoning m | prompt n), summed over its tokens
    length_M: np.ndarray  # int, tokens of each reasoning
    prompt_M: np.ndarray  # int, the column of each reasoning's own prompt


@dataclasses.dataclass(frozen=True)
class Sample:
    """The input of a scope: M turns with a reasoning, and N prompts to score them under."""

    prompts: list[np.ndarray]  # N arrays of token ids, int32
    turns: list[Turn]  # M turns
    prompt_M: np.ndarray  # int, the column of each turn's own prompt
    group_N: np.ndarray  # int, the group that a prompt belongs to
    before_N: list[tuple[Turn, ...]]  # for each prompt, the earlier turns of its episode


def collapse_metrics(
    model: Qwen,
    params: Params,
    episodes: Sequence[Episode],
    sizes: ScopeSizes,
    key: ScopeKey,
    *,
    flow: bool = False,
    chat: Chat | None = None,
    keep: Callable[[Scores], None] | None = None,
) -> Metrics:
    """Return mutual information and retrieval of both scopes and, on request, the flow figures.

    Args:
      model, params: the policy that sampled the episodes.
      episodes: G * K episodes, group by group; those whose environment broke are left out.
      flow: also score the actions (diagnostics/flow.py), in the same pass.
      chat: the chat that made the prompts. If given and a prompt shows a reasoning, the stripped
        forms are scored in a separate pass.
      keep: called with the first-turn scores, if any.

    Returns:
      collapse/{first_turn,trajectory}/*, collapse/trajectory_within_depth/* and with `chat`
      collapse/trajectory_stripped{,_within_depth}/* of `information_metrics` (within depth:
      `within_metrics`), `confidence_intervals`, `retrieval_p` and, except within depth,
      `log_margin`; with `flow`, flow/{first_turn,trajectory}/* of `flow_metrics`. A scope is left
      out when fewer than two prompts have a scorable reasoning.
    """

    def score(prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> tuple[np.ndarray, np.ndarray]:
        return cross_score(model, params, prompts, reasonings, micro_batch=sizes.micro_batch)

    score_with_flow = None
    if flow:
        score_with_flow = functools.partial(
            score_flow, model, params, micro_batch=sizes.micro_batch
        )
    return scope_metrics(
        score, episodes, sizes, key, score_with_flow=score_with_flow, chat=chat, keep=keep
    )


def scope_metrics(
    score: Scorer,
    episodes: Sequence[Episode],
    sizes: ScopeSizes,
    key: ScopeKey,
    *,
    score_with_flow: Callable[..., tuple[np.ndarray, np.ndarray, Metrics]] | None = None,
    chat: Chat | None = None,
    keep: Callable[[Scores], None] | None = None,
) -> Metrics:
    """Return `collapse_metrics` from the scores of any model.

    Args:
      score: the scorer of reasonings under prompts.
      score_with_flow: scores of a scope together with its flow figures: `score_flow` with a model;
        None: no flow figures.
      episodes, sizes, key, chat, keep: as in `collapse_metrics`.
    """
    # A prompt of an environment that broke may show nothing of the problem.
    episodes = [episode for episode in episodes if not episode.error]
    first = first_turns(episodes, samples=sizes.first_turn_samples)
    later = trajectory_turns(
        episodes, samples=sizes.trajectory_samples, rng=key.generator(Purpose.TRAJECTORY)
    )
    metrics, scored = {}, {}  # scored: form -> positional arguments of _figures
    for index, (scope, sample) in enumerate(zip(SCOPES, (first, later), strict=True)):
        if len(sample.prompts) < 2 or not sample.turns:
            continue
        prompt_id_N = _ids(sample.prompts)
        if score_with_flow is not None:
            *scores, figures = score_with_flow(
                sample.prompts,
                sample.turns,
                sample.prompt_M,
                prompt_id_N,
                group_N=sample.group_N,
                siblings=scope == "first_turn",  # later turns of a group show other states
                rng=key.generator(Purpose.PANELS, index),
            )
            metrics |= {f"flow/{scope}/{name}": value for name, value in figures.items()}
        else:
            reasonings = [reasoning_ids(turn) for turn in sample.turns]
            scores = score(sample.prompts, reasonings)
        scored[scope] = *scores, sample, prompt_id_N, None
        if keep is not None and scope == "first_turn":
            keep(Scores(*scores, sample.prompt_M))
    if "trajectory" in scored:
        *case, _ = scored["trajectory"]
        depth_N = np.array([len(before) for before in later.before_N])
        scored["trajectory_within_depth"] = *case, depth_N
        bare = later.prompts if chat is None else _stripped(chat, later)
        if not all(map(np.array_equal, bare, later.prompts)):
            reasonings = [reasoning_ids(turn) for turn in later.turns]
            scores = score(bare, reasonings)
            case = *scores, later, _ids(bare)
            scored["trajectory_stripped"] = *case, None
            scored["trajectory_stripped_within_depth"] = *case, depth_N
    for form, case in scored.items():
        rng = key.generator(Purpose.PERMUTATIONS, FORMS.index(form))
        # In the first turn, members of a group share only their prompt.
        figures = _figures(*case, permute_groups=form != "first_turn", rng=rng)
        metrics |= {f"collapse/{form}/{name}": value for name, value in figures.items()}
    return metrics


def _figures(
    score_MN: np.ndarray,
    length_M: np.ndarray,
    sample: Sample,
    prompt_id_N: np.ndarray,
    part_N: np.ndarray | None,
    *,
    permute_groups: bool,
    rng: np.random.Generator,
) -> Metrics:
    """Return the collapse/* figures of a form; {} if no part has two distinct prompts."""
    own_M = sample.prompt_M
    if part_N is None:
        metrics = information_metrics(score_MN, length_M, own_M, prompt_id_N=prompt_id_N)
        metrics |= log_margin(score_MN, own_M, prompt_id_N=prompt_id_N, group_N=sample.group_N)
    else:
        metrics = within_metrics(score_MN, length_M, own_M, part_N, prompt_id_N=prompt_id_N)
    if not metrics:
        return {}
    metrics |= confidence_intervals(
        score_MN, length_M, own_M, prompt_id_N=prompt_id_N, group_N=sample.group_N, part_N=part_N
    )
    group_N = sample.group_N if permute_groups else None
    p = retrieval_p(
        score_MN, own_M, prompt_id_N=prompt_id_N, group_N=group_N, part_N=part_N, rng=rng
    )
    return metrics | {"retrieval_p": p}


def _ids(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return an integer per prompt; equal prompts get equal integers."""
    ids = {}
    return np.array([ids.setdefault(prompt.tobytes(), len(ids)) for prompt in prompts])


def _stripped(chat: Chat, sample: Sample) -> list[np.ndarray]:
    """Return the prompts of a trajectory sample without the reasonings of earlier replies."""
    return [
        chat.without_reasoning(before, turn.message, turn.prompt, turn.spans)
        for before, turn in zip(sample.before_N, sample.turns, strict=True)
    ]


def reasoning_ids(turn: Turn) -> np.ndarray:
    """Return the token ids of a turn's reasoning; empty if the reasoning is empty or unclosed."""
    return turn.sampled[slice(*turn.reasoning)]


def first_turns(episodes: Sequence[Episode], *, samples: int) -> Sample:
    """Return all groups' first prompts and up to `samples` first turns with a reasoning.

    The turns are spread evenly: member 0 of every group first, then member 1, and so on. A group's
    prompt is that of its first member in `episodes`.

    Returns:
      `Sample` with one prompt per group.
    """
    by_member = sorted(episodes, key=lambda episode: (episode.member, episode.group))
    prompt_G = {episode.group: episode.turns[0].prompt for episode in reversed(by_member)}
    groups = sorted(prompt_G)
    prompts = [prompt_G[group] for group in groups]
    chosen = [episode for episode in by_member if len(reasoning_ids(episode.turns[0]))][:samples]
    return Sample(
        prompts=prompts,
        turns=[episode.turns[0] for episode in chosen],
        prompt_M=np.searchsorted(groups, [episode.group for episode in chosen]),
        group_N=np.array(groups, int),
        before_N=[()] * len(prompts),
    )


def trajectory_turns(
    episodes: Sequence[Episode], *, samples: int, rng: np.random.Generator
) -> Sample:
    """Draw a turn uniformly from each of up to `samples` episodes, spread over groups.

    Args:
      rng: generator for the draws.

    Returns:
      `Sample` with one prompt per turn: each reasoning is scored under the prompts of all turns.
      Turns whose reasoning is empty or unclosed are left out.
    """
    # Random members, groups in turn: the first `samples` cover the groups evenly.
    order = rng.permutation(len(episodes))
    rank = {}
    placed = []
    for index in order:
        group = episodes[index].group
        rank[group] = rank.get(group, 0) + 1
        placed.append((rank[group], len(placed), index))
    drawn = []
    for _, _, index in sorted(placed)[:samples]:
        episode = episodes[index]
        at = int(rng.integers(len(episode.turns)))
        if len(reasoning_ids(episode.turns[at])):
            drawn.append((episode, at))
    turns = [episode.turns[at] for episode, at in drawn]
    return Sample(
        prompts=[turn.prompt for turn in turns],
        turns=turns,
        prompt_M=np.arange(len(turns)),
        group_N=np.array([episode.group for episode, _ in drawn], int),
        before_N=[episode.turns[:at] for episode, at in drawn],
    )
