"""Any Gymnasium environment whose observations and actions are text, by its id.

    --config=gymnasium:llm --config.env.options.id=mine/Hunt-v0 --config.env.options.module=hunt

What is asked of it is Gymnasium's own calls and no more: reset(seed=...) -> (observation, info),
step(action) -> (observation, reward, terminated, truncated, info). Others follow the same
convention with a `make` of their own: `maker` names it. GEM's games draw from the process's
generators and begin alike:

    --config.env.options.module=gem.envs --config.env.options.maker=gem:make
    --config.env.options.id=game:Minesweeper-v0-easy --config.env.options.isolated=True
    --config.env.options.split_by=seed --config.env.options.success_reward=1
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.envs.engines import Engine, EngineEnvironment, Moved, Position
from ragen_jax.envs.options import finite_number, flag, function_of, imported
from ragen_jax.envs.scalars import plain_scalar, real_number
from ragen_jax.envs.types import Step

# Entries of a step's info by which environments say whether the task is solved.
SUCCESS_KEYS = ("success", "is_success")
MAX_RETURN = 1e6


class Gymnasium(EngineEnvironment):
    """One of Gymnasium's environments; see `ragen_jax.envs.engines`.

    An episode is solved where the environment says so, by True in info["success"] or
    info["is_success"] of a step, or where it ends with rewards that sum to `success_reward` or
    more. A positive reward alone is no success. Without either there are no figures of success
    (types.SUCCESS_UNDEFINED), and a line says so.

    id: as it is registered
    module: to be imported first, which registers it; "": none
    maker: MODULE:FUNCTION, called with the id and `arguments`
    arguments: of the environment
    instructions: the rules, if its first observation does not tell them
    split_by: "observation" or "seed" (engines.EngineEnvironment)
    replay: False of one that does not do the same after the same seed and actions
    isolated: of one that draws from the process's generators
    success_reward: sum of rewards from which on an episode that ended is solved, instead of what
        the info says; None: none. `spec.reward_threshold` is not read: it is a mean over episodes
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
            imported("module", module)
        make = function_of("maker", maker)
        given = dict(arguments or {})
        super().__init__(
            lambda: _Episode(make(id, **given), success_reward),
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
        except Exception as error:  # of any maker
            raise ValueError(f"{maker} makes no {id!r}: {type(error).__name__}: {error}") from error

    def step(self, state: Position, action: str, rng: np.random.Generator | None = None) -> Step:
        """As `EngineEnvironment.step`; prints a line at the first end without a verdict."""
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
    """An environment of that convention as an engine."""

    def __init__(self, environment: Any, success_reward: float | None) -> None:
        self._environment, self._success_reward = environment, success_reward
        self._sum = 0.0  # of the rewards so far

    def reset(self, seed: int) -> str:
        observation, info = self._environment.reset(seed=seed)
        return _with_suffix(observation, info)

    def step(self, action: str) -> Moved:
        observation, reward, terminated, truncated, info = self._environment.step(action)
        value = real_number(reward)
        if value is None:
            raise TypeError(f"the reward of a step must be a number, got {reward!r:.80}")
        self._sum += value
        done = bool(terminated or truncated)
        info = {**info, **self._verdict(info, done)}
        return Moved(_with_suffix(observation, info), value, done, info)

    def _verdict(self, info: Mapping[str, Any], done: bool) -> dict[str, bool]:
        """What there is to know of success after a step."""
        if self._success_reward is not None:
            return {"success": done and self._sum >= self._success_reward}
        said = [plain_scalar(info[key]) for key in SUCCESS_KEYS if info.get(key) is not None]
        if not said:
            return {"success": False, SUCCESS_UNDEFINED: True}
        if not isinstance(said[0], (bool, int, float)) or said[0] not in (0, 1):
            raise TypeError(
                f"the info of a step must have success True or False, got {said[0]!r:.80}"
            )
        return {"success": bool(said[0])}


def _with_suffix(observation: Any, info: Mapping[str, Any]) -> Any:
    """An observation with what GEM gives apart from it: the board."""
    suffix = info.get("suffix")
    if isinstance(observation, str) and isinstance(suffix, str) and suffix:
        return f"{observation}\n{suffix}"
    return observation
