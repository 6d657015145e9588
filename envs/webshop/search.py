"""Search: BM25 as Lucene computes it, over what products say of themselves.

Tokens are made by Lucene's English rules: words by Unicode's rules of where they end, lower case,
a possessive 's dropped, its 33 stop words dropped, Porter's stems.
"""

import functools
import importlib.util
import re
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragen_jax.envs import bm25
from ragen_jax.envs.webshop.catalogue import Product
from ragen_jax.storage.atomic_io import with_retries

if TYPE_CHECKING:
    import bm25s

FOUND = 50  # products of a search, at most (web_agent_site/engine/engine.py)

_STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
    """.split()
)
# Unicode's word boundaries (UAX 29) but for scripts without spaces: some signs join two letters,
# some two digits.
_TOKEN = re.compile(r"\w+(?:(?:(?<=[^\W\d_])['’.:·](?=[^\W\d_])|(?<=\d)['’.,;](?=\d))\w+)*")


def check_installed() -> None:
    """Raises ValueError where a package that searching needs is not there."""
    for module, package in (("bm25s", "bm25s"), ("Stemmer", "PyStemmer")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"webshop needs {package}: pip install 'ragen_jax[webshop]'")


def indexed_text(product: Product) -> str:
    """What a product is found by: title, description, first bullet, and its options' values.

    As WebShop's search_engine/convert_product_file_format.py writes it.
    """
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options)
    bullet = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {bullet} {options}".lower()


class Index:
    """What can be searched: texts by their places."""

    def __init__(self, texts: "bm25s.BM25") -> None:
        self._texts = texts

    def search(self, text: str) -> np.ndarray:
        """The places of what is found, the best first; equals in their order.

        Only what shares a word with `text`; FOUND at most. Any text: words that are nowhere find
        nothing.
        """
        known = self._texts.vocab_dict
        tokens = [known[token] for token in tokens_of(text) if token in known]
        if not tokens:
            return np.zeros(0, np.int64)
        scores = self._texts.get_scores_from_ids(tokens)
        return np.array(bm25.best(scores, FOUND), np.int64)

    def save(self, folder: Path) -> None:
        """Writes it, to be read with `load_index`."""
        with_retries(functools.partial(self._texts.save, folder, show_progress=False), folder)


class IndexBuilder:
    """Takes texts one after the other, of which it keeps no more than numbers."""

    def __init__(self) -> None:
        check_installed()
        self._vocabulary: dict[str, int] = {}
        self._texts: list[array[int]] = []

    def add(self, text: str) -> None:
        """The next text."""
        vocabulary = self._vocabulary
        numbers = [vocabulary.setdefault(token, len(vocabulary)) for token in tokens_of(text)]
        self._texts.append(array("i", numbers))

    def index(self) -> Index:
        """The index of all texts. Raises ValueError if they have no word."""
        if not self._vocabulary:
            raise ValueError("no product has a word to search for")
        texts = bm25.package().BM25(method=bm25.METHOD, k1=bm25.K1, b=bm25.B)
        # "" would be a word of its own, without any text.
        texts.index((self._texts, self._vocabulary), create_empty_token=False, show_progress=False)
        return Index(texts)


def load_index(folder: Path) -> Index:
    """An index that was saved; its arrays stay in their files."""
    return Index(bm25.package().BM25.load(folder, mmap=True))


def tokens_of(text: str) -> list[str]:
    """The words of a text as they are searched for, repeated ones included."""
    words = (re.sub("['’]s$", "", word) for word in _TOKEN.findall(text.lower()))
    return _stemmer().stemWords([word for word in words if word not in _STOP_WORDS])


@functools.lru_cache(maxsize=1)
def _stemmer() -> Any:
    import Stemmer  # ty: ignore[import-not-found] compiled, with no types beside it

    return Stemmer.Stemmer("porter")
