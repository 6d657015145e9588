"""Products, and a generated catalogue of products: the shop that needs no files."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ragen_jax.envs.problems import Draws

TAG = 0xC0117D0B  # tag of this environment's `Draws`
# Values of `attempt` that separate streams: the product itself, its price within a range, the price
# caps of its goals, and the options of a kind of product.
_SHELF, _PRICE, _CAPS, _RANGE = range(4)

MAX_PRODUCTS = 1_000_000  # maximum size of a generated catalogue, limited by the number of names
MAX_OPTIONS = 2  # maximum number of options of a generated product


@dataclass(frozen=True, slots=True)
class Wish:
    """A buyer's request for a product.

    text: the instruction
    attributes: attributes that the product must have
    options: the values to choose, as people wrote them; None: any values, so that each combination
        of the product's options is a separate goal
    """

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the shop.

    asin: its id, as pages show it: up to 10 characters
    title, description, bullets: its texts
    attributes: its known attributes, even if its texts do not mention them
    options: (name, values) of each option that a buyer can choose, in lower case
    price, tag: price in dollars, and the price as pages show it, which may be a range
    category, query, product_category: its department, the search that found it, and its category
        path as "A › B › C"
    wishes: requests of buyers who want it
    nouns: nouns of its title in lower case, with repetitions; None if unknown
    row: row of the file that it is from, or its number
    """

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[tuple[str, tuple[str, ...]], ...]
    price: float
    tag: str
    category: str
    query: str
    product_category: str
    wishes: tuple[Wish, ...] = ()
    nouns: tuple[str, ...] | None = None
    row: int = 0


