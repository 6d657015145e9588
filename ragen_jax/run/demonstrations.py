"""Demonstrations: an environment's expert as episodes to imitate, and problems to check on.

The tiny agent (imitate.py) and the fine-tuning of language models (fine_tune.py) imitate them.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import numpy as np
from flax.core import FrozenDict

from ragen_jax.config.build_environment import (
    build_environment,
    build_styles,
    environment_settings,
    tiny_words,
)
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import SOLVER, Config, Warmstart
from ragen_jax.core.domains import plain
from ragen_jax.core.types import Episode, Turn
from ragen_jax.envs.types import Environment, SolvableEnvironment, State
from ragen_jax.model.template import PromptError
from ragen_jax.rollout.chat import Chat, Spans, images_of
from ragen_jax.rollout.env_calls import NO_LIMITS, EnvFailure, begin, identify
from ragen_jax.rollout.episode import Room
from ragen_jax.run import datasets
from ragen_jax.storage.console import console

FEW_PROBLEMS = 1000  # distinct problems below which imitation is likely to fail for their number
NOTICE_EVERY = 20  # one in this number of demonstrations shows the notice of an invalid reply

EXPERT_NEEDS = ("solve", "narrate")  # methods of envs.types.NarratingEnvironment

# Fields of config.env, besides its name and options, that the demonstrations depend on.
_IMITATED = ("context", "window", "max_context", "prompt", "max_turns", "max_actions")


def imitation_config(config: Config) -> Config:
    """Return the config of the demonstrations: env.options updated by warmstart.options.

    Raises:
      ValueError: an environment cannot be imitated (`tiny_words`, `require_expert`), does not
        accept the options, or, for the tiny agent, has other words with them than in training.
    """
    if from_file(config):
        return config
    tiny, options = is_tiny(config), plain(config.warmstart.options)
    words = tiny_words(config) if tiny else require_expert(config)
    if not options:
        return config
    merged = FrozenDict(sorted((plain(config.env.options) | options).items()))
    config = dataclasses.replace(config, env=dataclasses.replace(config.env, options=merged))
    try:
        same = (tiny_words(config) if tiny else require_expert(config)) == words
    except ValueError as error:
        raise ValueError(f"with config.warmstart.options={options}: {error}") from error
    if not same:
        raise ValueError(
            f"config.warmstart.options={options} give environment {config.env.name!r} other "
            "words than config.env.options; the agent could not read its training problems"
        )
    return config


def from_file(config: Config) -> bool:
    """Return whether a file of conversations is imitated instead of the solver."""
    return not is_tiny(config) and config.warmstart.demonstrations != SOLVER


def is_tiny(config: Config) -> bool:
    """Return whether the model is the tiny agent, which imitates words instead of sentences."""
    return config.model.path == "tiny"


def require_expert(config: Config) -> None:
    """Refuse environments whose expert a language model cannot imitate.

    Raises:
      ValueError: an environment is unusable, or lacks `solve`, `narrate` or a style.
    """
    for name, c in per_task_configs(config).items():
        environment = build_environment(c.env, "train")
        missing = [member for member in EXPERT_NEEDS if not hasattr(environment, member)]
        if missing:
            how = getattr(environment, "solvable_by", "implement them")
            raise ValueError(
                f"config.warmstart.fine_tune is True, but environment {name!r} has no "
                f"{', '.join(missing)} (envs/types.py, NarratingEnvironment) to show a language "
                f"model how to solve it; {how}, or set warmstart.fine_tune=False"
            )
        build_styles(c, environment)  # raises for unknown styles


def expert_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of `datasets.play_expert` for config.env."""
    styles = style_fractions(config)
    return {
        "plan_moves": config.warmstart.plan_moves,
        "actions_per_turn": config.env.actions_per_turn,
        "max_turns": config.env.max_turns,
        "max_actions": config.env.max_actions,
        **({"styles": styles} if styles else {}),
        **({} if is_tiny(config) else {"sentences": True}),
    }


