"""Tool calls and later turns of a reply, in the text of the chat template.

Trainers that write a whole episode as a single text (verl's multi-turn rollouts) put later
observations and replies into the output. `split` finds them by the texts that the template writes
between replies; `calls_text` returns the text that a policy wrote to call tools.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragen_jax.score.messages import Messages
from ragen_jax.score.prompts import render_text, special_tokens, split_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARK = "MARKED_REPLY"


def split(
    tokenizer: "PreTrainedTokenizerFast", text: str, *, bare_prompt: bool
) -> tuple[list[tuple[str, str]], bool]:
    """Return ([(text since the previous reply, reply)], whether a last observation is left out).

    The first reply has no text before it. An observation that no reply follows is left out.

    Args:
      bare_prompt: whether the prompt is plain text; texts between replies then stay unchanged,
        otherwise their control tokens are restored.
    """
    marks = None
    if tokenizer.chat_template:
        marks = split_template(tokenizer, False) or split_template(tokenizer, True)
    if marks is None:
        return [("", text)], False
    full, bare = (texts[-2:] for texts in marks)  # before a user message, and after it
    special = special_tokens(tokenizer)
    if any(token in text for token in special):
        return _split_control(text, full, special)
    if not all(bare):
        return [("", text)], False
    user, tail = map(re.escape, bare)
    parts = re.split(f"{user}((?:(?!{user}).)*?){tail}", text, flags=re.DOTALL)
    before, after = bare if bare_prompt else full
    observations = [f"{before}{each}{after}" for each in parts[1::2]]
    last, trailing, _ = parts[-1].partition(bare[0]) if observations else (parts[-1], "", "")
    replies = [*parts[:-1:2], last]
    return list(zip(["", *observations], replies, strict=True)), bool(trailing)


def _split_control(
    text: str, full: Sequence[str], special: Sequence[str]
) -> tuple[list[tuple[str, str]], bool]:
    """Do the work of `split` for a text with control tokens, where a token ends each reply."""
    user, tail = full
    found = re.findall("|".join(map(re.escape, special)), user)
    if not found:
        return [("", text)], False
    end, opener = found[0], "".join(found[1:2])  # opener: start of the next message
    mark = tail.partition(end)[2].lstrip() or tail
    turns, between = [], ""
    while end in text:
        reply, _, rest = text.partition(end)
        begin = rest.find(mark)
        if begin < 0:
            if opener and rest.lstrip().startswith(opener):
                return [*turns, (between, reply + end)], True
            break
        turns.append((between, reply + end))
        cut = begin + len(mark)
        between, text = rest[:cut], rest[cut:]
    return [*turns, (between, text)], False


def calls_text(
    tokenizer: "PreTrainedTokenizerFast",
    before: Messages,
    content: str,
    calls: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
) -> str:
    """Return the text that a chat template writes after a reply's content to call tools.

    It excludes the control tokens that end the reply, and is empty if the template writes no calls.

    Args:
      before: messages that the policy read.
      content: text of the reply.

    Raises:
      ValueError: the template refuses the calls.
    """

    def render(message: dict[str, Any]) -> str:
        conversation = [*before, {"role": "assistant", **message}]
        return render_text(tokenizer, conversation, tools, reply_next=False)

    prefix, _, end = render({"content": MARK}).rpartition(MARK)
    text = render({"content": MARK, "tool_calls": list(calls)})
    if MARK in text:
        found = text.rpartition(MARK)[2]
    else:  # the template leaves the content out of a reply with calls
        found = text.removeprefix(prefix) if text.startswith(prefix) else ""
    for token in (end, *special_tokens(tokenizer)):
        bare = found.rstrip()
        if token.strip() and bare.endswith(token.strip()):
            found = bare.removesuffix(token.strip())
            break
    return found if content.strip() else found.lstrip("\n")
