"""The data set's files, read in one pass with at most one product in memory.

    products      items_shuffle*.json     list of products
    attributes    items_ins_v2*.json      asin -> attributes, and a synthetic buyer's request
    instructions  items_human_ins.json    asin -> people's requests
    nouns         a file of the user's    asin -> nouns of the title, as a tagger finds them

The rules are those of WebShop's web_agent_site/engine/engine.py: load_products.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen_jax.envs.files import is_text
from ragen_jax.envs.webshop.catalogue import Product, Wish, draw_price

FIELDS = (
    *("asin", "name", "full_description", "small_description", "pricing"),
    *("customization_options", "category", "query", "product_category"),
)
NO_ATTRIBUTES = ("DUMMY_ATTR",)  # for a product that is not in the file of attributes
NO_PRICE = 100.0  # dollars, for a product without a price
MAX_ASIN = 10  # characters; products with a longer asin are left out

_CHUNK = 1 << 20  # characters per read
_MAX_ELEMENT = 1 << 24  # characters of one product, or of one value of another file


@dataclass(frozen=True)
class Paths:
    """The files of a shop. Without `instructions`, goals are made from the attributes file; without
    `nouns`, words of titles take their place."""

    products: str | Path
    attributes: str | Path
    instructions: str | Path | None = None
    nouns: str | Path | None = None


def read_products(paths: Paths, *, seed: int) -> Iterator[Product]:
    """Yield the products of the files, in the order of their rows.

    As in the original, products are left out if their asin is "nan", too long, or a repetition.

    Args:
      seed: seed of prices that are given as a range.

    Raises:
      ValueError: a file is missing or malformed, or a field is missing; the message names path,
        row, asin and field.
    """
    attributes = _members(paths.attributes, _check_attributes)
    instructions = None
    if paths.instructions is not None:
        instructions = _members(paths.instructions, _check_instructions)
    nouns = None if paths.nouns is None else _members(paths.nouns, _check_nouns)
    seen = set()
    for row, item in enumerate(_elements(paths.products)):
        where = f"row {row} of {paths.products}"
        if not isinstance(item, dict):
            raise ValueError(f"{where} is not a product: {ascii(item)[:60]}")
        asin = _text(item, "asin", where)
        if asin == "nan" or len(asin) > MAX_ASIN or asin in seen:
            continue
        seen.add(asin)
        where = f"row {row} ({ascii(asin)}) of {paths.products}"
        known = json.loads(attributes[asin]) if asin in attributes else {}
        if instructions is not None:
            wishes = _human_wishes(json.loads(instructions.get(asin, b"[]")))
        else:
            wishes = _wish(known, f"{asin!a} of {paths.attributes}")
        if nouns is not None and asin not in nouns:
            raise ValueError(f"{paths.nouns} has no nouns of {asin!a}, {where}")
        prices, tag = _prices(item, where)
        bullets = item.get("small_description")
        yield Product(
            asin=asin,
            title=_text(item, "name", where),
            description=_text(item, "full_description", where),
            bullets=(
                _texts(item, "small_description", where)
                if isinstance(bullets, list)
                else (_text(item, "small_description", where),)
            ),
            attributes=tuple(known["attributes"]) if "attributes" in known else NO_ATTRIBUTES,
            options=_options(item, where),
            price=prices[0] if len(prices) == 1 else draw_price(*prices, seed=seed, row=row),
            tag=tag,
            category=_text(item, "category", where),
            query=_text(item, "query", where).lower().strip(),
            product_category=_text(item, "product_category", where),
            wishes=wishes,
            nouns=None if nouns is None else tuple(n.lower() for n in json.loads(nouns[asin])),
            row=row,
        )


# --------------------------------------------------------------------------- fields of a product


def _text(item: dict[str, Any], field: str, where: str) -> str:
    """Return a field that must be a text."""
    if field not in item:
        raise ValueError(f"{where} lacks the field {field}")
    if not is_text(item[field]):
        raise ValueError(f"field {field} of {where} must be text, got {ascii(item[field])[:60]}")
    return item[field]


def _texts(item: dict[str, Any], field: str, where: str) -> tuple[str, ...]:
    """Return a field that must be a list of texts."""
    value = item.get(field)
    if not isinstance(value, list) or not all(map(is_text, value)):
        raise ValueError(
            f"field {field} of {where} must be a list of texts, got {ascii(value)[:60]}"
        )
    return tuple(value)


def _prices(item: dict[str, Any], where: str) -> tuple[tuple[float, ...], str]:
    """Return (the price, or lowest and highest; displayed text) of "$1,299.00" or "$9 to $12"."""
    pricing = item.get("pricing")
    if not pricing:
        return (NO_PRICE,), f"${NO_PRICE}"
    parts = _text(item, "pricing", where).split("$")[1:]
    try:
        prices = tuple(float(re.sub(r"[^\d.]", "", part)) for part in parts[:2])
    except ValueError:
        prices = ()
    if not prices:
        raise ValueError(
            f"field pricing of {where} must be like $9.99 or $9.99 to $12, got "
            f"{ascii(pricing)[:60]}"
        )
    return prices, " to ".join(f"${price}" for price in prices)


def _options(item: dict[str, Any], where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (name, values) of each option in lower case; of names that then agree, the last."""
    choices = item.get("customization_options")
    if not choices:
        return ()
    bad = f"field customization_options of {where} must be names with lists of value, got "
    if not isinstance(choices, dict):
        raise ValueError(bad + ascii(choices)[:60])
    options = {}
    for name, contents in choices.items():
        if contents is None:
            continue
        is_list = isinstance(contents, list) and all(isinstance(x, dict) for x in contents)
        if not is_text(name) or not is_list or not all(is_text(x.get("value")) for x in contents):
            raise ValueError(f"{bad}{ascii(name)[:30]}: {ascii(contents)[:60]}")
        values = (content["value"].strip().replace("/", " | ").lower() for content in contents)
        options[name.lower()] = tuple(values)
    return tuple(options.items())