def style_fractions(config: Config) -> dict[str, float]:
    """Return the fractions of the reasoning styles whose fraction is above 0."""
    return {name: share for name, share in config.warmstart.styles.items() if share}


def imitation_settings(config: Config) -> dict[str, Any]:
    """Return the JSON-like settings that determine the demonstrations of config.env."""
    environment, found = imitation_environment(config), {}
    if is_tiny(config):
        found["words"] = tiny_words(config)
    if not from_file(config):
        found["sample"] = datasets.fingerprint(environment, **expert_arguments(config))
    return {
        **environment_settings(config.env),
        **found,
        **{f"env.{name}": getattr(config.env, name) for name in _IMITATED},
        "actions_per_turn": config.env.actions_per_turn,
    }


def imitation_environment(config: Config) -> SolvableEnvironment:
    """Return the environment of config.env with the problems of the imitation split."""
    # `tiny_words` refuses environments that cannot solve and explain their problems.
    return cast(SolvableEnvironment, build_environment(config.env, "imitation"))


def describe_few_problems(warmstart: Warmstart, name: str, count: int) -> str:
    """Return why imitation of `count` distinct problems is likely to fail, and what helps."""
    more = f"raise warmstart.rooms={warmstart.rooms}"
    if count < warmstart.rooms // 2:  # most were drawn more than once
        more = "use a larger file or options that give more problems"
    return (
        f"{count} distinct problems of {name} are imitated; an agent that imitates fewer than "
        f"about {FEW_PROBLEMS} rarely solves new ones: {more}, lower "
        f"warmstart.success={warmstart.success}, or train a language model (preset llm)"
    )


def as_episodes(examples: Sequence[dict[str, Any]], chat: Chat, positions: int) -> list[Episode]:
    """Return demonstrations as the episodes that an agent would have played.

    Rows, masks and context modes are then the same as in RL. An episode ends before the first reply
    whose prompt cannot be used. A line prints the number of replies that are left out.

    Args:
      examples: from `datasets.demonstrations`.
      positions: number of positions of the model, the maximum length of a prompt and its reply.

    Raises:
      ValueError: no reply can be imitated.
    """
    episodes: list[list[Turn]] = []
    reason, left_out, cut = "", 0, False
    for index, example in enumerate(examples):
        if example["turn"] == 0:
            episodes.append([])
            cut = False
        if not cut:
            last_valid = index % NOTICE_EVERY != 0
            try:
                turn = imitated_turn(example, episodes[-1], chat, positions, last_valid)
            except PromptError as error:
                reason, cut = reason or str(error), True
            else:
                episodes[-1].append(turn)
        left_out += cut
    kept = [make_episode(turns) for turns in episodes if turns]
    if not kept:
        raise ValueError(
            f"none of {len(examples)} demonstration replies can be used; first error: {reason}"
        )
    if left_out:
        console(
            f"warning: {left_out} of {len(examples)} demonstration replies are left out, "
            f"because their prompts cannot be used; first error: {reason}"
        )
    return kept


def imitated_turn(
    example: dict[str, Any],
    turns: Sequence[Turn],
    chat: Chat,
    positions: int,
    last_valid: bool,
) -> Turn:
    """Return a demonstration as the turn after `turns`.

    Raises:
      PromptError: the prompt cannot be used, as in episode.begin_turns.
    """
    observation = example["observation"]
    chat.check_images(observation)
    chat.images.register(images_of(observation))
    spans = chat.image_spans(observation)
    message = chat.observe(
        observation,
        actions_used=chat.format.actions_per_turn * example["turn"],
        last_valid=last_valid,
    )
    sampled = chat.reply_ids(example["reply"])
    prompt = chat.prompt_ids(turns, message, spans)
    Room(positions, len(sampled)).check(prompt, len(turns))
    return make_turn(prompt, message, sampled, spans)


