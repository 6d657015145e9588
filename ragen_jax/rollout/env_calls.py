"""Call an environment, which may raise, hang or return invalid values.

    begin    seeds -> initial states
    identify states -> contents of the problems
    observe  states -> observations
    act      actions of replies -> their results, and the next observations

`checked_step` and the other checks raise for a value that breaks the contract of envs/types.py.
Any failure becomes an `EnvFailure` in place of the result, only in the episode that it happened in.
Without a time limit, steps run one after another in this thread. With a time limit, which
environments need that wait for a network or another process, several steps run in parallel
threads. A step that exceeds the limit is abandoned, and its thread is not waited for.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ragen_jax.core.active_time import INTERVAL, ActiveTime
from ragen_jax.core.clean_text import clean_text, describe_error, format_error
from ragen_jax.core.progress import begin_count
from ragen_jax.envs.scalars import plain_scalar, real_number
from ragen_jax.envs.types import IMAGE, Environment, Observation, State, Step

MAX_TEXT = 100_000  # maximum characters per observation
MAX_IMAGES = 16  # maximum per observation
MAX_PIXELS = 4096 * 4096  # maximum per image
MAX_REWARD = 1e6  # maximum absolute reward of a step, so that a variance in float32 is accurate
MAX_NUMBER = 1.7e308  # maximum absolute number in an info: larger integers do not fit a float
KEPT = (bool, int, float, str)  # types of the kept entries of an info; text up to MAX_TEXT

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Time limits of an environment; see configs/base.py."""

    time_limit: float = 0.0  # seconds per step; 0: no limit
    workers: int = 16  # number of parallel steps if there is a limit


NO_LIMITS = Limits()
NO_LIMIT = 1e8  # seconds, three years: a time limit for `in_threads` that is never reached
# End of a message about an environment that raises for every problem.
SEE_CHECK_DATA = "python -m ragen_jax.check_data names the file and line of each fault"


@dataclasses.dataclass
class Clock:
    """Total time spent in environments, in seconds."""

    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class EnvFailure:
    """A failure of an environment, in place of its result."""

    error: str  # one line
    traceback: str
    timed_out: bool = False  # whether it took longer than the time limit


@dataclasses.dataclass(frozen=True)
class StepRequest:
    """The actions of a reply, to be run in a state."""

    state: State
    actions: tuple[str, ...]
    rng: np.random.Generator
    actions_left: int  # of the episode; further actions are not run, the last has no observation


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a `StepRequest`."""

    state: State
    actions: tuple[str, ...]  # the actions that were run
    reward: float  # sum over these actions
    info: dict[str, Any]  # info of the last action
    done: bool
    observation: str | Observation  # "" if the episode is over


def attempt(call: Callable[[], Result]) -> Result | EnvFailure:
    """Return the result of `call`, or an `EnvFailure` if the environment raises."""
    try:
        return call()
    except BaseException as error:  # a user's environment may raise anything
        # Ctrl-C and signals, which only the main thread gets, do not come from the environment.
        here = threading.current_thread() is threading.main_thread()
        if here and isinstance(error, KeyboardInterrupt):
            raise
        return _failure(error)


def begin(
    environment: Environment,
    seeds: Sequence[int],
    limits: Limits,
    clock: Clock | None = None,
) -> list[State | EnvFailure]:
    """Return the initial state of each seed; count them as problems of the phase."""
    count, finished = begin_count(len(seeds), "problems"), []

    def reset(seed, tick):
        try:
            return environment.reset(seed)
        finally:
            finished.append(seed)
            count(1)

    states = _each(reset, seeds, limits, clock)
    count(len(seeds) - len(finished))  # those that hang
    return states


def identify(
    environment: Environment, states: Sequence[State | EnvFailure], limits: Limits
) -> list[str | EnvFailure]:
    """Return the `identity` of each state, or the `EnvFailure` in its place."""

    def name(state, tick):
        if isinstance(state, EnvFailure):
            return state
        identity = environment.identity(state)
        if not isinstance(identity, str):
            raise TypeError(f"identity must return a str, got {type(identity).__name__}")
        return clean_text(identity)

    return _each(name, states, limits, None)


def observe(
    environment: Environment,
    states: Sequence[State | EnvFailure],
    limits: Limits,
    clock: Clock | None = None,
) -> list[str | Observation | EnvFailure]:
    """Return the observation of each state, or the `EnvFailure` in its place."""

    def show(state, tick):
        return (
            state
            if isinstance(state, EnvFailure)
            else checked_observation(environment.render(state))
        )

    return _each(show, states, limits, clock)


def act(
    environment: Environment,
    asked: Sequence[StepRequest],
    limits: Limits,
    clock: Clock | None = None,
) -> list[StepResult | EnvFailure]:
    """Run the actions of several episodes' replies."""

    def run(job, tick):
        state, reward, info, done, ran = job.state, 0.0, {}, False, []
        for action in job.actions[: job.actions_left]:
            tick()
            step = checked_step(environment.step(state, action, job.rng))
            state, info, done = step.state, step.info, step.done
            reward += step.reward
            ran.append(action)
            if done:
                break
        over = done or len(ran) == job.actions_left
        tick()
        observation = "" if over else checked_observation(environment.render(state))
        return StepResult(state, tuple(ran), reward, info, done, observation)

    return _each(run, asked, limits, clock)


