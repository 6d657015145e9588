"""Collapse figures from a trainer's rollouts and a function that returns log-probabilities.

    monitor = CollapseMonitor(tokenizer)
    for step in range(1, steps + 1):
        ...
        figures = monitor.update(step, rollouts, logprob)

The names and formulas are those of training (docs/diagnostics.md), and the code is the same as for
files (`ragen_jax.score`).
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_jax.configs.base import Regimes
from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.cross_scoring import Ids
from ragen_jax.diagnostics.regimes import init_regimes, update_regimes
from ragen_jax.diagnostics.scopes import ScopeKey, Scorer, scope_metrics
from ragen_jax.score.encode import ANSWER, THINK, Encoder
from ragen_jax.score.episodes import ScoredStep, encode_rows, make_steps
from ragen_jax.score.figures import (
    ScoringSettings,
    finite_metrics,
    recorded_metrics,
    scope_sizes,
    step_symptoms,
)
from ragen_jax.score.formats import ParsedReply, Prompt, Row
from ragen_jax.score.shared import text_decoder
from ragen_jax.score.values import MOST, ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOGGER = logging.getLogger("ragen_jax.integrations")

# (token ids of prompts, token ids of completions), of equal number, -> the log-probability of every
# completion's every token after its prompt, at temperature 1
Logprob = Callable[[Sequence[list[int]], Sequence[list[int]]], Sequence[Sequence[float]]]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A prompt and what the policy wrote after it."""

    prompt: Prompt  # token ids as the policy read them, messages, or text
    reply: str | Sequence[int]  # token ids, or text
    # For each token of `reply`, 1 if the policy sampled it, 0 for texts of tools and environments;
    # every run of ones is a turn. None: the policy sampled all of it.
    mask: Sequence[int] | None = None
    group: str | int | None = None  # rollouts of a prompt; None: those with equal prompts
    reward: float | None = None
    success: bool | None = None


