"""WebShop's reward: purchases by hand against the published rule, part by part."""

import itertools

import numpy as np
import pytest

from ragen_jax.envs.webshop import reward
from ragen_jax.envs.webshop.catalogue import DEPARTMENTS, Product, generate_catalogue
from ragen_jax.envs.webshop.goals import NO_CAP, Goal
from ragen_jax.envs.webshop.reward import purchase_reward, title_words, type_reward

pytest.importorskip("thefuzz")
pytestmark = pytest.mark.fast


def product(**changes):
    """A shirt that comes in red or dark blue."""
    fields = dict(
        asin="B1",
        title="Acme cotton shirt",
        description="Worn by everybody.",
        bullets=("Machine washable", "Long sleeves"),
        attributes=("slim fit", "machine wash"),
        options=(("color", ("red", "dark blue")), ("size", ("small", "x-large"))),
        price=25.0,
        tag="$25.0",
        category="fashion",
        query="men's shirts",
        product_category="Clothing › Men › Shirts",
    )
    return Product(**(fields | changes))


def goal(**changes):
    fields = dict(
        place=0,
        asin="B1",
        instruction="a shirt",
        attributes=("slim fit",),
        options=(("color", "red"),),
        cap=30.0,
    )
    return Goal(**(fields | changes))


WANTED = product()
OTHER = dict(query="mugs", product_category="Kitchen › Mugs")

# (bought product, goal, chosen options, reward as a fraction). There is one part for each attribute
# and option, and one for the price.
PURCHASES = [
    # everything that the goal asks for
    (product(), goal(), {"color": "red"}, 3 / 3),
    (product(), goal(options=()), {}, 2 / 2),
    (product(), goal(attributes=("slim fit", "machine wash")), {"color": "red"}, 4 / 4),
    # a wrong option, no option, and one option too many
    (product(), goal(), {"color": "dark blue"}, 2 / 3),
    (product(), goal(), {}, 2 / 3),
    (product(), goal(), {"color": "red", "size": "small"}, 3 / 3),
    (product(), goal(options=(("color", "red"), ("size", "small"))), {"color": "red"}, 3 / 4),
    (product(), goal(options=(("color", "red"), ("size", "small"))), {"size": "small"}, 3 / 4),
    # the price: equal to the cap, above it, and no cap
    (product(price=30.0), goal(), {"color": "red"}, 3 / 3),
    (product(price=30.01), goal(), {"color": "red"}, 2 / 3),
    (product(price=5000.0), goal(cap=NO_CAP), {"color": "red"}, 3 / 3),
    # attributes: similar in other words, in the title, a bullet, the description, and nowhere
    (product(attributes=("fit slim",)), goal(), {"color": "red"}, 3 / 3),
    (product(attributes=("slim fits",)), goal(), {"color": "red"}, 3 / 3),
    (product(attributes=("loose",)), goal(), {"color": "red"}, 2 / 3),
    (product(attributes=("loose",)), goal(attributes=("cotton",)), {"color": "red"}, 3 / 3),
    (product(attributes=("x",)), goal(attributes=("washable",)), {"color": "red"}, 3 / 3),
    (product(attributes=("x",)), goal(attributes=("everybody",)), {"color": "red"}, 3 / 3),
    (product(), goal(attributes=("slim fit", "glows")), {"color": "red"}, 3 / 4),
    # Across two bullets, which are joined by a space.
    (product(attributes=("x",)), goal(attributes=("washable long",)), {"color": "red"}, 3 / 3),
    # People's options are plain values: "dark blue" and "light" reduce to their first colour word.
    (product(), goal(options=("red",)), {"color": "red"}, 3 / 3),
    (product(), goal(options=("bright red",)), {"color": "red"}, 3 / 3),
    # blue, not dark: colours are tried in sorted order
    (product(), goal(options=("blue",)), {"color": "dark blue"}, 3 / 3),
    (product(), goal(options=("x-large",)), {"size": "x-large"}, 3 / 3),
    (product(), goal(options=("x-large",)), {"size": "small"}, 2 / 3),
    # pairs: a colour only if a member is exactly a colour, and then the text of both
    (product(), goal(options=(("color", "dark blue"),)), {"color": "dark blue"}, 3 / 3),
    (product(), goal(options=(("size", "x-large"),)), {"size": "x-large"}, 3 / 3),
    # "standard" contains "tan", which is not similar to "size standard": the published rule
    # misses it
    (product(), goal(options=(("size", "standard"),)), {"size": "standard"}, 2 / 3),
    (product(), goal(options=("standard",)), {"size": "standard"}, 3 / 3),
    # another kind of product: no shared words in the titles, however much else is right
    (product(title="Steel mug"), goal(), {"color": "red"}, 0.0),
    (product(title="Steel mug", **OTHER), goal(), {"color": "red"}, 0.0),
]


