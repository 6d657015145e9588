"""Engines that change as they are played, adapted to the contract of environments.

An engine cannot go back, but a state is frozen and shared by the members of a group. A state here
is therefore the engine's seed and the actions so far. A step from the state that the engine is in
moves that engine; a step from any other state replays the actions on a fresh engine.

    replayed   exact, since the engine is reproducible: same seed and actions, same result
    live       not reproducible (a server, a shop): the engine is never replayed, so a state can be
               stepped only once, and a resumed run differs from an uninterrupted one
"""

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ragen_jax.envs.options import one_of, problem_seed
from ragen_jax.envs.problems import SPLITS, Draws, split_by_hash
from ragen_jax.envs.types import Step

TAG = 0xE6
MAX_DRAWS = 500  # engines started for one problem before its split is called empty
SPLIT_BY = ("observation", "seed")


@dataclasses.dataclass(frozen=True)
class EngineStep:
    """An engine's response to an action."""

    observation: str
    reward: float
    done: bool
    info: dict[str, Any]


class Engine(Protocol):
    """The interface of an engine, for one episode."""

    def reset(self, seed: int) -> str:
        """Begin the problem of `seed`, an int below 2**31; return the first observation."""
        ...

    def step(self, action: str) -> EngineStep:
        """Apply an action. Any exception ends the episode."""
        ...


@runtime_checkable
class ClosingEngine(Engine, Protocol):
    """An engine that holds something which is scarce, such as a place on a server."""

    def close(self) -> None:
        """End the episode. Called when only the first observation was needed."""
        ...


class _Live:
    """A running engine and the state that it is in."""

    engine: Engine

    def __init__(self) -> None:
        self.noise: tuple[Any, Any] | None = None  # states of its generators, if isolated
        self._at: object = None
        self._lock = threading.Lock()

    def set_place(self, place: object) -> None:
        self._at = place

    def leave_place(self, place: object) -> bool:
        """Return whether the engine was at `place`; afterwards it is at no place."""
        with self._lock:
            was_there, self._at = self._at is place, None
        return was_there


@dataclasses.dataclass(frozen=True)
class Position:
    """A state: the engine's seed, the actions so far, and the latest observation."""

    seed: int  # the engine's seed
    actions: tuple[str, ...]
    observation: str
    # The fields below do not count in comparisons.
    live: _Live | None = dataclasses.field(default=None, compare=False, repr=False)
    place: object = dataclasses.field(default_factory=object, compare=False, repr=False)


class EngineEnvironment:
    """Implements `ragen_jax.envs.types.Environment` on engines that `begin` returns.

    Any text is an action. A problem's identity, which also decides its split, is the first
    observation, or the engine's seed if first observations do not distinguish problems.

    begin: () -> an `Engine`; called for every episode
    name: enters the hash that assigns problems to splits
    replay: whether the engine is reproducible: same seed and actions, same result; else it is live
    isolated: give each engine its own `random` and `numpy.random` generators, for engines that
        draw from the process's. Steps of isolated engines do not run in parallel
    """

    actions: tuple[str, ...] = ()

    def __init__(
        self,
        begin: Callable[[], Engine],
        *,
        name: str,
        instructions: str,
        split: str | None,
        split_by: str = "observation",
        replay: bool = True,
        isolated: bool = False,
    ) -> None:
        self.instructions = instructions
        self.resumable = replay
        self.split = one_of("split", split, (*SPLITS, None))
        self.split_by = one_of("split_by", split_by, SPLIT_BY)
        self._begin, self._name = begin, name
        self._isolated = isolated

    def reset(self, seed: int) -> Position:
        """Return problem number `seed` of this split: the first engine seed that belongs to it.

        Raises ValueError after MAX_DRAWS attempts, and any exception of the engine.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_DRAWS):
            position = self._start(Draws(seed, attempt, TAG).below(2**31))
            if position.live is not None and isinstance(position.live.engine, ClosingEngine):
                position.live.engine.close()
            content = self.identity(position)
            if self.split in (None, split_by_hash(self._name, content)):
                # Release its engine: held-out problems are kept for a whole run.
                return dataclasses.replace(position, live=None)
        raise ValueError(
            f"none of {MAX_DRAWS} problems of {self._name} lies in split {self.split!r} by what is "
            "shown first; if all begin alike, give split_by='seed'"
        )

    def render(self, state: Position) -> str:
        """Return the engine's latest observation."""
        return state.observation

    def identity(self, state: Position) -> str:
        """Return the first observation, or the engine's seed."""
        return state.observation if self.split_by == "observation" else str(state.seed)

    def step(self, state: Position, action: str, rng: np.random.Generator | None = None) -> Step:
        """Apply an action, with the engine that is at `state` or by replay.

        `rng` is unused: noise comes from the engine's seed, which all members of a group share.
        Raises RuntimeError if a live engine would have to be replayed or a replay gave a different
        observation; and any exception of the engine.
        """
        live = state.live
        if live is None or not live.leave_place(state.place):
            live = self._replay(state)
        with self._noise(live):
            result = live.engine.step(action)
        after = Position(state.seed, (*state.actions, action), result.observation, live)
        live.set_place(after.place)
        return Step(after, result.reward, result.done, result.info)

    def _start(self, seed: int) -> Position:
        live = _Live()
        with self._noise(live, seed):
            live.engine = self._begin()
            observation = live.engine.reset(seed)
        if not isinstance(observation, str):
            kind = type(observation).__name__
            raise TypeError(f"{self._name} shows a {kind} at first; only text can be read")
        return Position(seed, (), observation, live)

    def _replay(self, state: Position) -> _Live:
        """Return an engine that is at `state`."""
        if state.actions and not self.resumable:
            raise RuntimeError(f"an engine of {self._name} cannot be played again")
        restarted = self._start(state.seed)
        live, observation = restarted.live, restarted.observation
        assert live is not None
        for action in state.actions:
            with self._noise(live):
                observation = live.engine.step(action).observation
        if observation != state.observation:
            raise RuntimeError(
                f"an engine of {self._name} shows a different observation after the same seed "
                f"{state.seed} and {len(state.actions)} actions: it uses an unseeded random source"
            )
        return live

    @contextlib.contextmanager
    def _noise(self, live: _Live, seed: int | None = None) -> Generator[None]:
        """Swap in the engine's own `random` and `numpy.random` states; seed them if it begins."""
        if not self._isolated:
            yield
            return
        with _GENERATORS:
            before = random.getstate(), np.random.get_state()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            elif live.noise is not None:
                _set_generators(live.noise)
            try:
                yield
            finally:
                live.noise = random.getstate(), np.random.get_state()
                _set_generators(before)


_GENERATORS = threading.RLock()


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
