"""What the model of a config reads: the first prompt as text, and the lengths of all in tokens."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from ragen_jax.config.build_environment import build_chat, tiny_tokenizer
from ragen_jax.config.build_model import tiny_shape
from ragen_jax.configs.base import Config
from ragen_jax.envs.types import Environment, Observation, State
from ragen_jax.model import hf
from ragen_jax.model.template import PromptError
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.env_calls import EnvFailure, attempt, checked_observation

MAX_SHOWN = 3000  # largest number of characters shown of a prompt


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a model reads an environment."""

    name: str
    chat: Chat
    positions: int  # of the model: the maximum length of a conversation


def make_reader(config: Config, environment: Environment) -> Reader | None:
    """Return how the config's model reads an environment; None if the config names no model.

    Raises:
      ValueError: there is no such model, its tokenizer cannot be used, or env.max_context leaves no
        token for the prompt.
    """
    path = config.model.path
    if not path:
        return None
    if path == "tiny":
        tokenizer = tiny_tokenizer(config)
        positions = tiny_shape(config, tokenizer).max_positions
        return Reader("the tiny agent", build_chat(config, tokenizer, environment), positions)
    directory = hf.resolve(path)
    tokenizer = hf.load_tokenizer(directory)
    chat = build_chat(config, tokenizer, environment, hf.stop_ids(directory))
    return Reader(path, chat, hf.model_config(directory).max_positions)


def describe_prompts(
    config: Config,
    environment: Environment,
    reader: Reader,
    states: Sequence[State],
    messages: Sequence[str],
) -> Iterator[str]:
    """Yield the first problem as the model reads it, and the lengths of the prompts of all.

    Args:
      states: initial states of the problems.
      messages: the longest later observation of each played problem.
    """
    chat, lengths, first, refused = reader.chat, [], "", []
    for state in states:
        shown = attempt(lambda state=state: checked_observation(environment.render(state)))
        if isinstance(shown, EnvFailure):
            continue
        if isinstance(shown, Observation) and shown.images:
            yield "prompts: they hold images, whose tokens are not counted here"
            return
        message = chat.observe(shown, actions_used=0, last_valid=True)
        try:
            ids = chat.prompt_ids((), message)
        except PromptError as error:
            refused.append(str(error))
            continue
        lengths.append(len(ids))
        first = first or chat.text(ids)
    if first:
        yield f"the first problem as {reader.name} reads it:"
        cut = first if len(first) <= MAX_SHOWN else f"{first[:MAX_SHOWN]} ... (cut)"
        yield from (f"  | {line}" for line in cut.splitlines())
    new = config.rollout.max_new_tokens
    limit = config.env.max_context or reader.positions
    what = "env.max_context" if config.env.max_context else "positions of the model"
    room = limit - new
    if lengths or refused:
        over = sum(length > room for length in lengths) + len(refused)
        spread = "too long"
        if lengths:
            middle = statistics.median(lengths)
            spread = f"{min(lengths)} to {max(lengths)} tokens, median {middle:g}"
        yield (
            f"prompts     {spread}; {over} of {len(lengths) + len(refused)} leave no room for a "
            f"reply of {new} (rollout.max_new_tokens) within {limit} ({what})"
        )
    if refused:
        yield f"            first that cannot be used: {refused[0]}"
    turns = config.env.max_turns
    if lengths and turns > 1 and config.env.context == "full":
        later = max((len(chat.template.plain(text)) for text in messages), default=0)
        longest = max(lengths) + turns * new + (turns - 1) * later
        effect = "oldest turns are dropped above it" if config.env.max_context else "fits"
        if longest > limit and not config.env.max_context:
            effect = "longer ones end early; lower env.max_turns or rollout.max_new_tokens"
        yield (
            f"            a conversation of {turns} turns has at most about {longest} tokens; "
            f"limit {limit}: {effect}"
        )
