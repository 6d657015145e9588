"""symptoms/* metrics: what a reader of the replies would notice first.

Repeated text, floods of one token, reasoning that is empty or never closed, letters of other
scripts, copies of the prompt, sentences that all prompts share, control tokens that become
unlikely. docs/symptoms/ says what to do about each. Everything here is computed on the host.
"""

import collections
import dataclasses
import functools
import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ragen_jax.algorithm.rewards import success_is_defined
from ragen_jax.core.types import Episode, Metrics, Turn
from ragen_jax.diagnostics.repetition import copied_ngrams, longest_repeats, repeated_ngrams
from ragen_jax.diagnostics.shared_texts import THINK, reasoning_of, template_figures

REPEATED = 4  # tokens of an n-gram that counts as repeated
COPIED = 8  # tokens of an n-gram that counts as copied from the prompt
LOOP = 0.5  # fraction of a reply from which its longest immediate repeat is a loop
LEAST_LOOP = 16  # tokens of a repeat below which it is no loop, and of a run that is a flood
TAIL = 16  # last tokens of a prompt that may open the reasoning
# The texts around a tool call in most chat templates.
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
ANSWER = ("<answer>", "</answer>")
TAG = re.compile(r"</?\w+>|<\|[^<>|]*\|>")
BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are no character
# Scripts that are written together are one script.
TOGETHER = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "KATAKANA-HIRAGANA": "CJK", "BOPOMOFO": "CJK"}

Text = Callable[[np.ndarray], str]  # token ids -> text


@dataclasses.dataclass(frozen=True)
class _Reply:
    """A reply of a sound episode."""

    turn: Turn
    group: int
    text: str
    opened: bool  # whether its reasoning was opened, by the reply or by its prompt
    closed: bool


def symptom_metrics(
    episodes: Sequence[Episode],
    text: Text,
    *,
    tags: tuple[str, str] = THINK,
    outcomes: bool = True,
    logps: bool = True,
) -> Metrics:
    """Return the symptoms/* metrics of all replies of a step.

    Args:
      episodes: those whose environment broke are left out.
      text: control tokens included.
      tags: the tags around a reasoning.
      outcomes: whether success is known.
      logps: whether `Turn.logp` holds the sampler's log-probabilities.

    Returns:
      The metrics of docs/diagnostics.md; one that is not defined is left out. {} without replies.
    """
    sound = [episode for episode in episodes if not episode.error]
    replies = _read(sound, text, tags)
    if not replies:
        return {}
    figures = _repetition(replies) | _reasoning(replies, tags) | _letters(replies, text)
    figures |= template_figures(first_reasonings(sound, text, tags))
    figures["repeated_tags"] = np.mean([_repeats_tags(reply.text, tags) for reply in replies])
    if any(CALL in reply.text for reply in replies) or _offers_calls(replies, text):
        figures["call_rate"] = np.mean([CALL in reply.text for reply in replies])
    if logps:
        figures |= _control(replies)
    if outcomes and success_is_defined(sound):
        figures |= _lengths(sound)
    return {f"symptoms/{name}": float(value) for name, value in figures.items()}


def first_reasonings(
    episodes: Sequence[Episode], text: Text, tags: tuple[str, str]
) -> list[tuple[int, str]]:
    """Return (group, reasoning) of the first turns, whose prompts are the same in a group."""
    first = [
        dataclasses.replace(episode, turns=episode.turns[:1])
        for episode in episodes
        if not episode.error
    ]
    return [(reply.group, reasoning_of(reply.text, tags)) for reply in _read(first, text, tags)]


def _read(episodes: Sequence[Episode], text: Text, tags: tuple[str, str]) -> list[_Reply]:
    """Return the replies of the episodes; equal ids are decoded once."""
    opening, closing = tags
    known: dict[bytes, str] = {}

    def decode(ids: np.ndarray) -> str:
        key = ids.tobytes()
        if key not in known:
            known[key] = text(ids)
        return known[key]

    replies = []
    for episode in episodes:
        for turn in episode.turns:
            reply = decode(turn.sampled)
            opened = opening in reply
            # The last tokens of a prompt are enough to see whether it opens the reasoning.
            opened = opened or decode(turn.prompt[-TAIL:]).rstrip().endswith(opening)
            replies.append(_Reply(turn, episode.group, reply, opened, closing in reply))
    return replies


def _repetition(replies: Sequence[_Reply]) -> dict[str, Any]:
    ids_R = [reply.turn.sampled for reply in replies]
    length_R, flood_R = longest_repeats(ids_R)
    size_R = np.maximum([len(ids) for ids in ids_R], 1)
    loop_R = (length_R >= LOOP * size_R) & (length_R >= LEAST_LOOP)
    figures: dict[str, Any] = {
        "longest_repeat": np.mean(length_R / size_R),
        "loop_rate": loop_R.mean(),
        "flood_rate": np.mean(flood_R >= LEAST_LOOP),
        "repeated_ngrams": repeated_ngrams(ids_R, REPEATED).mean(),
    }
    raw = packed = 0
    for reply, number in collections.Counter(reply.text for reply in replies).items():
        content = reply.encode("utf-8", "replace")
        raw += number * len(content)
        packed += number * len(zlib.compress(content))
    return figures | ({"compression": packed / raw} if raw else {})


