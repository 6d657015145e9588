"""The contract between an environment and the rest: all that the code asks of one.

An environment is a set of rules with its options fixed at construction; it holds no episode. All
that changes lives in a frozen state, so a state can be shared by the members of a group, kept in a
log, or replayed. `reset(seed)` is a pure function of the seed and the options, in every process
and on every machine; noise inside an episode comes only from the `rng` handed to `step`.

A language model trains on whatever has the members of `Environment` and is built as
`EnvironmentClass` says; the other protocols add what is optional:

    EnvironmentClass       how one is built                            always
    Environment            what is played                              always
    SolvableEnvironment    words, solve, explain                       for model.path=tiny
    StyledEnvironment      styles                                      for warmstart.styles
    ReversibleEnvironment  opposites                                   for action/* figures
    GroundedEnvironment    grounded                                    for reasoning/* figures
    DrawingEnvironment     transcribe                                  for the same, of images
    LiveEnvironment        resumable                                   where it may be False
    ToolEnvironment        tools                                       for calls of functions
    FileEnvironment        fields, given                               for check_data
    ResidentEnvironment    resident                                    for preflight

How a model is told to answer (think and answer tags), how many actions a turn may hold and how
many turns an episode may last belong to the chat format and the rollout, never to an environment.

What is shown is a text, or an `Observation`: a text with images in their places. Where an
environment shows images, a model that cannot see is refused before anything compiles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ragen_jax.envs.styles import Style

# An environment's own frozen and hashable type: nobody else looks inside.
State = Any


IMAGE = "\ufffc"  # in the text of an Observation, where its next image stands


@dataclass(frozen=True, eq=False, slots=True)
class Observation:
    """What is shown, with images in it.

    text: holds IMAGE once for each image, in order
    images: uint8 [height, width, 3] each, red, green and blue from 0 to 255; at most MAX_IMAGES of
        MAX_PIXELS (ragen_jax/rollout/env_calls.py)
    """

    text: str
    images: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What one action led to.

    state: the state after the action (environment's own frozen type)
    reward: reward of this action alone, in the environment's own units; a Python float
    done: True only when the task is over; running out of actions or turns is the rollout's affair
    info: facts for metrics: bools, finite numbers and texts, others are left out. "success" (bool:
        the task is solved in `state`) is the one that is read, and False where it is missing. An
        engine that does not say whether a task is solved has SUCCESS_UNDEFINED there
    """

    state: State
    reward: float
    done: bool
    info: dict[str, Any]


class EnvironmentClass(Protocol):
    """How an environment is built: what `envs.ENVS` holds, a class or a function.

    Its parameters are keywords, all named in its signature: `split` and the environment's own
    options, which `env.options` of the config gives and which have defaults. It raises ValueError
    for a value that it cannot use, NaN and sizes beyond what plays in reasonable time included.

    split: "train", "eval" or, for the tiny agent alone, "imitation": sets of problems that share
        none up to `identity`, each with endless seeds. It is always passed. "eval" needs at least
        eval.episodes different problems.
    path, ..._path: an option that is the name of a file counts by the file's content in the names
        of caches, if the option is called so.
    """

    # To a type checker `*_` and `**options`, both of Any, are whatever other parameters it has.
    def __call__(self, *_: Any, split: str, **options: Any) -> "Environment": ...


@runtime_checkable
class Environment(Protocol):
    """What the rollout needs of an environment.

    actions: the accepted action words, exactly as `step` takes them: no two that differ by case
        alone, none with "||" in it; empty where an action is any text (the whole of an answer is
        then one action)
    instructions: the rules of the game in plain prose for a language model, with the meaning of
        every symbol that `render` uses, and the look of all that it draws, under the configured
        options
    """

    actions: tuple[str, ...]
    instructions: str

    def reset(self, seed: int) -> State:
        """The initial state of problem `seed`, an int in [0, 2**63). Pure in seed and options."""
        ...

    def render(self, state: State) -> str | Observation:
        """The observation shown to the agent in `state`.

        One of text alone is a plain str, in which U+FFFC means nothing.
        """
        ...

    def identity(self, state: State) -> str:
        """The problem's content up to symmetry: equal for two seeds that pose the same problem."""
        ...

    def step(self, state: State, action: str, rng: np.random.Generator) -> Step:
        """Apply one action word; `rng` is the only source of noise.

        Raises ValueError for a word not in `actions`, unless that is empty: filtering replies is
        the rollout's work.
        """
        ...


