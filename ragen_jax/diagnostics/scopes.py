"""Which turns' reasonings are scored under which prompts, and the figures that come of it.

Two scopes (RAGEN-2, section 2.3): *first turn*, every group's first prompt against reasonings
spread evenly over groups and members; *trajectory*, one uniformly drawn turn of each of S
episodes, so that reasonings and prompts are the same S turns.
"""

import numpy as np

from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.flow import score_flow
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals, retrieval_p
from ragen_jax.randomness import Purpose, generator

SCOPES = ("first_turn", "trajectory")


def collapse_metrics(
    model,
    params,
    episodes,
    *,
    first_turn_samples,
    trajectory_samples,
    micro_batch,
    seed,
    step,
    environment=0,
    flow=False,
):
    """Mutual information and retrieval of both scopes and, on request, what actions depend on.

    Args:
      model, params: the policy that sampled the episodes.
      episodes: G * K `Episode`s, group by group.
      first_turn_samples: most reasonings of the first scope.
      trajectory_samples: S of the second scope.
      micro_batch: (prompt, reasoning) rows of a device call.
      seed, step, environment: ints of what the draws and permutations are for: seed of the run,
        number of the iteration and of the environment within the run.
      flow: also score the actions (diagnostics/flow.py), in the same pass.

    Returns:
      dict collapse/{first_turn,trajectory}/* of `information_metrics`, `confidence_intervals` and
      `retrieval_p` and, with `flow`, flow/{first_turn,trajectory}/* of `flow_metrics`. A scope is
      left out when fewer than two prompts have a scorable reasoning.
    """
    scopes = {
        "first_turn": first_turns(episodes, samples=first_turn_samples),
        "trajectory": trajectory_turns(
            episodes,
            samples=trajectory_samples,
            rng=generator(Purpose.TRAJECTORY, seed, step, environment),
        ),
    }
    metrics = {}
    for index, (scope, (prompts, turns, prompt_M)) in enumerate(scopes.items()):
        if len(prompts) < 2 or not turns:
            continue
        ids = {}
        prompt_id_N = np.array([ids.setdefault(prompt.tobytes(), len(ids)) for prompt in prompts])
        if flow:
            score_MN, length_M, found = score_flow(
                model,
                params,
                prompts,
                turns,
                prompt_M,
                prompt_id_N,
                siblings=scope == "first_turn",  # later turns of a group show other states
                micro_batch=micro_batch,
                rng=generator(Purpose.PANELS, seed, step, environment, index),
            )
            metrics |= {f"flow/{scope}/{name}": value for name, value in found.items()}
        else:
            reasonings = [reasoning_ids(turn) for turn in turns]
            score_MN, length_M = cross_score(
                model, params, prompts, reasonings, micro_batch=micro_batch
            )
        found = information_metrics(score_MN, length_M, prompt_M, prompt_id_N=prompt_id_N)
        found |= confidence_intervals(score_MN, length_M, prompt_M, prompt_id_N=prompt_id_N)
        found["retrieval_p"] = retrieval_p(
            score_MN,
            prompt_M,
            prompt_id_N=prompt_id_N,
            rng=generator(Purpose.PERMUTATIONS, seed, step, environment, index),
        )
        metrics |= {f"collapse/{scope}/{name}": value for name, value in found.items()}
    return metrics


def reasoning_ids(turn):
    """The token ids of a turn's reasoning; empty if it is empty or unclosed."""
    return turn.sampled[slice(*turn.reasoning)]


def first_turns(episodes, *, samples):
    """All groups' first prompts, and up to `samples` first turns with a reasoning, spread evenly.

    Member 0 of every group first, then member 1, and so on.

    Returns:
      (prompts, turns, prompt_M): prompt_M int, the column of each turn's own prompt.
    """
    by_member = sorted(episodes, key=lambda episode: (episode.member, episode.group))
    prompts = [episode.turns[0].prompt for episode in by_member if episode.member == 0]
    chosen = [episode for episode in by_member if len(reasoning_ids(episode.turns[0]))][:samples]
    return (
        prompts,
        [episode.turns[0] for episode in chosen],
        np.array([episode.group for episode in chosen], int),
    )


def trajectory_turns(episodes, *, samples, rng):
    """One uniformly drawn turn of each of up to `samples` episodes, spread over groups.

    Args:
      rng: np.random.Generator of the draws.

    Returns:
      (prompts, turns, prompt_M) with as many prompts as turns: each reasoning is scored under its
      own prompt and the others'. Turns whose reasoning is empty or unclosed are left out.
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
        turns = episodes[index].turns
        turn = turns[rng.integers(len(turns))]
        if len(reasoning_ids(turn)):
            drawn.append(turn)
    return [turn.prompt for turn in drawn], drawn, np.arange(len(drawn))
