"""A shop: a searchable catalogue and the goals of its buyers."""

import functools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ragen_jax.envs.problems import Draws
from ragen_jax.envs.webshop.catalogue import TAG, Product, Products, generate_catalogue
from ragen_jax.envs.webshop.goals import Goals, count_goals, deal_by_share, shuffled_goals
from ragen_jax.envs.webshop.search import MAX_RESULTS, Index, IndexBuilder, indexed_text

_RANDOM_SEED = 2**63  # seed of the products that "<r>" shows, outside the range of catalogue seeds
_NO_PRODUCTS = np.zeros(0, np.int64)

CACHED_SEARCHES = 1024  # number of searches whose results are cached


@dataclass(frozen=True, eq=False)
class Shop:
    """Products, their search index, and the goals of each split.

    A shop never changes and its methods are pure: any number of episodes can share it.

    lists: "<a> slim fit", "<c> fashion" or "<q> shirt" -> the products with that attribute,
        category or query
    splits: split -> indices of its goals
    """

    products: Products
    index: Index
    lists: Mapping[str, np.ndarray]
    goals: Goals
    splits: Mapping[str, np.ndarray]

    @functools.cached_property
    def find(self) -> "functools._lru_cache_wrapper[np.ndarray]":
        """(query) -> indices of the products that a search shows, best first.

        As in web_agent_site/engine/engine.py (get_top_n_product_from_keywords): queries that begin
        with "<a>", "<c>" or "<q>" list the products of an attribute, a category or a query; "<r>"
        shows random products, here always the same.
        """
        return functools.lru_cache(maxsize=CACHED_SEARCHES)(self._find)

    def _find(self, query: str) -> np.ndarray:
        head, _, rest = query.partition(" ")
        if head == "<r>":
            draws = Draws(_RANDOM_SEED, 0, TAG)
            shown: dict[int, None] = {}
            while len(shown) < min(MAX_RESULTS, len(self.products)):
                shown[draws.below(len(self.products))] = None
            return np.array(list(shown))
        if head == "<c>":  # a category is one word
            rest = rest.partition(" ")[0]
        if head in LIST_PREFIXES:
            return self.lists.get(f"{head} {rest.strip()}", _NO_PRODUCTS)
        return self.index.search(query)


LIST_PREFIXES = ("<a>", "<c>", "<q>")


def listed_under(product: Product) -> list[str]:
    """Return the keys of `Shop.lists` for a product."""
    attributes = [f"<a> {attribute}" for attribute in dict.fromkeys(product.attributes)]
    return [*attributes, f"<c> {product.category}", f"<q> {product.query}"]


@functools.lru_cache(maxsize=4)
def generated_shop(products: int, seed: int, options: int) -> Shop:
    """Return the shop of a generated catalogue (`generate_catalogue`)."""
    catalogue = generate_catalogue(products, seed=seed, options=options)
    builder, lists = IndexBuilder(), {}
    for place, product in enumerate(catalogue):
        builder.add(indexed_text(product))
        for key in listed_under(product):
            lists.setdefault(key, array("i")).append(place)
    ends = np.cumsum([count_goals(product) for product in catalogue])
    return Shop(
        catalogue,
        builder.index(),
        {key: np.array(places) for key, places in lists.items()},
        Goals(catalogue, ends, seed),
        deal_by_share(shuffled_goals(int(ends[-1]))),
    )
