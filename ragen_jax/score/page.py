"""The report page of scored rollouts: a run's page without the data that only a run has."""

import math
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from ragen_jax.core.types import Metrics, Turn
from ragen_jax.diagnostics.shared_texts import THINK
from ragen_jax.report.episodes import SavedEpisodes
from ragen_jax.report.matrices import StoredMatrix
from ragen_jax.report.page import Contents
from ragen_jax.report.runs import ONLY, RunRecord
from ragen_jax.score.episodes import ScoredStep


def contents(
    steps: Sequence[ScoredStep],
    rows: Sequence[Metrics],
    stored: Sequence[StoredMatrix],
    tokenizer: Tokenizer,
    *,
    name: str,
    about: str,
    settings: dict[str, Any],
    config: dict[str, Any],
    tags: tuple[str, str] = THINK,
) -> Contents:
    """Return the page's contents for steps and their metrics.

    Args:
      stored: first-turn scores of the steps that have them.
      name, about: title of the page, and the line below it.
      settings: content of the table of settings.
      config: a config like base.py, with the thresholds of the alarm and the named causes.
      tags: the tags around a reasoning.
    """
    limit = {"max_new_tokens": math.inf}  # other trainers' rollouts do not record it
    run = RunRecord(
        name=name,
        about=about,
        fields=settings,
        config=config | {"steps": steps[-1].number, "rollout": config["rollout"] | limit},
        rows=[{"step": step.number} | row for step, row in zip(steps, rows, strict=True)],
        events=[],
        labels=(ONLY,),
        outcomes={ONLY: {}},
    )
    saved = [SavedEpisodes(ONLY, step.number, _records(step)) for step in steps]
    return Contents(run, saved, list(stored), tokenizer, place="the rows scored", tags=tags)


def _records(step: ScoredStep) -> list[dict[str, Any]]:
    """Return a step's episodes in the form of rollouts/*.jsonl; None for unrecorded values."""
    return [
        {
            "seed": None,
            "group": episode.group,
            "member": episode.member,
            "success": episode.success if step.success else None,
            "return": float(reward) if math.isfinite(reward) else None,
            "turns": [_turn(turn, step.valid) for turn in episode.turns],
        }
        for episode, reward in zip(step.episodes, step.reward_E, strict=True)
    ]


def _turn(turn: Turn, valid: bool) -> dict[str, Any]:
    answered = turn.answer[1] > 0  # even after an empty reasoning
    return {
        "prompt_ids": turn.prompt.tolist(),
        "sampled_ids": turn.sampled.tolist(),
        "actions": list(turn.actions) or None,
        "valid": turn.valid if valid else None,
        "reward": None,
        "tags": [turn.reasoning[1] or answered - 1, turn.answer[0] if answered else -1],
    }
