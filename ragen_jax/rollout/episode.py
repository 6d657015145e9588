"""A running episode on the host: start it, build the next prompt, act on the reply.

play.py plays all episodes at once, slots.py a few at a time. They differ in the order in which they
sample tokens from the model; the code here is common to both.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from ragen_jax.core.clean_text import last_line
from ragen_jax.core.randomness import Purpose, generator, key_word
from ragen_jax.core.types import Episode, Turn
from ragen_jax.envs.types import Environment, Observation, State
from ragen_jax.model.template import PromptError, Span
from ragen_jax.rollout.chat import Chat, images_of
from ragen_jax.rollout.env_calls import (
    NO_LIMITS,
    Clock,
    EnvFailure,
    Limits,
    StepRequest,
    StepResult,
    act,
)
from ragen_jax.rollout.routes import new_part
from ragen_jax.rollout.sample import DecodeSettings
from ragen_jax.rollout.stops import Stops

PROMPT_ERROR = PromptError.__name__  # first word of the `Episode.error` of an unusable prompt


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Limits of one episode; the environment does not know them."""

    max_turns: int
    max_actions: int
    max_new_tokens: int  # per reply


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Training uses only the temperature (see types.Turn.logp)."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def decode_settings(
        self, stop_ids: tuple[int, ...], max_tokens: int, stops: Stops | None = None
    ) -> DecodeSettings:
        """Return the settings of the decoding loop, which do not include the temperature."""
        return DecodeSettings(
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            stops=stops,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


@dataclasses.dataclass(frozen=True)
class PlaySettings:
    """Settings to play the episodes of a task, except the policy, the problems and the random key.

    With `slots` or `chunk` set, slots.py plays the episodes; the episodes are the same.
    """

    chat: Chat  # builds the prompts
    environment: Environment
    budgets: Budgets
    sampling: Sampling
    limits: Limits = NO_LIMITS  # time limits of the environment
    compact: bool = True  # drop finished episodes from the batch
    slots: int = 0  # number of episodes played at a time; 0: all, or no slots if chunk is 0 as well
    chunk: int = 0  # tokens decoded between two checks for finished replies
    cache_dtype: str = "model"  # these two: see `ModelConfig`
    cache_kernel: str = "xla"
    replay_experts: bool = False  # whether turns carry the experts of their tokens (routes.py)
    lanes: int = 1  # the most parts of a batch that are sampled at the same time (lanes.py)
    # Whether replies are decoded in parts, after which their number is shown (counted.py).
    counted: bool = False
    # Length of first prompts, in tokens, from which slots compute the size of their cache. It is
    # fixed so that every rollout of a run has the same programs; 0: the longest first prompt.
    first_prompt: int = 0


@dataclasses.dataclass
class Play:
    """A running episode."""

    seed: int
    group: int
    member: int
    state: State
    rng: np.random.Generator
    observation: str | Observation  # observation of the state
    error: str = ""  # why its environment broke or its prompt cannot be used; "": sound
    turns: list[Turn] = dataclasses.field(default_factory=list)  # finished turns
    # User message, image spans and prompt of the current turn.
    message: str = ""
    spans: tuple[Span, ...] = ()
    prompt: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    actions_used: int = 0
    success: bool = False
    over: bool = False
    left_out: int = 0  # as in `Episode`
    experts: np.ndarray | None = None  # int16 [T, X], of the tokens that sampling has read last


def start_plays(
    seeds_G: Sequence[int],
    states_G: Sequence[State | EnvFailure],
    observation_G: Sequence[str | Observation | EnvFailure],
    group_size: int,
    key: jax.Array,
    *,
    first: int = 0,
) -> list[Play]:
    """Return the `Play`s of a batch, group by group; `key` as in `rollout`.

    Args:
      first: index of the first group.
    """
    noise = key_word(key)  # the environment's noise (such as slips) is keyed like the draws
    starts = zip(seeds_G, states_G, observation_G, strict=True)
    return [
        Play(
            seed=seed,
            group=group,
            member=member,
            state=state,
            rng=generator(Purpose.ENVIRONMENT, seed, member, noise),
            observation="" if isinstance(shown, EnvFailure) else shown,
            error=shown.traceback if isinstance(shown, EnvFailure) else "",
        )
        for group, (seed, state, shown) in enumerate(starts, first)
        for member in range(group_size)
    ]


def as_episode(play: Play) -> Episode:
    """Return the `Episode` of a finished play."""
    return Episode(
        seed=play.seed,
        group=play.group,
        member=play.member,
        turns=tuple(play.turns),
        success=play.success,
        error=play.error,
        left_out=play.left_out,
    )


@dataclasses.dataclass(frozen=True)
class Room:
    """The number of positions that a prompt and its reply may use together."""

    positions: int  # positions of the model; 0: not known, no prompt is refused
    max_new_tokens: int  # per reply

    def check(self, prompt: np.ndarray, turn: int) -> None:
        """Refuse a prompt that leaves no room for its reply.

        Args:
          prompt: int32 ids.
          turn: 0-based index of the prompt's turn.

        Raises:
          PromptError: the prompt and a reply need more positions than the model has.
        """
        if self.positions and len(prompt) + self.max_new_tokens > self.positions:
            raise PromptError(
                f"the prompt of turn {turn + 1} has {len(prompt)} tokens and its reply up to "
                f"{self.max_new_tokens}, but the model has {self.positions} positions; lower "
                "rollout.max_new_tokens or env.max_turns, or shorten the prompt "
                "(env.max_context, env.context)"
            )


def begin_turns(plays: Sequence[Play], chat: Chat, room: Room) -> None:
    """Give each play the message and the prompt that its next reply answers.

    A play breaks if its prompt cannot be used (too long, refused by the tokenizer, or with an image
    that the model cannot process); `Play.error` gives the reason. A broken play without any turn
    gets the prompt of an empty observation, so that every episode has a turn; otherwise it is over.

    With several processes, all must call this function together, each with its plays.

    Raises:
      PromptError: the prompt of an empty observation cannot be used either.
    """
    for play in plays:
        try:
            chat.check_images(play.observation)
        except PromptError as error:
            _leave_out(play, error)
    chat.images.register(image for play in plays for image in images_of(play.observation))
    for play in plays:
        if play.over:
            continue
        try:
            _begin_turn(play, chat, room)
        except PromptError as error:
            _leave_out(play, error)
            if not play.over:
                _begin_turn(play, chat, room)


def _begin_turn(play: Play, chat: Chat, room: Room) -> None:
    play.spans = chat.image_spans(play.observation)
    play.message = chat.observe(
        play.observation,
        actions_used=play.actions_used,
        last_valid=not play.turns or play.turns[-1].valid,
    )
    play.prompt = chat.prompt_ids(play.turns, play.message, play.spans)
    room.check(play.prompt, len(play.turns))


def _leave_out(play: Play, error: PromptError) -> None:
    """Mark a play as broken because its prompt cannot be used."""
    play.observation = ""
    play.over = bool(play.turns)
    if not play.error:
        name = getattr(play.state, "row", None)
        row = "" if name is None else f" (row {name})"
        play.error = f"{PROMPT_ERROR}: environment seed {play.seed}{row}: {error}"


def is_prompt_error(error: str) -> bool:
    """Return whether an `Episode.error` is due to the prompt, not to the environment's code."""
    return error.startswith(f"{PROMPT_ERROR}: ")


def act_on(
    replies: Sequence[tuple[Play, np.ndarray, np.ndarray]],
    environment: Environment,
    chat: Chat,
    max_actions: int,
    limits: Limits,
    clock: Clock | None,
) -> None:
    """Parse each reply, run its actions and append the turn to its play.

    A reply that cannot be parsed runs no actions.

    Args:
      replies: (play, sampled ids, log-probs) of each reply.
    """
    read = [(play, chat.read(sampled)) for play, sampled, _ in replies]
    asked = [
        StepRequest(play.state, reply.actions, play.rng, max_actions - play.actions_used)
        for play, reply in read
        if not play.error
    ]
    acted = iter(act(environment, asked, limits, clock))
    for (play, sampled, logp), (_, reply) in zip(replies, read, strict=True):
        result = None if play.error else next(acted)
        if isinstance(result, EnvFailure):
            play.error = result.traceback
        if not isinstance(result, StepResult):
            result = StepResult(play.state, (), 0.0, {"error": last_line(play.error)}, True, "")
        images = images_of(play.observation)
        play.state, play.observation = result.state, result.observation
        play.actions_used += len(result.actions)
        play.success |= bool(result.info.get("success", False))
        play.over = result.done or play.actions_used >= max_actions
        play.turns.append(
            Turn(
                prompt=play.prompt,
                message=play.message,
                sampled=sampled,
                logp=logp,
                reasoning=reply.reasoning,
                answer=reply.answer,
                actions=result.actions,
                valid=reply.valid,
                reward=result.reward,
                info=result.info,
                images=images,
                spans=play.spans,
                experts=new_part(play.turns, play.prompt, play.experts),
            )
        )
