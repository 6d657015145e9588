"""Score matrices of some steps: how likely each reasoning is under each prompt."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.report.runs import RunRecord
from ragen_jax.run.run_files import Say, read_scores


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """The first-turn scores of a step of one environment."""

    label: str
    step: int
    scores: Scores


def read_stored(folder: Path, run: RunRecord, say: Say) -> list[StoredMatrix]:
    """Those that a run has stored in its folder; `say` is told of what is damaged."""
    return [
        StoredMatrix(label, step, scores)
        for label in run.labels
        for step, scores in read_scores(folder / "diagnostics" / label, say).items()
        if step <= run.last_step
    ]


def shown(stored: Sequence[StoredMatrix], budget: int) -> Iterator[dict[str, Any]]:
    """Matrices for a page, as JSON objects; evenly left out where they do not all fit.

    A value is log p(z|x) / length less its mean over the prompts: 0 everywhere in a row whose
    reasoning tells nothing of its prompt. Rows are sorted by their own prompt.

    Args:
      budget: bytes that they may take.
    """
    found = []
    for each in stored:
        scores = each.scores
        per_token_MN = scores.score_MN / np.maximum(scores.length_M, 1)[:, None]
        relative_MN = per_token_MN - per_token_MN.mean(1, keepdims=True)
        order = np.argsort(scores.prompt_M, kind="stable")
        found.append(
            {
                "step": each.step,
                "label": each.label,
                "own": scores.prompt_M[order].tolist(),
                "values": [[round(x, 2) for x in row] for row in relative_MN[order].tolist()],
            }
        )
    size = sum(len(json.dumps(matrix)) for matrix in found)
    every = max(1, -(-size // budget))
    yield from found[::every]
