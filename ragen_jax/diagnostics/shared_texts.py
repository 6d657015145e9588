"""What the reasonings of different prompts share: their template, by counting words.

No model is needed. The words of a reasoning are bound to its prompt if they are more frequent in
the other reasonings of that prompt than in those of other prompts. A reasoning, or a sentence,
without such words fits any prompt: it belongs to a template, whether the template repeats a
sentence word by word or chooses its words freely. A frame such as "The player is at (3,2)" does
not fit any prompt, since its numbers are bound.

With a single reasoning per prompt nothing is known about bound words, and only sentences that occur
under many prompts show a template.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np

CONTROL = re.compile(r"(?:<\|[^<>|]*\|>)+\Z")  # control tokens at the end of a text
LEAST_WORDS = 3  # shorter texts are left out
LEAST_MEMBERS = 4  # reasonings of a prompt from which its bound words are known
MOST_WORDS = 24  # longest opening
BOUND = 0.1  # nats per word from which a text is bound to its prompt
PRIOR = 2.0  # weight of the other prompts in the frequency of a word under a prompt, in reasonings
SHARED = 0.25  # fraction of prompts, and of reasonings, from which a text is shared
MOST = 0.5  # fraction of the prompts from which most prompts have a sentence
SHOWN = 4  # largest number of listed texts of a kind
# A sentence ends at a mark followed by white space, and at a line break.
SENTENCE = re.compile(r"(?<=[.!?;:])\s+|\s*[\n\r]+\s*|(?<=[。！？；])")

THINK = ("<think>", "</think>")  # the tags around a reasoning
NONE = np.zeros(0, np.int64)
Reasonings = Sequence[tuple[int, str]]  # (number of the prompt, text) of each reasoning


@dataclasses.dataclass(frozen=True)
class SharedText:
    """A text that fits any prompt, and how often it occurs in the reasonings of a step."""

    kind: str  # "opening" or "sentence"
    text: str
    prompts: float  # fraction of the prompts with a reasoning that has it
    reasonings: float  # fraction of the reasonings that have it


@dataclasses.dataclass(frozen=True)
class Template:
    """What the reasonings of a step share."""

    free: float  # fraction of the reasonings that fit any prompt; NaN: unknown
    example: str  # the reasoning that fits any prompt and shares most with the others; "": few do
    texts: list[SharedText]  # most widely shared first


def find_template(reasonings: Reasonings) -> Template:
    """Return what the reasonings of a step share; empty with fewer than two prompts."""
    words = _Words(reasonings)
    if len(words.members) < 2:
        return Template(math.nan, "", [])
    free = words.free_fraction()
    texts: list[SharedText] = []
    for kind, texts_of in (("opening", _openings), ("sentence", _sentences)):
        counted = _count(kind, reasonings, texts_of, words.is_free)
        # If most reasonings are bound to their prompts, a rare text is shared by mistakes.
        found = [
            each
            for each, listed in counted
            if each.prompts >= SHARED and (free >= SHARED or listed >= SHARED)
        ]
        found = _without_parts(found) if kind == "opening" else found
        found.sort(key=lambda each: (-each.prompts, -each.reasonings, each.text))
        texts += found[:SHOWN]
    return Template(free, words.example() if free >= SHARED else "", texts)


def measure_text(shared: SharedText, reasonings: Reasonings) -> SharedText:
    """Return the same text with its fractions in other reasonings."""
    texts_of = _openings if shared.kind == "opening" else _sentences
    prompts = {prompt for prompt, _ in reasonings}
    having = [p for p, text in reasonings if any(x == shared.text for x, _ in texts_of(text))]
    return dataclasses.replace(
        shared,
        prompts=len(set(having)) / max(len(prompts), 1),
        reasonings=len(having) / max(len(reasonings), 1),
    )


def template_figures(reasonings: Reasonings) -> dict[str, float]:
    """Return how much the reasonings of different prompts share.

    Returns:
      prompt_free, the fraction of the reasonings that fit any prompt, among those of LEAST_WORDS
      words or more whose prompt has LEAST_MEMBERS reasonings or more (left out without two such
      prompts); shared_sentence, the fraction of the reasonings that have the most frequent of the
      sentences that most prompts have; shared_words, the mean fraction of a reasoning's words that
      are in sentences of most prompts. {} with fewer than two prompts.
    """
    words = _Words(reasonings)
    if len(words.members) < 2:
        return {}
    counted = _count("sentence", reasonings, _sentences, lambda prompt, text: True)
    shared = {each.text: each.reasonings for each, _ in counted if each.prompts >= MOST}
    inside = 0.0
    for (_, text), number in words.counts.items() if shared else ():
        in_shared = [part for part, _ in _sentences(text) if part in shared]
        inside += number * sum(len(part.split()) for part in in_shared) / len(text.split() or "-")
    figures = {
        "shared_sentence": max(shared.values(), default=0.0),
        "shared_words": inside / len(reasonings),
    }
    free = words.free_fraction()
    return figures if math.isnan(free) else figures | {"prompt_free": free}


def reasoning_of(reply: str, tags: tuple[str, str]) -> str:
    """Return the reasoning of a reply, or all of a reply that does not close it.

    A control token that ended an unclosed reply is no part of it; some trainers drop it.
    """
    text = CONTROL.sub("", reply.partition(tags[1])[0])
    return text.strip().removeprefix(tags[0]).strip()


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, without surrounding white space."""
    return [part for part in map(str.strip, SENTENCE.split(text)) if part]


