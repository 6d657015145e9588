"""How long scoring will take: the number of its tokens, at the speed of a short trial."""

import time
from collections.abc import Sequence

import jax

from ragen_jax.core.progress import duration
from ragen_jax.core.randomness import Purpose
from ragen_jax.core.types import Params, Turn
from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.flow import PANEL
from ragen_jax.diagnostics.scopes import (
    Sample,
    ScopeKey,
    first_turns,
    reasoning_ids,
    trajectory_turns,
)
from ragen_jax.model.qwen import Qwen
from ragen_jax.score.episodes import ScoredStep
from ragen_jax.score.figures import ScoringSettings, scope_sizes

# Floating-point operations of a scoring worth a trial, which takes 10 to 20 s with a language model
# on two cores: about a minute there.
LEAST_OPERATIONS = 2e13
TRIAL = (8, 2)  # prompts and reasonings of a trial


def estimate_line(
    model: Qwen, params: Params, steps: Sequence[ScoredStep], sampling: ScoringSettings
) -> str:
    """Return a line with the size of a scoring and its expected time; "" if it is short.

    It runs a trial, with the mesh of the scoring set.
    """
    samples = [sample for step in steps for sample in _samples(step, sampling)]
    tokens = sum(map(count_tokens, samples))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    if 2.0 * size * tokens < LEAST_OPERATIONS:
        return ""
    rate = _tokens_per_second(model, params, samples[0])
    pairs = sum(len(sample.prompts) * len(sample.turns) for sample in samples)
    return (
        f"scoring {pairs:,} pairs of a prompt and a reasoning, {tokens:,} tokens: about "
        f"{duration(tokens / rate)} ({rate:,.0f} tokens/s in a trial)"
    )


def _samples(step: ScoredStep, sampling: ScoringSettings) -> list[Sample]:
    """Return what a step's scopes score, as `scope_metrics` draws it."""
    sizes = scope_sizes(step, sampling)
    rng = ScopeKey(seed=sampling.seed, step=step.number).generator(Purpose.TRAJECTORY)
    found = [
        first_turns(step.episodes, samples=sizes.first_turn_samples),
        trajectory_turns(step.episodes, samples=sizes.trajectory_samples, rng=rng),
    ]
    return [sample for sample in found if len(sample.prompts) > 1 and sample.turns]


def count_tokens(sample: Sample) -> int:
    """Return the number of tokens of a scope's forward passes, without padding.

    Every distinct prompt is read once, every distinct turn is scored under each of them, and each
    answer after the other reasonings of two panels (diagnostics/flow.py).
    """
    prompts = {prompt.tobytes(): len(prompt) for prompt in sample.prompts}
    turns = {turn.sampled.tobytes(): turn for turn in sample.turns}
    rows = sum(map(_scored_tokens, turns.values())) * len(prompts)
    answered = [turn for turn in sample.turns if turn.answer[1]]
    panels = 2 * (PANEL - 1) * sum(map(_scored_tokens, answered))
    return sum(prompts.values()) + rows + panels


def _scored_tokens(turn: Turn) -> int:
    """Return the number of tokens from the start of the reasoning to the end of the answer."""
    return max(turn.answer[1], turn.reasoning[1]) - turn.reasoning[0]


def _tokens_per_second(model: Qwen, params: Params, sample: Sample) -> float:
    prompts = sample.prompts[: TRIAL[0]]
    by_length = sorted((reasoning_ids(turn) for turn in sample.turns), key=len)
    middle = by_length[len(by_length) // 2 :][: TRIAL[1]]
    tokens = sum(map(len, prompts)) + len(prompts) * sum(map(len, middle))
    seconds = []
    for _ in range(2):  # the first compiles
        start = time.perf_counter()
        cross_score(model, params, prompts, middle, micro_batch=TRIAL[0] * TRIAL[1])
        seconds.append(time.perf_counter() - start)
    return tokens / seconds[1]
