"""Bandit for language agents: choose between sure arms and risky arms that may pay more.

As in the released RAGEN, a sure arm pays 0.1 and a risky arm pays 1 with probability 0.25, which is
better on average, and the names of the arms may connote the opposite.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np

from ragen_jax.envs.bandit import problems, reading
from ragen_jax.envs.bandit.names import CONNOTATIONS, WORDS
from ragen_jax.envs.bandit.problems import State
from ragen_jax.envs.options import bounds, flag, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.styles import Style, make_styles
from ragen_jax.envs.types import Step

MAX_ARMS = 10
MAX_PULLS = 50

_RULES = """\
You are pulling the arms of a bandit, {pulls}. A sure arm pays the same every time; a risky one \
pays 1 by chance and nothing otherwise. What an arm pays is what you earn. Choose the arm that \
pays most on average.
{shown}
Answer with the name of one arm. An answer that names none of them, or several, earns nothing and \
uses up the pull."""

_PAY_LISTED = "Each arm is shown with what it pays and with the chance that it does."
_PAY_HIDDEN = {
    "neutral": "What the arms pay is not told.",
    "fitting": "What the arms pay is not told. A name that sounds risky is that of a risky arm.",
    "misleading": "What the arms pay is not told. A name that sounds risky is that of a sure arm.",
}
_HISTORY = "\nWhat was pulled so far and what it paid is listed in order."

# The rules of `Bandit.brief`.
_BRIEF = """\
Bandit: choose the arm that pays most on average. A sure arm always pays the same; a risky arm \
pays 1 by chance, or else nothing.{hidden}{history}
The answer is the name of one arm."""
_BRIEF_HIDDEN = {
    "neutral": " What they pay is hidden.",
    "fitting": " What they pay is hidden; names that sound risky are of risky arms.",
    "misleading": " What they pay is hidden; names that sound risky are of sure arms.",
}
_BRIEF_HISTORY = " You earn what each of {pulls} pulls pays; earlier pulls are listed."


class Bandit:
    """Generated bandits; see `ragen_jax.envs.types.Environment`.

    An action is any text that names an arm, so `actions` is empty. If the arms' pay is shown, the
    task is to compare sure and uncertain pay. If not, the task is to explore or, with a single
    pull, to infer the pay from the names' connotations.

    arms: number of arms, from 2 to 10; half of them, rounded down, are risky
    pulls: pulls per episode, from 1 to 50. The problem is solved if the last pull is of an arm with
        the highest expected pay
    told: show the pay of every arm and its probability
    names: "neutral", "fitting" (risky arms sound dangerous and sure arms safe) or "misleading"
        (the reverse)
    sure: (lowest, highest) pay of a sure arm, in hundredths
    chance: (lowest, highest) probability that a risky arm pays 1, in hundredths
    split: "imitation", "train" or "eval": three disjoint sets of problems, regardless of the order
        of the arms; None draws from all
    """

    actions: tuple[str, ...] = ()

    def __init__(
        self,
        arms: int = 2,
        pulls: int = 1,
        told: bool = True,
        names: str = "neutral",
        sure: Sequence[int] = (10, 10),
        chance: Sequence[int] = (25, 25),
        split: str | None = "train",
    ) -> None:
        self.arms = whole("arms", arms, least=2, most=MAX_ARMS)
        self.pulls = whole("pulls", pulls, least=1, most=MAX_PULLS)
        self.told = flag("told", told)
        one_of("names", names, tuple(CONNOTATIONS))
        self.names = names
        self.sure = bounds("sure", sure, least=0, most=100, ends="lowest, highest")
        self.chance = bounds("chance", chance, least=0, most=100, ends="lowest, highest")
        if len({*self.sure, *self.chance}) == 1:
            raise ValueError(f"sure and chance must differ, got {sure!r} and {chance!r}")
        alike = self.sure[0] == self.sure[1] and self.chance[0] == self.chance[1]
        if not told and self.pulls == 1 and (names == "neutral" or not alike):
            raise ValueError(
                "told must be True if a single pull has no other information; otherwise set "
                "pulls to 2 or more, or names to fitting or misleading with a single value of "
                "sure and of chance"
            )
        self.split = one_of("split", split, (*SPLITS, None))
        self.words: tuple[str, ...] = self._words()
        self.instructions: str = _RULES.format(
            pulls="once" if self.pulls == 1 else f"{self.pulls} times",
            shown=(_PAY_LISTED if told else _PAY_HIDDEN[names]) + _HISTORY * (self.pulls > 1),
        )
        self.brief: str = _BRIEF.format(
            hidden="" if told else _BRIEF_HIDDEN[names],
            history=_BRIEF_HISTORY.format(pulls=self.pulls) if self.pulls > 1 else "",
        )

    def _words(self) -> tuple[str, ...]:
        words = ["arms", " choose", *(f" {_number(amount)}" for amount in range(101))]
        words += [" pays", " with", " chance", " expected"]
        words += ["Arms:", "Pulled:", " none", " pulled", " mean"]
        words += [f" {count}" for count in range(self.pulls)]
        for kind in dict.fromkeys(CONNOTATIONS[self.names]):
            firsts, seconds = WORDS[kind]
            words += [*firsts, *(f" {word}" for word in (*firsts, *seconds))]
        return tuple(words)

    def reset(self, seed: int) -> State:
        """Return problem number `seed`, an int in [0, 2**63), of this split.

        It is the first of attempts 0, 1, ... that meets the constraints. Raises ValueError after
        MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            state = problems.draw_problem(
                Draws(seed, attempt, problems.TAG),
                arms=self.arms,
                names=self.names,
                sure=self.sure,
                chance=self.chance,
            )
            if state is not None and self.split in (None, problems.split_of(state)):
                return state
        raise ValueError(
            f"no problem found in {MAX_ATTEMPTS} attempts for seed={seed}, arms={self.arms}, "
            f"sure={self.sure}, chance={self.chance}, split={self.split!r}: widen the bounds"
        )

    def render(self, state: State) -> str:
        """Return the observation: the arms and the pulls so far."""
        lines = [
            f"{arm.name}: pays {_number(arm.pay)} with chance {_number(arm.chance)}"
            for arm in state.arms
        ]
        if not self.told:
            lines = [f"Arms: {', '.join(arm.name for arm in state.arms)}"]
        if state.history:
            pulls = (
                f"{'none' if number is None else state.arms[number].name} {_number(paid)}"
                for number, paid in state.history
            )
            lines.append(f"Pulled: {', '.join(pulls)}")
        return "\n".join(lines)

    def step(self, state: State, action: str, rng: np.random.Generator | None) -> Step:
        """Pull the arm that an answer names, if any: one draw of `rng` per answer.

        Without `rng` (None) a risky arm pays. After the last pull every answer earns 0.

        info: "success" (the last pull was of an arm with the highest expected pay), "best" (this
        pull was) and "readable" (the answer names an arm).
        """
        if len(state.history) >= self.pulls:
            best = state.is_best(state.history[-1][0])
            return Step(state, 0.0, True, {"success": best, "best": False, "readable": False})
        number = reading.find_arm(action, [arm.name for arm in state.arms])
        uniform = 0.0 if rng is None else rng.random()
        paid = 0
        if number is not None and uniform < state.arms[number].chance / 100:
            paid = state.arms[number].pay
        after = State(state.arms, (*state.history, (number, paid)))
        done = len(after.history) == self.pulls
        best = state.is_best(number)
        info = {"success": done and best, "best": best, "readable": number is not None}
        return Step(after, paid / 100, done, info)

    def identity(self, state: State) -> str:
        """Return a text of the arms that does not depend on their order."""
        return problems.identity(state)

    def solve(self, state: State) -> tuple[str, ...]:
        """Return the arms to pull until the end, for imitation.

        If the pay is shown, or there is only one pull, repeat the first arm with the highest
        expected pay. Otherwise first pull the least-pulled arm, then the arm with the highest mean
        pay so far. The plan uses only the pulls so far: call again after each pull.
        """
        pulls_left = self.pulls - len(state.history)
        if self.told or self.pulls == 1:
            best = next(i for i in range(len(state.arms)) if state.is_best(i))
            return (state.arms[best].name,) * pulls_left
        counts = [len(pays) for pays in _payments(state)]
        means = [reading.mean(pays) if pays else Decimal(-1) for pays in _payments(state)]
        explore = min(self.pulls - 1, max(self.arms, self.pulls // 2))
        plan = []
        for pull in range(len(state.history), self.pulls):
            number = means.index(max(means))
            if pull < explore:
                number = counts.index(min(counts))
                counts[number] += 1
            plan.append(state.arms[number].name)
        return tuple(plan)

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the facts known about each arm, and the arm to pull.

        For example "arms Red Table pays 0.10 chance 1.00 expected 0.10 Blue Window pays 1.00
        chance 0.25 expected 0.25 choose Blue Window"; if the pay is not shown, "arms Red Table
        pulled 2 mean 0.10 Blue Window pulled 0 choose Blue Window".
        """
        words = ["arms"]
        for arm, pays in zip(state.arms, _payments(state), strict=True):
            words.append(arm.name)
            if self.told:
                words += ["pays", _number(arm.pay), "chance", _number(arm.chance)]
                words += ["expected", _number(arm.expected_pay / 100)]
            else:
                words += ["pulled", str(len(pays))]
                words += ["mean", str(reading.mean(pays))] if pays else []
        return " ".join([*words, *(f"choose {name}" for name in plan[:1])])

    def narrate(self, state: State, plan: Sequence[str]) -> str:
        """Return the expert's reasoning in sentences: facts about each arm, and the arm to pull.

        For example "The Red Table pays 0.10 with chance 1.00, expected 0.10. The Blue Window pays
        1.00 with chance 0.25, expected 0.25. Choose Blue Window."; if the pay is not shown, "The
        Red Table was pulled 2 times, mean 0.10. The Blue Window was pulled 0 times. Choose Blue
        Window."
        """
        sentences = []
        for arm, pays in zip(state.arms, _payments(state), strict=True):
            facts = f"pays {_number(arm.pay)} with chance {_number(arm.chance)}"
            facts += f", expected {_number(arm.expected_pay / 100)}"
            if not self.told:
                facts = f"was pulled {len(pays)} time{'' if len(pays) == 1 else 's'}"
                facts += f", mean {reading.mean(pays)}" if pays else ""
            sentences.append(f"The {arm.name} {facts}.")
        return " ".join([*sentences, *(f"Choose {name}." for name in plan[:1])])

    @property
    def sentence_styles(self) -> Mapping[str, Style]:
        """Reasoning styles in sentences, for `warmstart.styles` of a language model."""
        name, number = "[A-Z][a-z]+ [A-Z][a-z]+", r"[0-9]\.[0-9]{2}"
        facts = f"pays {number} with chance {number}, expected {number}"
        if not self.told:
            facts = f"was pulled [0-9]+ times?(?:, mean {number})?"
        arm = rf"The {name} {facts}\."
        pattern = rf"{arm}(?: {arm})*(?: Choose {name}\.)?"
        return make_styles(self.narrate, pattern, "The")

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true facts about arms in `thought`, number of facts stated).

        A fact is an arm's pay, its probability ("chance"), its expected pay, how often it was
        pulled, or the mean pay of those pulls.
        """
        claims = reading.parse_claims(thought)
        truth = reading.list_supported_facts(observation)
        return sum(claim in truth for claim in claims), len(claims)


def _payments(state: State) -> list[list[Decimal]]:
    """Return the payments of each arm, in the order of the pulls."""
    return [
        [Decimal(paid) / 100 for index, paid in state.history if index == number]
        for number in range(len(state.arms))
    ]


def _number(hundredths: float) -> str:
    return f"{hundredths / 100:.2f}"
