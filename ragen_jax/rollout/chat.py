"""Text and tokens: build the prompt of a turn, read the reply.

Only this file knows context modes. The mode decides how many turns a prompt shows, including the
current turn: "full" all, "window" the last W, "single_turn" one (W = 1). The system message of full
and brief prompts is always shown.

A prompt always ends with the opening `<think>`, so that X (the prompt) ends and Z (the reasoning)
begins at a token boundary. Sampled ids are kept unchanged: a later turn's prompt repeats the ids,
never their re-tokenised text. It includes their reasoning, even if the template would leave that
out (Qwen3's does).

Text never becomes control tokens (template.py): the control ids in a prompt are those that the chat
template places. Since every control id ends a reply, an earlier reply adds at most its last id.
A tag in an observation stays in the text and has no effect: the reasoning is the text after the
prompt, and only sampled ids are parsed.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragen_jax.core.types import Turn
from ragen_jax.envs.types import (
    IMAGE,
    BriefEnvironment,
    BudgetEnvironment,
    Environment,
    Observation,
    ToolEnvironment,
)
from ragen_jax.model.template import (
    NOTICE,
    Message,
    PromptError,
    Span,
    Template,
    parse_chat_template,
)
from ragen_jax.model.token_bytes import token_bytes
from ragen_jax.model.vision.image_table import NO_IMAGES, ImageSource
from ragen_jax.rollout.stops import END_OF_REASONING, Stops, find_end, make_stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# context -> largest number of turns that a prompt shows when the episode has `turns` turns
CONTEXTS = {
    "full": lambda turns, window: turns,
    "window": lambda turns, window: min(turns, window),
    "single_turn": lambda turns, window: 1,
}
PROMPTS = ("full", "brief", "terse")

Spans = tuple[Span, ...]

FEW = 64  # texts of fewer tokens are joined token by token

ANSWER_ENDS = ("</answer>", "</tool_call>")  # texts after which nothing of a reply is read

_REPLY_FORMAT = (
    "Think first, then act. Answer in the form "
    "<think>your reasoning</think><answer>your actions</answer>, with at most {actions_per_turn} "
    "action(s) separated by ||, each one of: {actions}. Example: <answer>{example}</answer>"
)
_TEXT_REPLY_FORMAT = (
    "Think first, then answer. Answer in the form "
    "<think>your reasoning</think><answer>your answer</answer>."
)
_TOOL_REPLY_FORMAT = (
    "Think first, then call a tool or answer. A reply is <think>your reasoning</think> and behind "
    "it either one call of a tool or <answer>your answer</answer>, which is final."
)

# The reply formats of brief prompts.
_BRIEF_REPLY_FORMAT = "Reply as <think>reasoning</think><answer>{example}</answer>: {actions}."
_BRIEF_TEXT_REPLY_FORMAT = "Reply as <think>reasoning</think><answer>answer</answer>."
_BRIEF_TOOL_REPLY_FORMAT = (
    "Reply as <think>reasoning</think> and one tool call, or <answer>final answer</answer>."
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """A parsed reply. Spans are half-open ranges of its tokens."""

    reasoning: tuple[int, int]
    answer: tuple[int, int]
    actions: tuple[str, ...]  # known actions, at most actions_per_turn; a text answer is an action
    valid: bool
    calls: bool = False  # whether it calls a tool; the action is then the call's text with its tags


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """What the prompts of an environment show.

    Raises:
      ValueError: unknown context or prompt, or a window below 1.
    """

    context: str  # a key of CONTEXTS
    # One of PROMPTS: "full" (rules and reply format in the system message, budgets in the user
    # message), "brief" (the same in few tokens, budgets only if they matter) or "terse" (the bare
    # observation: for an agent that has learnt the rest by imitation)
    prompt: str
    actions_per_turn: int  # the rollout's budgets, which full and brief prompts state
    max_actions: int  # per episode
    window: int = 1  # turns that context "window" shows, including the current turn; at least 1
    max_prompt: int = 0  # tokens above which a prompt drops its oldest turns; 0: no limit
    stop: tuple[str, ...] = ()  # stop strings: texts after the reasoning that end a reply
    strict: bool = True  # whether text after </answer> makes a reply invalid

    def __post_init__(self) -> None:
        if self.context not in CONTEXTS:
            raise ValueError(f"env.context is {self.context!r}; accepted: {', '.join(CONTEXTS)}")
        if self.window < 1:
            raise ValueError(f"env.window is {self.window}; it must be at least 1")
        if self.prompt not in PROMPTS:
            raise ValueError(f"env.prompt is {self.prompt!r}; accepted: {', '.join(PROMPTS)}")


@dataclasses.dataclass(frozen=True)
class Chat:
    """The conversation format of one environment, with a tokenizer's chat template."""

    template: Template
    token_bytes: tuple[bytes, ...]  # bytes of each token id
    close_id: int  # the stop id with which the template ends a reply
    end_ids: tuple[int, ...]  # close_id, the tokenizer's eos and the model's stop ids
    stop_ids: tuple[int, ...]  # ids that end a reply: end_ids and every other control id
    format: ChatFormat
    actions: tuple[str, ...]  # empty: any text is an action
    system: str | None = None  # text of the system message; None: no system message
    opening: tuple[int, ...] = ()  # ids at the end of every prompt, which the reply continues
    images: ImageSource = NO_IMAGES  # the images that messages show
    stops: Stops | None = None  # the stop strings of the format; None: there are none
    budget_matters: bool = True  # whether brief messages state the actions left

    @property
    def prefix_ids(self) -> np.ndarray:
        """The int32 ids that every prompt begins with: those of the system message, or none."""
        return self.template.opening.ids

    def check_images(self, observation: str | Observation) -> None:
        """Raise PromptError for an image that the model cannot process."""
        for image in images_of(observation):
            try:
                self.images.check(image)
            except ValueError as error:
                raise PromptError(str(error)) from error

    def image_spans(self, observation: str | Observation) -> Spans:
        """Return the spans of an observation's images, which must be registered.

        Raises:
          ValueError: an image is not registered.
        """
        return tuple(self.images.span(image) for image in images_of(observation))

    def observe(
        self, observation: str | Observation, *, actions_used: int, last_valid: bool
    ) -> str:
        """Return the user message of a turn, with envs.types.IMAGE in the place of each image."""
        parts = [] if last_valid else [NOTICE]
        parts.append(observation.text if isinstance(observation, Observation) else observation)
        budget = self._describe_budget(self.format.max_actions - actions_used)
        return "\n".join([*parts, budget] if budget else parts)

    def _describe_budget(self, left: int) -> str:
        """Return what a user message says about the number of actions left; "" for nothing."""
        format, tools = self.format, self.template.tools
        if format.prompt == "full" and self.actions:
            limit = min(left, format.actions_per_turn)
            return f"You have {left} action(s) left, at most {limit} in this reply."
        if format.prompt == "full" and format.max_actions > 1:
            return f"You have {left} {'call(s) or answer(s)' if tools else 'answer(s)'} left."
        several = format.max_actions > format.actions_per_turn  # otherwise one reply may use all
        if format.prompt == "brief" and self.budget_matters and several:
            kinds = ("action",) if self.actions else ("call", "answer") if tools else ("answer",)
            return f"{left} {' or '.join(kind + 's' * (left != 1) for kind in kinds)} left."
        return ""

    def prompt_ids(self, turns: Sequence[Turn], message: str, spans: Spans = ()) -> np.ndarray:
        """Return the int32 ids of the prompt that shows `message` after the earlier `turns`.

        The prompt shows the turns that the context mode allows, without the oldest turns if there
        are more than format.max_prompt tokens. A turn is shown in full, with its original message.

        Args:
          spans: spans of the images in the message, as in `Turn`.

        Raises:
          PromptError: `message` alone is too long, or the tokenizer refuses it.
        """
        limit = self.format.max_prompt
        for first in range(self._oldest(turns), len(turns) + 1):
            prompt = self._show(turns, first, in_parts(message, spans))
            if not limit or len(prompt) <= limit:
                return prompt
        raise PromptError(
            f"the prompt of turn {len(turns) + 1} has {len(prompt)} tokens even without "
            f"earlier turns, but env.max_context leaves {limit} after "
            "rollout.max_new_tokens for the reply; raise env.max_context, or set it to 0 to "
            "use the model's limit"
        )

    def _oldest(self, turns: Sequence[Turn]) -> int:
        """Return the index of the oldest earlier turn that the context mode allows."""
        shown = CONTEXTS[self.format.context](len(turns) + 1, self.format.window)
        return len(turns) + 1 - shown

    def _show(self, turns: Sequence[Turn], first: int, message: Message) -> np.ndarray:
        """Return the prompt that shows turns[first:] and `message`."""
        if first == len(turns):
            return np.append(self.template.begin(message), np.array(self.opening, np.int32))
        last = turns[-1]
        # A prompt that drops nothing continues the last prompt, which did not drop anything either.
        shown = last.prompt
        if first:
            shown = self._show(turns[:-1], first, in_parts(last.message, last.spans))
        # The template closes a reply. If the policy has sampled that token, it is not repeated.
        closed = len(last.sampled) > 0 and last.sampled[-1] == self.close_id
        close = self.template.next_turn(message, result=self.calls(last))
        close = np.append(close, np.array(self.opening, np.int32))
        return np.concatenate([shown, last.sampled, close[1:] if closed else close])

    def reply_ids(self, text: str) -> np.ndarray:
        """Return the int32 ids of a reply given as text (of a demonstration), with `close_id`."""
        return np.append(self.template.plain(text), np.int32(self.close_id))

    def without_reasoning(
        self, turns: Sequence[Turn], message: str, prompt: np.ndarray, spans: Spans = ()
    ) -> np.ndarray:
        """Return the int32 ids of `prompt` without the reasoning of the replies that it shows.

        An earlier reply keeps its sampled ids from </think> on; a reply that never closed its
        reasoning keeps none. The user messages and the choice of shown turns are unchanged.

        Args:
          turns: the episode's turns before the turn of the prompt.
          message, prompt, spans: of the turn of the prompt.

        Raises:
          ValueError: `prompt` does not show the last of these turns.
        """

        bare = []
        for turn in turns[self.first_shown(turns, message, prompt, spans) :]:
            closed = END_OF_REASONING in self._bytes(turn.sampled)[0]
            start = turn.reasoning[1] if closed else len(turn.sampled)
            bare.append(dataclasses.replace(turn, sampled=turn.sampled[start:]))
        return self._show_all(bare, in_parts(message, spans))

    def first_shown(
        self, turns: Sequence[Turn], message: str, prompt: np.ndarray, spans: Spans = ()
    ) -> int:
        """Return the index of the oldest earlier turn that `prompt` shows; len(turns): none.

        Args:
          message, prompt, spans: of the turn of the prompt.

        Raises:
          ValueError: `prompt` does not show the last of these turns.
        """
        for first in range(self._oldest(turns), len(turns) + 1):
            if np.array_equal(self._show_all(turns[first:], in_parts(message, spans)), prompt):
                return first
        raise ValueError(
            f"a prompt of {len(prompt)} tokens does not contain its {len(turns)} turns"
        )

    def _show_all(self, turns: Sequence[Turn], message: Message) -> np.ndarray:
        """Return the prompt that shows all of `turns` and `message`."""
        chain: list[Turn] = []
        for turn in turns:
            before = self._show(chain, 0, in_parts(turn.message, turn.spans))
            chain.append(dataclasses.replace(turn, prompt=before))
        return self._show(chain, 0, message)

    def calls(self, turn: Turn) -> bool:
        """Return whether a turn's reply calls a tool, so that the next message is its result."""
        return bool(self.template.tools) and self.read(turn.sampled).calls

    def read(self, sampled: Sequence[int] | np.ndarray) -> Reply:
        """Parse sampled ids. Never raises: a reply may contain anything."""
        if len(sampled) and int(sampled[-1]) in self.stop_ids:
            sampled = sampled[:-1]
        text, ends = self._bytes(sampled)
        close = text.find(END_OF_REASONING)
        if close < 0:
            return Reply((0, 0), (0, 0), (), False)
        # The token that ends a stop string may contain further text.
        stops = self.stops.texts if self.stops else ()
        text = text[: find_end(text, stops if self.format.strict else (*stops, *ANSWER_ENDS))]
        reasoning, rest = token_span(ends, 0, close), close + len(END_OF_REASONING)
        # The answer must follow the first </think>, and nothing may follow the answer (except after
        # a stop string, or unless format.strict).
        inside = enclosed(text, rest, b"answer")
        if inside is None and self.template.tools:
            call = enclosed(text, rest, b"tool_call")
            if call is not None and b"<tool_call>" not in text[slice(*call)]:
                action_text = text[rest:].strip().decode("utf-8", errors="replace")
                return Reply(reasoning, token_span(ends, *call), (action_text,), True, calls=True)
        if inside is None:
            return Reply(reasoning, (0, 0), (), False)
        answer = token_span(ends, *inside)
        action_text = text[slice(*inside)].decode("utf-8", errors="replace")
        if not self.actions:
            action_text = action_text.strip()
            return Reply(
                reasoning, answer, (action_text,) if action_text else (), bool(action_text)
            )
        known = {action.lower(): action for action in self.actions}
        words = [word.strip().lower() for word in action_text.split("||")][
            : self.format.actions_per_turn
        ]
        actions = tuple(known[word] for word in words if word in known)
        return Reply(reasoning, answer, actions, len(actions) == len(words))

    def ends_reply(self, sampled: Sequence[int] | np.ndarray) -> bool:
        """Return whether a reply ended by itself: by a stop token or a stop string."""
        if not len(sampled):
            return False
        by_text = self.stops is not None and self.stops.have_ended(sampled)
        return int(sampled[-1]) in self.stop_ids or by_text

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids, stop tokens included."""
        return self._bytes(ids)[0].decode("utf-8", errors="replace")

    @functools.cached_property
    def _table(self) -> tuple[list[bytes], np.ndarray, np.ndarray, np.ndarray]:
        """(bytes of each id, all of them joined, first byte of each id, its number of bytes).

        The last entry is for ids without text.
        """
        # An embedding may have more rows than the tokenizer has ids (Qwen2.5 pads it), so that
        # an id without text can be sampled; it is decoded to a byte that UTF-8 never uses.
        pieces = [*self.token_bytes, b"\xff"]
        size_V = np.array([len(piece) for piece in pieces], np.int32)
        first_V = np.cumsum(size_V, dtype=np.int32) - size_V
        return pieces, np.frombuffer(b"".join(pieces), np.uint8), first_V, size_V

    def _bytes(self, ids: Sequence[int] | np.ndarray) -> tuple[bytes, np.ndarray]:
        """Return (the bytes of token ids, offset at which the bytes of each id end)."""
        pieces, letters, first_V, size_V = self._table
        places_T = np.minimum(np.asarray(ids, np.int64), len(self.token_bytes))
        size_T = size_V[places_T]
        ends_T = size_T.cumsum(dtype=np.int32)
        if len(ids) < FEW:
            return b"".join([pieces[place] for place in places_T.tolist()]), ends_T
        # For 4,096 tokens, joining would take four times as long.
        moved_T = first_V[places_T] - (ends_T - size_T)
        at = np.repeat(moved_T, size_T)
        at += np.arange(len(at), dtype=np.int32)
        return letters[at].tobytes(), ends_T


def images_of(observation: str | Observation) -> tuple[np.ndarray, ...]:
    """Return the images of an observation."""
    return observation.images if isinstance(observation, Observation) else ()


def in_parts(message: str, spans: Spans) -> Message:
    """Split a message into alternating texts and image spans; without images, return its text."""
    if not spans:
        return message
    texts = message.split(IMAGE)
    pairs = zip(spans, texts[1:], strict=True)
    return (texts[0], *(part for pair in pairs for part in pair))


def enclosed(text: bytes, start: int, tag: bytes) -> tuple[int, int] | None:
    """Return the span between <tag> and </tag> if text[start:] is exactly these, else None.

    Whitespace before <tag> and after </tag> is allowed.
    """
    opening, closing, rest = b"<%s>" % tag, b"</%s>" % tag, text[start:]
    begin = len(text) - len(rest.lstrip()) + len(opening)
    stop = start + len(rest.rstrip()) - len(closing)
    found = text.startswith(opening, begin - len(opening)) and text.startswith(closing, stop)
    return (begin, stop) if found else None  # two tags cannot overlap


def token_span(ends: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """Return the span of tokens entirely inside bytes [start, stop)."""
    # Token i begins where token i - 1 ends.
    first = 1 + int(ends[:-1].searchsorted(start)) if start > 0 else 0
    last = int(ends.searchsorted(stop, side="right"))
    return (first, last) if last > first else (0, 0)


def make_chat(
    tokenizer: "PreTrainedTokenizerFast",
    environment: "Environment",
    format: ChatFormat,
    *,
    extra_stop_ids: Iterable[int] = (),
    images: ImageSource = NO_IMAGES,
    date: str | None = None,
) -> Chat:
    """Return the `Chat` of an environment and a tokenizer.

    Args:
      tokenizer: has a chat template.
      environment: defines `actions`, `instructions` and optionally `tools`, `brief` and
        `budget_matters`.
      extra_stop_ids: further ids that end a reply (those of a model's generation_config).
      images: the images that messages may show.
      date: as in `parse_chat_template`.

    Raises:
      ValueError: a tokenizer whose bytes are unknown, or a chat template that cannot be parsed.
    """
    pieces = token_bytes(tokenizer)
    stops = None
    tools = environment.tools if isinstance(environment, ToolEnvironment) else ()
    system = _describe_rules(environment, format, bool(tools))
    template = parse_chat_template(tokenizer, system, tools, images.pad, date)
    ends = {template.close_id, *extra_stop_ids}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    if format.stop:
        calls = ("</tool_call>",) if tools else ()
        stops = make_stops(pieces, tuple(dict.fromkeys((*format.stop, *calls))))
    return Chat(
        template=template,
        token_bytes=pieces,
        close_id=template.close_id,
        end_ids=tuple(sorted(ends)),
        stop_ids=tuple(sorted(ends | template.control)),
        format=format,
        actions=environment.actions,
        system=system,
        images=images,
        stops=stops,
        budget_matters=not isinstance(environment, BudgetEnvironment) or environment.budget_matters,
    )


def _describe_rules(environment: Environment, format: ChatFormat, tools: bool) -> str | None:
    """Return the system message, the rules and the reply format; None for terse prompts."""
    actions, most = environment.actions, format.actions_per_turn
    if format.prompt == "full":
        rules = _TOOL_REPLY_FORMAT if tools else _TEXT_REPLY_FORMAT
        if actions:
            rules = _REPLY_FORMAT.format(
                actions_per_turn=most,
                actions=", ".join(actions),
                example=" || ".join(actions[:most]),
            )
        return environment.instructions + "\n\n" + rules
    if format.prompt == "brief":
        rules = _BRIEF_TOOL_REPLY_FORMAT if tools else _BRIEF_TEXT_REPLY_FORMAT
        if actions:
            rules = _BRIEF_REPLY_FORMAT.format(
                actions=f"{'one' if most == 1 else f'at most {most}'} of {', '.join(actions)}",
                example="||".join(actions[: min(most, 2)]),  # as in demonstrations
            )
        has_brief = isinstance(environment, BriefEnvironment)
        game = environment.brief if has_brief else environment.instructions
        return f"{game}\n{rules}" if game else rules
    return None
