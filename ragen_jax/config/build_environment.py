"""Build what a config says about environments: the environment, its chat, its limits."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config, Env
from ragen_jax.core.domains import plain
from ragen_jax.envs import IncompleteEnvironment, code_hash, find_env, make_env
from ragen_jax.envs.styles import Style
from ragen_jax.envs.types import (
    Environment,
    HarnessEnvironment,
    LiveEnvironment,
    SentenceEnvironment,
    SolvableEnvironment,
    StyledEnvironment,
)
from ragen_jax.model.dates import day_of
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout import chat
from ragen_jax.rollout.env_calls import Limits
from ragen_jax.rollout.episode import Budgets
from ragen_jax.serving.conversation import make_conversation
from ragen_jax.serving.harness_chat import harness_chat
from ragen_jax.storage.cache import content_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def environment_settings(env: Env) -> dict[str, Any]:
    """Return the JSON-like settings that determine the problems of an environment, for cache names.

    Files of problems (the options `path`, `..._path` and `problems`) and the sources of a user's
    environment count by their content, not by their location.

    Raises:
      ValueError: a file cannot be read.
    """
    options = plain(env.options) | hash_option_files(env)
    code = code_hash(env.name)
    return {"env": env.name if code is None else f"{env.name} {code}", **options}


def hash_option_files(env: Env) -> dict[str, str]:
    """Return {option: content hash} of the files and folders that an environment's options name.

    Raises:
      ValueError: a file or folder cannot be read.
    """
    found = {}
    for name, value in env.options.items():
        # Problems that are no file are a data set of the Hub.
        is_file = name == "problems" and os.path.exists(str(value))
        if (is_file or name == "path" or name.endswith("_path")) and value is not None:
            try:
                found[name] = content_hash(value)
            except OSError as error:
                raise ValueError(f"config.env.options.{name} cannot be read: {error}") from error
    return found


TINY_NEEDS = ("words", "solve", "explain")  # methods of envs.types.SolvableEnvironment


def tiny_words(config: Config) -> tuple[str, ...]:
    """Return the distinct words that the tiny agent's tokenizer does not split.

    Raises:
      ValueError: an environment is unusable or lacks TINY_NEEDS.
    """
    words = {}
    for name, c in per_task_configs(config).items():
        environment = build_environment(c.env, "train")
        missing = [member for member in TINY_NEEDS if not hasattr(environment, member)]
        if missing:
            how = getattr(environment, "solvable_by", "implement them")
            raise ValueError(
                f"config.model.path is {config.model.path!r}, an agent that imitates a solver, "
                f"but environment {name!r} has no {', '.join(missing)} (envs/types.py, "
                f"SolvableEnvironment); {how}, or train a language model: preset llm and "
                "--config.model.path=DIR_OR_HUB_ID"
            )
        words |= dict.fromkeys(cast(SolvableEnvironment, environment).words)
        for style in build_styles(c, environment).values():
            words |= dict.fromkeys(style.words)
    return tuple(words)


def tiny_tokenizer(config: Config) -> "PreTrainedTokenizerFast":
    """Build the tiny agent's tokenizer.

    Raises:
      ValueError: see `tiny_words`.
    """
    return build_tokenizer(tiny_words(config), sees=bool(config.warmstart.tower_layers))


def build_styles(config: Config, environment: Environment) -> dict[str, Style]:
    """Return the styles that config.warmstart.styles mixes, in the environment's order.

    An agent that reads terse prompts writes the words of `styles`; a language model writes
    `sentence_styles`. {} if there is no mixture.

    Raises:
      ValueError: the environment lacks a style, or the fractions are unusable.
    """
    fractions = config.warmstart.styles
    if not fractions:
        return {}
    member, known = "sentence_styles", {}
    if config.env.prompt == "terse":
        member = "styles"
        known = environment.styles if isinstance(environment, StyledEnvironment) else {}
    elif isinstance(environment, SentenceEnvironment):
        known = environment.sentence_styles
    unknown = [name for name in fractions if name not in known]
    if unknown:
        raise ValueError(
            f"config.warmstart.styles has {', '.join(unknown)}, but environment "
            f"{config.env.name!r} has {', '.join(known) or f'no {member} (envs/types.py)'}"
        )
    return {name: style for name, style in known.items() if fractions.get(name)}


def build_environment(env: Env, split: str) -> Environment:
    """Build an environment, which draws its problems from `split`.

    Raises:
      ValueError: the class cannot be found, options or values are unknown, env.actions_per_turn
        is above 1 for actions that are free text, a harness has no env.max_context, or a pool has
        problems that do not recur.
    """
    try:
        find_env(env.name)
    except ValueError as error:
        raise ValueError(f"config.env.name: {error}") from error
    try:
        environment = make_env(env.name, **plain(env.options), split=split)
    except IncompleteEnvironment as error:
        raise ValueError(f"config.env.name: {error}") from error
    except ValueError as error:
        raise ValueError(f"config.env.options of {env.name!r}: {error}") from error
    if not environment.actions and env.actions_per_turn != 1:
        raise ValueError(
            f"config.env.actions_per_turn is {env.actions_per_turn}; accepted: 1, "
            f"because in environment {env.name!r} the whole answer is one action"
        )
    if isinstance(environment, HarnessEnvironment) and not env.max_context:
        raise ValueError(
            "config.env.max_context is 0; a harness writes prompts of any length, so give the "
            "maximum number of tokens of a prompt and its reply, such as 4096"
        )
    if env.pool and not resumable(environment):
        raise ValueError(
            f"config.env.pool is {env.pool}; accepted: 0, because environment "
            f"{env.name!r} cannot repeat a problem"
        )
    return environment


def resumable(environment: Environment) -> bool:
    """Return whether equal seeds and actions give equal episodes (envs.types.LiveEnvironment)."""
    return not isinstance(environment, LiveEnvironment) or environment.resumable


def build_chat(
    config: Config,
    tokenizer: "PreTrainedTokenizerFast",
    environment: Environment,
    extra_stop_ids: Sequence[int] = (),
    images: ImageSource = NO_IMAGES,
) -> chat.Chat:
    """Build the config's `Chat`; the other arguments are those of `make_chat`."""
    limit = config.env.max_context
    date = day_of(config.model.date)
    found = chat.make_chat(
        tokenizer,
        environment,
        chat.ChatFormat(
            context=config.env.context,
            window=config.env.window,
            max_prompt=limit - config.rollout.max_new_tokens if limit else 0,
            prompt=config.env.prompt,
            actions_per_turn=config.env.actions_per_turn,
            max_actions=config.env.max_actions,
            stop=config.rollout.stop,
            strict=config.env.strict_format,
        ),
        extra_stop_ids=extra_stop_ids,
        images=images,
        date=date,
    )
    if not isinstance(environment, HarnessEnvironment):
        return found
    return harness_chat(found, make_conversation(tokenizer, thinks=environment.thinks, date=date))


def build_budgets(config: Config) -> Budgets:
    """Build the config's `Budgets`."""
    return Budgets(
        max_turns=config.env.max_turns,
        max_actions=config.env.max_actions,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def build_limits(env: Env) -> Limits:
    """Build the config's time `Limits` for environments."""
    return Limits(time_limit=env.time_limit, workers=env.workers)
