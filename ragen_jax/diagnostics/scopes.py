"""Which reasonings are scored under which prompts, and the figures that come of it.

Two scopes (RAGEN-2, section 2.3): *first turn*, every group's first prompt against reasonings
spread evenly over groups and members; *trajectory*, one uniformly drawn turn of each of S
episodes, so that reasonings and prompts are the same S turns.
"""

import numpy as np

from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals, retrieval_p

SCOPES = ("first_turn", "trajectory")


def collapse_metrics(
    model, params, episodes, *, first_turn_samples, trajectory_samples, micro_batch, seed, step
):
    """Mutual information and retrieval of both scopes.

    Args:
      model, params: the policy that sampled the episodes.
      episodes: G * K `Episode`s, group by group.
      first_turn_samples: most reasonings of the first scope.
      trajectory_samples: S of the second scope.
      micro_batch: (prompt, reasoning) rows of a device call.
      seed, step: key of the draws and of the permutations.

    Returns:
      dict collapse/{first_turn,trajectory}/* of `information_metrics`, `confidence_intervals` and
      `retrieval_p`. A scope is left out when fewer than two prompts have a scorable reasoning.
    """
    scopes = {
        "first_turn": first_turns(episodes, samples=first_turn_samples),
        "trajectory": trajectory_turns(episodes, samples=trajectory_samples, seed=seed, step=step),
    }
    metrics = {}
    for index, (scope, (prompts, reasonings, prompt_M)) in enumerate(scopes.items()):
        if len(prompts) < 2 or not reasonings:
            continue
        score_MN, length_M = cross_score(
            model, params, prompts, reasonings, micro_batch=micro_batch
        )
        ids = {}
        prompt_id_N = np.array([ids.setdefault(prompt.tobytes(), len(ids)) for prompt in prompts])
        found = information_metrics(score_MN, length_M, prompt_M, prompt_id_N=prompt_id_N)
        found |= confidence_intervals(score_MN, length_M, prompt_M, prompt_id_N=prompt_id_N)
        found["retrieval_p"] = retrieval_p(
            score_MN, prompt_M, prompt_id_N=prompt_id_N, seed=[seed, step, index]
        )
        metrics |= {f"collapse/{scope}/{name}": value for name, value in found.items()}
    return metrics


def reasoning_ids(turn):
    """The token ids of a turn's reasoning; empty if it is empty or unclosed."""
    return turn.sampled[slice(*turn.reasoning)]


def first_turns(episodes, *, samples):
    """All groups' first prompts, and up to `samples` first reasonings spread evenly.

    Member 0 of every group first, then member 1, and so on.

    Returns:
      (prompts, reasonings, prompt_M): prompt_M int, the column a reasoning belongs to.
    """
    by_member = sorted(episodes, key=lambda episode: (episode.member, episode.group))
    prompts = [episode.turns[0].prompt for episode in by_member if episode.member == 0]
    chosen = [episode for episode in by_member if len(reasoning_ids(episode.turns[0]))][:samples]
    reasonings = [reasoning_ids(episode.turns[0]) for episode in chosen]
    return prompts, reasonings, np.array([episode.group for episode in chosen], int)


def trajectory_turns(episodes, *, samples, seed, step):
    """One uniformly drawn turn of each of up to `samples` episodes, spread over groups.

    Returns:
      (prompts, reasonings, prompt_M) with as many prompts as reasonings: each is scored under
      its own prompt and the others'. Turns whose reasoning is empty or unclosed are left out.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, step]))
    # Random members, groups in turn: the first `samples` cover the groups evenly.
    order = rng.permutation(len(episodes))
    rank = {}
    placed = []
    for index in order:
        group = episodes[index].group
        rank[group] = rank.get(group, 0) + 1
        placed.append((rank[group], len(placed), index))
    prompts, reasonings = [], []
    for _, _, index in sorted(placed)[:samples]:
        turns = episodes[index].turns
        turn = turns[rng.integers(len(turns))]
        if len(reasoning_ids(turn)):
            prompts.append(turn.prompt)
            reasonings.append(reasoning_ids(turn))
    return prompts, reasonings, np.arange(len(reasonings))
