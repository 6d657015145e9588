"""The user's functions: how they are called, and what they may return."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ragen_jax.envs.options import function_of
from ragen_jax.envs.scalars import plain_scalar, real_number


@dataclass(frozen=True)
class Outcome:
    """The result of a reply.

    message: the user's next message; None: the task is over
    """

    message: str | None
    reward: float
    success: bool
    info: dict[str, Any]


def user_function(option: str, value: str, *arguments: str) -> Callable[..., Any]:
    """Return the function MODULE:FUNCTION, which must accept these positional arguments.

    Raises:
      ValueError: it cannot be imported, or has other parameters.
    """
    function = function_of(option, value)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{option} {value!r} must take ({', '.join(arguments)}): {error}"
        ) from error
    except ValueError:  # no signature, as for some functions written in C
        return function
    return function


def convert_reward(value: Any, name: str, threshold: float) -> Outcome:
    """Convert the return value of a reward function.

    The value is a real scalar of any library (`scalars.real_number`), a success if it is at least
    `threshold`; or a dict with `reward` and perhaps `success`, whose other entries are facts kept
    with the episode.

    Raises:
      TypeError: any other value.
    """
    facts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    reward = real_number(facts.pop("reward", None))
    if reward is None:
        raise TypeError(
            f"{name} must return a number or a dict with `reward`, a number; got {_preview(value)}"
        )
    return Outcome(None, reward, _success(facts, reward, name, threshold), facts)


def convert_step(value: Any, name: str, threshold: float) -> Outcome | None:
    """Convert the return value of a step function; None leaves the end to the reward function.

    A text is the user's next message. A dict has `message` (if None or missing, the task is over),
    `reward` (default 0) and `success`.

    Raises:
      TypeError: any other value.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return Outcome(value, 0.0, False, {})
    facts = dict(value) if isinstance(value, Mapping) else {}
    message, reward = facts.pop("message", None), real_number(facts.pop("reward", 0.0))
    is_valid = isinstance(value, Mapping) and isinstance(message, (str, type(None)))
    if not is_valid or reward is None:
        raise TypeError(
            f"{name} must return the next message, None, or a dict with `message`, `reward` and "
            f"`success`; got {_preview(value)}"
        )
    success = _success(facts, reward, name, threshold) if message is None else False
    return Outcome(message, reward, success, facts)


def _success(facts: dict[str, Any], reward: float, name: str, threshold: float) -> bool:
    """Pop `success` from the facts; default: whether the reward is at least the threshold."""
    success = plain_scalar(facts.pop("success", reward >= threshold))
    if not isinstance(success, bool):
        raise TypeError(f"{name} must give success as True or False, got {_preview(success)}")
    return success


def _preview(value: Any) -> str:
    """Return a value in one line of at most 80 characters."""
    return " ".join(repr(value).split())[:80]
