"""An agent that runs in its own harness: a program or a function plays, and the policy replies.

    --config=harness --config.env.options.problems=problems.jsonl
                     --config.env.options.function=my_agent:play
                     --config.env.options.command="python my_agent.py"   (one of these two)

    def play(problem, base_url, api_key): -> a number, or dict(reward=..., success=..., ...)

The function, which may be asynchronous, gets a row of the problems and what an OpenAI client needs.
A command gets the row as JSON on its standard input, the other two as OPENAI_BASE_URL and
OPENAI_API_KEY, and prints the same as JSON in its last line. Either may also post it to
BASE_URL/reward. Every request is a turn of the episode.

The result may hold `rewards` instead of `reward`: a list with the reward of each request.
"""

import asyncio
import inspect
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.envs.dataset.functions import convert_reward, user_function
from ragen_jax.envs.dataset.rows import (
    file_source,
    hub_source,
    load_rows,
    prompt_identity,
    rows_of_split,
)
from ragen_jax.envs.harness.programs import run_program
from ragen_jax.envs.options import file_name, finite_number, flag, one_of, problem_seed, text
from ragen_jax.envs.problems import SPLITS, Draws
from ragen_jax.envs.scalars import real_number
from ragen_jax.envs.types import HarnessResult, ModelAccess, Step

TAG = 0x4A27E55  # tag of this environment's `Draws`
MAX_SUCCESS = 1e6  # larger rewards are refused (rollout/env_calls.py)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """A state: a row of the problems."""

    row: int


class Harness:
    """Problems that a program plays; see `ragen_jax.envs.types.HarnessEnvironment`.

    problems: a JSON Lines file, a JSON list, a Parquet file, or a data set of the Hub (OWNER/NAME,
        split train), whose rows are objects with any fields
    function: MODULE:FUNCTION of (problem, base_url, api_key); its module is imported from the
        folder where the command is started, or from the installed packages
    command: a command line in place of `function`, without a shell
    variables: names of the environment variables that the command gets, besides OPENAI_BASE_URL and
        OPENAI_API_KEY
    success: reward from which an episode counts as a success, if the result does not say
    thinks: whether every prompt ends with <think>; False: as the model's chat template has it
    split_field: the field with each row's split (dataset/rows.SPLIT_NAMES); "": split by a hash of
        the row
    split: "imitation", "train" or "eval"; None: all rows
    """

    actions: tuple[str, ...] = ()
    instructions: str = ""

    def __init__(
        self,
        problems: str | Path | None = None,
        function: str = "",
        command: str = "",
        variables: tuple[str, ...] = ("PATH", "HOME", "LANG"),
        success: float = 1.0,
        thinks: bool = False,
        split_field: str = "",
        split: str | None = "train",
    ) -> None:
        text("function", function), text("command", command), text("split_field", split_field)
        self._success = finite_number("success", success, most=MAX_SUCCESS)
        self.thinks: bool = flag("thinks", thinks)
        self.split = one_of("split", split, (*SPLITS, None))
        self._variables = _names(variables)
        if bool(function) == bool(command):
            raise ValueError(
                "give function, MODULE:FUNCTION of (problem, base_url, api_key), or command, a "
                f"command line: got {function!r} and {command!r}"
            )
        self._name = function or command
        self._function = None
        if function:
            names = ("problem", "base_url", "api_key")
            self._function = user_function("function", function, *names)
        self._command = _words(command) if command else []
        if file_name("problems", problems) is None:
            raise ValueError("problems must name a file or a data set of the Hub, got None")
        source = (
            hub_source(str(problems), subset="", split="train", revision="")
            if _is_hub_name(problems)
            else file_source(str(problems))
        )
        self._rows = load_rows(source, prompt="", split_field=split_field)
        splits = np.where(self._rows.splits == "imitation", "train", self._rows.splits)
        wanted = "train" if split == "imitation" else split  # there is no expert to imitate
        self._split_rows = rows_of_split(splits, wanted, source.name)

    def reset(self, seed: int) -> Problem:
        """Return the state of row number `seed`, an int in [0, 2**63), of this split."""
        draws = Draws(problem_seed(seed), 0, TAG)
        return Problem(int(self._split_rows[draws.below(len(self._split_rows))]))

    def render(self, state: Problem) -> str:
        """Return the row as JSON, from which the length of a first prompt is estimated."""
        return self._rows.prompt(state.row)

    def identity(self, state: Problem) -> str:
        """Return the row as JSON, ignoring case and spaces."""
        return prompt_identity(self.render(state))

    def step(self, state: Problem, action: str, rng: np.random.Generator | None = None) -> Step:
        """Raise TypeError: the program plays (`play`)."""
        raise TypeError("a harness plays its episodes by itself")

    def play(self, state: Problem, access: ModelAccess) -> HarnessResult:
        """Run the function or the command on a row and return its result.

        Raises:
          RuntimeError: the command fails.
          TypeError: the result is neither a number nor a dict with a reward.
          Any exception of the function.
        """
        problem = self._rows.row(state.row)
        if self._function is not None:
            value = self._function(problem, access.base_url, access.api_key)
            if inspect.isawaitable(value):
                value = asyncio.run(_wait(value))
        else:
            variables = {n: os.environ[n] for n in self._variables if n in os.environ}
            value = run_program(self._command, problem, variables, access)
        value = access.posted() if value is None else value
        if value is None:
            raise TypeError(
                f"{self._name} gave no reward: return it, print it as JSON in the last line, or "
                "post it to BASE_URL/reward"
            )
        return as_result(value, self._name, self._success)


def as_result(value: Any, name: str, threshold: float) -> HarnessResult:
    """Convert what a program gives as the result of an episode.

    The value is a number, or a dict with `reward` or `rewards` and perhaps `success`; its other
    entries are facts kept with the episode.

    Args:
      threshold: reward from which the episode is a success, if the value does not say.

    Raises:
      TypeError: any other value.
    """
    facts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    given, rewards = facts.pop("rewards", None), []
    if given is not None:
        listed = given if isinstance(given, (list, tuple)) else [None]
        rewards = [number for x in listed if (number := real_number(x)) is not None]
        if len(rewards) < len(listed) or not rewards:
            raise TypeError(f"{name} must give rewards as a list of numbers; got {given!r:.80}")
        facts.setdefault("reward", sum(rewards))
    outcome = convert_reward(facts, name, threshold)
    return HarnessResult(outcome.reward, outcome.success, tuple(rewards), outcome.info)


async def _wait(value: Any) -> Any:
    return await value


def _names(variables: Any) -> tuple[str, ...]:
    """Return the names of environment variables."""
    names = (variables,) if isinstance(variables, str) else tuple(variables)
    for name in names:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            raise ValueError(f"variables must be names of environment variables, got {name!r:.80}")
    return names


def _words(command: str) -> list[str]:
    """Return the words of a command line."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command {command!r} cannot be read: {error}") from error
    if not words:
        raise ValueError(f"command must be a command line, got {command!r}")
    return words


def _is_hub_name(problems: object) -> bool:
    """Whether problems are a data set of the Hub, OWNER/NAME, and not a file."""
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(problems)) is not None
    return hub and not Path(str(problems)).exists() and not Path(str(problems)).suffix
