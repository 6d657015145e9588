"""The contract between environments and the rest of the code.

An environment is a set of rules whose options are fixed at construction; it holds no episode.
Everything that changes is in a frozen state, so a state can be shared by the members of a group,
kept in a log, or replayed. `reset(seed)` is a pure function of the seed and the options, in every
process and on every machine; noise within an episode comes only from the `rng` passed to `step`.

A language model can train on any object that has the members of `Environment` and is built as
`EnvironmentClass` specifies. The other protocols are optional:

    EnvironmentClass       how an environment is built                 always
    Environment            rules of the game                           always
    SolvableEnvironment    words, solve, explain                       for model.path=tiny
    StyledEnvironment      styles                                      for warmstart.styles
    NarratingEnvironment   solve, narrate                              for warmstart.fine_tune
    SentenceEnvironment    sentence_styles                             for styles with fine_tune
    MultiPlanEnvironment   sample_plan                                 for varied demonstrations
    BriefEnvironment       brief                                       for env.prompt=brief
    BudgetEnvironment      budget_matters                              where it may be False
    ReversibleEnvironment  opposites                                   for action/* metrics
    GroundedEnvironment    count_grounded                              for reasoning/* metrics
    DrawingEnvironment     transcribe                                  for reasoning/* with images
    LiveEnvironment        resumable                                   where it may be False
    ToolEnvironment        tools                                       for function calls
    FileEnvironment        fields, list_problems                       for check_data
    ResidentEnvironment    resident                                    for preflight
    HarnessEnvironment     play, thinks                                where a program plays

The answer format (think and answer tags), the number of actions per turn and the number of turns
per episode belong to the chat format and the rollout, never to an environment.

An observation is a text, or an `Observation`: a text with images in it. If an environment shows
images, a model without a vision tower is refused before anything compiles.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ragen_jax.envs.styles import Style

# The environment's frozen and hashable type: no other code looks inside.
State = Any


IMAGE = "\ufffc"  # in the text of an Observation, marks the place of its next image


@dataclass(frozen=True, eq=False, slots=True)
class Observation:
    """An observation that contains images.

    text: holds IMAGE once for each image, in order
    images: uint8 [height, width, 3] each, red, green and blue from 0 to 255; at most MAX_IMAGES of
        MAX_PIXELS (ragen_jax/rollout/env_calls.py)
    """

    text: str
    images: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one action.

    state: the state after the action (the environment's frozen type)
    reward: reward of this action alone, in the environment's units; a Python float
    done: True only when the task is over; limits on actions and turns are the rollout's concern
    info: facts for metrics: bools, finite numbers and texts; other values are left out. Only
        "success" is read (bool: the task is solved in `state`); a missing "success" counts as
        False. An engine that does not report whether a task is solved sets SUCCESS_UNDEFINED
    """

    state: State
    reward: float
    done: bool
    info: dict[str, Any]


class EnvironmentClass(Protocol):
    """How an environment is built; `envs.ENVS` holds such classes or functions.

    Its parameters are keywords, all named in its signature: `split` and the environment's options,
    which have defaults and come from `env.options` of the config. It raises ValueError for a value
    that it cannot use, including NaN and sizes too large to play in reasonable time.

    split: "train", "eval" or, for the tiny agent only, "imitation": sets of problems that are
        disjoint up to `identity`, each with endless seeds. It is always passed. Of "eval", up to
        eval.episodes different problems are played.
    path, ..._path: an option with such a name names a file, and the file's content, not its name,
        enters the names of caches.
    """

    # To a type checker, `*_` and `**options`, both of Any, stand for any other parameters.
    def __call__(self, *_: Any, split: str, **options: Any) -> "Environment": ...


@runtime_checkable
class Environment(Protocol):
    """The members of an environment that the rollout needs.

    actions: the accepted action words, exactly as `step` takes them: no two differ only by case,
        and none contains "||"; empty if any text is an action (the whole answer is then one action)
    instructions: the rules of the game in plain prose for a language model, with the meaning of
        every symbol that `render` writes and the look of everything that it draws, under the
        configured options
    """

    actions: tuple[str, ...]
    instructions: str

    def reset(self, seed: int) -> State:
        """Return the initial state of problem `seed`, an int in [0, 2**63).

        Pure in the seed and the options.
        """
        ...

    def render(self, state: State) -> str | Observation:
        """Return the observation shown to the agent in `state`.

        An observation without images is a plain str, in which U+FFFC has no special meaning.
        """
        ...

    def identity(self, state: State) -> str:
        """Return the problem's content up to symmetry: equal for two seeds of the same problem."""
        ...

    def step(self, state: State, action: str, rng: np.random.Generator) -> Step:
        """Apply one action word; `rng` is the only source of noise.

        Raises ValueError for a word not in `actions`, unless `actions` is empty: filtering
        responses is the rollout's task.
        """
        ...


