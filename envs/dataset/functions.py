"""Functions of one's own: what is asked of them, and what they may return."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ragen_jax.envs.options import function_of
from ragen_jax.envs.scalars import plain_scalar, real_number


@dataclass(frozen=True)
class Outcome:
    """What a reply led to.

    message: what the user says next; None: the task is over
    """

    message: str | None
    reward: float
    success: bool
    info: dict[str, Any]


def user_function(option: str, value: str, *arguments: str) -> Callable[..., Any]:
    """The function MODULE:FUNCTION, which takes so many positional arguments.

    Raises:
      ValueError: it cannot be imported, or takes others.
    """
    function = function_of(option, value)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{option} {value!r} must take ({', '.join(arguments)}): {error}"
        ) from error
    except ValueError:  # of one that has no signature, as some written in C
        return function
    return function


def paid(value: Any, name: str, threshold: float) -> Outcome:
    """What a reward function says of the last reply.

    A real scalar of any library (`scalars.real_number`), which is a success from `threshold` on; or
    a dict with `reward` and perhaps `success`, whose other entries are facts that are kept with the
    episode.

    Raises:
      TypeError: another thing.
    """
    facts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = real_number(facts.pop("reward", None))
    if reward is None:
        raise TypeError(
            f"{name} must return a number or a dict with `reward`, a number; got {_shown(value)}"
        )
    return Outcome(None, reward, _success(facts, reward, name, threshold), facts)


def replied(value: Any, name: str, threshold: float) -> Outcome | None:
    """What a step function says: None where it leaves the end to the reward function.

    A text is the user's next message; a dict has `message` (None, or none: the task is over),
    `reward` (0 where there is none) and `success`.

    Raises:
      TypeError: another thing.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return Outcome(value, 0.0, False, {})
    facts = dict(value) if isinstance(value, Mapping) else {}
    message, reward = facts.pop("message", None), real_number(facts.pop("reward", 0.0))
    right = isinstance(value, Mapping) and isinstance(message, (str, type(None)))
    if not right or reward is None:
        raise TypeError(
            f"{name} must return the next message, None, or a dict with `message`, `reward` and "
            f"`success`; got {_shown(value)}"
        )
    success = _success(facts, reward, name, threshold) if message is None else False
    return Outcome(message, reward, success, facts)


def _success(facts: dict[str, Any], reward: float, name: str, threshold: float) -> bool:
    """Takes `success` from the facts; without it, whether the reward reaches the threshold."""
    success = plain_scalar(facts.pop("success", reward >= threshold))
    if not isinstance(success, bool):
        raise TypeError(f"{name} must give success as True or False, got {_shown(success)}")
    return success


def _shown(value: Any) -> str:
    """A value in one line of at most 80 characters."""
    return " ".join(repr(value).split())[:80]