def _reasoning(replies: Sequence[_Reply], tags: tuple[str, str]) -> dict[str, Any]:
    """Return the metrics of the reasoning."""
    figures: dict[str, Any] = {}
    tagged = [reply.opened or reply.closed for reply in replies]
    if any(tagged):  # else the agent does not write tags
        # A reply without tags has no reasoning, if other replies have.
        empty = [
            not (has and reasoning_of(reply.text, tags))
            for has, reply in zip(tagged, replies, strict=True)
        ]
        unclosed = [
            not reply.closed and not none for none, reply in zip(empty, replies, strict=True)
        ]
        figures |= {"empty_rate": np.mean(empty), "unclosed_rate": np.mean(unclosed)}
    spans = [slice(0, reply.turn.reasoning[1] if reply.closed else None) for reply in replies]
    copied, total = copied_ngrams(
        [reply.turn.sampled[span] for span, reply in zip(spans, replies, strict=True)],
        [reply.turn.prompt for reply in replies],
        COPIED,
    )
    return figures | ({"prompt_copies": copied / total} if total else {})


def _letters(replies: Sequence[_Reply], text: Text) -> Metrics:
    """Return the fraction of the replies' letters in scripts that their prompts do not have.

    Tags do not count. Bytes that are no character count as letters of another script.
    """
    of_group: dict[int, list[_Reply]] = collections.defaultdict(list)
    for reply in replies:
        of_group[reply.group].append(reply)
    letters = foreign = 0
    for group in of_group.values():
        counts = collections.Counter(TAG.sub("", "".join(reply.text for reply in group)))
        by_script: collections.Counter[str] = collections.Counter()
        for letter, number in counts.items():
            by_script[find_script(letter)] += number
        del by_script[""]
        known = {""}
        for reply in group:  # the first prompt nearly always shows all scripts
            if by_script.keys() <= known | {BROKEN}:
                break
            known |= {find_script(letter) for letter in set(text(reply.turn.prompt))} - {BROKEN}
        if len(known) > 1:  # else the prompts have no letters
            letters += by_script.total()
            foreign += sum(number for script, number in by_script.items() if script not in known)
    return {"foreign_letters": foreign / letters} if letters else {}


@functools.lru_cache(maxsize=65536)
def find_script(letter: str) -> str:
    """Return the script of a letter, such as "LATIN"; "" for a character that is no letter."""
    if letter == BROKEN:
        return BROKEN
    if not letter.isalpha():
        return ""
    plain = unicodedata.normalize("NFKC", letter)[0]  # of full-width and mathematical letters
    script = unicodedata.name(plain, "UNNAMED").split(" ")[0]
    return TOGETHER.get(script, script)


def _repeats_tags(reply: str, tags: tuple[str, str]) -> bool:
    """Return whether a tag is out of place: a second time, or a call inside a call."""
    calls = reply.split(CALL)[1:-1]  # each must end before the next begins
    nested = any(END_OF_CALL not in call for call in calls)
    return nested or any(reply.count(tag) > 1 for tag in (*tags, *ANSWER))


def _offers_calls(replies: Sequence[_Reply], text: Text) -> bool:
    """Return whether a group's first prompt shows the form of a tool call."""
    firsts = {reply.group: reply.turn.prompt for reply in reversed(replies)}
    return any(CALL in text(prompt) for prompt in firsts.values())


def _control(replies: Sequence[_Reply]) -> Metrics:
    """Return mean log-probabilities of control tokens and of tool calls.

    Control tokens of a well-formed reply are those outside its reasoning and its answer: the tags,
    and the token that ends the reply.
    """
    control, call = [], []
    for reply in replies:
        turn, (first, last) = reply.turn, reply.turn.answer
        if not last or not reply.closed:
            continue
        control += [turn.logp[turn.reasoning[1] : first], turn.logp[last:]]
        if CALL in reply.text:
            call.append(turn.logp[first:last])
    figures = {}
    for name, found in (("control_logp", control), ("call_logp", call)):
        values = np.concatenate(found) if found else np.zeros(0)
        if len(values):
            figures[name] = values.mean(dtype=np.float64)
    return figures


def _lengths(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the mean tokens of a reply in solved and in failed episodes, if there are both."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for episode in episodes:
        lengths[bool(episode.success)] += [len(turn.sampled) for turn in episode.turns]
    if not all(lengths.values()):
        return {}
    return {
        "length_success": np.mean(lengths[True]),
        "length_failure": np.mean(lengths[False]),
    }
