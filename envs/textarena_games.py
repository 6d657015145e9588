"""TextArena's single-player games, by their id.

    --config=textarena:llm --config.env.options.id=GuessTheNumber-v0

A game draws from the process's generators when it begins, and often later, so each game has its own
generators (envs/engines.py). The first observation does not reveal a game's hidden part, so
problems are distinguished by their seeds.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from ragen_jax.envs.engines import Engine, EngineEnvironment, EngineStep
from ragen_jax.envs.options import finite_number

MAX_REWARD = 1e6


class TextArena(EngineEnvironment):
    """A game of TextArena (0.7); see `ragen_jax.envs.engines`.

    The reward is the game's, paid at its end; in most games it is from 0 to 1, and 1 for a win.

    id: as `textarena.make` takes it. With the suffix "-raw" a turn shows only new messages, for
        contexts that show earlier turns; without it, the whole history
    arguments: keyword arguments of the game
    success_reward: reward from which a game counts as won
    """

    def __init__(
        self,
        id: str = "",
        arguments: Mapping[str, Any] | None = None,
        success_reward: float = 1.0,
        split: str | None = "train",
    ) -> None:
        if not isinstance(id, str) or not id:
            raise ValueError(f"id must be a text, got {id!r}")
        least = finite_number("success_reward", success_reward, most=MAX_REWARD)
        try:
            make = importlib.import_module("textarena").make
        except ModuleNotFoundError as error:
            raise ValueError(
                f"TextArena cannot be imported: {error}: pip install ragen_jax[textarena]"
            ) from error
        keywords = dict(arguments or {})
        super().__init__(
            lambda: _Game(make(id, **keywords), least),
            name=id,
            instructions="",
            split=split,
            split_by="seed",
            isolated=True,
        )
        try:
            self.reset(0)
        except Exception as error:  # a game may need files, a key or other players
            raise ValueError(
                f"game {id!r} does not begin for one player: {type(error).__name__}: {error}"
            ) from error


class _Game(Engine):
    def __init__(self, game: Any, success_reward: float) -> None:
        self._game, self._success_reward = game, success_reward

    def reset(self, seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._observation()

    def step(self, action: str) -> EngineStep:
        done, _ = self._game.step(action)
        if not done:
            return EngineStep(self._observation(), 0.0, False, {"success": False})
        rewards, _ = self._game.close()
        reward = float((rewards or {}).get(0, 0.0))
        return EngineStep("", reward, True, {"success": reward >= self._success_reward})

    def _observation(self) -> str:
        """Return the new observation, or the new messages without the player's own."""
        player, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(message for sender, message, _ in observation if sender != player)
