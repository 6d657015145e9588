"""Rules about symptoms, as tables: a metric, its limit, and the page that says what to do.

A limit concerns the newest step: the metrics of texts hardly vary while a run is healthy. A change
compares the newest steps with the first steps of the same run. The limits are far from the values
of healthy runs (docs/diagnostics.md).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.estimates import name_steps
from ragen_jax.diagnostics.rules import BAD, WEAK, LevelRule, Records

COMPARED = 10  # largest number of steps at each end that a change compares
FEWEST_COMPARED = 9  # steps below which no change is named, as by the alarm
EVALUATIONS = 3  # evaluations that validation is compared with
GAP = 0.3  # difference of success in training and validation that is named
DROP = 0.3  # fall of the mean log-probability of control tokens that is named, in nats
PAGES = "docs/symptoms"


@dataclasses.dataclass(frozen=True)
class Limit:
    """A metric that is beyond a limit in the newest step that has it."""

    name: str
    metric: str
    limit: float
    words: str  # the evidence; {} is the newest value
    page: str  # file name in PAGES, without its ending
    above: bool = True  # whether it must be at least the limit, or at most
    grade: str = BAD

    def rule(self) -> LevelRule:
        side = "at least" if self.above else "at most"
        return LevelRule(
            self.name,
            self.grade,
            f"`{self.metric}` is {side} {self.limit:g} in the newest step that has it",
            _see(self.page),
            self.find,
        )

    def find(self, records: Records) -> str | None:
        rows = [row for row in records.steps if self.metric in row][-1:]
        for row in rows:
            value = row[self.metric]
            if value >= self.limit if self.above else value <= self.limit:
                return f"{name_steps(rows)}, {self.words.format(value)}"
        return None


@dataclasses.dataclass(frozen=True)
class Change:
    """A metric that has moved far from its mean in the first steps of the run."""

    name: str
    metric: str
    factor: float  # change of the mean; above 1 it must rise by it, below 1 fall to it
    words: str  # the evidence; {0} is the mean of the first steps, {1} that of the newest
    page: str

    def rule(self) -> LevelRule:
        moved = f"at least {self.factor:.2g}" if self.factor > 1 else f"at most {self.factor:.2g}"
        return LevelRule(
            self.name,
            WEAK,
            f"the mean of `{self.metric}` over the newest steps (at most {COMPARED}) is {moved} "
            "times that over the first steps",
            _see(self.page),
            self.find,
        )

    def find(self, records: Records) -> str | None:
        ends = _ends(records.steps, self.metric)
        if ends is None:
            return None
        first, last = ends
        moved = last >= self.factor * first if self.factor > 1 else last <= self.factor * first
        # A metric that was 0, or negative, has no ratio.
        return self.words.format(first, last) if moved and first > 0 else None


def _ends(rows: Sequence[Metrics], metric: str) -> tuple[float, float] | None:
    """Return the means of a metric over the first and the newest steps, or None if too few."""
    values = [row[metric] for row in rows if metric in row]
    if len(values) < FEWEST_COMPARED:
        return None
    number = min(COMPARED, len(values) // 3)
    return float(np.mean(values[:number])), float(np.mean(values[-number:]))


def _see(page: str) -> str:
    return f"`{PAGES}/{page}.md` says what else to look at and what helped."


def _unlikely_control(records: Records) -> str | None:
    ends = _ends(records.steps, "symptoms/control_logp")
    if ends is None or ends[1] > ends[0] - DROP:
        return None
    return (
        f"the mean log-probability of control tokens fell from {ends[0]:.2f} to {ends[1]:.2f}: the "
        "policy writes tags and stop tokens by chance"
    )


def _validation(records: Records) -> str | None:
    trained = [row["rollout/success"] for row in records.steps if "rollout/success" in row]
    evaluated = [row["eval/success"] for row in records.steps if "eval/success" in row]
    if len(trained) < FEWEST_COMPARED or len(evaluated) < EVALUATIONS:
        return None
    train = float(np.mean(trained[-COMPARED:]))
    held_out = float(np.mean(evaluated[-EVALUATIONS:]))
    if abs(train - held_out) < GAP:
        return None
    return (
        f"success in training ({train:.2f}, newest steps) and on held-out problems "
        f"({held_out:.2f}, last {EVALUATIONS} evaluations) differ"
    )


TEXT_RULES = tuple(
    limit.rule()
    for limit in (
        Limit(
            "one token without end",
            "symptoms/flood_rate",
            0.05,
            "{:.0%} of the replies repeat one token 16 times or more",
            "gibberish",
        ),
        Limit(
            "repeated text",
            "symptoms/loop_rate",
            0.2,
            "{:.0%} of the replies are at least half one repeated text",
            "repeats_itself",
        ),
        Limit(
            "repeated phrases",
            "symptoms/repeated_ngrams",
            0.4,
            "{:.0%} of the replies' sequences of four tokens occurred before in the reply",
            "repeats_itself",
        ),
        Limit(
            "text without content",
            "symptoms/compression",
            0.2,
            "replies shrink to {:.0%} of their bytes when compressed",
            "repeats_itself",
            above=False,
        ),
        Limit(
            "letters of another script",
            "symptoms/foreign_letters",
            0.05,
            "{:.0%} of the letters are of scripts that the prompts do not have",
            "gibberish",
        ),
    )
)

REASONING_RULES = tuple(
    limit.rule()
    for limit in (
        Limit(
            "empty reasoning",
            "symptoms/empty_rate",
            0.2,
            "{:.0%} of the replies have no reasoning",
            "stops_thinking",
        ),
        Limit(
            "reasoning that never ends",
            "symptoms/unclosed_rate",
            0.2,
            "{:.0%} of the replies do not close their reasoning",
            "stops_thinking",
        ),
        Limit(
            "tags out of place",
            "symptoms/repeated_tags",
            0.1,
            "{:.0%} of the replies repeat a tag, or open a call inside a call",
            "stops_using_tools",
        ),
        Limit(
            "reasoning that fits any prompt",
            "symptoms/prompt_free",
            0.5,
            "{:.0%} of the reasonings have no words that are specific to their prompt",
            "same_reasoning",
        ),
        Limit(
            "the same sentences for every prompt",
            "symptoms/shared_words",
            0.5,
            "{:.0%} of the words of a reasoning are in sentences that most prompts share",
            "same_reasoning",
        ),
        Limit(
            "copies of the prompt",
            "symptoms/prompt_copies",
            0.5,
            "{:.0%} of the reasonings' sequences of eight tokens are copied from the prompt",
            "repeats_itself",
            grade=WEAK,
        ),
        Limit(
            "groups without a learning signal",
            "anatomy/mixed",
            0.1,
            "rewards differ inside {:.0%} of the groups",
            "reward_flat",
            above=False,
            grade=WEAK,
        ),
        Limit(
            "large updates",
            "update/approx_kl",
            0.05,
            "the KL from the sampling policy to the updated one is {:.3f}",
            "kl_explodes",
            grade=WEAK,
        ),
    )
)

CHANGE_RULES = (
    *(
        change.rule()
        for change in (
            Change(
                "reward dropped",
                "rollout/success",
                1 / 3,
                "success in training fell from {0:.2f} to {1:.2f}",
                "reward_drops",
            ),
            Change(
                "replies grew",
                "rollout/response_length",
                2.0,
                "replies grew from {0:.0f} to {1:.0f} tokens",
                "replies_grow",
            ),
            Change(
                "replies shrank",
                "rollout/response_length",
                0.5,
                "replies shrank from {0:.0f} to {1:.0f} tokens",
                "replies_shrink",
            ),
            Change(
                "fewer tool calls",
                "symptoms/call_rate",
                0.25,
                "the fraction of replies with a tool call fell from {0:.2f} to {1:.2f}",
                "stops_using_tools",
            ),
            Change(
                "entropy rose",
                "update/entropy",
                3.0,
                "entropy rose from {0:.3f} to {1:.3f} nats per token",
                "entropy_explodes",
            ),
            Change(
                "entropy fell",
                "update/entropy",
                0.2,
                "entropy fell from {0:.3f} to {1:.3f} nats per token",
                "entropy_vanishes",
            ),
            Change(
                "KL rose",
                "update/kl",
                10.0,
                "the KL from the initial policy rose from {0:.3f} to {1:.3f}",
                "kl_explodes",
            ),
        )
    ),
    LevelRule(
        "unlikely control tokens",
        WEAK,
        f"the mean of `symptoms/control_logp` over the newest steps (at most {COMPARED}) is at "
        f"least {DROP} below that over the first steps",
        _see("gibberish"),
        _unlikely_control,
    ),
    LevelRule(
        "validation differs from training",
        WEAK,
        f"the mean of `rollout/success` over the newest {COMPARED} steps and that of "
        f"`eval/success` over the last {EVALUATIONS} evaluations differ by {GAP:g} or more",
        _see("validation_differs"),
        _validation,
    ),
)
