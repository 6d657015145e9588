"""Reward of a purchase: WebShop's published rule (web_agent_site/engine/goal.py: get_reward).

reward = type * (attributes hit + options hit + price within the cap)
              / (attributes + options + 1)
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragen_jax.envs.webshop.catalogue import Product
from ragen_jax.envs.webshop.goals import Goal

SIMILAR = 85  # texts with a higher token_set_ratio (0 to 100) count as the same

# The colours of web_agent_site/engine/normalize.py, in its order: the first match counts.
COLORS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold
    granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon
    leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
    mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
    rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal
    tiger turquoise violet walnut wheat white wine yellow
    """.split()
)

# Words in titles that no tagger calls nouns.
_NO_NOUNS = frozenset(
    """
    a an and are as at be by for from in into is it its more new non not of off on one only or our
    out over per that the their them these this to too under up very with without you your
    """.split()
)


@dataclass(frozen=True)
class PurchaseReward:
    """A purchase's reward, from 0 to 1, and its parts.

    kind: type reward, 1, 0.5, 0.1 or 0: whether the product is of the wanted type
    attributes, options: number of hits
    price: whether the price is within the cap
    """

    reward: float
    kind: float
    attributes: int
    options: int
    price: bool


def check_installed() -> None:
    """Raise ValueError if thefuzz, which compares texts, is missing."""
    if importlib.util.find_spec("thefuzz") is None:
        raise ValueError("webshop needs thefuzz: pip install 'ragen_jax[webshop]'")


def purchase_reward(
    product: Product, wanted: Product, goal: Goal, chosen: Mapping[str, str]
) -> PurchaseReward:
    """Return the reward for buying `product` with `goal` in mind.

    wanted: the goal's product
    chosen: option name -> value
    """
    kind = type_reward(product, wanted)
    attributes = attribute_hits(product, goal.attributes)
    options = option_hits(chosen.values(), goal.options)
    price = product.price <= goal.cap
    parts = len(goal.attributes) + len(goal.options) + 1
    return PurchaseReward(
        kind * (attributes + options + price) / parts, kind, attributes, options, price
    )


def type_reward(product: Product, wanted: Product) -> float:
    """Return whether a product is of the wanted type, mainly by the nouns of the titles.

    Nouns are those given with the products, or else `title_words`; the published rule takes them
    from spaCy's tagger.

    title = nouns in both titles / nouns of the wanted title; 0.2 if the latter has none. The result
    is 0 for title = 0 and 0.1 for title < 0.1. Otherwise it is 1 if title > 0.2, the queries are
    the same, or the categories share two names; else 0.5.
    """
    wanted_nouns = _nouns(wanted)
    both = len(set(_nouns(product)) & set(wanted_nouns))
    title = both / len(wanted_nouns) if wanted_nouns else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    places = len(_places(product) & _places(wanted))
    same = product.query == wanted.query or places >= 2 or title > 0.2
    return 1.0 if same else 0.5


def _nouns(product: Product) -> Sequence[str]:
    return title_words(product.title) if product.nouns is None else product.nouns


def _places(product: Product) -> set[str]:
    return {name.strip() for name in product.product_category.split("›")}


def attribute_hits(product: Product, attributes: Iterable[str]) -> int:
    """Return the number of attributes that resemble one of the product's or occur in its texts."""
    texts = (product.title, " ".join(product.bullets), product.description)
    texts = tuple(text.lower() for text in texts)
    return sum(
        any(_similar(own, attribute) for own in product.attributes)
        or any(attribute in text for text in texts)
        for attribute in attributes
    )


def option_hits(chosen: Iterable[str], wanted: Iterable[str | tuple[str, str]]) -> int:
    """Return the number of wanted options that resemble a chosen value.

    Colours are compared by their first colour word. A wanted (name, value) pair is compared as in
    the published code: it counts as a colour only if its name or value is exactly a colour, and
    otherwise as Python's text of the pair.
    """
    values = [color(value) for value in chosen]
    return sum(any(_similar(value, color(option)) for value in values) for option in wanted)


def color(option: str | tuple[str, str]) -> str:
    """Return the first of COLORS in an option, or else the option as text."""
    for name in COLORS:
        if name in option:  # part of a text, member of a pair
            return name
    return str(option)


def _similar(one: str, other: str) -> bool:
    from thefuzz import fuzz

    return fuzz.token_set_ratio(one, other) > SIMILAR


def title_words(title: str) -> list[str]:
    """Return the words of a title that may be nouns: two letters or more, no digits, no stop words.

    This replaces a tagger. It counts adjectives and verbs as nouns, so the fraction of the wanted
    title's nouns is over more words than in the published rule, and rewards of products other than
    the wanted product differ.
    """
    words = re.findall(r"\b[^\W\d_]{2,}\b", title.lower())
    return [word for word in words if word not in _NO_NOUNS]