# ------------------------------------------------------------------------------ validation


def checked_observation(observation: object) -> str | Observation:
    """Validate an observation and return it with copies of its images.

    The images are copied because an environment may draw its next images into the same arrays.

    Raises:
      TypeError, ValueError: it is not an observation, its text is too long, an image is invalid or
        too large, or the number of images differs from the number of IMAGE in the text.
    """
    if not isinstance(observation, Observation):
        return _text("render must return a str or an Observation", observation)
    text, images = _text("Observation.text must be a str", observation.text), observation.images
    if not isinstance(images, tuple):
        raise TypeError(f"Observation.images must be a tuple, got {type(images).__name__}")
    if len(images) > MAX_IMAGES:
        raise ValueError(f"Observation.images must be at most {MAX_IMAGES}, got {len(images)}")
    if text.count(IMAGE) != len(images):
        raise ValueError(
            f"Observation.text must contain IMAGE ({IMAGE!a}) once for each image, got "
            f"{text.count(IMAGE)} and {len(images)} image(s)"
        )
    return Observation(text, tuple(_image(number, image) for number, image in enumerate(images)))


def _text(what: str, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{what}, got {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise ValueError(f"render must return at most {MAX_TEXT} characters, got {len(text)}")
    return clean_text(text)


def _image(number: int, image: object) -> np.ndarray:
    what = f"Observation.images[{number}] must be a uint8 array [height, width, 3]"
    if not isinstance(image, np.ndarray):
        raise TypeError(f"{what}, got {type(image).__name__}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"{what}, got {image.dtype} {list(image.shape)}")
    pixels = image.shape[0] * image.shape[1]
    if not 1 <= pixels <= MAX_PIXELS:
        raise ValueError(f"{what} of 1 to {MAX_PIXELS} pixels, got {list(image.shape)}")
    return np.array(image, order="C")


def checked_step(step: object) -> Step:
    """Validate a step; return it with only the finite numbers, strings and bools of its info.

    Raises:
      TypeError, ValueError: it is not a `Step`, or one of its fields is invalid.
    """
    if not isinstance(step, Step):
        got = type(step).__name__
        if isinstance(step, tuple) and len(step) in (4, 5):
            got = f"a tuple of {len(step)} as in Gymnasium (env.name=gymnasium plays those)"
        raise TypeError(f"step must return a Step(state, reward, done, info), got {got}")
    reward, done, info = real_number(step.reward), plain_scalar(step.done), step.info
    if reward is None or not abs(reward) <= MAX_REWARD:
        limit, got = f"{MAX_REWARD:g}", " ".join(repr(step.reward).split())[:80]
        raise ValueError(f"Step.reward must be a number from -{limit} to {limit}, got {got}")
    if not isinstance(done, bool):
        raise TypeError(f"Step.done must be a bool, got {step.done!r:.80}")
    if not isinstance(info, dict):
        raise TypeError(f"Step.info must be a dict, got {type(info).__name__}")
    return Step(step.state, reward, done, _json_entries(info))


def checked_plan(plan: object) -> tuple[str, ...] | None:
    """Validate a plan of `solve` and return it.

    Raises:
      TypeError: it is neither None nor a tuple (or list) of texts.
    """
    if plan is None:
        return None
    if not isinstance(plan, tuple | list) or not all(isinstance(word, str) for word in plan):
        got = f"{type(plan).__name__} {plan!r:.60}"
        raise TypeError(f"solve must return a tuple of str or None, got {got}")
    return tuple(plan)


def checked_explanation(text: object, member: str = "explain") -> str:
    """Validate a text of `explain` or `narrate` (`member`) and return it.

    Raises:
      TypeError: it is not a text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{member} must return a str, got {type(text).__name__}")
    return text


def _json_entries(info: dict[Any, Any]) -> dict[str, bool | int | float | str]:
    """Return the JSON-compatible entries of an info: finite numbers, bools, strings."""
    kept = {}
    for name, value in info.items():
        value = plain_scalar(value)
        if not isinstance(name, str) or not isinstance(value, KEPT):
            continue
        if isinstance(value, str):
            if len(value) <= MAX_TEXT:
                kept[clean_text(name)] = clean_text(value)
        elif abs(value) <= MAX_NUMBER:  # False for NaN
            kept[clean_text(name)] = value
    return kept


def _failure(error: BaseException) -> EnvFailure:
    return EnvFailure(describe_error(error), format_error(error))


# ------------------------------------------------------------------------------ threads


def _each(
    call: Callable[[Job, Callable[[], None]], Result],
    jobs: Sequence[Job],
    limits: Limits,
    clock: Clock | None,
) -> list[Result | EnvFailure]:
    """Return call(job, tick) of each job, or an `EnvFailure`.

    `call` must call tick at the start of each step.
    """

    def guarded(job, tick):
        return attempt(lambda: call(job, tick))

    start = time.perf_counter()
    if limits.time_limit:
        results = in_threads(guarded, jobs, limits)
    else:
        results = [guarded(job, lambda: None) for job in jobs]
    if clock is not None:
        clock.seconds += time.perf_counter() - start
    return results


def in_threads(
    call: Callable[[Job, Callable[[], None]], Result],
    jobs: Sequence[Job],
    limits: Limits,
    give_up: Callable[[Job], None] = lambda job: None,
) -> list[Result | EnvFailure]:
    """Run the jobs in `limits.workers` threads; abandon jobs that do not tick within the limit.

    The threads are daemons, so that a thread that hangs does not keep the process alive.

    Args:
      call: (job, tick) -> result; does not raise.
      limits: with a time limit.
      give_up: called with each job that is abandoned.
    """
    changed, clock = threading.Condition(), ActiveTime()
    waiting = list(reversed(range(len(jobs))))
    ticked: dict[int, float] = {}  # running job -> time at which its current step began
    results: dict[int, Any] = {}

    def tick(index):
        with changed:
            if index in ticked:
                ticked[index] = clock.seconds()

    def work():
        while True:
            with changed:
                if not waiting:
                    return
                index = waiting.pop()
                ticked[index] = clock.seconds()
            result = call(jobs[index], functools.partial(tick, index))
            with changed:
                if ticked.pop(index, None) is None:
                    return  # the job was abandoned, and another thread has replaced this thread
                results[index] = result
                changed.notify()

    def hire(count):
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()

    hire(min(limits.workers, len(jobs)))
    with changed:
        while len(results) < len(jobs):
            now = clock.seconds()
            late = [i for i, since in ticked.items() if now - since >= limits.time_limit]
            for index in late:
                del ticked[index]
                late_error = TimeoutError(f"a step took longer than {limits.time_limit:g} s")
                results[index] = dataclasses.replace(_failure(late_error), timed_out=True)
                give_up(jobs[index])
            hire(min(len(late), len(waiting)))
            if len(results) < len(jobs):
                oldest = min(ticked.values(), default=now)
                left = oldest + limits.time_limit - now
                changed.wait(min(max(left, 0.0), INTERVAL))
    return [results[index] for index in range(len(jobs))]
