"""The cache of the data set's files: a folder in the user's cache, from which a shop is opened.

Reading and indexing a million products takes minutes; opening the cache takes seconds, and products
stay in their file until a page shows them.
"""

import functools
import json
import mmap
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ragen_jax.envs.webshop.catalogue import Product, Wish
from ragen_jax.envs.webshop.files import Paths, read_products
from ragen_jax.envs.webshop.goals import Goals, count_goals, deal_released, shuffled_goals
from ragen_jax.envs.webshop.search import IndexBuilder, indexed_text, load_index
from ragen_jax.envs.webshop.shop import Shop, listed_under
from ragen_jax.storage.atomic_io import atomic_write, make_folder, reading, with_retries
from ragen_jax.storage.writers import save_array

FORMAT = 1  # version of the cached data; raise it when a change of the data changes results


class StoredProducts:
    """Products in a file with one JSON list per line, each read on demand."""

    def __init__(self, path: Path, ends: np.ndarray) -> None:
        """ends: [products], end of each product's line in the file, in bytes."""
        with path.open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> Product:
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} products, and none at {place}")
        first = int(self._ends[place - 1]) if place else 0
        return _product(self._text[first : int(self._ends[place])])


class Lists(Mapping[str, np.ndarray]):
    """Key -> indices of products, all stored in one array."""

    def __init__(self, keys: Sequence[str], ends: np.ndarray, places: np.ndarray) -> None:
        """ends: [keys], end of each key's part of `places`."""
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._ends, self._places = ends, places

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __getitem__(self, key: str) -> np.ndarray:
        number = self._numbers[key]
        first = int(self._ends[number - 1]) if number else 0
        return self._places[first : int(self._ends[number])]


def open_shop(paths: Paths, *, seed: int) -> Shop:
    """Return the shop of the files, read at first use and cached by their content.

    Args:
      seed: seed of prices and price caps.

    Raises:
      ValueError: a file is unusable (`files.read_products`), or there are too few goals.
    """
    # Imported here: these modules import environments.
    from ragen_jax.storage.cache import cache_directory, content_hash, lock_path
    from ragen_jax.storage.datasets import settings_hash

    files = {name: path for name, path in vars(paths).items() if path is not None}
    for path in files.values():
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}")
    try:
        contents = {name: content_hash(path) for name, path in files.items()}
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error}") from error
    name = settings_hash({"contents": contents, "seed": seed, "format": FORMAT})
    folder = cache_directory() / "datasets" / f"webshop_{name}"
    if not folder.exists():
        with lock_path(folder):
            if not folder.exists():  # no other process made it meanwhile
                _make_folder(paths, seed, folder)
    return _open(folder, seed)


@functools.lru_cache(maxsize=4)
def _open(folder: Path, seed: int) -> Shop:
    def numbers(name):
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    products = StoredProducts(folder / "products.jsonl", numbers("product_ends"))
    keys = json.loads((folder / "keys.json").read_text())
    return Shop(
        products,
        load_index(folder / "index"),
        Lists(keys, numbers("key_ends"), numbers("listed")),
        Goals(products, numbers("goal_ends"), seed),
        deal_released(numbers("goals")),
    )


def _make_folder(paths: Paths, seed: int, folder: Path) -> None:
    """Read the files and write the folder atomically."""
    from ragen_jax.storage.console import console

    console(f"webshop: reading {paths.products} (once; kept in {folder})")
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted process
    make_folder(part)
    try:
        with_retries(lambda: _write(_read(paths, seed), part, paths), folder)
        with_retries(functools.partial(part.rename, folder), folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _read(paths: Paths, seed: int) -> Iterator[Product]:
    """Yield the products of the files; errors in reading are not reported as errors in writing."""
    with reading():
        yield from read_products(paths, seed=seed)


def _write(products: Iterable[Product], folder: Path, paths: Paths) -> None:
    builder, lists = IndexBuilder(), {}
    product_ends, goal_ends = array("q"), array("q")
    byte_count, goals = 0, 0
    with (folder / "products.jsonl").open("wb") as file:
        for place, product in enumerate(products):
            byte_count += file.write(_line(product))
            goals += count_goals(product)
            product_ends.append(byte_count)
            goal_ends.append(goals)
            builder.add(indexed_text(product))
            for key in listed_under(product):
                lists.setdefault(key, array("i")).append(place)
    if not product_ends:
        raise ValueError(f"{paths.products} holds no product")
    order = shuffled_goals(goals)
    try:
        deal_released(order)
    except ValueError as error:
        raise ValueError(f"{paths.products} and {paths.attributes}: {error}") from error
    save_array(folder / "product_ends.npy", np.array(product_ends))
    save_array(folder / "goal_ends.npy", np.array(goal_ends))
    save_array(folder / "goals.npy", order)
    atomic_write(folder / "keys.json", json.dumps(list(lists)))
    save_array(folder / "key_ends.npy", np.cumsum([len(places) for places in lists.values()]))
    save_array(folder / "listed.npy", np.concatenate([np.array(x) for x in lists.values()]))
    del lists
    builder.index().save(folder / "index")


def _line(product: Product) -> bytes:
    """Return a product as one line of JSON."""
    wishes = [[wish.text, wish.attributes, wish.options] for wish in product.wishes]
    fields = [getattr(product, name) for name in _FIELDS]
    return json.dumps([*fields, wishes], ensure_ascii=False).encode() + b"\n"


def _product(line: bytes) -> Product:
    *values, wishes = json.loads(line)
    fields = dict(zip(_FIELDS, values, strict=True))
    for name in ("bullets", "attributes"):
        fields[name] = tuple(fields[name])
    fields["options"] = tuple((name, tuple(found)) for name, found in fields["options"])
    fields["nouns"] = None if fields["nouns"] is None else tuple(fields["nouns"])
    return Product(
        **fields,
        wishes=tuple(
            Wish(text, tuple(attributes), None if options is None else tuple(options))
            for text, attributes, options in wishes
        ),
    )


_FIELDS = tuple(name for name in Product.__dataclass_fields__ if name != "wishes")
