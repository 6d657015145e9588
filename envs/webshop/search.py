"""Search: BM25 as Lucene computes it, over the texts of products.

Tokens follow Lucene's English rules: Unicode word boundaries, lower case, without a possessive 's,
without its 33 stop words, stemmed by Porter's algorithm.
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

MAX_RESULTS = 50  # maximum products per search (web_agent_site/engine/engine.py)

_STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
    """.split()
)
# Unicode's word boundaries (UAX 29), except for scripts without spaces: some signs join two
# letters, some join two digits.
_TOKEN = re.compile(r"\w+(?:(?:(?<=[^\W\d_])['’.:·](?=[^\W\d_])|(?<=\d)['’.,;](?=\d))\w+)*")


def check_installed() -> None:
    """Raise ValueError if a package that search needs is missing."""
    for module, package in (("bm25s", "bm25s"), ("Stemmer", "PyStemmer")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"webshop needs {package}: pip install 'ragen_jax[webshop]'")


def indexed_text(product: Product) -> str:
    """Return the indexed text of a product: title, description, first bullet, and options.

    The format is that of WebShop's search_engine/convert_product_file_format.py.
    """
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options)
    bullet = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {bullet} {options}".lower()


class Index:
    """An index of texts, which are identified by their position."""

    def __init__(self, texts: "bm25s.BM25") -> None:
        self._texts = texts

    def search(self, text: str) -> np.ndarray:
        """Return the positions of matching texts, best first; equal scores in their order.

        Returns at most MAX_RESULTS texts, each sharing a word with `text`. Any text is allowed:
        unknown words match nothing.
        """
        ids = self._texts.vocab_dict
        tokens = [ids[token] for token in tokens_of(text) if token in ids]
        if not tokens:
            return np.zeros(0, np.int64)
        scores = self._texts.get_scores_from_ids(tokens)
        return np.array(bm25.best(scores, MAX_RESULTS), np.int64)

    def save(self, folder: Path) -> None:
        """Write the index, for `load_index`."""
        with_retries(functools.partial(self._texts.save, folder, show_progress=False), folder)


class IndexBuilder:
    """Builds an `Index` from texts added one by one, storing only their token ids."""

    def __init__(self) -> None:
        check_installed()
        self._vocabulary: dict[str, int] = {}
        self._texts: list[array[int]] = []

    def add(self, text: str) -> None:
        """Add the next text."""
        vocabulary = self._vocabulary
        ids = [vocabulary.setdefault(token, len(vocabulary)) for token in tokens_of(text)]
        self._texts.append(array("i", ids))

    def index(self) -> Index:
        """Return the index of all texts. Raises ValueError if they contain no word."""
        if not self._vocabulary:
            raise ValueError("no product has a word to search for")
        texts = bm25.package().BM25(method=bm25.METHOD, k1=bm25.K1, b=bm25.B)
        # Otherwise "" would be a word without any text.
        texts.index((self._texts, self._vocabulary), create_empty_token=False, show_progress=False)
        return Index(texts)


def load_index(folder: Path) -> Index:
    """Return a saved index; its arrays stay in their files."""
    return Index(bm25.package().BM25.load(folder, mmap=True))


def tokens_of(text: str) -> list[str]:
    """Return the searchable words of a text, with repetitions."""
    words = (re.sub("['’]s$", "", word) for word in _TOKEN.findall(text.lower()))
    return _stemmer().stemWords([word for word in words if word not in _STOP_WORDS])


@functools.lru_cache(maxsize=1)
def _stemmer() -> Any:
    import Stemmer

    return Stemmer.Stemmer("porter")