@dataclasses.dataclass(frozen=True)
class MonitorSettings:
    """Which replies are scored, and how their reasoning is found."""

    think: tuple[str, ...] = THINK  # tags around the reasoning
    answer: tuple[str, ...] = ANSWER  # tags around the answer; (): the text after the reasoning
    samples: int = 32  # maximum number of reasonings of a step that are scored
    prompts: int = 16  # maximum number of prompts that each of them is scored under
    seed: int = 0  # of draws and permutations

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("prompts", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from {least}")


class CollapseMonitor:
    """The figures of each step, and the alarm over the steps."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", settings: MonitorSettings | None = None
    ) -> None:
        """
        Args:
          tokenizer: of the policy, as in `token_bytes` (Qwen, Llama 3, Gemma).

        Raises:
          ValueError: another kind of tokenizer, or unusable tags.
        """
        self.settings = settings or MonitorSettings()
        # A model may have more ids than its tokenizer, so any id is read.
        self._encoder = Encoder(tokenizer, MOST, self.settings.think, self.settings.answer)
        self._text = text_decoder(tokenizer)
        self._tags = (self._encoder.opening, self._encoder.closing)
        self._regimes = init_regimes()
        self._reported: set[str] = set()  # kinds of lines that were logged

    def update(
        self, step: int, rollouts: Sequence[Rollout], logprob: Logprob | None = None
    ) -> Metrics:
        """Return the figures of a step, and judge them.

        Args:
          step: number of the step, larger than that of the call before.
          rollouts: all rollouts of the step.
          logprob: the policy's log-probabilities; None: only the figures that need no model.

        Returns:
          rollout/*, symptoms/*, anatomy/* and action/* of all rollouts; with `logprob`, collapse/*
          of settings.samples reasonings; regime/*. Figures that the rollouts do not allow are left
          out: collapse/* needs two prompts and a reasoning, anatomy/* groups whose rollouts all
          have a reward, and without success it is only anatomy/mixed. Rollouts that cannot be read
          are left out, with a logged line. An alarm is a logged warning.

        Raises:
          ValueError: a rollout's mask does not fit its reply, or `logprob` returned other numbers
            of values than it got tokens, or a value that is not finite.
        """
        metrics: Metrics = {}
        found = self._read(step, rollouts)
        if found is not None:
            metrics |= recorded_metrics(found)
            metrics |= step_symptoms(found, self._text, self._tags)
            if logprob is not None:
                metrics |= self._information(found, logprob)
        return metrics | self._judge(metrics | {"step": step})

    def replay(self, rows: Iterable[dict[str, Any]]) -> None:
        """Restore the alarm's levels of a resumed run from the rows that it logged.

        Args:
          rows: metrics by name, in order, each with its `step`; rows without regime/ figures are
            skipped.
        """
        for row in rows:
            if "regime/alarm" in row:
                numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
                self._regimes, _, _ = update_regimes(self._regimes, Regimes(), [numbers])

    def report(self, kind: str, line: str) -> None:
        """Log a line, unless one of its kind was logged before."""
        if kind not in self._reported:
            self._reported.add(kind)
            LOGGER.warning(line)

    def _judge(self, row: Metrics) -> Metrics:
        self._regimes, (regime,), fired = update_regimes(self._regimes, Regimes(), [row])
        for alarm in fired:
            LOGGER.warning("step %d: %s", row["step"], alarm.reason)
        return finite_metrics(regime)

    def _read(self, step: int, rollouts: Sequence[Rollout]) -> ScoredStep | None:
        """Return the step's episodes; None if no rollout can be read."""
        infinite = sum(
            rollout.reward is not None and not math.isfinite(rollout.reward) for rollout in rollouts
        )
        if infinite:
            self.report(
                "reward", f"step {step}: {infinite} rewards are not finite, and read as missing"
            )
        rows = [_row(f"rollout {index}", step, each) for index, each in enumerate(rollouts)]
        replies, broken = encode_rows(rows, self._encoder)
        self._encoder.forget_prompts()
        if broken:
            self.report(
                "broken",
                f"step {step}: {len(broken)} of {len(rows)} rollouts cannot be read; the first: "
                f"{broken[0].place} {broken[0].reason}",
            )
        rows = [row for row in rows if row.place in replies]
        if not rows:
            return None
        if not any(reply.turn.reasoning[1] for each in replies.values() for reply in each):
            self.report(
                "reasoning",
                f"step {step}: none of {len(rows)} rollouts holds reasoning that ends with "
                f"{self._encoder.closing}; set its tags with MonitorSettings(think=(OPENING, "
                "CLOSING))",
            )
        (found,), surprises = make_steps(rows, replies)
        if surprises.split_groups:
            self.report(
                "groups",
                f"step {step}: {len(surprises.split_groups)} rollouts have a prompt that differs "
                "from the first of their group and form separate groups",
            )
        return found

    def _information(self, step: ScoredStep, logprob: Logprob) -> Metrics:
        """Return the collapse/* figures of some of the step's groups."""
        groups = step.episodes[-1].group + 1
        # The first and the last group, and others at equal distances.
        chosen = set(np.linspace(0, groups - 1, min(groups, self.settings.prompts)).round())
        step = dataclasses.replace(
            step, episodes=[episode for episode in step.episodes if episode.group in chosen]
        )
        sampling = ScoringSettings(
            first_turn_samples=self.settings.samples,
            trajectory_samples=self.settings.prompts,
            micro_batch=0,
            seed=self.settings.seed,
        )
        metrics = scope_metrics(
            pair_scorer(logprob),
            step.episodes,
            scope_sizes(step, sampling),
            ScopeKey(seed=self.settings.seed, step=step.number),
        )
        if not metrics:
            self.report(
                "prompts",
                f"step {step.number}: {groups} prompts, of which {len(chosen)} are scored, allow "
                "no comparison: the information needs reasoning and two prompts per step",
            )
        return finite_metrics(metrics)


def _row(place: str, step: int, rollout: Rollout) -> Row:
    reward = rollout.reward
    return Row(
        place=place,
        replies=_replies(place, rollout),
        group=None if rollout.group is None else str(rollout.group),
        step=step,
        form="rollout",
        reward=float(reward) if reward is not None and math.isfinite(reward) else None,
        success=None if rollout.success is None else bool(rollout.success),
    )


def _replies(place: str, rollout: Rollout) -> tuple[ParsedReply, ...]:
    """Return the turns of a rollout.

    Raises:
      ValueError: see `Rollout`.
    """
    prompt, reply, mask = rollout.prompt, rollout.reply, rollout.mask
    is_ids = not isinstance(prompt, str) and not any(isinstance(each, dict) for each in prompt)
    if is_ids:
        prompt = _as_ids(place, "prompt", prompt)
    if isinstance(reply, str):
        if mask is not None:
            raise ValueError(f"{place} has a mask; its reply must be token ids")
        return (ParsedReply(prompt, reply, transcript=True),)
    reply = _as_ids(place, "reply", reply)
    if mask is None:
        return (ParsedReply(prompt, reply),)
    if not is_ids:
        raise ValueError(f"{place} has a mask; its prompt must be token ids")
    if len(mask) != len(reply):
        raise ValueError(f"{place} has a mask of {len(mask)} for a reply of {len(reply)} tokens")
    every = [*_as_ids(place, "prompt", prompt), *reply]
    turns, end = [], len(prompt)
    for sampled, run in itertools.groupby(mask, key=bool):
        start, end = end, end + len(list(run))
        if sampled:
            turns.append(ParsedReply(every[:start], every[start:end]))
    return tuple(turns) or (ParsedReply(prompt, []),)


def _as_ids(place: str, name: str, value: Any) -> list[int]:
    """Return the token ids of a list, an array or a tensor."""
    try:
        return ids(value.tolist() if hasattr(value, "tolist") else list(value), name)
    except ValueError as error:
        raise ValueError(f"{place} {error}") from error


def pair_scorer(logprob: Logprob) -> Scorer:
    """Return the scorer of a function of log-probabilities; each distinct pair is scored once."""

    def score(prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> tuple[np.ndarray, np.ndarray]:
        prompts_N = [tuple(map(int, prompt)) for prompt in prompts]
        reasonings_M = [tuple(map(int, reasoning)) for reasoning in reasonings]
        pairs = list(dict.fromkeys(itertools.product(prompts_N, reasonings_M)))
        rows = logprob([list(x) for x, _ in pairs], [list(z) for _, z in pairs])
        if len(rows) != len(pairs):
            raise ValueError(f"logprob returned {len(rows)} rows for {len(pairs)} completions")
        total = {}
        for index, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
            values = np.asarray(row, np.float64)
            if values.shape != (len(pair[1]),) or not np.isfinite(values).all():
                raise ValueError(
                    f"logprob returned {values.size} values for completion {index}, of "
                    f"{len(pair[1])} tokens, {np.isfinite(values).sum()} of them finite; expected "
                    "a finite log-probability for each token"
                )
            total[pair] = values.sum()
        score_MN = np.array([[total[x, z] for x in prompts_N] for z in reasonings_M])
        return score_MN, np.array([len(z) for z in reasonings_M], np.int32)

    return score
