"""Tool calls and later turns of a reply, as the chat template writes them.

Trainers that dump a whole episode as one text (verl's multi-turn rollouts) put later observations
and replies into the output. `split` finds them by the texts that the template writes between a
reply and the next one; `calls_text` is what a policy wrote to call tools.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragen_jax.score.messages import Messages
from ragen_jax.score.prompts import asked, render_text, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARK = "MARKED_REPLY"


def split(
    tokenizer: "PreTrainedTokenizerFast", text: str, *, bare_prompt: bool
) -> tuple[list[tuple[str, str]], bool]:
    """([(text between the previous reply and this one, reply)] of an output, whether a last
    observation, which no reply follows, is left out). The first reply has no text before it.

    Args:
      bare_prompt: the prompt is plain text, so that texts between replies stay as they are; else
        they get back their control tokens.
    """
    marks = None
    if tokenizer.chat_template:
        marks = asked(tokenizer, False) or asked(tokenizer, True)
    if marks is None:
        return [("", text)], False
    full, bare = (around[-2:] for around in marks)  # before a user message, and after it
    special = special_tokens(tokenizer)
    if any(token in text for token in special):
        return _split_control(text, full, special)
    if not all(bare):
        return [("", text)], False
    user, tail = map(re.escape, bare)
    parts = re.split(f"{user}((?:(?!{user}).)*?){tail}", text, flags=re.DOTALL)
    before, after = bare if bare_prompt else full
    observed = [f"{before}{each}{after}" for each in parts[1::2]]
    last, trailing, _ = parts[-1].partition(bare[0]) if observed else (parts[-1], "", "")
    replies = [*parts[:-1:2], last]
    return list(zip(["", *observed], replies, strict=True)), bool(trailing)


def _split_control(
    text: str, full: Sequence[str], special: Sequence[str]
) -> tuple[list[tuple[str, str]], bool]:
    """`split` of a text with control tokens, which a reply's last token ends."""
    user, tail = full
    found = re.findall("|".join(map(re.escape, special)), user)
    if not found:
        return [("", text)], False
    end, opener = found[0], "".join(found[1:2])  # opener: of the next message
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
    """Text that a chat template writes after the content of a reply to call tools, without the
    control tokens that end the reply; empty if it writes no calls.

    Args:
      before: messages that the policy read.
      content: text of the reply.

    Raises:
      ValueError: the template refuses the calls.
    """

    def written(message: dict[str, Any]) -> str:
        conversation = [*before, {"role": "assistant", **message}]
        return render_text(tokenizer, conversation, tools, reply_next=False)

    prefix, _, end = written({"content": MARK}).rpartition(MARK)
    text = written({"content": MARK, "tool_calls": list(calls)})
    if MARK in text:
        found = text.rpartition(MARK)[2]
    else:  # a template that leaves the content out of a reply with calls
        found = text.removeprefix(prefix) if text.startswith(prefix) else ""
    for token in (end, *special_tokens(tokenizer)):
        bare = found.rstrip()
        if token.strip() and bare.endswith(token.strip()):
            found = bare.removesuffix(token.strip())
            break
    return found if content.strip() else found.lstrip("\n")
