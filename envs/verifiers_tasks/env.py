"""Tasks of the package `verifiers` (Prime Intellect), played by its own client and harness.

    --config=verifiers --config.env.options.taskset=gsm8k-v1

A taskset is an installed module, or one in the folder where the command is started. Its rewards are
those that `verifiers` computes. A process plays all episodes, in any Python that has the package.
"""

import json
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ragen_jax.envs.dataset.rows import rows_of_split
from ragen_jax.envs.options import (
    finite_number,
    flag,
    one_of,
    problem_seed,
    text,
    whole,
)
from ragen_jax.envs.problems import SPLITS, Draws, split_by_hash
from ragen_jax.envs.types import HarnessResult, ModelAccess, Step
from ragen_jax.envs.verifiers_tasks.process import Player

TAG = 0x7E21F1E5  # tag of this environment's `Draws`
MAX_SUCCESS = 1e6  # larger rewards are refused (rollout/env_calls.py)
MAX_TASKS = 10_000_000

# The splits of a taskset share a process.
_PLAYERS: "weakref.WeakValueDictionary[tuple[str, str], Player]" = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Task:
    """A state: the number of a task, in the order of the taskset."""

    index: int


class Verifiers:
    """Tasks of a taskset of `verifiers`; see `ragen_jax.envs.types.HarnessEnvironment`.

    taskset: its id, the name of an installed package such as "gsm8k-v1", or of a module in the
        folder where the command is started
    arguments: fields of the taskset's config
    settings: other fields of the environment's config, such as {"agent": {"harness": {"id":
        "bash"}, "runtime": {"type": "docker"}}}
    python: a Python that has the package `verifiers`; "": this one
    limit: number of tasks, the first of the taskset; 0: all
    success: reward from which an episode counts as a success
    thinks: whether every prompt ends with <think>; False: as the model's chat template has it
    split: "imitation", "train" or "eval", by a hash of the task; None: all tasks
    """

    actions: tuple[str, ...] = ()
    instructions: str = ""

    def __init__(
        self,
        taskset: str = "",
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        python: str = "",
        limit: int = 0,
        success: float = 1.0,
        thinks: bool = False,
        split: str | None = "train",
    ) -> None:
        if not text("taskset", taskset):
            raise ValueError("taskset must be the id of a taskset of verifiers, got ''")
        self._python = text("python", python)
        self._success = finite_number("success", success, most=MAX_SUCCESS)
        self.thinks: bool = flag("thinks", thinks)
        self.split = one_of("split", split, (*SPLITS, None))
        self._asked = {
            "taskset": taskset,
            "arguments": _plain("arguments", arguments),
            "settings": _plain("settings", settings),
            "limit": whole("limit", limit, least=0, most=MAX_TASKS),
        }
        self._lock = threading.Lock()
        self._player = _find_player(self._python, self._asked)
        self._tasks = self._player.tasks
        splits = np.array([split_by_hash("verifiers", content) for _, content in self._tasks])
        splits = np.where(splits == "imitation", "train", splits)
        wanted = "train" if split == "imitation" else split  # there is no expert to imitate
        self._of_split = rows_of_split(splits, wanted, f"taskset {taskset}")

    def reset(self, seed: int) -> Task:
        """Return the state of task number `seed`, an int in [0, 2**63), of this split."""
        draws = Draws(problem_seed(seed), 0, TAG)
        return Task(int(self._of_split[draws.below(len(self._of_split))]))

    def render(self, state: Task) -> str:
        """Return the text of the task, from which the length of a first prompt is estimated."""
        return self._tasks[state.index][0]

    def identity(self, state: Task) -> str:
        """Return a hash of the task's content."""
        return self._tasks[state.index][1]

    def step(self, state: Task, action: str, rng: np.random.Generator | None = None) -> Step:
        """Raise TypeError: `verifiers` plays (`play`)."""
        raise TypeError("verifiers plays its episodes by itself")

    def play(self, state: Task, access: ModelAccess) -> HarnessResult:
        """Let `verifiers` play a task.

        Raises:
          RuntimeError: it fails.
        """
        answer = self._running().play(state.index, access)
        reward = float(answer["reward"])
        return HarnessResult(reward, reward >= self._success, info=answer["info"])

    def _running(self) -> Player:
        """Return the process, or a new one if it has ended."""
        with self._lock:
            if self._player.has_ended:
                self._player = _find_player(self._python, self._asked)
                if self._player.tasks != self._tasks:
                    raise RuntimeError(
                        f"taskset {self._asked['taskset']} listed other tasks after a restart; its "
                        "load() must return the same tasks each time"
                    )
            return self._player


def _find_player(python: str, asked: Mapping[str, Any]) -> Player:
    """Return the process of a taskset, which is started if it does not run."""
    key = (python, json.dumps(asked, sort_keys=True))
    with _LOCK:
        player = _PLAYERS.get(key)
        if player is None or player.has_ended:
            player = _PLAYERS[key] = Player(python, asked)
        return player


def _plain(name: str, value: Any) -> dict[str, Any]:
    """Return a section of options as JSON objects."""
    if hasattr(value, "to_dict"):  # of ml_collections
        value = value.to_dict()
    if not isinstance(value or {}, Mapping):
        raise ValueError(f"{name} must be a section of fields, got {value!r:.80}")
    try:
        return json.loads(json.dumps(dict(value or {})))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers, texts, lists and sections: {error}") from error