@pytest.mark.parametrize("bought, wanted, chosen, expected", PURCHASES)
def test_purchases_by_hand(bought, wanted, chosen, expected):
    earned = purchase_reward(bought, WANTED, wanted, chosen)
    assert earned.reward == pytest.approx(expected)


@pytest.mark.parametrize(
    "own, asked, hit",
    [
        ("abcdefghijklmnopqrst", "abcxefghixklmnopxrst", False),  # similarity 85 of 100
        ("abcdefghijklmn", "abxxefghijklmn", True),  # similarity 86
        ("fit slim", "slim fit", True),  # order and capitals do not matter
        ("Slim-Fit!", "slim fit", True),
        ("slim fit for men", "fit slim", True),  # additional words do not matter
        ("", "", True),  # an empty text is part of every text
        ("caf\u00e9", "caf", True),
    ],
)
def test_how_alike_an_attribute_must_be(own, asked, hit):
    assert (reward.attribute_hits(product(attributes=(own,)), [asked]) == 1) == hit


TEN = "one two three four five six seven eight nine ten"


def titled(nouns, **changes):
    """A product with the given title nouns; the title itself contains none of them."""
    return product(title="The 1", nouns=tuple(nouns.split()), **changes)


@pytest.mark.parametrize(
    "bought, wanted, expected",
    [
        # 2 of 10 nouns are 0.2, not above it: the query or two category names must be shared.
        ("one two", {}, 1.0),
        ("one two", {"query": "mugs"}, 1.0),  # by the category
        ("one two", {"product_category": "Kitchen"}, 1.0),  # by the query
        ("one two", {"query": "mugs", "product_category": "Men › Kitchen › Mugs"}, 0.5),
        ("one two", {"query": "mugs", "product_category": "Mugs›Shirts ›Men"}, 1.0),  # in any order
        ("one two", OTHER, 0.5),
        ("one two three", OTHER, 1.0),  # 0.3
        ("one", OTHER, 0.5),  # 0.1 is not below 0.1
        ("eleven", {}, 0.0),
    ],
)
def test_type_by_hand(bought, wanted, expected):
    assert type_reward(titled(bought, **wanted), titled(TEN)) == expected


def test_type_of_a_title_with_next_to_nothing_in_common():
    """1 of 11 nouns is below 0.1, for any query; repeated nouns of the wanted title count."""
    assert type_reward(titled("one"), titled(f"{TEN} eleven")) == 0.1
    assert type_reward(titled("one"), titled("one " + "two " * 10)) == 0.1


def test_type_of_a_title_without_nouns():
    """Counts as 0.2: the query or the category decides."""
    wanted = product(title="for 12")
    assert type_reward(product(), wanted) == 1.0
    assert type_reward(product(**OTHER), wanted) == 0.5
    assert type_reward(product(nouns=("lamp",)), titled("")) == 1.0
    assert type_reward(product(nouns=("lamp",), **OTHER), titled("")) == 0.5


def test_title_words():
    assert title_words("A Pair of Men's 2-in-1 USB-C Café lamps (Pack of 3)") == [
        *("pair", "men", "usb", "café", "lamps", "pack"),
    ]


def test_colors():
    assert len(reward.COLORS) == 102 and list(reward.COLORS) == sorted(reward.COLORS)
    assert reward.color("dark red") == "dark" and reward.color("navy/wine") == "navy"
    assert reward.color(("color", "red")) == "red"
    assert reward.color(("color", "dark red")) == "('color', 'dark red')"
    assert reward.color("xl") == "xl"


def test_the_generated_catalogue_is_told_apart_by_the_rule():
    """Within a department, attributes and values match only themselves."""
    for department in DEPARTMENTS.values():
        for one, other in itertools.permutations(department.attributes, 2):
            assert not reward._similar(one, other), (one, other)
        for name, values in department.options.items():
            for one, other in itertools.product(values, repeat=2):
                assert reward.option_hits([one], [(name, other)]) == (one == other), (one, other)
                assert reward.option_hits([one], [other]) == (one == other), (one, other)


