"""Text and tokens: what a turn's prompt shows, and what a reply says.

Only this file knows context modes, which say how many turns a prompt shows, the current one
included: "full" all, "window" the last W, "single_turn" one (W = 1). What stands before the first
turn (a system message with full prompts) is always shown.

A prompt always ends with the opening `<think>`, so that X (the prompt) ends and Z (the reasoning)
begins at a token boundary. Sampled ids are kept as they are: a later turn's prompt repeats them,
never their re-tokenised text, and with their reasonings, also where the template alone would leave
those out (Qwen3's does).

Text is never control (template.py): in a prompt the control ids are those that the chat template
places. Because every control id ends a reply, an earlier reply adds at most the one it ended with.
A tag in an observation stays a tag, which does nothing there: the reasoning is what follows the
prompt, and only sampled ids are read.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragen_jax.core.types import Turn
from ragen_jax.envs.types import IMAGE, Observation, ToolEnvironment
from ragen_jax.model.template import (
    NOTICE,
    Message,
    PromptError,
    Span,
    Template,
    parse_chat_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ragen_jax.envs.types import Environment

# context -> the most turns that a prompt shows when the episode has `turns` of them
CONTEXTS = {
    "full": lambda turns, window: turns,
    "window": lambda turns, window: min(turns, window),
    "single_turn": lambda turns, window: 1,
}
PROMPTS = ("full", "terse")

Spans = tuple[Span, ...]

_CLOSE = b"</think>"

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


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a sampled reply says. Spans are half-open ranges of its tokens."""

    reasoning: tuple[int, int]
    answer: tuple[int, int]
    actions: tuple[str, ...]  # the known ones, at most actions_per_turn; a text answer is one
    valid: bool
    calls: bool = False  # a tool: the action is then the text of the call, tags included