class Products(Protocol):
    """Products by index, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Product: ...


@dataclass(frozen=True)
class Department:
    """The common properties of products of a department.

    place: the first two names of their `product_category`
    kinds: kinds of product, each a separate search
    attributes: attributes that any of them may have
    options: name -> values
    """

    place: str
    kinds: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]


# The published rule for options maps each value to the first colour word anywhere in it ("tan" in
# "standard") and then misses the value. The values here are therefore colours, or contain none.
_COLORS = ("red", "blue", "green", "black", "white", "purple", "silver", "pink")
_SIZES = ("small", "medium", "large", "huge")

DEPARTMENTS = {
    "fashion": Department(
        "Clothing › Wardrobe",
        ("shirt", "jacket", "dress", "sweater", "sandals", "boots", "scarf", "backpack"),
        (
            *("machine washable", "slim fit", "water resistant", "cotton lining"),
            *("hand made", "everyday wear", "double stitched", "elastic waist"),
        ),
        {"color": _COLORS, "size": _SIZES},
    ),
    "beauty": Department(
        "Beauty › Care",
        ("shampoo", "lotion", "lipstick", "perfume", "soap", "sunscreen", "serum", "mascara"),
        (
            *("cruelty free", "fragrance safe", "long lasting", "clinically tested"),
            *("plant based", "for sensitive skin", "quick drying", "dermatologist approved"),
        ),
        {"scent": ("vanilla", "jasmine", "cedar", "citrus", "ocean"), "size": _SIZES},
    ),
    "electronics": Department(
        "Electronics › Devices",
        ("headphones", "charger", "keyboard", "speaker", "monitor", "tripod", "camera", "router"),
        (
            *("noise cancelling", "fast charging", "plug and play", "high resolution"),
            *("battery powered", "wireless", "hands free", "carbon fiber"),
        ),
        {"color": _COLORS, "bundle": ("basic", "plus", "studio", "family")},
    ),
    "home": Department(
        "Home › Living",
        ("sofa", "lamp", "rug", "table", "mirror", "pillow", "curtain", "shelf"),
        (
            *("easy assembly", "solid wood", "space saving", "wall mounted"),
            *("stain proof", "eco friendly", "mid century", "heavy duty"),
        ),
        {"color": _COLORS, "size": _SIZES},
    ),
    "grocery": Department(
        "Grocery › Pantry",
        ("cookies", "crackers", "tea", "granola", "sauce", "candy", "noodles", "popcorn"),
        (
            *("gluten free", "low sodium", "non gmo", "high protein"),
            *("ready to eat", "kosher", "individually wrapped", "no added sugar"),
        ),
        {
            "flavor": ("maple", "ginger", "lemon", "pepper", "cinnamon"),
            "bundle": ("basic", "plus", "studio", "family"),
        },
    ),
}
BRANDS = (
    *("Acorn", "Birch", "Comet", "Delta", "Ember", "Fjord", "Gale", "Heron"),
    *("Iris", "Juno", "Kite", "Lotus", "Maple", "Nova", "Orbit", "Pine"),
)
MIN_PRICE, MAX_PRICE = 10, 99  # whole dollars


def generate_catalogue(
    products: int = 1000, *, seed: int = 0, options: int = MAX_OPTIONS
) -> tuple[Product, ...]:
    """Return the products of `generated_products`."""
    return tuple(generated_products(products, seed=seed, options=options))


def generated_products(products: int, *, seed: int, options: int) -> Iterator[Product]:
    """Yield a generated catalogue: a pure function of the arguments.

    A title contains two of a product's three attributes, those that its buyer asks for; the first
    bullet contains the third. All products of a kind have the same colours, sizes and so on, so
    the results page already shows whether a product fits.

    products: number of products, up to MAX_PRODUCTS
    seed: seed of all draws, in [0, 2**63)
    options: maximum number of options of a product, up to MAX_OPTIONS; it has this number or one
        less
    """
    names = tuple(DEPARTMENTS)
    ranges = {}
    kinds = [(kind, department) for department in DEPARTMENTS.values() for kind in department.kinds]
    for number, (kind, department) in enumerate(kinds):
        ranges[kind] = _options(department, _stream(seed, number, _RANGE), options)
    digits = max(4, len(str(products - 1)))
    for number in range(products):
        draws = _stream(seed, number, _SHELF)
        category = names[draws.below(len(names))]
        department = DEPARTMENTS[category]
        kind = department.kinds[draws.below(len(department.kinds))]
        first, second, third = draws.shuffled(department.attributes)[:3]
        brand = BRANDS[draws.below(len(BRANDS))]
        price = float(MIN_PRICE + draws.below(MAX_PRICE - MIN_PRICE + 1))
        yield Product(
            asin=f"B0{number:0{digits + digits % 2}d}",  # pairs of digits
            title=f"{brand} {first} {second} {kind}",
            description=f"A {kind} by {brand}.",
            bullets=(third, f"{first} and {second}"),
            attributes=(first, second, third),
            options=ranges[kind],
            price=price,
            tag=f"${price}",
            category=category,
            query=kind,
            product_category=f"{department.place} › {kind.title()}",
            wishes=(Wish(f"i am looking for {first} {second} {kind}", (first, second)),),
            row=number,
        )


def _options(
    department: Department, draws: Draws, most: int
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return a random number of options, with two or three values each."""
    names = list(department.options)[:most]
    count = max(most - 1, 0) + draws.below(2) if most else 0
    return tuple(
        (name, tuple(draws.shuffled(department.options[name])[: 2 + draws.below(2)]))
        for name in names[:count]
    )


def draw_price(low: float, high: float, *, seed: int, row: int) -> float:
    """Return a price within a range for the product in a row of its file."""
    return low + (high - low) * _stream(seed, row, _PRICE).below(2**53) / 2**53


def cap_draws(seed: int, row: int) -> Draws:
    """Return the draws for the price caps of a product's goals."""
    return _stream(seed, row, _CAPS)


def _stream(seed: int, row: int, attempt: int) -> Draws:
    """Return draws for the product in a row of a catalogue, independent of other products."""
    return Draws(seed, attempt | row << 2, TAG)


def generated_words() -> tuple[str, ...]:
    """Return texts of the generated catalogue that are one token each for the tiny agent."""
    departments = DEPARTMENTS.values()
    attributes = dict.fromkeys(a for d in departments for a in d.attributes)
    values = dict.fromkeys(v for d in departments for x in d.options.values() for v in x)
    return (
        *(f"{pair:02d}" for pair in range(100)),  # for ids and prices
        *(word for a in attributes for word in (a, f" {a}")),
        *(word for v in values for word in (v, f" {v}")),
        *(f" {kind}" for d in departments for kind in d.kinds),
        *(f" {brand}" for brand in BRANDS),
        *dict.fromkeys(f" {name}" for d in departments for name in d.options),
    )
