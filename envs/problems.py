"""What generated problems share: random integers that never change, symmetry, and splits."""

import hashlib
from collections.abc import Iterable
from typing import TypeVar

from ragen_jax.core.randomness import philox

# Split -> share of all problems, in percent.
SPLIT_SHARES = {"imitation": 40, "train": 40, "eval": 20}
SPLITS = tuple(SPLIT_SHARES)

MAX_SOLUTION = 200  # moves that a bound on the shortest plan may ask for or allow
MAX_ATTEMPTS = 50_000  # draws of one seed, before its constraints are called impossible

Item = TypeVar("Item")


class Draws:
    """Bounded integers from raw Philox words.

    Only the raw words are NumPy's: they are fixed by the algorithm (Salmon et al. 2011), while
    NumPy's distributions may change between versions.

    seed: of the problem, in [0, 2**64)
    attempt: the how many-th draw for this seed, below 2**32
    tag: below 2**32; keeps the words of one environment apart from those drawn for anything else
        with the same seed
    """

    def __init__(self, seed: int, attempt: int, tag: int) -> None:
        self._philox = philox(tag, seed, attempt)
        self._bits, self._count = 0, 0

    def below(self, n: int) -> int:
        """Uniform on [0, n), exactly: as few bits as can hold n - 1, drawn again if too large."""
        width = (n - 1).bit_length()
        while True:
            while self._count < width:
                words = self._philox.random_raw(8).astype("<u8").tobytes()
                self._bits |= int.from_bytes(words, "little") << self._count
                self._count += 512
            value = self._bits & ((1 << width) - 1)
            self._bits >>= width
            self._count -= width
            if value < n:
                return value

    def member(self, bits: int) -> int:
        """A uniform member of a bit-set, as a bit-set of one."""
        for _ in range(self.below(bits.bit_count())):
            bits &= bits - 1
        return bits & -bits

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        """The items in an order of which each is as likely as the others."""
        order = list(items)
        for i in range(len(order) - 1):
            j = i + self.below(len(order) - i)
            order[i], order[j] = order[j], order[i]
        return order


def canonical_grid(text: str) -> str:
    """The one representative of a grid text under rotations and reflections.

    The lexicographic minimum of the eight images (of either shape when the grid is not square).
    """
    return min(grid_images(text))


def grid_images(text: str) -> list[str]:
    """The rotations and reflections of a grid text, itself included: eight, not all distinct."""
    rows = text.split("\n")
    columns = ["".join(column) for column in zip(*rows, strict=True)]
    images = [
        text,
        "\n".join(rows[::-1]),
        "\n".join(columns),
        "\n".join(columns[::-1]),
    ]
    # Read backwards, a text is its own image turned by 180 degrees.
    return images + [image[::-1] for image in images]


def split_by_hash(environment: str, content: str) -> str:
    """The split of a problem: SHA-256 of its content (up to symmetry), by SPLIT_SHARES."""
    text = f"ragen_jax {environment} split\n{content}"
    percentile = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    for split, share in SPLIT_SHARES.items():
        if percentile < share:
            return split
        percentile -= share
    raise AssertionError("the shares of the splits must add up to 100")