@dataclasses.dataclass(frozen=True)
class Chat:
    """How one environment speaks through a tokenizer's chat template."""

    template: Template
    token_bytes: tuple[bytes, ...]
    close_id: int  # the stop id with which the template ends a reply
    end_ids: tuple[int, ...]  # close_id, the tokenizer's eos and the model's own ends of a reply
    stop_ids: tuple[int, ...]  # what ends a reply: end_ids and every other control id
    context: str
    window: int  # turns that context "window" shows, at least 1
    max_prompt: int  # tokens of a prompt; 0: no limit
    prompt: str
    actions: tuple[str, ...]  # empty: any text is an action
    actions_per_turn: int
    max_actions: int
    system: str | None = None  # text of the system message; None: there is none
    opening: tuple[int, ...] = ()  # ids that every prompt ends with: the reply goes on from them

    def observe(
        self, observation: str | Observation, *, actions_used: int, last_valid: bool
    ) -> str:
        """The user message of a turn, with envs.types.IMAGE where the observation has an image."""
        parts = [] if last_valid else [NOTICE]
        parts.append(observation.text if isinstance(observation, Observation) else observation)
        left = self.max_actions - actions_used
        if self.prompt == "full" and self.actions:
            limit = min(left, self.actions_per_turn)
            parts.append(f"You have {left} action(s) left, at most {limit} in this reply.")
        elif self.prompt == "full" and self.max_actions > 1:
            what = "call(s) or answer(s)" if self.template.tools else "answer(s)"
            parts.append(f"You have {left} {what} left.")
        return "\n".join(parts)

    def prompt_ids(self, turns: Sequence[Turn], message: str, spans: Spans = ()) -> np.ndarray:
        """int32 ids of the prompt that shows `message` after the episode's earlier `turns`.

        Shows the turns that the context mode allows, less the oldest where they are more than
        max_prompt tokens. A turn is shown whole, with the message it had then.

        Args:
          spans: of the images in the message, as in `Turn`.

        Raises:
          PromptError: `message` alone is too long, or the tokenizer refuses it.
        """
        for first in range(self._oldest(turns), len(turns) + 1):
            prompt = self._show(turns, first, in_parts(message, spans))
            if not self.max_prompt or len(prompt) <= self.max_prompt:
                return prompt
        raise PromptError(
            f"the prompt of turn {len(turns) + 1} has {len(prompt)} tokens even without "
            f"earlier turns, but env.max_context leaves {self.max_prompt} after "
            "rollout.max_new_tokens for the reply; raise env.max_context, or set it to 0 to "
            "use the model's limit"
        )

    def _oldest(self, turns: Sequence[Turn]) -> int:
        """The index of the oldest of the earlier turns that the context mode allows."""
        return len(turns) + 1 - CONTEXTS[self.context](len(turns) + 1, self.window)

    def _show(self, turns: Sequence[Turn], first: int, message: Message) -> np.ndarray:
        """The prompt that shows turns[first:] and `message`."""
        if first == len(turns):
            return np.append(self.template.begin(message), np.array(self.opening, np.int32))
        last = turns[-1]
        # A prompt from which nothing is dropped goes on from the last one, which dropped nothing.
        shown = last.prompt
        if first:
            shown = self._show(turns[:-1], first, in_parts(last.message, last.spans))
        # The template closes a reply; where the policy did so itself that token is not repeated.
        closed = len(last.sampled) > 0 and last.sampled[-1] == self.close_id
        close = self.template.next_turn(message, result=self.calls(last))
        close = np.append(close, np.array(self.opening, np.int32))
        return np.concatenate([shown, last.sampled, close[1:] if closed else close])

    def reply_ids(self, text: str) -> np.ndarray:
        """int32 ids of a reply that is given as text (a demonstration's), `close_id` at its end."""
        return np.append(self.template.plain(text), np.int32(self.close_id))

    def without_reasoning(
        self, turns: Sequence[Turn], message: str, prompt: np.ndarray, spans: Spans = ()
    ) -> np.ndarray:
        """`prompt` less the reasonings of the replies that it shows, int32 ids.

        Of an earlier reply its sampled ids from </think> on are left, and nothing of one that never
        closed its reasoning. User messages stay as they were, and which turns are shown does, too.

        Args:
          turns: the episode's turns before the prompt's.
          message, prompt, spans: of the prompt's own turn.

        Raises:
          ValueError: `prompt` shows something else than the last of these turns.
        """

        bare = []
        for turn in turns[self.first_shown(turns, message, prompt, spans) :]:
            closed = _CLOSE in self._bytes(turn.sampled)[0]
            start = turn.reasoning[1] if closed else len(turn.sampled)
            bare.append(dataclasses.replace(turn, sampled=turn.sampled[start:]))
        return self._show_all(bare, in_parts(message, spans))

    def first_shown(
        self, turns: Sequence[Turn], message: str, prompt: np.ndarray, spans: Spans = ()
    ) -> int:
        """The index of the oldest of the earlier `turns` that `prompt` shows; len(turns): none.

        Args:
          message, prompt, spans: of the prompt's own turn.

        Raises:
          ValueError: `prompt` shows something else than the last of these turns.
        """
        for first in range(self._oldest(turns), len(turns) + 1):
            if np.array_equal(self._show_all(turns[first:], in_parts(message, spans)), prompt):
                return first
        raise ValueError(
            f"a prompt of {len(prompt)} tokens does not contain its {len(turns)} turns"
        )

    def _show_all(self, turns: Sequence[Turn], message: Message) -> np.ndarray:
        """The prompt that shows all of `turns` and `message`."""
        chain: list[Turn] = []
        for turn in turns:
            before = self._show(chain, 0, in_parts(turn.message, turn.spans))
            chain.append(dataclasses.replace(turn, prompt=before))
        return self._show(chain, 0, message)

    def calls(self, turn: Turn) -> bool:
        """Whether a turn's reply calls a tool, so that what is shown next is what came of it."""
        return bool(self.template.tools) and self.read(turn.sampled).calls

    def read(self, sampled: Sequence[int] | np.ndarray) -> Reply:
        """What sampled ids say. Never raises: a reply may hold anything."""
        if len(sampled) and int(sampled[-1]) in self.stop_ids:
            sampled = sampled[:-1]
        text, ends = self._bytes(sampled)
        close = text.find(_CLOSE)
        if close < 0:
            return Reply((0, 0), (0, 0), (), False)
        reasoning, rest = token_span(ends, 0, close), close + len(_CLOSE)
        # The answer must follow the first </think>, and nothing may follow the answer.
        inside = enclosed(text, rest, b"answer")
        if inside is None and self.template.tools:
            call = enclosed(text, rest, b"tool_call")
            if call is not None and b"<tool_call>" not in text[slice(*call)]:
                said = text[rest:].strip().decode("utf-8", errors="replace")
                return Reply(reasoning, token_span(ends, *call), (said,), True, calls=True)
        if inside is None:
            return Reply(reasoning, (0, 0), (), False)
        answer = token_span(ends, *inside)
        said = text[slice(*inside)].decode("utf-8", errors="replace")
        if not self.actions:
            said = said.strip()
            return Reply(reasoning, answer, (said,) if said else (), bool(said))
        known = {action.lower(): action for action in self.actions}
        words = [word.strip().lower() for word in said.split("||")][: self.actions_per_turn]
        actions = tuple(known[word] for word in words if word in known)
        return Reply(reasoning, answer, actions, len(actions) == len(words))

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids, stop tokens included."""
        return self._bytes(ids)[0].decode("utf-8", errors="replace")

    @functools.cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(bytes of all ids in a row, where an id's begin, how many); last an id without text."""
        # An embedding may have more rows than the tokenizer has ids (Qwen2.5 pads it), so that
        # an id without text can be sampled; it reads as a byte that UTF-8 never uses.
        pieces = [*self.token_bytes, b"\xff"]
        size_V = np.array([len(piece) for piece in pieces], np.int32)
        first_V = np.cumsum(size_V, dtype=np.int32) - size_V
        return np.frombuffer(b"".join(pieces), np.uint8), first_V, size_V

    def _bytes(self, ids: Sequence[int] | np.ndarray) -> tuple[bytes, np.ndarray]:
        """(the bytes of token ids, where among them each id's end)."""
        letters, first_V, size_V = self._table
        # Not a piece a token: joining 4,096 of them takes longer than all else that is read.
        places_T = np.minimum(np.asarray(ids, np.int64), len(self.token_bytes))
        size_T = size_V[places_T]
        ends_T = np.cumsum(size_T, dtype=np.int32)
        moved_T = first_V[places_T] - (ends_T - size_T)
        at = np.repeat(moved_T, size_T)
        at += np.arange(len(at), dtype=np.int32)
        return letters[at].tobytes(), ends_T


