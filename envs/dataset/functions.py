"""The user's functions: how they are called, and what they may return."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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


# Parameters of TRL's reward functions that are not columns of the row.
OF_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


def reward_function(value: str) -> Callable[[Any, str, dict[str, Any]], Any]:
    """Return the reward function MODULE:FUNCTION as a function of (prompt, reply, row).

    Functions of other trainers are accepted as they are, recognized by the names of their
    parameters. The reply is the text in <answer>.

    - verl: (data_source, solution_str, ground_truth, extra_info). The row's columns of these names
      are passed; ground_truth may be in the row's reward_model, as in verl's files.
    - TRL: (completions, ..., **columns), with a list of one completion and of one value for each
      column: texts, or lists of messages if the prompt is a list of messages. None, for a function
      that does not apply to the row, is a reward of 0.

    Raises:
      ValueError: it cannot be imported, is asynchronous, or has other parameters.
    """
    function = function_of("reward", value)
    names = _parameters(function)
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward {value} is an async function; give one that returns the reward")
    missing = [n for n in OF_TRAINER if n in names and names[n].default is inspect.Parameter.empty]
    if "completions" in names and missing:
        raise ValueError(
            f"reward {value} needs {' and '.join(missing)}, which only TRL's trainer has; give "
            "the parameter a default"
        )
    if {"solution_str", "ground_truth"} <= names.keys():
        return functools.partial(_call_verl, function, names)
    if "completions" in names:
        return functools.partial(_call_trl, function, names)
    return user_function("reward", value, "prompt", "reply", "row")


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; {} if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # as for some functions written in C
        return {}


def _accepted(names: Mapping[str, inspect.Parameter], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function with these parameters accepts."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in names}


def _call_verl(
    function: Callable[..., Any],
    names: Mapping[str, inspect.Parameter],
    prompt: Any,
    reply: str,
    row: dict[str, Any],
) -> Any:
    stored = row.get("reward_model")
    truth = stored.get("ground_truth") if isinstance(stored, Mapping) else None
    arguments = {
        "data_source": row.get("data_source", ""),
        "solution_str": reply,
        "ground_truth": row.get("ground_truth", truth),
        "extra_info": row.get("extra_info"),
    }
    value = function(**_accepted(names, arguments))
    if isinstance(value, Mapping) and "score" in value and "reward" not in value:
        return {"reward": value["score"]} | {k: x for k, x in value.items() if k != "score"}
    return value


def _call_trl(
    function: Callable[..., Any],
    names: Mapping[str, inspect.Parameter],
    prompt: Any,
    reply: str,
    row: dict[str, Any],
) -> Any:
    completion = [{"role": "assistant", "content": reply}] if isinstance(prompt, list) else reply
    arguments = {name: [value] for name, value in row.items()}
    arguments |= {"prompts": [prompt], "completions": [completion]}
    values = function(**_accepted(names, arguments))
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 1:
        raise TypeError(
            f"a reward function of completions must return a list with one number for each of "
            f"them; for one completion it returned {_preview(values)}"
        )
    return 0.0 if values[0] is None else values[0]


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
