"""Problems played to their end, by the expert or with random actions.

Only the environment is used: no model, no chat format. The budgets of actions are those of a run.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ragen_jax.check_data.contract import Problem
from ragen_jax.core.progress import advance
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.envs.types import (
    Environment,
    Observation,
    SolvableEnvironment,
    State,
    ToolEnvironment,
)
from ragen_jax.rollout.env_calls import EnvFailure, Limits, StepRequest, act, attempt

TEXTS = ("", "0", "yes")  # random answers where any text is an action

# (state, rng) -> the next action; None: the player has none
Choose = Callable[[State, np.random.Generator], str | None]


@dataclasses.dataclass(frozen=True)
class Episode:
    """A problem that was played."""

    reward: float  # sum over all actions
    success: bool
    actions: int
    done: bool  # whether the task is over; otherwise a budget or a dead end stopped the episode
    message: str  # the longest observation after the first


@dataclasses.dataclass
class Plays:
    """The episodes of one player."""

    player: str  # with its split
    episodes: list[Episode] = dataclasses.field(default_factory=list)
    unplanned: int = 0  # number of problems without a solution
    failures: list[tuple[str, EnvFailure]] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        """Return the line of the report."""
        if not self.episodes:
            return f"played {self.player}: none"
        rewards = [episode.reward for episode in self.episodes]
        spread = f" ({min(rewards):g} to {max(rewards):g})" if min(rewards) < max(rewards) else ""
        done = sum(episode.done for episode in self.episodes)
        parts = [
            f"{done} of {len(self.episodes)} problems to their end",
            f"success {np.mean([episode.success for episode in self.episodes]):.3f}",
            f"return {np.mean(rewards):+.3g}{spread}",
            f"{statistics.median(episode.actions for episode in self.episodes):g} actions (median)",
        ]
        if self.unplanned:
            parts.append(f"{self.unplanned} more have no solution")
        return f"played {self.player}: {'; '.join(parts)}"


def play(
    player: str,
    environment: Environment,
    problems: Iterable[Problem],
    *,
    expert: bool,
    max_actions: int,
    limits: Limits,
) -> Plays:
    """Play problems to their end or to `max_actions` actions.

    Args:
      player: name of split and player, for the report.
      expert: whether `solve` chooses the actions; otherwise they are drawn at random.
    """
    plays = Plays(player)
    choose = _expert(environment) if expert else _random(environment)
    for index, problem in enumerate(problems):
        rng = generator(Purpose.CHECK_PLAYS, index)
        found = _play_one(environment, problem.state, choose, rng, max_actions, limits)
        if isinstance(found, EnvFailure):
            plays.failures.append((problem.name, found))
        elif found is None:
            plays.unplanned += 1
        else:
            plays.episodes.append(found)
        advance()
    return plays


def _play_one(
    environment: Environment,
    state: State,
    choose: Choose,
    rng: np.random.Generator,
    max_actions: int,
    limits: Limits,
) -> Episode | EnvFailure | None:
    """Return a problem's episode; None if the player has no action in its first state."""
    total, count, done, success, message = 0.0, 0, False, False, ""
    while count < max_actions and not done:
        action = attempt(lambda state=state: choose(state, rng))
        if isinstance(action, EnvFailure):
            return action
        if action is None:  # the task cannot be solved from here
            return None if not count else Episode(total, success, count, False, message)
        request = StepRequest(state, (action,), rng, max_actions - count)
        (result,) = act(environment, [request], limits)
        if isinstance(result, EnvFailure):
            return result
        state, done, count = result.state, result.done, count + 1
        total, success = total + result.reward, result.info.get("success") is True
        shown = result.observation
        message = max(message, shown.text if isinstance(shown, Observation) else shown, key=len)
    return Episode(total, success, count, done, message)


def _expert(environment: Environment) -> Choose:
    """Return a player that solves each state anew, so that it also survives noise."""
    assert isinstance(environment, SolvableEnvironment)

    def choose(state: State, rng: np.random.Generator) -> str | None:
        plan = environment.solve(state)
        return plan[0] if plan else None

    return choose


def _random(environment: Environment) -> Choose:
    words: Sequence[str] = environment.actions or TEXTS
    if isinstance(environment, ToolEnvironment):
        names = [tool.get("function", tool).get("name", "") for tool in environment.tools]
        calls = [json.dumps({"name": name, "arguments": {}}) for name in names]
        words = [*words, *(f"<tool_call>{call}</tool_call>" for call in calls)]
    return lambda state, rng: words[int(rng.integers(len(words)))]