# --------------------------------------------------------------------------- buyers' requests


def _wish(known: dict[str, Any], where: str) -> tuple[Wish, ...]:
    """Return a synthetic buyer's request; () if there is none."""
    if known.get("instruction") is None:
        return ()
    wanted = tuple(known.get("instruction_attributes") or ())
    if not wanted:
        raise ValueError(f"field instruction_attributes of {where} must not be empty")
    return (Wish(known["instruction"], wanted),)


def _human_wishes(items: list[dict[str, Any]]) -> tuple[Wish, ...]:
    """Return people's requests, without those that ask for no attribute."""
    return tuple(
        Wish(
            wish["instruction"],
            tuple(wish["instruction_attributes"]),
            tuple(wish["instruction_options"]),
        )
        for wish in items
        if wish["instruction_attributes"]
    )


def _check_attributes(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, got {ascii(value)[:60]}")
    if "attributes" in value:
        _texts(value, "attributes", where)
    if value.get("instruction") is not None:
        _text(value, "instruction", where)
    if value.get("instruction_attributes") is not None:
        _texts(value, "instruction_attributes", where)


def _check_instructions(value: Any, where: str) -> None:
    if not isinstance(value, list) or not all(isinstance(wish, dict) for wish in value):
        raise ValueError(f"{where} must be a list of instructions, got {ascii(value)[:60]}")
    for wish in value:
        _text(wish, "instruction", where)
        _texts(wish, "instruction_attributes", where)
        _texts(wish, "instruction_options", where)


def _check_nouns(value: Any, where: str) -> None:
    _texts({"nouns": value}, "nouns", where)


# --------------------------------------------------------------------------- JSON, piece by piece


def _elements(path: str | Path) -> Iterator[Any]:
    """Yield the elements of a file that is a JSON list."""
    with _Pieces(path) as pieces:
        pieces.expect("[", "a list of products")
        row = 0
        while not pieces.ends_with("]", first=row == 0, name=f"row {row}"):
            yield pieces.value(f"row {row}")[0]
            row += 1


def _members(path: str | Path, check: Callable[[Any, str], None]) -> dict[str, bytes]:
    """Return {name: JSON text} of a file that is a JSON object, with each value checked.

    The values stay text, since a million small objects take several times the memory.
    """
    members: dict[str, bytes] = {}
    name = "the beginning"
    with _Pieces(path) as pieces:
        pieces.expect("{", "an object of asins")
        while not pieces.ends_with("}", first=not members, name=f"what follows {name!a}"):
            name = pieces.value(f"what follows {name!a}")[0]
            if not isinstance(name, str):
                raise ValueError(f"{path} has {name!a} where an asin must be")
            pieces.expect(":", f"a colon after {name!a}")
            value, text = pieces.value(f"{name!a}")
            check(value, f"{name!a} of {path}")
            members[name] = text.encode()
    return members


class _Pieces:
    """A reader of the JSON values of a file, one after another."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}")
        self._decoder = json.JSONDecoder()
        self._text, self._position, self._at_end = "", 0, False

    def __enter__(self) -> "_Pieces":
        try:
            self._file = Path(self._path).open(encoding="utf-8-sig")
        except OSError as error:
            raise ValueError(f"{self._path} cannot be read: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_more(self, name: str) -> bool:
        """Read more text; return whether there was any."""
        try:
            piece = self._file.read(_CHUNK)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._path} cannot be read at {name}: {error}") from error
        self._text, self._position = self._text[self._position :] + piece, 0
        self._at_end = not piece
        return bool(piece)

    def _peek(self, name: str) -> str:
        """Return the next character other than white space, without consuming it; "" at the end."""
        while True:
            while self._position < len(self._text) and self._text[self._position] in " \t\n\r":
                self._position += 1
            if self._position < len(self._text) or not self._read_more(name):
                return self._text[self._position : self._position + 1]

    def expect(self, sign: str, what: str) -> None:
        """Consume a sign; raise ValueError if it is not there."""
        found = self._peek(what)
        if found != sign:
            raise ValueError(f"{self._path} must hold {what}: expected {sign!r}, got {found!a}")
        self._position += 1

    def ends_with(self, sign: str, *, first: bool, name: str) -> bool:
        """Consume the comma before another element, or `sign`; return whether it was `sign`."""
        found = self._peek(name)
        if found == sign or (not first and found == ","):
            self._position += 1
            return found == sign
        if first and found:
            return False
        raise ValueError(
            f"{self._path} cannot be read as JSON at {name}: expected ',' or {sign!r}, got "
            f"{found!a}{'' if found else ', the end of the file'}"
        )

    def value(self, name: str) -> tuple[Any, str]:
        """Consume the next value; return (value, its text)."""
        self._peek(name)
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._position)
            except (ValueError, RecursionError) as error:
                # The value may continue after the text read so far; a number has no closing sign.
                if len(self._text) - self._position > _MAX_ELEMENT or not self._read_more(name):
                    raise ValueError(
                        f"{self._path} cannot be read as JSON at {name}: {error}"
                    ) from error
                continue
            if end < len(self._text) or self._at_end:
                text, self._position = self._text[self._position : end], end
                return value, text
            self._read_more(name)
