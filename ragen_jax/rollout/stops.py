"""Stop strings: texts that end a reply, found in the bytes of its token ids while it is sampled.

A stop string counts only after the end of the reasoning, because reasoning may quote the form of an
answer. It may begin or end inside a token: an automaton reads the bytes of every token. Its state
is the matched part of </think>, then the matched part of a stop string; a table with an entry for
each state and token lets the decoding loop follow it on the device.

Axes: S states, V vocabulary.
"""

import functools
from collections.abc import Sequence

import numpy as np

END_OF_REASONING = b"</think>"
NO_TEXT = b"\xff"  # the byte of ids without text, as in chat.py; UTF-8 never uses it


class Stops:
    """The automaton of some stop strings over a vocabulary.

    Equal only to itself, so that it can be a static argument of a compiled program.

    texts: the stop strings
    next_SV: uint8, the state after a token; the last state, `ended`, is never left
    """

    def __init__(self, token_bytes: Sequence[bytes], texts: tuple[str, ...]) -> None:
        """
        Raises:
          ValueError: a stop string is empty, or they have more than 200 bytes in total.
        """
        patterns = tuple(text.encode() for text in texts)
        if not all(patterns) or sum(map(len, patterns)) > 200:
            raise ValueError(
                f"rollout.stop is {texts}; it must hold non-empty texts of at most 200 bytes in all"
            )
        self.texts = texts
        byte_SB = _byte_table(patterns)
        self.ended = len(byte_SB) - 1
        self.next_SV = _token_table(byte_SB, [*token_bytes, NO_TEXT])

    def table(self, vocab_size: int) -> np.ndarray:
        """Return next_SV for the ids of a model, which may have more ids than the tokenizer."""
        columns = np.minimum(np.arange(vocab_size), self.next_SV.shape[1] - 1)
        return self.next_SV[:, columns]

    def advance(self, state: int, ids: Sequence[int] | np.ndarray) -> int:
        """Return the state after further token ids."""
        for token in np.minimum(np.asarray(ids, np.int64), self.next_SV.shape[1] - 1).tolist():
            state = int(self.next_SV[state, token])
        return state

    def have_ended(self, ids: Sequence[int] | np.ndarray) -> bool:
        """Return whether a reply holds a stop string."""
        return self.advance(0, ids) == self.ended


@functools.lru_cache(maxsize=8)
def make_stops(token_bytes: tuple[bytes, ...], texts: tuple[str, ...]) -> Stops:
    """Return the `Stops`; the same object for the same arguments."""
    return Stops(token_bytes, texts)


def find_end(text: bytes, texts: Sequence[str]) -> int | None:
    """Return the index after the first stop string that follows the reasoning; None if none."""
    after = text.find(END_OF_REASONING)
    if after < 0:
        return None
    found = []
    for pattern in (stop.encode() for stop in texts):
        start = text.find(pattern, after + len(END_OF_REASONING))
        if start >= 0:
            found.append(start + len(pattern))
    return min(found, default=None)


def _byte_table(patterns: Sequence[bytes]) -> np.ndarray:
    """Return uint8 [S, 256], the state after a byte.

    States are the prefixes of </think> without itself, then the prefixes of the stop strings
    without themselves, then the end: an Aho-Corasick automaton (1975) after another.
    """
    first = [END_OF_REASONING[:n] for n in range(len(END_OF_REASONING))]
    second = sorted({pattern[:n] for pattern in patterns for n in range(len(pattern))}, key=len)
    ended = len(first) + len(second)

    def longest(text: bytes, states: list[bytes]) -> int:
        """Return the index of the longest state that the text ends with."""
        ending = [i for i, state in enumerate(states) if text.endswith(state)]
        return max(ending, key=lambda i: len(states[i]))

    table = np.full((ended + 1, 256), ended, np.uint8)
    for byte in range(256):
        for index, state in enumerate(first):
            text = state + bytes([byte])
            done = text.endswith(END_OF_REASONING)
            table[index, byte] = len(first) if done else longest(text, first)
        for index, state in enumerate(second):
            text = state + bytes([byte])
            if not any(text.endswith(pattern) for pattern in patterns):
                table[len(first) + index, byte] = len(first) + longest(text, second)
    return table


def _token_table(byte_SB: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """Return uint8 [S, V], the state after all bytes of a token."""
    size_V = np.array([len(piece) for piece in token_bytes])
    letters = np.frombuffer(b"".join(token_bytes), np.uint8)
    first_V = np.cumsum(size_V) - size_V
    S = len(byte_SB)
    next_SV = np.repeat(np.arange(S, dtype=np.uint8)[:, None], len(token_bytes), axis=1)
    for position in range(int(size_V.max(initial=0))):
        longer_W = np.flatnonzero(size_V > position)
        byte_W = letters[first_V[longer_W] + position]
        next_SV[:, longer_W] = byte_SB[next_SV[:, longer_W], byte_W[None, :]]
    return next_SV