def without_prompts(episodes: Sequence[Episode], chat: Chat, share: float) -> list[Episode]:
    """Return a share of the replies with their reasoning as their prompt.

    An agent that imitates them, besides the replies to the prompts, learns to answer from its
    reasoning alone (`diagnostics.faithfulness`, case "necessary").

    Args:
      episodes: from `as_episodes`.
      share: from 0 to 1; the replies are taken at equal distances. Those without reasoning are not
        counted.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    spans = [(turn, chat.read(turn.sampled).reasoning) for turn in turns] if share else []
    reasoned = [(turn, *span) for turn, span in spans if np.diff(span)]
    return [
        make_episode([make_turn(turn.sampled[first:last], "", turn.sampled[last:])])
        for i, (turn, first, last) in enumerate(reasoned)
        if int((i + 1) * share) > int(i * share)
    ]


def make_turn(prompt: np.ndarray, message: str, sampled: np.ndarray, spans: Spans = ()) -> Turn:
    """Return a demonstrated turn, which has no reward and log-probs of 0."""
    return Turn(
        prompt=prompt,
        message=message,
        sampled=sampled,
        logp=np.zeros(len(sampled), np.float32),
        reasoning=(0, 0),
        answer=(0, 0),
        actions=(),
        valid=True,
        reward=0.0,
        info={},
        spans=spans,
    )


def make_episode(turns: Iterable[Turn]) -> Episode:
    """Return the episode of demonstrated turns."""
    return Episode(seed=0, group=0, member=0, turns=tuple(turns), success=True)


def hold_back(
    environment: Environment, examples: list[dict[str, Any]], config: Config
) -> tuple[list[dict[str, Any]], list[int], list[State]]:
    """Return (examples to imitate, seeds, states), with problems on which imitation is checked.

    The problems are imitation problems after the demonstrations' seeds that differ from all of
    them. An environment with few problems, such as a small file, may have none: then a fifth of the
    demonstrated problems, at most warmstart.check_episodes, is held back instead, and a line says
    so. Seeds for which the environment raises are left out, and a line counts them.

    Raises:
      ValueError: the environment has fewer than two problems.
    """
    w = config.warmstart
    first = datasets.IMITATION_SEEDS + w.rooms
    seen = list(dict.fromkeys(example["identity"] for example in examples))
    later = range(first, first + 100 * w.check_episodes)
    seeds, states = _find_problems(environment, later, config, seen)
    if seeds:
        return examples, seeds, states
    count = min(w.check_episodes, len(seen) // 5 or 1)
    imitated = set(seen[: len(seen) - count])
    if not imitated:
        raise ValueError(
            f"{config.env.name} has a single problem to imitate, and none to check the imitation "
            "on; widen env.options or use a larger file"
        )
    console(
        f"warmstart.rooms={w.rooms} is an upper bound: there are {len(seen)} distinct problems to "
        f"imitate, of which {count} are held back to check the imitation"
    )
    kept = [example for example in examples if example["identity"] in imitated]
    demonstrated = range(datasets.IMITATION_SEEDS, first)
    return kept, *_find_problems(environment, demonstrated, config, imitated)


def first_problems(environment: Environment, config: Config) -> tuple[list[int], list[State]]:
    """Return (seeds, states) of the first warmstart.check_episodes imitation problems."""
    later = range(datasets.IMITATION_SEEDS, datasets.IMITATION_SEEDS + 2**20)
    return _find_problems(environment, later, config, ())


def _find_problems(
    environment: Environment, candidates: Iterable[int], config: Config, seen: Collection[str]
) -> tuple[list[int], list[State]]:
    """Return (seeds, states) of the first warmstart.check_episodes problems not in `seen`."""
    seen, seeds, states, failed = set(seen), [], [], []
    for seed in candidates:
        (state,) = begin(environment, [seed], NO_LIMITS)
        (identity,) = identify(environment, [state], NO_LIMITS)
        if isinstance(identity, EnvFailure):
            failed.append((seed, identity))
        elif identity not in seen:
            seeds.append(seed)
            states.append(state)
        if len(seeds) == config.warmstart.check_episodes:
            break
    if failed:
        console(
            f"warning: {len(failed)} problems for checking the imitation cannot be built and "
            f"are left out; {datasets.first_failed(failed)}"
        )
    return seeds, states