@runtime_checkable
class SolvableEnvironment(Environment, Protocol):
    """An environment that also has an expert, which the tiny agent imitates.

    Nothing else reads these members, so an environment for language models alone needs none. If
    it has them only with some options, a member `solvable_by`, a text, names those options.

    words: texts that the tiny agent's tokenizer keeps as one token each, in addition to single
        bytes: the words that `render` and `explain` write and that actions consist of
    """

    words: tuple[str, ...]

    def solve(self, state: State) -> tuple[str, ...] | None:
        """Return a shortest sequence of actions that ends the task from `state`; None if none.

        Noise is ignored: after a slip, call again with the resulting state.
        """
        ...

    def explain(self, state: State, plan: Sequence[str]) -> str:
        """Return the reasoning that the expert writes before it follows `plan` from `state`."""
        ...


@runtime_checkable
class StyledEnvironment(SolvableEnvironment, Protocol):
    """An environment whose expert has more than one reasoning style: optional, for the tiny agent.

    styles: name -> style; the grounded style, which writes the text of `explain`, comes first
    """

    @property
    def styles(self) -> Mapping[str, Style]: ...


@runtime_checkable
class NarratingEnvironment(Environment, Protocol):
    """An environment whose expert reasons in sentences: optional, for language models that are
    fine-tuned on its demonstrations. They need neither `words` nor `explain`.

    solve: as in `SolvableEnvironment`
    """

    def solve(self, state: State) -> tuple[str, ...] | None: ...

    def narrate(self, state: State, plan: Sequence[str]) -> str:
        """Return the reasoning of `explain` in short English sentences.

        The text depends only on the arguments, and holds no tag of the answer format. An empty plan
        leaves only the facts. If the environment has `count_grounded`, it counts every fact of the
        text, as true.
        """
        ...


@runtime_checkable
class SentenceEnvironment(NarratingEnvironment, Protocol):
    """An environment whose expert has more than one reasoning style in sentences: optional, for
    language models.

    sentence_styles: as `StyledEnvironment.styles`; the grounded style, which writes the text of
        `narrate`, comes first
    """

    @property
    def sentence_styles(self) -> Mapping[str, Style]: ...


@runtime_checkable
class MultiPlanEnvironment(NarratingEnvironment, Protocol):
    """An environment whose problems have several plans that are equally good: optional, for
    language models, which become nearly deterministic if they imitate only the plan of `solve`."""

    def sample_plan(self, state: State, rng: np.random.Generator) -> tuple[str, ...] | None:
        """Return a plan that `solve` could return as well, drawn by `rng`; None if none."""
        ...


@runtime_checkable
class BriefEnvironment(Environment, Protocol):
    """An environment whose rules have a short form: optional, for env.prompt="brief".

    brief: the rules in a few lines: goal, form of an action and meaning of every symbol that a
        prompt may show, under the configured options. The reply format, which lists `actions`, is
        added. Without it, brief prompts have the `instructions`
    """

    brief: str


@runtime_checkable
class BudgetEnvironment(Environment, Protocol):
    """An environment that says whether good play depends on the actions left: optional.

    budget_matters: if False, brief prompts do not state how many actions are left
    """

    budget_matters: bool


@runtime_checkable
class ReversibleEnvironment(Environment, Protocol):
    """An environment whose actions can be undone by other actions: optional, for diagnostics.

    opposites: action -> the action that reverses it, both from `actions`. Whether it succeeds in a
        given state (a wall, a pushed box) does not matter
    """

    opposites: Mapping[str, str]


@runtime_checkable
class AskingEnvironment(Environment, Protocol):
    """An environment whose agent must ask for what it needs to know: optional, for diagnostics."""

    def asks(self, action: str) -> bool:
        """Return whether an action asks for information."""
        ...

    def needed(self, state: Any) -> tuple[str, ...]:
        """Return the texts that observations must show, in any order, before the answer of a first
        state is known; () if this is not known."""
        ...


