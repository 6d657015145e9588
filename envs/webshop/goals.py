"""Goals of buyers, made from a catalogue, with price caps, and their assignment to splits.

The rules are those of WebShop (web_agent_site/engine/goal.py: get_human_goals,
get_synthetic_goals) and of RAGEN's wrapper (ragen/env/webshop/env.py: reset).
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ragen_jax.envs.problems import SPLIT_SHARES, Draws
from ragen_jax.envs.webshop.catalogue import Product, Products, Wish, cap_draws

NO_CAP = 1_000_000.0  # dollars; the cap of a goal without a price limit
_CAPS = tuple(10.0 * tens for tens in range(1, 100))
SHUFFLE, PERMUTATION = 233, 42  # seeds: of WebShop's order of goals, and of RAGEN's permutation

# First position of RAGEN's test, validation and training goals after both shuffles. No training run
# uses its test set, so the tiny agent imitates that set.
_FIRST = {"imitation": 0, "eval": 500, "train": 1500}
MIN_GOALS = _FIRST["train"] + 1

Options = tuple[tuple[str, str], ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of one buyer.

    place, asin: index and id of the product that the buyer has in mind
    instruction: the buyer's request
    attributes: attributes that the product must have
    options: options to choose: (name, value) pairs, or plain values for instructions that people
        wrote. The reward treats the two differently
    cap: maximum price in dollars
    """

    place: int
    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: Options
    cap: float


def draw_cap(price: float, draws: Draws) -> tuple[float, str]:
    """Return (cap in dollars, its words in the instruction).

    Of the next four multiples of 10 above the price, up to 990, two are drawn and the larger is
    the cap. If fewer than two are left there is no cap: (NO_CAP, "").
    """
    above = [cap for cap in _CAPS if cap > price][:4]
    if len(above) < 2:
        return NO_CAP, ""
    cap = max(draws.shuffled(above)[:2])
    return cap, f", and price lower than {cap:.2f} dollars"


def count_goals(product: Product) -> int:
    """Return the number of goals of a product."""
    return sum(_goals_of_wish(product, wish) for wish in product.wishes)


def _goals_of_wish(product: Product, wish: Wish) -> int:
    if wish.options is not None:
        return 1
    return math.prod(len(values) for _, values in product.options)


def make_goal(product: Product, place: int, number: int, *, seed: int) -> Goal:
    """Return goal `number`, from 0, of the product at `place`.

    The goals of a wish without options follow each other as in itertools.product over the values
    of the options, in the order of the options' names, and share one cap.

    seed: seed of the caps
    """
    draws = cap_draws(seed, product.row)
    for wish in product.wishes:
        cap, cap_text = draw_cap(product.price, draws)
        if number < (count := _goals_of_wish(product, wish)):
            break
        number -= count
    else:
        raise IndexError(f"product {product.asin} has fewer goals")
    if wish.options is not None:
        text = f"{wish.text.strip('.')}{cap_text}"
        return Goal(place, product.asin, text, wish.attributes, wish.options, cap)
    chosen = []
    for name, values in sorted(product.options, reverse=True):
        number, which = divmod(number, len(values))
        chosen.insert(0, (name, values[which]))
    wanted = ", and ".join(f"{name}: {value}" for name, value in chosen)
    text = f"{wish.text}{' with ' if wanted else ''}{wanted}{cap_text}"
    return Goal(place, product.asin, text, wish.attributes, tuple(chosen), cap)


class Goals:
    """The goals of a catalogue in the order of its products, each made on demand."""

    def __init__(self, products: Products, ends: np.ndarray, seed: int) -> None:
        """ends: [products], cumulative number of goals, including those of the product."""
        self._products, self._ends, self._seed = products, ends, seed

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Goal]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Goal:
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} goals, and no number {number}")
        place = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[place - 1]) if place else 0
        return make_goal(self._products[place], place, number - first, seed=self._seed)


def shuffled_goals(count: int) -> np.ndarray:
    """Return [count] indices of goals in RAGEN's order."""
    order, places = list(range(count)), list(range(count))
    random.Random(SHUFFLE).shuffle(order)
    random.Random(PERMUTATION).shuffle(places)
    return np.array(order, np.int32)[places]


def deal_released(order: np.ndarray) -> dict[str, np.ndarray]:
    """Return {split: its goals} as in RAGEN: test 500, validation 1,000, training the rest.

    Raises ValueError for too few goals.
    """
    if len(order) < MIN_GOALS:
        raise ValueError(
            f"RAGEN's splits need at least {MIN_GOALS} goals, and these products have "
            f"{len(order)}: give files with more products that have instructions"
        )
    ends = {"imitation": _FIRST["eval"], "eval": _FIRST["train"], "train": len(order)}
    return {split: order[first : ends[split]] for split, first in _FIRST.items()}


def deal_by_share(order: np.ndarray) -> dict[str, np.ndarray]:
    """Return {split: its goals}, by SPLIT_SHARES."""
    ends = np.cumsum([*SPLIT_SHARES.values()]) * len(order) // 100
    return dict(zip(SPLIT_SHARES, np.split(order, ends[:-1]), strict=True))


def identity(goal: Goal) -> str:
    """Return the wanted product, attributes and options, whatever the wording."""
    return repr((goal.asin, sorted(goal.attributes), sorted(goal.options)))
