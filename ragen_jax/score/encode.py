"""Convert rollouts to token ids, and find the reasoning and the answer in them.

As in training, X is the prompt up to and including the tag that opens the reasoning, whether the
template, the trainer or the policy wrote it; Z is the tokens entirely between the tags.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_jax.core.types import Turn
from ragen_jax.model.dates import with_date
from ragen_jax.model.token_bytes import token_bytes
from ragen_jax.rollout.chat import token_span
from ragen_jax.score import prompts, transcript
from ragen_jax.score.formats import ParsedReply, Prompt
from ragen_jax.score.messages import CALL_KEYS, CLOSE, OPEN, Messages, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THINK = ("<think>", "</think>")
ANSWER = ("<answer>", "</answer>")
MAX_TEXT = 2_000_000  # largest number of characters of a prompt or a reply, beyond any model's


@dataclasses.dataclass(frozen=True)
class EncodedReply:
    """A reply as token ids."""

    prompt_ids: np.ndarray  # int32, the prompt as it was given
    turn: Turn  # its prompt ends, and its reply begins, where the reasoning begins


@dataclasses.dataclass
class Counts:
    """How the prompts and replies of rows were read."""

    prompt_kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    # Numbers of prompts and replies that lack a part.
    missing_parts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    transcripts: int = 0  # outputs with several turns
    trailing_observations: int = 0  # outputs that end with an observation


def _size(value: Prompt) -> int:
    """Return the number of characters of a text or of messages; 0 for token ids."""
    if isinstance(value, str):
        return len(value)
    return sum(len(json.dumps(each, default=str)) for each in value if isinstance(each, dict))


class Encoder:
    """A model's tokenizer and the tags used to read replies."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        vocabulary: int,
        think: Sequence[str] = THINK,
        answer: Sequence[str] = ANSWER,
        date: str | None = None,
        positions: int = 0,
    ) -> None:
        """
        Args:
          vocabulary: the model's number of ids.
          think: the tags around a reasoning.
          answer: the tags around an answer; empty: all text after the reasoning is the answer.
          date: the day that the chat template writes, if any; see `with_date`. `set_date` changes
            it.
          positions: the model's number of positions; 0: replies of any length are read.

        Raises:
          ValueError: not two tags, or an empty tag; a tokenizer that is not byte-level; see also
            `with_date`.
        """
        for name, tags, counts in (("think", think, (2,)), ("answer", answer, (0, 2))):
            if len(tags) not in counts or not all(tags):
                nothing = ", or nothing" if 0 in counts else ""
                raise ValueError(
                    f"--{name}={','.join(tags)}: expected the opening and the closing tag, a comma "
                    f"between them{nothing}"
                )
        self.date, self._original_tokenizer = date, tokenizer
        tokenizer = with_date(tokenizer, date)
        self._tokenizers = {date: tokenizer}  # {day that the template writes: tokenizer}
        self.tokenizer, self.vocabulary, self.positions = tokenizer, vocabulary, positions
        self.opening, self.closing = think
        self.answer = tuple(answer)
        self.prefilled = False  # whether prompts open the reasoning and no reply does
        self.counts = Counts()
        self._pieces = token_bytes(tokenizer)
        self._special = [token.encode() for token in prompts.special_tokens(tokenizer)]
        self.written_keys: set[str] = set()  # keys of messages that the chat template writes
        self._read: dict[str, tuple[str, np.ndarray, list[str]]] = {}  # (kind, ids, left out)

    def forget_prompts(self) -> None:
        """Release the encoded prompts, which are kept for other rollouts with the same prompt."""
        self._read.clear()

    def writes_date(self) -> bool:
        """Return whether the chat template wrote a date into any prompt."""
        kinds = self.counts.prompt_kinds
        if not any(kinds[kind] for kind in ("messages", "restored", "text")):
            return False
        if not self._original_tokenizer.chat_template:
            return False
        one, other = (
            with_date(self._original_tokenizer, day) for day in ("2001-02-03", "2012-11-10")
        )
        return any(
            prompts.split_template(one, s) != prompts.split_template(other, s)
            for s in (False, True)
        )

    def set_date(self, date: str | None) -> None:
        """Render further prompts as on another day, YYYY-MM-DD, or NO_DAY for None."""
        if date not in self._tokenizers:
            self._tokenizers[date] = with_date(self._original_tokenizer, date)
        self.date, self.tokenizer = date, self._tokenizers[date]

    def detect_prefilled(self, texts: Iterable[str]) -> None:
        """Find out from all replies whether the prompt opens their reasoning.

        A truncated reply alone does not show this.
        """
        opened = closed = False
        for text in texts:
            opened = opened or self.opening in text or OPEN in text
            closed = closed or self.closing in text
        self.prefilled = closed and not opened

    def encode_prompt(
        self, prompt: Prompt, tools: Sequence[dict[str, Any]] = (), kind: str = ""
    ) -> np.ndarray:
        """Return the int32 ids of a prompt as given; see prompts.py.

        Args:
          tools: tools offered to the policy; the chat template writes them.
          kind: the kind as which it is counted; "": its own.

        Raises:
          ValueError: messages that the template refuses, an id beyond the vocabulary, no ids.
        """
        key = json.dumps(
            [prompt, tools, self.date], default=str
        )  # members of a group have the same prompt
        if key not in self._read:
            found, ids, missing = self._encode_prompt(prompt, tools)
            if not len(ids):
                raise ValueError("has an empty prompt")
            self._read[key] = found, np.asarray(ids, np.int32), missing
        own_kind, ids, missing = self._read[key]
        self.counts.prompt_kinds[kind or own_kind] += 1
        self.counts.missing_parts.update(missing)
        return ids

    def _encode_prompt(
        self, prompt: Prompt, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, Sequence[int], list[str]]:
        messages = [m for m in prompt if isinstance(m, dict)]
        if not isinstance(prompt, str) and not messages:
            return "token ids", self._check_ids([i for i in prompt if isinstance(i, int)]), []
        kind, text = self._prompt_text(prompt, tools)
        if kind == "text":  # includes the ids that the tokenizer puts in front
            return kind, self.tokenizer(text)["input_ids"], []
        missing = prompts.find_missing_parts(text, read_messages(messages), tools)
        return kind, prompts.text_ids(self.tokenizer, text), missing

    def _prompt_text(self, prompt: Prompt, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, str]:
        """Return (kind, text with control tokens) of a prompt that is a text or messages."""
        if isinstance(prompt, str):
            return prompts.restore_text(self.tokenizer, prompt, self.opening)
        messages = self._messages(prompt)
        for key in prompts.list_keys(messages) - self.written_keys:
            if prompts.writes_key(self.tokenizer, messages, tools, key):
                self.written_keys.add(key)
        return "messages", prompts.render_text(self.tokenizer, messages, tools)

    def _messages(self, prompt: Prompt) -> Messages:
        """Return messages in the form that this chat template accepts."""
        messages = []
        for message in read_messages(prompt):
            message = dict(message)
            role, thought = message["role"], message.get("reasoning_content")
            if role == "developer" and not prompts.writes_role(self.tokenizer, role):
                message["role"] = "system"  # developer is the later name of system
            elif role == "assistant" and thought and not prompts.writes_reasoning(self.tokenizer):
                del message["reasoning_content"]
                message["content"] = f"{OPEN}{thought}{CLOSE}{message['content']}"
            if role == "assistant" and message["content"] and "reasoning_content" not in message:
                # If the prompt opened the reply's reasoning, show the reply with that tag.
                message["content"] = self._restore_opening(message["content"])
            messages.append(message)
        return messages

    def _restore_opening(self, text: str) -> str:
        """Return a reply, with the tag that opened its reasoning if that was in the prompt."""
        text = text.replace(OPEN, self.opening).replace(CLOSE, self.closing)
        before, closed, _ = text.partition(self.closing)
        missing = (closed or self.prefilled) and self.opening not in before
        return self.opening + text if missing else text

    def opens_reasoning(self, prompt: np.ndarray) -> bool:
        """Return whether a prompt ends with the tag that opens reasoning, ignoring white space."""
        tail = b"".join(map(self._bytes, prompt[-32:]))
        return tail.rstrip().endswith(self.opening.encode())

    def encode_replies(self, reply: ParsedReply) -> list[EncodedReply]:
        """Return a reply, or the replies of all turns in its text (see transcript.py).

        Raises:
          ValueError: see `encode_prompt`; also a text of more than MAX_TEXT characters, or more
            tokens than the model has positions.
        """
        first_prompt, output = reply.prompt, reply.response
        for what, value in (("prompt", first_prompt), ("reply", output)):
            size = _size(value)
            if size > MAX_TEXT:
                raise ValueError(f"has a {what} of {size} characters; at most {MAX_TEXT} are read")
        if not reply.transcript or not isinstance(output, str):
            return [self.encode_reply(reply)]
        if not isinstance(first_prompt, str) and not isinstance(first_prompt[0], dict):  # token ids
            return [self.encode_reply(reply)]
        kind, text = self._prompt_text(first_prompt, reply.tools)
        turns, trailing = transcript.split(self.tokenizer, output, bare_prompt=kind == "text")
        self.counts.transcripts += len(turns) > 1
        self.counts.trailing_observations += trailing
        found = []
        for between, response in turns:
            text += between
            prompt = text if found else first_prompt
            turn = dataclasses.replace(reply, prompt=prompt, response=response)
            found.append(self.encode_reply(turn, kind))  # later prompts are as exact as the first
            text += (
                response
                if text.rstrip().endswith(self.opening)
                else self._restore_opening(response)
            )
        return found

    def _render_calls(self, reply: ParsedReply, content: str) -> str:
        """Return the text that the template writes after a reply's content for its tool calls."""
        before = self._messages(reply.prompt)
        found = transcript.calls_text(self.tokenizer, before, content, reply.calls, reply.tools)
        if found:
            self.written_keys |= {"tool_calls", *(f"tool_calls[].{key}" for key in CALL_KEYS)}
        else:
            self.counts.missing_parts["tool calls of a reply"] += 1
        return found

    def encode_reply(self, reply: ParsedReply, kind: str = "") -> EncodedReply:
        """Return a reply after its prompt.

        Args:
          kind: see `encode_prompt`.

        Raises:
          ValueError: see `encode_prompt`.
        """
        prompt_ids, opening = self.encode_prompt(reply.prompt, reply.tools, kind), []
        prompt_opens = self.opens_reasoning(prompt_ids)
        if isinstance(reply.response, str):
            text = reply.response.replace(OPEN, self.opening)
            text = text.replace(CLOSE, self.closing)
            if reply.calls:
                text += self._render_calls(reply, text)
            if prompt_opens and text.lstrip().startswith(self.opening):  # written twice
                text = text.lstrip().removeprefix(self.opening)
                text = text.lstrip("\n") if self._bytes(prompt_ids[-1]).endswith(b"\n") else text
            if not prompt_opens and self._restore_opening(text) != text:
                opening = prompts.text_ids(self.tokenizer, self.opening)
            sampled = np.asarray(prompts.text_ids(self.tokenizer, text), np.int32)
        else:
            sampled = np.asarray(self._check_ids(reply.response), np.int32)
        (start, end), (first, last), answer_text = self._find_spans(sampled, reply.whole)
        length = len(prompt_ids) + len(opening) + len(sampled)
        if self.positions and length > self.positions:
            raise ValueError(
                f"has {length} tokens up to the end of a reply; the model has {self.positions} "
                "positions"
            )
        actions = reply.actions
        if actions is None:
            actions = (answer_text,) if answer_text else ()
        turn = Turn(
            prompt=np.concatenate([prompt_ids, np.asarray(opening, np.int32), sampled[:start]]),
            message="",  # the environment's message, which no diagnosis here reads
            sampled=sampled[start:],
            logp=np.zeros(len(sampled) - start, np.float32),  # not read either
            reasoning=(0, end - start),
            answer=(first - start, last - start) if last else (0, 0),
            actions=actions,
            valid=bool(reply.valid),
            reward=0.0,
            info={},
        )
        return EncodedReply(prompt_ids, turn)

    def _check_ids(self, ids: Sequence[int]) -> Sequence[int]:
        beyond = [i for i in ids if i >= self.vocabulary]
        if beyond:
            raise ValueError(f"has the token id {beyond[0]}; the model has {self.vocabulary}")
        return ids

    def _find_spans(
        self, ids: np.ndarray, whole: bool
    ) -> tuple[tuple[int, int], tuple[int, int], str]:
        """Return (reasoning's token span, answer's token span, answer's text) of a reply."""
        pieces = [self._bytes(i) for i in ids]
        text, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
        opening, closing = self.opening.encode(), self.closing.encode()
        close = text.find(closing)
        if close < 0:
            return (0, 0), (0, 0), ""
        begin = text.find(opening, 0, close)
        reasoning = token_span(ends, 0 if begin < 0 else begin + len(opening), close)
        after, end = close + len(closing), len(text)
        for token in self._special:  # drop the token that ended the reply
            if text.endswith(token):
                end -= len(token)
                break
        form = rb"\s*(.*?)\s*\Z"
        if self.answer:
            form = rb"\s*%s(.*?)%s\s*\Z" if whole else rb".*?%s(.*?)%s"
            form %= tuple(re.escape(tag.encode()) for tag in self.answer)
        found = re.compile(form, re.DOTALL).match(text, after, end)
        if not found:
            return reasoning, (0, 0), ""
        answer_text = found[1].decode("utf-8", errors="replace").strip()
        return reasoning, token_span(ends, *found.span(1)), answer_text

    def _bytes(self, id_: int) -> bytes:
        # The model may have more ids than the tokenizer; see `Chat.text`.
        return self._pieces[id_] if id_ < len(self._pieces) else b"\xff"