@runtime_checkable
class LiveEnvironment(Environment, Protocol):
    """An environment that may be live, and so not reproducible: optional.

    resumable: whether the same seed and actions lead to the same result. If not, a resumed run
        differs from an uninterrupted one, and env.pool is refused
    """

    resumable: bool


@runtime_checkable
class ToolEnvironment(Environment, Protocol):
    """An environment whose agent may call functions before it answers: optional.

    Its `actions` are empty. A call is an action like an answer: the text
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, even if the JSON is malformed. The
    text that `render` shows after a call has the chat template's role for tool results.

    tools: JSON schemas of the functions, as `apply_chat_template` takes them; may be empty
    """

    tools: tuple[dict[str, Any], ...]


@runtime_checkable
class FileEnvironment(Environment, Protocol):
    """An environment whose problems may come from a file: optional, for `check_data`.

    fields: names of the fields of a row that are read
    """

    fields: tuple[str, ...]

    def list_problems(self) -> Iterator[tuple[int, str, State]]:
        """Yield (row, split, initial state) of each problem that may be drawn from the file.

        Covers every split, in the file's order; yields nothing if problems are generated.
        """
        ...


@dataclass(frozen=True)
class Resident:
    """An array that an environment keeps on the devices throughout a run, and its program.

    name: name of the program that reads the array
    function: a jitted function
    arguments: `jax.ShapeDtypeStruct`s; the first, which has a sharding, is the array kept
    keywords: static arguments of the function
    rows: number of episodes that a call serves
    flops: FLOPs of a call, on one device
    helps: config fields that make the array smaller
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
    """An environment that may keep an array on the devices throughout a run: optional, for
    preflight, which asks the class and builds no environment."""

    @staticmethod
    def resident(mesh: Any, **options: Any) -> Resident | None:
        """Return the array that these options keep on a `jax.sharding.Mesh`; None if none.

        The mesh may have any devices; nothing is placed on them. Raises ValueError for unusable
        options.
        """
        ...


@runtime_checkable
class GroundedEnvironment(Environment, Protocol):
    """An environment that can check statements about a state: optional, for diagnostics."""

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of true facts stated in `thought`, number of facts stated).

        Counts only facts that can be checked literally, such as positions; a plan states no facts.
        Never raises, whatever `thought` holds.

        observation: the message shown, which holds the text that `render` wrote, perhaps among
            other lines. For an image it holds the text from `transcribe`, or else IMAGE, which
            leaves nothing to check: (0, 0)
        """
        ...


@runtime_checkable
class DrawingEnvironment(Environment, Protocol):
    """An environment that can describe its images in words: optional, for diagnostics. No agent
    reads the description."""

    def transcribe(self, image: np.ndarray) -> str:
        """Return the text that `render` would have written instead, as `grounded` reads it.

        image: uint8 [height, width, 3], from an `Observation` of this environment
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How the program of an episode asks the policy for replies, over the OpenAI API.

    base_url, api_key: as an OpenAI client takes them; the key is that of this episode alone
    posted: returns what the program has posted to BASE_URL/reward, JSON-like; None: nothing
    when_over: registers a function that ends what the episode has started. It is called when the
        episode is over or given up, at once if it is already
    """

    base_url: str
    api_key: str
    posted: Callable[[], Any]
    when_over: Callable[[Callable[[], object]], None]


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """The result of an episode that a program has played.

    reward: of the whole episode
    success: whether the task is solved
    rewards: reward of each request, in the order in which they were answered; empty: `reward` is
        given for the last
    info: facts, as in `Step`
    """

    reward: float
    success: bool
    rewards: tuple[float, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class HarnessEnvironment(Environment, Protocol):
    """An environment whose episodes are played by a program that asks for replies over HTTP.

    Its prompts are those that the program sends: `instructions` are not shown, `step` is never
    called, and `render` only tells how long a first prompt may be.

    thinks: whether every prompt ends with <think>, as for agents that imitated
    """

    thinks: bool

    def play(self, state: State, access: ModelAccess) -> HarnessResult:
        """Play an episode to its end; called in a thread, for several episodes at a time.

        May raise anything: only this episode fails.
        """
        ...
