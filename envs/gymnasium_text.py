"""Any Gymnasium environment whose observations and actions are text, by its id.

    --config=gymnasium:llm --config.env.options.id=mine/Hunt-v0 --config.env.options.module=hunt

What is asked of it is Gymnasium's own calls and no more: reset(seed=...) -> (observation, info),
step(action) -> (observation, reward, terminated, truncated, info). Others follow the same
convention with a `make` of their own: `maker` names it. GEM's games draw from the process's
generators and begin alike:

    --config.env.options.module=gem.envs --config.env.options.maker=gem:make
    --config.env.options.id=game:Minesweeper-v0-easy --config.env.options.isolated=True
    --config.env.options.split_by=seed
"""

from collections.abc import Mapping
from typing import Any

from ragen_jax.envs.engines import Engine, EngineEnvironment, Moved
from ragen_jax.envs.options import flag, function_of, imported


class Gymnasium(EngineEnvironment):
    """One of Gymnasium's environments; see `ragen_jax.envs.engines`.

    An episode is solved where info["success"] says so; without that, where it terminates with a
    reward above 0.

    id: as it is registered
    module: to be imported first, which registers it; "": none
    maker: MODULE:FUNCTION, called with the id and `arguments`
    arguments: of the environment
    instructions: the rules, if its first observation does not tell them
    split_by: "observation" or "seed" (engines.EngineEnvironment)
    replay: False of one that does not do the same after the same seed and actions
    isolated: of one that draws from the process's generators
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
        split: str | None = "train",
    ) -> None:
        for name, value in (("id", id), ("module", module), ("maker", maker)):
            if not isinstance(value, str) or (name == "id" and not value):
                raise ValueError(f"{name} must be a text, got {value!r}")
        for name, value in (("replay", replay), ("isolated", isolated)):
            flag(name, value)
        if not isinstance(instructions, str):
            raise ValueError(f"instructions must be a text, got {instructions!r}")
        if module:
            imported("module", module)
        make = function_of("maker", maker)
        given = dict(arguments or {})
        super().__init__(
            lambda: _Episode(make(id, **given)),
            name=id,
            instructions=instructions,
            split=split,
            split_by=split_by,
            replay=replay,
            isolated=isolated,
        )
        try:
            self._start(0)
        except Exception as error:  # of any maker
            raise ValueError(f"{maker} makes no {id!r}: {type(error).__name__}: {error}") from error


class _Episode(Engine):
    """An environment of that convention as an engine."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def reset(self, seed: int) -> str:
        observation, info = self._environment.reset(seed=seed)
        return _with_suffix(observation, info)

    def step(self, action: str) -> Moved:
        observation, reward, terminated, truncated, info = self._environment.step(action)
        solved = info.get("success", bool(terminated) and reward > 0)
        done = bool(terminated or truncated)
        observation = _with_suffix(observation, info)
        return Moved(observation, float(reward), done, {**info, "success": bool(solved)})


def _with_suffix(observation: Any, info: Mapping[str, Any]) -> Any:
    """An observation with what GEM gives apart from it: the board."""
    suffix = info.get("suffix")
    if isinstance(observation, str) and isinstance(suffix, str) and suffix:
        return f"{observation}\n{suffix}"
    return observation
