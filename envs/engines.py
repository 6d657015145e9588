"""Engines that change while they are played, behind the contract of environments.

An engine cannot go back; a state is frozen, and the members of a group share it. So a state here
is what leads to it: the engine's seed and the actions so far. Stepped where its engine stands, it
moves that engine; anywhere else, a fresh engine plays the actions again.

    replayed   that is exact, since the engine does the same after the same seed and actions
    live       an engine that does not (a server, a shop): it is never played again, so a state can
               be stepped once, and such runs do not continue exactly
"""

import contextlib
import dataclasses
import random
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from ragen_jax.envs.options import one_of, problem_seed
from ragen_jax.envs.problems import SPLITS, Draws, split_by_hash
from ragen_jax.envs.types import Step

TAG = 0xE6
MAX_DRAWS = 500  # engines begun for one problem, before its split is called empty
SPLIT_BY = ("observation", "seed")


@dataclasses.dataclass(frozen=True)
class Moved:
    """What an engine answers to an action."""

    observation: str
    reward: float
    done: bool
    info: dict[str, Any]


class Engine(Protocol):
    """What is asked of an engine, for one episode."""

    def reset(self, seed: int) -> str:
        """Begins the problem of a seed, below 2**31; returns what is shown first."""
        ...

    def step(self, action: str) -> Moved:
        """Goes on. Whatever it raises ends the episode."""
        ...


class _Live:
    """An engine under way, and at which state it stands."""

    engine: Engine

    def __init__(self) -> None:
        self.noise: tuple[Any, Any] | None = None  # of the process's generators, if isolated
        self._at: object = None
        self._lock = threading.Lock()

    def stand(self, place: object) -> None:
        self._at = place

    def leave(self, place: object) -> bool:
        """Whether it stood there; it does no more."""
        with self._lock:
            stood, self._at = self._at is place, None
        return stood


@dataclasses.dataclass(frozen=True)
class Position:
    """A state: how an engine gets there, and what it shows then."""

    seed: int  # of the engine
    actions: tuple[str, ...]
    observation: str
    # Whatever else it holds is no part of what it is.
    live: _Live | None = dataclasses.field(default=None, compare=False, repr=False)
    place: object = dataclasses.field(default_factory=object, compare=False, repr=False)


class EngineEnvironment:
    """The members of `ragen_jax.envs.types.Environment`, of what `begin` makes.

    Any text is an action. Problems are told apart, and dealt to splits, by what is shown first, or,
    where that does not tell them apart, by the engine's seed.

    begin: () -> an `Engine`; a fresh one for every episode
    name: by which splits are dealt
    replay: whether an engine does the same after the same seed and actions; else it is live
    isolated: give each engine generators `random` and `numpy.random` of its own, of engines that
        draw from the process's. Their steps then wait for each other
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
        """Problem number `seed` of this split: the first of its engine seeds that lies in there.

        Raises ValueError after MAX_DRAWS, and whatever the engine raises.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_DRAWS):
            position = self._start(Draws(seed, attempt, TAG).below(2**31))
            content = self.identity(position)
            if self.split in (None, split_by_hash(self._name, content)):
                # Its engine goes: held-out problems are kept for a whole run.
                return dataclasses.replace(position, live=None)
        raise ValueError(
            f"none of {MAX_DRAWS} problems of {self._name} lies in split {self.split!r} by what is "
            "shown first; if all begin alike, give split_by='seed'"
        )

    def render(self, state: Position) -> str:
        """What the engine showed last."""
        return state.observation

    def identity(self, state: Position) -> str:
        """What is shown first, or the engine's seed."""
        return state.observation if self.split_by == "observation" else str(state.seed)

    def step(self, state: Position, action: str, rng: np.random.Generator | None = None) -> Step:
        """Moves an engine that stands at `state`.

        `rng` is unused: noise comes of the engine's seed, the same for all members of a group.
        Raises RuntimeError where an engine would have to be played again that cannot, or did not do
        the same again; and whatever the engine raises.
        """
        live = state.live
        if live is None or not live.leave(state.place):
            live = self._replay(state)
        with self._noise(live):
            moved = live.engine.step(action)
        there = Position(state.seed, (*state.actions, action), moved.observation, live)
        live.stand(there.place)
        return Step(there, moved.reward, moved.done, moved.info)

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
        """An engine that stands at a state."""
        if state.actions and not self.resumable:
            raise RuntimeError(f"an engine of {self._name} cannot be played again")
        again = self._start(state.seed)
        live, observation = again.live, again.observation
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
        """Under it the process's generators are the engine's own, seeded if it begins."""
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
