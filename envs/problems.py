"""Shared code for generated problems: reproducible random integers, symmetry, and splits."""

import hashlib
from collections.abc import Iterable
from typing import TypeVar

from ragen_jax.core.randomness import philox, restarts

# Split -> percentage of all problems.
SPLIT_SHARES = {"imitation": 40, "train": 40, "eval": 20}
SPLITS = tuple(SPLIT_SHARES)

MAX_SOLUTION = 200  # moves; largest bound that an option may set on the shortest plan
MAX_ATTEMPTS = 50_000  # draws for one seed before its constraints are called impossible

Item = TypeVar("Item")


class Draws:
    """Bounded integers from raw Philox words.

    Only the raw words come from NumPy: the algorithm fixes them (Salmon et al. 2011), while NumPy's
    distributions may change between versions.

    seed: the problem's seed, in [0, 2**64)
    attempt: index of the draw for this seed, below 2**32
    tag: identifies the environment, below 2**32, so that its words differ from all other words
        drawn with the same seed
    """

    def __init__(self, seed: int, attempt: int, tag: int) -> None:
        self._philox = philox(tag, seed, attempt)
        self._restart = restarts(self._philox, tag, seed)
        self._bits, self._count = 0, 0

    def restart(self, attempt: int) -> None:
        """Draw as new `Draws` of this attempt would, which take longer to make."""
        self._restart(attempt)
        self._bits, self._count = 0, 0

    def below(self, n: int) -> int:
        """Return an exactly uniform int in [0, n), by rejection sampling with the fewest bits."""
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
        """Return a uniformly chosen member of a bit set, as a bit set with that member."""
        for _ in range(self.below(bits.bit_count())):
            bits &= bits - 1
        return bits & -bits

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        """Return the items in a uniformly random order."""
        order = list(items)
        for i in range(len(order) - 1):
            j = i + self.below(len(order) - i)
            order[i], order[j] = order[j], order[i]
        return order


def canonical_grid(text: str) -> str:
    """Return the representative of a grid text under rotations and reflections.

    It is the lexicographic minimum of the eight images (which have two shapes if the grid is not
    square).
    """
    return min(grid_images(text))


def grid_images(text: str) -> list[str]:
    """Return the eight rotations and reflections of a grid text, itself included."""
    rows = text.split("\n")
    columns = ["".join(column) for column in zip(*rows, strict=True)]
    images = [
        text,
        "\n".join(rows[::-1]),
        "\n".join(columns),
        "\n".join(columns[::-1]),
    ]
    # Reversing a text rotates its grid by 180 degrees.
    return images + [image[::-1] for image in images]


def split_by_hash(environment: str, content: str) -> str:
    """Return the split of a problem from the SHA-256 of its content, by SPLIT_SHARES.

    The content must be the same for symmetric problems.
    """
    text = f"ragen_jax {environment} split\n{content}"
    percentile = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    for split, share in SPLIT_SHARES.items():
        if percentile < share:
            return split
        percentile -= share
    raise AssertionError("the shares of the splits must add up to 100")
