"""Rollouts as token ids, and where reasoning and answer are in them.

As in training, X is the prompt up to and including the tag that opens the reasoning, whether the
template, the trainer or the policy wrote it; Z are the tokens wholly between the tags.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragen_jax.rollout.chat import token_bytes, token_span
from ragen_jax.score import formats, prompts
from ragen_jax.score.formats import Prompt, Reply
from ragen_jax.types import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THINK = ("<think>", "</think>")
ANSWER = ("<answer>", "</answer>")


@dataclasses.dataclass(frozen=True)
class Spoken:
    """A reply as token ids."""

    given: np.ndarray  # int32, the prompt as it was given
    turn: Turn  # whose prompt ends where the reasoning begins, and whose reply begins there


class Encoder:
    """The tokenizer of a model, and the tags that replies are read by."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        vocabulary: int,
        think: Sequence[str] = THINK,
        answer: Sequence[str] = ANSWER,
    ) -> None:
        """
        Args:
          vocabulary: ids of the model.
          think: the tags around a reasoning.
          answer: those around an answer; none: all that follows the reasoning is the answer.

        Raises:
          ValueError: not two tags, or an empty one; a tokenizer that is not byte-level.
        """
        for name, tags, counts in (("think", think, (2,)), ("answer", answer, (0, 2))):
            if len(tags) not in counts or not all(tags):
                nothing = ", or nothing" if 0 in counts else ""
                raise ValueError(
                    f"--{name}={','.join(tags)}: expected the opening and the closing tag, a comma "
                    f"between them{nothing}"
                )
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.opening, self.closing = think
        self.answer = tuple(answer)
        self.prefilled = False  # whether prompts open the reasoning and no reply does
        self.kinds: collections.Counter[str] = collections.Counter()  # of prompts
        self._pieces = token_bytes(tokenizer)
        self._special = [token.encode() for token in prompts.special_tokens(tokenizer)]
        self._read: dict[str, tuple[str, np.ndarray]] = {}  # prompt -> (kind, ids)

    def look(self, texts: Iterable[str]) -> None:
        """Finds out from all replies whether it is the prompt that opens their reasoning, as of a
        reply that is cut off nothing else tells."""
        opened = closed = False
        for text in texts:
            opened = opened or self.opening in text or formats.OPEN in text
            closed = closed or self.closing in text
        self.prefilled = closed and not opened

    def prompt(self, prompt: Prompt) -> np.ndarray:
        """int32 ids of a prompt as it is given; see prompts.py.

        Raises:
          ValueError: messages that the template refuses, an id beyond the vocabulary, no ids.
        """
        key = json.dumps(prompt)  # members of a group show the same one
        if key not in self._read:
            kind, ids = self._prompt(prompt)
            if not len(ids):
                raise ValueError("has a prompt of no tokens")
            self._read[key] = kind, np.asarray(ids, np.int32)
        kind, ids = self._read[key]
        self.kinds[kind] += 1
        return ids

    def _prompt(self, prompt: Prompt) -> tuple[str, Sequence[int]]:
        if isinstance(prompt, str):
            return prompts.read_text(self.tokenizer, prompt, self.opening)
        messages = [m for m in prompt if isinstance(m, dict)]
        if messages:
            # A reply whose reasoning the prompt had opened is shown with that tag.
            shown = [
                m | {"content": self._whole(m["content"])} if m["role"] == "assistant" else m
                for m in messages
            ]
            return "messages", prompts.render(self.tokenizer, shown)
        return "token ids", self._checked([i for i in prompt if isinstance(i, int)])

    def _whole(self, text: str) -> str:
        """A reply with the tag that opened its reasoning, where that stood in the prompt."""
        text = text.replace(formats.OPEN, self.opening).replace(formats.CLOSE, self.closing)
        before, closed, _ = text.partition(self.closing)
        missing = (closed or self.prefilled) and self.opening not in before
        return self.opening + text if missing else text

    def opened(self, prompt: np.ndarray) -> bool:
        """Whether a prompt ends with the tag that opens a reasoning, white space apart."""
        tail = b"".join(map(self._bytes, prompt[-32:]))
        return tail.rstrip().endswith(self.opening.encode())

    def reply(self, reply: Reply) -> Spoken:
        """A reply behind its prompt.

        Raises:
          ValueError: as `prompt` does.
        """
        given, opening = self.prompt(reply.prompt), []
        opened = self.opened(given)
        if isinstance(reply.response, str):
            text = reply.response.replace(formats.OPEN, self.opening)
            text = text.replace(formats.CLOSE, self.closing)
            if opened and text.lstrip().startswith(self.opening):  # written twice
                text = text.lstrip().removeprefix(self.opening)
                text = text.lstrip("\n") if self._bytes(given[-1]).endswith(b"\n") else text
            if not opened and self._whole(text) != text:
                opening = prompts.text_ids(self.tokenizer, self.opening)
            sampled = np.asarray(prompts.text_ids(self.tokenizer, text), np.int32)
        else:
            sampled = np.asarray(self._checked(reply.response), np.int32)
        (start, end), (first, last), said = self._spans(sampled, reply.whole)
        actions = reply.actions
        if actions is None:
            actions = (said,) if said else ()
        turn = Turn(
            prompt=np.concatenate([given, np.asarray(opening, np.int32), sampled[:start]]),
            message="",  # of the environment: no diagnosis here reads it
            sampled=sampled[start:],
            logp=np.zeros(len(sampled) - start, np.float32),  # nor this
            reasoning=(0, end - start),
            answer=(first - start, last - start) if last else (0, 0),
            actions=actions,
            valid=bool(reply.valid),
            reward=0.0,
            info={},
        )
        return Spoken(given, turn)

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        beyond = [i for i in ids if i >= self.vocabulary]
        if beyond:
            raise ValueError(f"has the token id {beyond[0]}; the model has {self.vocabulary}")
        return ids

    def _spans(self, ids: np.ndarray, whole: bool) -> tuple[tuple[int, int], tuple[int, int], str]:
        """(token span of the reasoning, of the answer, text of the answer) of a reply."""
        pieces = [self._bytes(i) for i in ids]
        text, ends = b"".join(pieces), np.cumsum([len(piece) for piece in pieces])
        opening, closing = self.opening.encode(), self.closing.encode()
        close = text.find(closing)
        if close < 0:
            return (0, 0), (0, 0), ""
        begin = text.find(opening, 0, close)
        reasoning = token_span(ends, 0 if begin < 0 else begin + len(opening), close)
        behind, end = close + len(closing), len(text)
        for token in self._special:  # that ended the reply
            if text.endswith(token):
                end -= len(token)
                break
        form = rb"\s*(.*?)\s*\Z"
        if self.answer:
            form = rb"\s*%s(.*?)%s\s*\Z" if whole else rb".*?%s(.*?)%s"
            form %= tuple(re.escape(tag.encode()) for tag in self.answer)
        found = re.compile(form, re.DOTALL).match(text, behind, end)
        if not found:
            return reasoning, (0, 0), ""
        said = found[1].decode("utf-8", errors="replace").strip()
        return reasoning, token_span(ends, *found.span(1)), said

    def _bytes(self, id_: int) -> bytes:
        # The model may have more ids than the tokenizer; see `Chat.text`.
        return self._pieces[id_] if id_ < len(self._pieces) else b"\xff"