def test_a_generated_product_bought_for_another():
    """Products of different kinds share only attributes in their titles."""
    catalogue = generate_catalogue(300)
    wanted = catalogue[0]
    (wish,) = wanted.wishes
    aim = Goal(0, wanted.asin, "", wish.attributes, (), 100.0)
    for bought in catalogue:
        earned = purchase_reward(bought, wanted, aim, {})
        shared = len(set(bought.attributes) & set(wish.attributes))
        assert earned.attributes == shared
        assert earned.reward == pytest.approx(earned.kind * (shared + 1) / 3)


def published(bought, wanted, goal, chosen):
    """An independent version of the rule, in fractions, as described for the original."""
    from thefuzz.fuzz import token_set_ratio

    def first_color(option):
        return next((name for name in reward.COLORS if name in option), option)

    goal_nouns = list(wanted.nouns)
    overlap = len({*bought.nouns} & {*goal_nouns}) / len(goal_nouns) if goal_nouns else 0.2
    names = [{x.strip() for x in p.product_category.split("›")} for p in (bought, wanted)]
    alike = bought.query == wanted.query or len(names[0] & names[1]) > 1 or overlap > 0.2
    kind = 0 if overlap == 0 else 0.1 if overlap < 0.1 else 1 if alike else 0.5
    hits = int(bought.price <= goal.cap)
    for attribute in goal.attributes:
        own = max([token_set_ratio(a, attribute) for a in bought.attributes], default=0) > 85
        texts = [bought.title, " ".join(bought.bullets), bought.description]
        hits += own or any(attribute in text.lower() for text in texts)
    for option in goal.options:
        ratios = [token_set_ratio(first_color(c), first_color(option)) for c in chosen.values()]
        hits += max(ratios, default=0) > 85
    return kind * hits / (len(goal.attributes) + len(goal.options) + 1)


ATTRIBUTES = ("slim fit", "fit slim", "machine wash", "machine washable", "easy clean", "glows")
VALUES = ("red", "dark red", "navy | wine", "standard", "x-large", "it's 5\" wide", "café", "10 ft")
NOUNS = ("shirt", "lamp", "café", "rug", "mug", "sofa", "tea", "soap", "tent", "sock", "hat", "pen")
PLACES = ("Clothing › Men › Shirts", "Men›Shirts", "Kitchen › Mugs", "Clothing ›Women › Shirts")


def random_product(rng):
    def some(items, most):
        return tuple(rng.choice(items, size=rng.integers(most + 1), replace=False).tolist())

    values = some(VALUES, 4)
    return product(
        title=" ".join(some(ATTRIBUTES + NOUNS, 3)).title(),
        nouns=some(NOUNS, 12),
        description=" ".join(some(ATTRIBUTES, 1)),
        bullets=some(ATTRIBUTES, 2),
        attributes=some(ATTRIBUTES, 3),
        options=(("color", values[:2]), ("size", values[2:])),
        price=float(rng.integers(10, 100)),
        query=str(rng.choice(("shirts", "mugs"))),
        product_category=str(rng.choice(PLACES)),
    )


def test_three_hundred_random_purchases():
    """Purchases of all four kinds, with all sorts of parts."""
    rng = np.random.default_rng(2**63 + 17)
    seen = []
    for index in range(300):
        bought, wanted = random_product(rng), random_product(rng)
        pairs = [(name, value) for name, values in wanted.options for value in values]
        aim = goal(
            attributes=wanted.attributes or ("glows",),
            options=tuple(pairs if index % 2 else [value for _, value in pairs]),
            cap=(NO_CAP, 50.0, 30.0)[index % 3],
        )
        chosen = {name: values[-1] for name, values in bought.options if values}
        earned = purchase_reward(bought, wanted, aim, chosen)
        assert earned.reward == pytest.approx(published(bought, wanted, aim, chosen), abs=1e-12)
        seen.append(earned)
    assert {x.kind for x in seen} == {0.0, 0.1, 0.5, 1.0}
    assert {x.attributes for x in seen} >= {0, 1, 2} and {x.options for x in seen} >= {0, 1, 2}
    assert len({round(x.reward, 6) for x in seen}) > 20
