"""Any Gymnasium environment with text observations and text actions, by its id.

    --config=gymnasium:llm --config.env.options.id=mine/Hunt-v0 --config.env.options.module=hunt

Only two Gymnasium calls are used: reset(seed=...) -> (observation, info) and
step(action) -> (observation, reward, terminated, truncated, info). Other packages follow the same
convention with their own `make` function, which `maker` names. GEM's games, for example, draw
from the process's generators and all begin with the same observation:

    --config.env.options.module=gem.envs --config.env.options.maker=gem:make
    --config.env.options.id=game:Minesweeper-v0-easy --config.env.options.isolated=True
    --config.env.options.split_by=seed --config.env.options.success_reward=1
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.envs.engines import Engine, EngineEnvironment, EngineStep, Position
from ragen_jax.envs.options import finite_number, flag, function_of, import_option
from ragen_jax.envs.scalars import plain_scalar, real_number
from ragen_jax.envs.types import Step

# Keys of a step's info that may report whether the task is solved.
SUCCESS_KEYS = ("success", "is_success")
MAX_RETURN = 1e6


class Gymnasium(EngineEnvironment):
    """A Gymnasium environment; see `ragen_jax.envs.engines`.

    An episode is solved if the environment reports it, by True in info["success"] or
    info["is_success"] of a step, or if it ends with rewards that sum to `success_reward` or more.
    A positive reward alone is not success. Without either there are no success metrics
    (types.SUCCESS_UNDEFINED), and a printed line says so.

    id: the registered id
    module: module to import first, which registers the environment; "": none
    maker: MODULE:FUNCTION, called with the id and `arguments`
    arguments: keyword arguments of the environment
    instructions: the rules, if the first observation does not state them
    split_by: "observation" or "seed" (engines.EngineEnvironment)
    replay: False if the environment is not reproducible: same seed and actions, other result
    isolated: True if the environment draws from the process's generators
    success_reward: sum of rewards from which an ended episode counts as solved, in place of the
        info; None: use the info. `spec.reward_threshold` is not read: it is a mean over episodes
    """

    def __init__(
        self,
        id: str = "",
        module: str = "",
        maker: str = "gymnasium:make",
        arguments: Mapping[str, Any] | None = None,
        instructions: str = "",
        split_by: str = "observation",
        replay: bool = True,
        isolated: bool = False,
        success_reward: float | None = None,
        split: str | None = "train",
    ) -> None:
        for name, value in (("id", id), ("module", module), ("maker", maker)):
            if not isinstance(value, str) or (name == "id" and not value):
                raise ValueError(f"{name} must be a text, got {value!r}")
        for name, value in (("replay", replay), ("isolated", isolated)):
            flag(name, value)
        if not isinstance(instructions, str):
            raise ValueError(f"instructions must be a text, got {instructions!r}")
        if success_reward is not None:
            finite_number("success_reward", success_reward, most=MAX_RETURN)
        if module:
            import_option("module", module)
        make = function_of("maker", maker)
        keywords = dict(arguments or {})
        super().__init__(
            lambda: _Episode(make(id, **keywords), success_reward),
            name=id,
            instructions=instructions,
            split=split,
            split_by=split_by,
            replay=replay,
            isolated=isolated,
        )
        self._warned = success_reward is not None
        try:
            self._start(0)
        except Exception as error:  # a maker may raise anything
            raise ValueError(f"{maker} makes no {id!r}: {type(error).__name__}: {error}") from error

    def step(self, state: Position, action: str, rng: np.random.Generator | None = None) -> Step:
        """As `EngineEnvironment.step`; prints a line if the first ended episode has no verdict."""
        step = super().step(state, action, rng)
        if step.done and step.info.get(SUCCESS_UNDEFINED) and not self._warned:
            from ragen_jax.storage.console import console

            self._warned = True
            console(
                f"{self._name} does not say whether an episode is solved (no "
                f"{' or '.join(SUCCESS_KEYS)} in its info), so there are no figures of success; "
                "to have them, give --config.env.options.success_reward=NUMBER, the sum of an "
                "episode's rewards that solves it"
            )
        return step


class _Episode(Engine):
    """An environment of this convention, as an engine."""

    def __init__(self, environment: Any, success_reward: float | None) -> None:
        self._environment, self._success_reward = environment, success_reward
        self._sum = 0.0  # rewards so far

    def reset(self, seed: int) -> str:
        observation, info = self._environment.reset(seed=seed)
        return _with_suffix(observation, info)

    def step(self, action: str) -> EngineStep:
        observation, reward, terminated, truncated, info = self._environment.step(action)
        value = real_number(reward)
        if value is None:
            raise TypeError(f"the reward of a step must be a number, got {reward!r:.80}")
        self._sum += value
        done = bool(terminated or truncated)
        info = {**info, **self._verdict(info, done)}
        return EngineStep(_with_suffix(observation, info), value, done, info)

    def _verdict(self, info: Mapping[str, Any], done: bool) -> dict[str, bool]:
        """Return the info entries on success after a step."""
        if self._success_reward is not None:
            return {"success": done and self._sum >= self._success_reward}
        reports = [plain_scalar(info[key]) for key in SUCCESS_KEYS if info.get(key) is not None]
        if not reports:
            return {"success": False, SUCCESS_UNDEFINED: True}
        if not isinstance(reports[0], (bool, int, float)) or reports[0] not in (0, 1):
            raise TypeError(
                f"the info of a step must have success True or False, got {reports[0]!r:.80}"
            )
        return {"success": bool(reports[0])}


def _with_suffix(observation: Any, info: Mapping[str, Any]) -> Any:
    """Return an observation with the suffix that GEM returns separately: the board."""
    suffix = info.get("suffix")
    if isinstance(observation, str) and isinstance(suffix, str) and suffix:
        return f"{observation}\n{suffix}"
    return observation