class _Words:
    """The words of a step's reasonings, and how much each is bound to each prompt."""

    def __init__(self, reasonings: Reasonings) -> None:
        self.counts = collections.Counter(reasonings)
        self.members = collections.Counter(prompt for prompt, _ in reasonings)
        index: dict[str, int] = {}
        place = {prompt: at for at, prompt in enumerate(self.members)}
        words_R = [
            np.array([index.setdefault(word, len(index)) for word in set(text.split())], np.int64)
            for _, text in self.counts
        ]
        self.index, self.place = index, place
        size_R = [len(words) for words in words_R]
        prompt_R = np.array([place[prompt] for prompt, _ in self.counts], np.int64)
        # A pair of a prompt and a word is prompt * number of words + word.
        pairs = np.repeat(prompt_R, size_R) * len(index) + np.concatenate([*words_R, NONE])
        times = np.repeat(np.array(list(self.counts.values()), np.float64), size_R)
        self.pairs, which = np.unique(pairs, return_inverse=True)
        own = np.bincount(which, times, len(self.pairs)) if len(times) else np.zeros(0)
        word, prompt = self.pairs % max(len(index), 1), self.pairs // max(len(index), 1)
        others = np.bincount(word, own, len(index))[word] - own
        size = np.array(list(self.members.values()))[prompt]
        rate = (others + 0.5) / (len(reasonings) - size + 1)
        # The reasoning itself is no evidence.
        own_rate = (own - 1 + PRIOR * rate) / (size - 1 + PRIOR)
        # Of each pair: log(frequency under the prompt / under others). A word of a single reasoning
        # is no evidence: NaN.
        self.bound = np.where(own + others > 1, np.log(own_rate / rate), np.nan)

    def is_free(self, prompt: int, text: str) -> bool:
        """Return whether a text, part of a reasoning of a prompt, fits any prompt.

        At least half of its words must be known from other reasonings.
        """
        words = [self.index[word] for word in set(text.split())]
        if not words:
            return False
        pairs = self.place[prompt] * len(self.index) + np.array(words)
        bound = self.bound[np.searchsorted(self.pairs, pairs)]
        known = bound[~np.isnan(bound)]
        return 2 * len(known) >= len(words) and float(known.mean()) < BOUND

    def free_fraction(self) -> float:
        """Return the fraction of the reasonings that fit any prompt; NaN if unknown."""
        judged = [
            (prompt, number, self.is_free(prompt, text))
            for (prompt, text), number in self.counts.items()
            if self.members[prompt] >= LEAST_MEMBERS and len(text.split()) >= LEAST_WORDS
        ]
        if len({prompt for prompt, *_ in judged}) < 2:
            return math.nan
        return sum(n for _, n, free in judged if free) / sum(n for _, n, _ in judged)

    def example(self) -> str:
        """Return the reasoning that fits any prompt whose pairs of words most prompts have.

        It is at least as long as half of those that fit any prompt.
        """
        free = {
            (prompt, text): set(itertools.pairwise(text.split()))
            for prompt, text in self.counts
            if len(text.split()) >= LEAST_WORDS and self.is_free(prompt, text)
        }
        if not free:
            return ""
        prompts_with: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
        for (prompt, _), pairs in free.items():
            for pair in pairs:
                prompts_with[pair].add(prompt)
        least = np.median([len(pairs) for pairs in free.values()])
        shared = {
            key: (float(np.mean([len(prompts_with[pair]) for pair in pairs])), key[1])
            for key, pairs in free.items()
            if len(pairs) >= least
        }
        return max(shared, key=shared.__getitem__)[1]


def _count(
    kind: str,
    reasonings: Reasonings,
    texts_of: Callable[[str], Iterator[tuple[str, str]]],
    is_listed: Callable[[int, str], bool],
) -> list[tuple[SharedText, float]]:
    """Return the texts that are listed under two or more prompts, and in most of their reasonings.

    Args:
      texts_of: reasoning -> pairs of a text and the sentence that it is from.
      is_listed: (prompt, sentence) -> whether its texts are listed there.

    Returns:
      [(text with its fractions, fraction of the reasonings in which it is listed)].
    """
    prompts_with: dict[str, set[int]] = collections.defaultdict(set)
    listed_under: dict[str, set[int]] = collections.defaultdict(set)
    number: collections.Counter[str] = collections.Counter()
    listed_number: collections.Counter[str] = collections.Counter()
    for (prompt, text), times in collections.Counter(reasonings).items():
        parts = set(texts_of(text))
        listed = {sentence: is_listed(prompt, sentence) for _, sentence in parts}
        for part, sentence in parts:
            prompts_with[part].add(prompt)
            number[part] += times
            if listed[sentence]:
                listed_under[part].add(prompt)
                listed_number[part] += times
    prompts, total = len({prompt for prompt, _ in reasonings}), len(reasonings)
    return [
        (
            SharedText(kind, part, len(prompts_with[part]) / prompts, number[part] / total),
            listed_number[part] / total,
        )
        for part, under in listed_under.items()
        if len(under) > 1 and 2 * listed_number[part] > number[part]
    ]


def _openings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the beginnings of a reasoning's first sentence, from LEAST_WORDS words on."""
    for sentence in split_sentences(text)[:1]:
        words = sentence.split()
        for end in range(LEAST_WORDS, min(len(words), MOST_WORDS) + 1):
            yield " ".join(words[:end]), sentence


def _sentences(text: str) -> Iterator[tuple[str, str]]:
    yield from ((part, part) for part in split_sentences(text) if len(part.split()) >= LEAST_WORDS)


def _without_parts(found: Sequence[SharedText]) -> list[SharedText]:
    """Leave out openings that are the beginning of a longer one of the same reasonings."""
    kept: list[SharedText] = []
    for each in sorted(found, key=lambda each: -len(each.text)):
        longer = (x for x in kept if x.text.startswith(each.text + " "))
        if not any(x.reasonings == each.reasonings for x in longer):
            kept.append(each)
    return kept
