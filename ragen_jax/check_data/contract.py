"""The members of an environment, checked one by one on some of its problems.

The contract is envs/types.py. A fault is counted per member; its line names the file, line and
function that raised, or else the member, and the first problem that shows it.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ragen_jax.config.build_environment import resumable
from ragen_jax.config.user_code import Frame, frames, user_frame
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.envs.types import (
    Environment,
    GroundedEnvironment,
    HarnessEnvironment,
    NarratingEnvironment,
    Observation,
    ReversibleEnvironment,
    SolvableEnvironment,
    State,
    Step,
)
from ragen_jax.rollout.env_calls import (
    EnvFailure,
    attempt,
    checked_explanation,
    checked_observation,
    checked_plan,
    checked_step,
)

RAISED = object()  # in place of a result


class Problem(NamedTuple):
    """A problem whose initial state could be built."""

    name: str
    state: State
    seed: int | None  # None: it is from a file


@dataclasses.dataclass
class Fault:
    """A fault of a member."""

    where: str  # "FILE:LINE: FUNCTION"
    first: str  # name of the first problem that shows it; "": it depends on no problem
    count: int = 0


@dataclasses.dataclass
class Faults:
    """The faults of an environment, by (member, reason), in the order in which they were found."""

    environment: Environment
    found: dict[tuple[str, str], Fault] = dataclasses.field(default_factory=dict)

    def add(self, member: str, reason: str, problem: str = "", traceback: str = "") -> None:
        """Count a fault of a member, found in a problem."""
        key = (member, reason)
        if key not in self.found:
            frame = raised_at(self.environment, traceback)
            where = f"{place_of(self.environment, member)}: {member}"
            if frame is not None:
                is_member = hasattr(type(self.environment), frame.function)
                caller = "" if is_member else f", called by {member}"
                where = f"{frame}: {frame.function}{caller}"
            self.found[key] = Fault(where, problem)
        self.found[key].count += 1

    def lines(self) -> list[str]:
        """Return a line for each fault."""
        found = []
        for (_, reason), fault in self.found.items():
            more = f", and {fault.count - 1} more" if fault.count > 1 else ""
            problems = f" ({fault.first}{more})" if fault.first else ""
            found.append(f"{fault.where}: {reason}{problems}")
        return found

    def call(self, member: str, problem: str, function: Callable[[], Any]) -> Any:
        """Return the result of a call of the environment; RAISED if it raises, which is a fault."""
        result = attempt(function)
        if isinstance(result, EnvFailure):
            self.add(member, result.error, problem, result.traceback)
            return RAISED
        return result


def place_of(environment: Environment, member: str) -> str:
    """Return FILE:LINE of a member, or of the class if the class does not define it."""
    kind = type(environment)
    found = inspect.getattr_static(kind, member, None)
    function = found.fget if isinstance(found, property) else found
    if isinstance(found, staticmethod | classmethod):
        function = found.__func__
    if inspect.isfunction(function):
        code = inspect.unwrap(function).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        lines, first = inspect.getsourcelines(kind)
        file = inspect.getsourcefile(kind)
    except (OSError, TypeError):  # a class without a source file
        return f"{kind.__module__}.{kind.__qualname__}"
    assigned = re.compile(rf"^\s*(self\.)?{re.escape(member)}\b[^=(]*=[^=]")
    offset = next((i for i, line in enumerate(lines) if assigned.match(line)), 0)
    return f"{file}:{first + offset}"


def raised_at(environment: Environment, traceback: str) -> Frame | None:
    """Return the innermost call of a traceback in the user's code or the environment's own file."""
    if (frame := user_frame(traceback)) is not None:
        return frame
    try:
        file = inspect.getsourcefile(type(environment))
    except TypeError:  # a class without a source file
        return None
    own = [frame for frame in frames(traceback) if frame.file == file]
    return own[-1] if own else None


def check_members(environment: Environment, faults: Faults) -> None:
    """Check the members that do not depend on a problem."""
    actions = environment.actions
    if not _is_texts(actions):
        faults.add("actions", f"must be a tuple of str, got {_short(actions)}")
        return
    lower = [word.lower() for word in actions]
    for word in actions:
        if lower.count(word.lower()) > 1:
            faults.add("actions", f"{word!r} is there twice; case does not distinguish words")
        if "||" in word or not word.strip():
            faults.add("actions", f"{word!r} must be a word without '||', which separates actions")
    for name in ("instructions", "brief"):
        rules = getattr(environment, name, "")  # `brief` is optional
        if not isinstance(rules, str):
            faults.add(name, f"must be a str, got {type(rules).__name__}")
    if isinstance(environment, SolvableEnvironment) and not _is_texts(environment.words):
        faults.add("words", f"must be a tuple of str, got {_short(environment.words)}")
    if isinstance(environment, ReversibleEnvironment):
        for word, other in dict(environment.opposites).items():
            if word not in actions or other not in actions:
                faults.add("opposites", f"{word!r} -> {other!r}: both must be in actions")


def check_problems(environment: Environment, problems: Sequence[Problem], faults: Faults) -> None:
    """Check what the environment returns for some problems."""
    for name, state, seed in problems:
        identity = faults.call("identity", name, lambda state=state: environment.identity(state))
        if identity is not RAISED and not isinstance(identity, str):
            faults.add("identity", f"must return a str, got {type(identity).__name__}", name)
        if isinstance(found := attempt(lambda state=state: hash(state)), EnvFailure):
            faults.add("reset", f"a state must be frozen and hashable: {found.error}", name)
        shown = _render(environment, state, name, faults)
        if resumable(environment) and seed is not None:
            again = faults.call("reset", name, lambda seed=seed: environment.reset(seed))
            if again is not RAISED and shown is not RAISED:
                if not _same(shown, _render(environment, again, name, faults)):
                    faults.add("reset", "gives another problem for the same seed", name)
        if shown is not RAISED and not isinstance(environment, HarnessEnvironment):
            _check_step(environment, state, shown, name, faults)
            _check_expert(environment, state, shown, name, faults)


def _check_step(
    environment: Environment, state: State, shown: Any, name: str, faults: Faults
) -> None:
    """Check a step with each action from a state, which it must not change."""
    for action in environment.actions or ("", "0"):
        steps = []
        for _ in range(2):
            step = faults.call(
                "step",
                name,
                lambda action=action: checked_step(
                    environment.step(state, action, generator(Purpose.CHECK_STEPS))
                ),
            )
            if step is RAISED:
                return
            steps.append(step)
        first, second = steps
        if resumable(environment) and _facts(first) != _facts(second):
            faults.add("step", "gives another result for the same state, action and rng", name)
        if not _same(shown, _render(environment, state, name, faults)):
            faults.add("step", "changes the state that it is given; return a new one", name)
            return


def _check_expert(
    environment: Environment, state: State, shown: Any, name: str, faults: Faults
) -> None:
    if not isinstance(environment, SolvableEnvironment | NarratingEnvironment):
        return
    plan = faults.call("solve", name, lambda: checked_plan(environment.solve(state)))
    if plan is RAISED or plan is None:
        return
    strange = [word for word in plan if environment.actions and word not in environment.actions]
    if strange:
        faults.add("solve", f"returns {strange[0]!r}, which is not in actions", name)
    for member in ("explain", "narrate"):
        write = getattr(environment, member, None)
        if write is None:
            continue
        text = faults.call(
            member,
            name,
            lambda write=write, member=member: checked_explanation(write(state, plan), member),
        )
        if text is not RAISED and isinstance(environment, GroundedEnvironment):
            _check_grounding(environment, shown, text, name, faults)


def _check_grounding(
    environment: GroundedEnvironment, shown: Any, text: str, name: str, faults: Faults
) -> None:
    message = shown.text if isinstance(shown, Observation) else shown
    counts = faults.call("count_grounded", name, lambda: environment.count_grounded(message, text))
    if counts is not RAISED and not (
        isinstance(counts, tuple) and len(counts) == 2 and all(type(n) is int for n in counts)
    ):
        faults.add("count_grounded", f"must return two ints, got {_short(counts)}", name)


def _render(environment: Environment, state: State, name: str, faults: Faults) -> Any:
    return faults.call("render", name, lambda: checked_observation(environment.render(state)))


def _same(first: Any, second: Any) -> bool:
    """Whether two observations are equal."""
    if isinstance(first, Observation) and isinstance(second, Observation):
        images = zip(first.images, second.images, strict=False)
        return first.text == second.text and all(np.array_equal(a, b) for a, b in images)
    return type(first) is type(second) and first == second


def _facts(step: Step) -> tuple[Any, ...]:
    return step.reward, step.done, sorted(step.info.items())


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
