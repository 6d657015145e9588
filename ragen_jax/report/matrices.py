"""Score matrices of some steps: the likelihood of each reasoning under each prompt."""

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
    """The first-turn scores of a step in one environment."""

    label: str
    step: int
    scores: Scores


def read_stored(folder: Path, run: RunRecord, say: Say) -> list[StoredMatrix]:
    """Read the matrices stored in a run's folder; report damaged files to `say`."""
    return [
        StoredMatrix(label, step, scores)
        for label in run.labels
        for step, scores in read_scores(folder / "diagnostics" / label, say).items()
        if step <= run.last_step
    ]


def select_matrices(stored: Sequence[StoredMatrix], budget: int) -> Iterator[dict[str, Any]]:
    """Yield matrices for a page as JSON objects; if not all fit, leave out steps evenly.

    A value is log p(z|x) / length minus its mean over the prompts. It is 0 everywhere in a row
    whose reasoning does not depend on its prompt. Rows are sorted by the prompt of the reasoning.

    Args:
      budget: largest total size in bytes.
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