@runtime_checkable
class SolvableEnvironment(Environment, Protocol):
    """An environment that can also show how it is done: what the tiny agent imitates.

    Nothing else reads these members, and where model.path is a language model none is needed. One
    that has them with some options alone says with which in a member `solvable_by`, a text.

    words: texts that the tiny agent's tokenizer keeps as one token each, besides single bytes;
        what `render` and `explain` write and actions hold, cut as one would say it
    """

    words: tuple[str, ...]

    def solve(self, state: State) -> tuple[str, ...] | None:
        """A shortest sequence of actions that ends the task from `state`; None if there is none.

        Noise has no part in it: after a slip, ask again from where that led.
        """
        ...

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """The reasoning an imitated expert writes before it follows `plan` from `state`."""
        ...


@runtime_checkable
class StyledEnvironment(SolvableEnvironment, Protocol):
    """An environment whose expert can think in more than one way: optional, for the tiny agent.

    styles: name -> way to think, the grounded one, which writes what `explain` does, first
    """

    @property
    def styles(self) -> Mapping[str, Style]: ...


@runtime_checkable
class ReversibleEnvironment(Environment, Protocol):
    """An environment whose actions can be undone by others: optional, for diagnostics.

    opposites: action -> the action that goes back, both from `actions`. Whether it does so in a
        given state (a wall, a pushed box) does not matter
    """

    opposites: Mapping[str, str]


@runtime_checkable
class LiveEnvironment(Environment, Protocol):
    """An environment that may be a live thing, which does not do the same again: optional.

    resumable: whether the same seed and actions lead to the same; where not, a run that goes on
        behind a stop has other numbers than one without, and env.pool is refused
    """

    resumable: bool


@runtime_checkable
class ToolEnvironment(Environment, Protocol):
    """An environment whose agent may call functions before it answers: optional.

    Its `actions` are empty. A call is an action like an answer: the text
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, whatever stands in it. What `render`
    shows behind it is shown in the chat template's role for results.

    tools: JSON schemas of the functions, as `apply_chat_template` takes them; empty: none
    """

    tools: tuple[dict[str, Any], ...]


@runtime_checkable
class FileEnvironment(Environment, Protocol):
    """An environment whose problems may come from a file: optional, for `check_data`.

    fields: those of a row that are read
    """

    fields: tuple[str, ...]

    def given(self) -> Iterator[tuple[int, str, State]]:
        """(row, split, initial state) of each problem that may be drawn from the file, of every
        split, in the file's order; nothing where problems are generated."""
        ...


@dataclass(frozen=True)
class Resident:
    """What an environment keeps on the devices all through a run, and the program that reads it.

    name: of the program
    function: a jitted function
    arguments: `jax.ShapeDtypeStruct`s; the first, which has a sharding, is what is kept
    keywords: its static arguments
    rows: episodes that a call serves
    flops: of a call, on one device
    helps: config fields that make it smaller
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    rows: int
    flops: float
    helps: tuple[str, ...]


@runtime_checkable
class ResidentEnvironment(Environment, Protocol):
    """An environment that may keep an array on the devices all through a run: optional, for
    preflight, which asks the class and builds no environment."""

    @staticmethod
    def resident(mesh: Any, **options: Any) -> Resident | None:
        """What one with these options keeps on a `jax.sharding.Mesh`, of whatever devices; None:
        nothing. Nothing is placed on a device. Raises ValueError for unusable options."""
        ...


@runtime_checkable
class GroundedEnvironment(Environment, Protocol):
    """An environment that can tell whether what a text says of a state is so: optional, for
    diagnostics."""

    def grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """(facts stated in `thought` that are so, facts stated).

        Only facts that are checked without reading between the lines, such as positions; a plan
        states none. Never raises, whatever `thought` holds.

        observation: the message shown, which holds what `render` wrote, perhaps among other lines;
            for an image what `transcribe` says of it, or else IMAGE, so that there is nothing to
            check by: (0, 0)
        """
        ...


@runtime_checkable
class DrawingEnvironment(Environment, Protocol):
    """An environment that can tell in words what an image of its own shows: optional, for
    diagnostics. No agent reads it."""

    def transcribe(self, image: np.ndarray) -> str:
        """What `render` would have written in the image's place, as `grounded` reads it.

        image: uint8 [height, width, 3], of an `Observation` of this environment
        """
        ...