def in_parts(message: str, spans: Spans) -> Message:
    """A message as texts and images in turn; a text alone where it has no image."""
    if not spans:
        return message
    texts = message.split(IMAGE)
    behind = zip(spans, texts[1:], strict=True)
    return (texts[0], *(part for pair in behind for part in pair))


def enclosed(text: bytes, start: int, tag: bytes) -> tuple[int, int] | None:
    """The span between <tag> and </tag> where text[start:] is these alone, else None.

    Whitespace may stand before and behind them.
    """
    opening, closing, rest = b"<%s>" % tag, b"</%s>" % tag, text[start:]
    begin = len(text) - len(rest.lstrip()) + len(opening)
    stop = start + len(rest.rstrip()) - len(closing)
    found = text.startswith(opening, begin - len(opening)) and text.startswith(closing, stop)
    return (begin, stop) if found else None  # two tags cannot overlap


def token_span(ends: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The tokens lying wholly inside bytes [start, stop); a straddling token is outside."""
    first = int(np.searchsorted(np.concatenate([[0], ends[:-1]]), start, side="left"))
    last = int(np.searchsorted(ends, stop, side="right"))
    return (first, last) if last > first else (0, 0)


def make_chat(
    tokenizer: "PreTrainedTokenizerFast",
    environment: "Environment",
    *,
    context: str,
    window: int = 1,
    max_prompt: int = 0,
    prompt: str,
    actions_per_turn: int,
    max_actions: int,
    extra_stop_ids: Iterable[int] = (),
    image_pad: int | None = None,
    date: str | None = None,
) -> Chat:
    """The `Chat` of an environment and a tokenizer.

    Args:
      tokenizer: one with a chat template.
      environment: gives `actions` and `instructions`, and perhaps `tools`.
      context: a key of CONTEXTS.
      window: turns that context "window" shows, the current one included.
      max_prompt: tokens from which on a prompt drops its oldest turns; 0: no limit.
      prompt: "full" (rules and reply format in the system message, budgets in the user message)
        or "terse" (the bare observation: for an agent that has learnt the rest by imitation).
      actions_per_turn, max_actions: the rollout's budgets, told to a policy with full prompts.
      extra_stop_ids: further ids that end a reply (those of a model's generation_config).
      image_pad, date: of `take_apart`.

    Raises:
      ValueError: unknown context or prompt, a window below 1, a tokenizer that is not byte-level,
        or a chat template that cannot be taken apart.
    """
    if context not in CONTEXTS:
        raise ValueError(f"env.context is {context!r}; accepted: {', '.join(CONTEXTS)}")
    if window < 1:
        raise ValueError(f"env.window is {window}; it must be at least 1")
    if prompt not in PROMPTS:
        raise ValueError(f"env.prompt is {prompt!r}; accepted: {', '.join(PROMPTS)}")
    pieces = token_bytes(tokenizer)
    system = None
    tools = environment.tools if isinstance(environment, ToolEnvironment) else ()
    if prompt == "full":
        rules = _TOOL_REPLY_FORMAT if tools else _TEXT_REPLY_FORMAT
        if environment.actions:
            rules = _REPLY_FORMAT.format(
                actions_per_turn=actions_per_turn,
                actions=", ".join(environment.actions),
                example=" || ".join(environment.actions[:actions_per_turn]),
            )
        system = environment.instructions + "\n\n" + rules
    template = parse_chat_template(tokenizer, system, tools, image_pad, date)
    ends = {template.close_id, *extra_stop_ids}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return Chat(
        template=template,
        token_bytes=pieces,
        close_id=template.close_id,
        end_ids=tuple(sorted(ends)),
        stop_ids=tuple(sorted(ends | template.control)),
        context=context,
        window=window,
        max_prompt=max_prompt,
        prompt=prompt,
        actions=environment.actions,
        actions_per_turn=actions_per_turn,
        max_actions=max_actions,
        system=system,
    )


@functools.lru_cache(maxsize=8)
def token_bytes(tokenizer: "PreTrainedTokenizerFast") -> tuple[bytes, ...]:
    """The bytes of every id of a byte-level BPE tokenizer (Qwen2.5, Qwen3, Llama-3, our tiny one).

    Byte-level BPE writes each byte as one printable character (GPT-2's table): the printable
    Latin-1 bytes stand for themselves, the others are numbered from U+0100 on. Added tokens
    are plain text.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + i): byte for i, byte in enumerate(others)}
    added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
    pieces = []
    for id_, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if id_ in added:
            pieces.append(added[id_].encode())
        elif token is None:  # a hole in the vocabulary
            pieces.append(b"")
        elif all(character in byte_of for character in token):
            pieces.append(bytes(byte_of[character] for character in token))
        else:
            raise ValueError(
                f"token {id_} ({token!r}) is not byte-level; only byte-level BPE tokenizers "
                "(Qwen2.5, Qwen3, Llama-3) are supported"
            )
    return tuple(pieces)
