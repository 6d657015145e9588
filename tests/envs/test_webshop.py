"""WebShop: pages by hand, effects of actions, search, goals, prices, splits, the expert."""

import dataclasses
import hashlib
import itertools
import random

import numpy as np
import pytest

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.types import Environment, GroundedEnvironment, SolvableEnvironment
from ragen_jax.envs.webshop import WebShop, catalogue, env, goals, pages, search, shop
from ragen_jax.envs.webshop.catalogue import Product, Wish, generate_catalogue
from ragen_jax.envs.webshop.goals import NO_CAP, Goal, Goals, draw_cap
from ragen_jax.envs.webshop.pages import Visit
from ragen_jax.envs.webshop.shop import Shop

for package in ("bm25s", "Stemmer", "thefuzz"):
    pytest.importorskip(package)
pytestmark = pytest.mark.fast

# sha256 of the observations of seeds 0..49 with default options, along the expert's path. A
# different digest means that every problem has changed, and with it warm starts, evaluation sets
# and resumed runs.
PAGES_0_TO_49 = "97c046f47c9349d7346a7faf38da8945b1e98b005ef3d4c852300fa0492df6c6"


def pages_digest() -> str:
    env = WebShop()
    digest = hashlib.sha256()
    for seed in range(50):
        state = env.reset(seed)
        for action in env.solve(state):
            digest.update(env.render(state).encode())
            state = env.step(state, action).state
    return digest.hexdigest()


def play(env, state, *actions):
    """The state after the actions; the pages must offer each of them."""
    for action in actions:
        step = env.step(state, action)
        assert step.info["valid"], (action, env.render(state))
        state = step.state
    return state


# ------------------------------------------------------------------------------------- a small shop

LAMP = Product(
    asin="B0LAMP",
    title="Brass lamp, dimmable",
    description="A lamp for the desk.\n It is made of brass. ",
    bullets=("Warm light", "Made by hand"),
    attributes=("easy clean", "hand made"),
    options=(("color", ("gold", "black | white")), ("size", ('10" small', "tall", "gold"))),
    price=25.0,
    tag="$20.0 to $30.0",
    category="home",
    query="desk lamps",
    product_category="Home \u203a Lamps \u203a Desk Lamps",
    wishes=(Wish("Find me a lamp", ("easy clean",)),),
)
BARE = Product(
    asin="b0bare",
    title="",
    description="",
    bullets=("", "  ", "\n\t", " x "),
    attributes=(),
    options=(),
    price=100.0,
    tag="$100.0",
    category="home",
    query="things",
    product_category="Home",
    row=1,
)
MUG = dataclasses.replace(LAMP, title="Mug", description="A mug.", query="mugs", wishes=())
MUGS = [
    dataclasses.replace(MUG, asin=f"B0MUG{i:02d}", title=f"Mug number {i}", row=2 + i)
    for i in range(23)
]


def small_shop(products=(LAMP, BARE, *MUGS)):
    builder, lists = search.IndexBuilder(), {}
    for place, product in enumerate(products):
        builder.add(search.indexed_text(product))
        for key in shop.listed_under(product):
            lists.setdefault(key, []).append(place)
    ends = np.cumsum([goals.count_goals(product) for product in products])
    found = Goals(products, ends, seed=0)
    every = np.arange(len(found))
    lists = {key: np.array(places) for key, places in lists.items()}
    splits = {split: every for split in ("imitation", "train", "eval")}
    return Shop(products, builder.index(), lists, found, splits)


@pytest.fixture
def environment(monkeypatch):
    """A function: options -> an environment over the small shop."""
    made = small_shop()
    monkeypatch.setattr(env, "generated_shop", lambda *_: made)
    return lambda **options: WebShop(**{"show_choices": False} | options)


GOAL = 'Find me a lamp with color: gold, and size: 10" small, and price lower than 60.00 dollars'
TOP = f"Instruction: [SEP] {GOAL} [SEP] Back to Search"


def start(environment):
    """The first goal, with a known cap."""
    state = environment.reset(0)
    assert state.goal.options == (("color", "gold"), ("size", '10" small'))
    text = state.goal.instruction.rpartition(", and price")[0]
    told = f"{text}, and price lower than 60.00 dollars"
    return Visit(dataclasses.replace(state.goal, instruction=told, cap=60.0))


# ------------------------------------------------------------------------------------ pages by hand


def test_the_first_page(environment):
    shown = environment().render(start(environment()))
    assert shown == f"WebShop [SEP] Instruction: [SEP] {GOAL} [SEP] Search"


def test_pages_of_results(environment):
    """Ten results per page, of all products with the word; later pages have a way back, and all
    pages have a way forward."""
    own = environment()
    state = play(own, start(own), "search[mug]")
    first = [f"B0MUG{i:02d} [SEP] Mug number {i} [SEP] $20.0 to $30.0" for i in range(23)]
    assert own.render(state) == " [SEP] ".join(
        [TOP, "Page 1 (Total results: 23)", "Next >", *first[:10]]
    )
    state = play(own, state, "click[next >]", "click[next >]")
    assert own.render(state) == " [SEP] ".join(
        [TOP, "Page 3 (Total results: 23)", "< Prev", "Next >", *first[20:]]
    )
    state = play(own, state, "click[next >]")  # after the last page
    assert own.render(state) == f"{TOP} [SEP] Page 4 (Total results: 23) [SEP] < Prev [SEP] Next >"
    assert play(own, state, "click[< prev]").number == 3


def test_a_search_that_finds_nothing(environment):
    own = environment()
    for text in ("zebra", "the of and", "\u202e\U0001f600", "]", "[[["):
        state = play(own, start(own), f"search[{text}]")
        assert own.render(state) == f"{TOP} [SEP] Page 1 (Total results: 0) [SEP] Next >"


def test_a_products_page(environment):
    """Options by name, then values; the displayed price is the text, not the drawn price."""
    own = environment()
    state = play(own, start(own), "search[brass lamp]", "click[b0lamp]")
    expected = [
        *(TOP, "< Prev", "color", "gold", "black | white", "size", '10" small', "tall", "gold"),
        *("Brass lamp, dimmable", "Price: $20.0 to $30.0", "Rating: N.A."),
        *("Description", "Features", "Reviews", "Buy Now"),
    ]
    assert own.render(state) == " [SEP] ".join(expected)
    own = environment(show_attributes=True)
    assert own.render(state) == " [SEP] ".join([*expected[:-1], "Attributes", "Buy Now"])


@pytest.mark.parametrize(
    "label, texts",
    [
        ("description", ["A lamp for the desk.\n It is made of brass."]),
        ("features", ["Warm light", "Made by hand"]),
        ("reviews", []),
        (
            "attributes",
            [
                *("easy clean", "hand made", "home", "desk lamps"),
                "Home \u203a Lamps \u203a Desk Lamps",
            ],
        ),
    ],
)
def test_pages_below_a_products(environment, label, texts):
    own = environment(show_attributes=True)
    item = play(own, start(own), "search[brass lamp]", "click[b0lamp]", "click[tall]")
    state = play(own, item, f"click[{label}]")
    assert own.render(state) == " [SEP] ".join([TOP, "< Prev", *texts])
    assert play(own, state, "click[< prev]") == item  # with the chosen options


def test_texts_that_are_not_there(environment):
    """Empty texts are not on a page; entries of a list have a leading space, which shows as an
    empty text unless a line ends in it."""
    own = environment()
    state = play(own, start(own), "search[<q> things]")
    assert own.render(state).endswith("(Total results: 1) [SEP] Next > [SEP] b0bare [SEP] $100.0")
    state = play(own, state, "click[b0bare]")
    assert " [SEP] < Prev [SEP] Price: $100.0 [SEP] Rating" in own.render(state)
    assert own.render(play(own, state, "click[description]")) == f"{TOP} [SEP] < Prev"
    features = own.render(play(own, state, "click[features]"))
    assert features == f"{TOP} [SEP] < Prev [SEP]  [SEP]  [SEP] x"


def test_actions_that_are_shown(environment):
    """As RAGEN lists them: an empty page of results after another page shows no way forward."""
    own = environment(show_choices=True)
    state = start(own)
    shown = own.render(state).splitlines()
    assert shown[1:] == ["You must choose from these actions: search[<content>]."]
    state = play(own, state, "search[brass]")
    assert own.choices(state) == ("click[back to search]", "click[next >]", "click[b0lamp]")
    empty = play(own, state, "click[next >]")
    assert own.choices(empty) == ("click[back to search]", "click[< prev]")
    # the action works although it is not listed
    assert play(own, empty, "click[next >]").number == 3
    state = play(own, state, "click[b0lamp]")
    assert own.choices(state) == tuple(
        f"click[{label}]"
        for label in (
            *("back to search", "< prev", "description", "features", "reviews", "buy now"),
            *("gold", "black | white", '10" small', "tall"),  # each only once
        )
    )
    assert own.choices(play(own, state, "click[reviews]")) == (
        *("click[back to search]", "click[< prev]"),
    )
    assert own.choices(play(own, state, "click[buy now]")) == ()


def test_what_was_clicked_is_shown_if_asked_for(environment):
    for shown, own in ((True, environment(show_clicked=True)), (False, environment())):
        state = play(own, start(own), "search[brass]", "click[b0lamp]")
        assert own.render(state).startswith("Instruction")
        state = play(own, state, "click[tall]", "click[black | white]")
        told = "You have clicked tall, black | white.\nInstruction"
        assert own.render(state).startswith(told) == shown


# ---------------------------------------------------------------------------------- what actions do


@pytest.mark.parametrize(
    "action",
    [
        *(
            "",
            "search[]",
            "search",
            "click[search]",
            "click[b0lamp]",
            "click[buy now]",
            "Search[a]",
        ),
        *("CLICK[back to search]", "search [lamp]", "buy now", "think[x]", "search[\n]"),
        *("click[", "[lamp]", "x" * 10**6, "\x00", "search[" * 9999),
    ],
)
def test_what_a_page_has_not_changes_nothing(environment, action):
    own = environment()
    step = own.step(start(own), action)
    assert (step.state, step.reward, step.done) == (start(own), 0.0, False)
    assert step.info == {"success": False, "valid": False}


def test_searching_works_where_there_is_a_box(environment):
    own = environment()
    state = play(own, start(own), "search[brass]")
    assert not own.step(state, "search[mug]").info["valid"]
    assert not own.step(play(own, state, "click[b0lamp]"), "search[mug]").info["valid"]
    assert play(own, state, "click[back to search]", "search[mug]").query == "mug"


def test_capitals_do_not_matter_and_brackets_may_be_in_a_label(environment):
    own = environment()
    state = play(own, start(own), "search[BRASS [x]]")
    assert state.query == "brass [x]"
    assert play(own, state, "click[B0lamp]", "click[TALL] and so on").options == (("size", "tall"),)


def test_options(environment):
    """The last click on a name counts; a value of two options belongs to the last on the page."""
    own = environment()
    item = play(own, start(own), "search[brass]", "click[b0lamp]")
    state = play(own, item, "click[tall]", "click[black | white]", 'click[10" small]')
    assert state.options == (("size", '10" small'), ("color", "black | white"))
    assert play(own, item, "click[gold]").options == (("size", "gold"),)
    back = play(own, state, "click[< prev]")
    assert back == play(own, start(own), "search[brass]")
    assert play(own, back, "click[b0lamp]") == item  # nothing is chosen any more


def test_buttons_count_before_values_of_their_name(environment, monkeypatch):
    named = dataclasses.replace(LAMP, options=(("x", ("buy now", "features", "next >")),))
    made = small_shop((named,))
    monkeypatch.setattr(env, "generated_shop", lambda *_: made)
    own = WebShop()
    item = play(own, own.reset(0), "search[brass]", "click[b0lamp]")
    assert own.step(item, "click[buy now]").done
    assert play(own, item, "click[features]").page == pages.FEATURES
    assert play(own, item, "click[next >]").options == (("x", "next >"),)


def test_buying(environment):
    own = environment()
    item = play(own, start(own), "search[brass]", "click[b0lamp]", 'click[10" small]')
    step = own.step(item, "click[buy now]")
    # easy clean, the size and the price count, of four parts; the colour was not chosen
    assert step.done and step.reward == 3 / 4 and own.render(step.state).startswith("Thank you")
    assert step.info == {
        **{"success": False, "valid": True, "raw_reward": 3 / 4, "type": 1.0},
        **{"attributes": 1, "options": 1, "price": True},
    }
    assert environment(binary=True).step(item, "click[buy now]").reward == 0.0
    again = own.step(step.state, "click[buy now]")
    assert again.done and again.reward == 0.0 and not again.info["valid"]
    # The last click decides: "gold" is a size as well, so that colour cannot be chosen here.
    assert own.step(play(own, item, "click[gold]"), "click[buy now]").reward == 3 / 4


def test_buying_all_that_is_wanted_is_a_success(environment, monkeypatch):
    made = small_shop((dataclasses.replace(LAMP, options=LAMP.options[:1]),))
    monkeypatch.setattr(env, "generated_shop", lambda *_: made)
    for binary in (False, True):
        own = WebShop(binary=binary)
        item = play(own, own.reset(0), "search[brass]", "click[b0lamp]", "click[gold]")
        step = own.step(item, "click[buy now]")
        assert (step.reward, step.info["success"]) == (1.0, True)


# ------------------------------------------------------------------------------------------- search


def bm25(texts, query):
    """Scores by the formula, for words that need no stemming."""
    words = [text.split() for text in texts]
    mean = np.mean([len(w) for w in words])
    scores = []
    for document in words:
        score = 0.0
        for word in query.split():
            df = sum(word in other for other in words)
            idf = np.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            tf = document.count(word)
            score += idf * tf / (tf + 0.9 * (1 - 0.4 + 0.4 * len(document) / mean))
        scores.append(score)
    return np.array(scores)


def test_search_orders_by_bm25_of_lucene():
    rng = np.random.default_rng(2**61)
    words = np.array(["red", "lamp", "mug", "rug", "oak", "tin", "big", "old"])
    texts = [" ".join(rng.choice(words, size=rng.integers(1, 9))) for _ in range(60)]
    builder = search.IndexBuilder()
    for text in texts:
        builder.add(text)
    index = builder.index()
    for query in ("red lamp", "rug", "oak oak tin", "big old mug red lamp"):
        scores = bm25(texts, query)
        expected = [int(i) for i in np.lexsort((np.arange(60), -scores.round(5))) if scores[i] > 0]
        assert index.search(query).tolist() == expected[: search.MAX_RESULTS]
    assert index.search("zebra").tolist() == index.search("").tolist() == []
    assert len(index.search("red lamp mug rug oak tin big old")) == search.MAX_RESULTS == 50


@pytest.mark.parametrize(
    "text, words",
    [
        ("The men's Running SHOES, size 9.5", ["men", "run", "shoe", "size", "9.5"]),
        ("women\u2019s lamps' 1,000 u.s.a", ["women", "lamp", "1,000", "u.s.a"]),
        (
            "machine-washable x-large 2-in-1 100%",
            ["machin", "washabl", "x", "larg", "2", "1", "100"],
        ),
        ("no.5 end.Start a_b", ["no.5".split(".")[1], "end.start", "a_b"]),
        ("caf\u00e9 \u65e5\u672c \U0001f600", ["caf\u00e9", "\u65e5\u672c"]),
        ("to be or not to be", []),
    ],
)
def test_words_are_lucenes(text, words):
    assert search.tokens_of(text) == words


def test_what_a_product_is_found_by():
    """Title, description, only the first bullet, and the names and values of the options."""
    assert search.indexed_text(LAMP) == (
        "brass lamp, dimmable a lamp for the desk.\n it is made of brass.  warm light "
        'color: gold, black | white, and size: 10" small, tall, gold'
    )
    assert search.indexed_text(BARE) == "   "


def test_lists(environment):
    own = environment()
    for query, total in {
        **{"<c> home": 25, "<c> home and": 25, "<c> ho": 0, "<a> hand made": 24, "<a> hand": 0},
        **{"<q> mugs": 23, "<q> desk lamps": 1, "<q>": 0, "<x> lamp": 1},
    }.items():
        state = play(own, start(own), f"search[{query}]")
        assert f"(Total results: {total})" in own.render(state), query
    found = own.shop.find("<r>").tolist()
    assert sorted(found) == list(range(25)) != found
    many = small_shop([dataclasses.replace(MUG, asin=f"M{i}") for i in range(99)])
    assert len(set(many.find("<r>").tolist())) == search.MAX_RESULTS


def test_the_query_is_cut(environment):
    own = environment()
    state = play(own, start(own), f"search[{'mug ' * 10**5}]")
    assert len(state.query) == env.MAX_QUERY
    assert "(Total results: 23)" in own.render(state)


# --------------------------------------------------------------------------------- goals and prices


def test_caps():
    """The larger of two draws from the next four multiples of ten, and none above 990."""
    drawn = [draw_cap(25.0, catalogue.cap_draws(2**63 - 1, row)) for row in range(2000)]
    counts = {cap: sum(found == cap for found, _ in drawn) for cap in (30, 40, 50, 60)}
    expected = {30: 0, 40: 1 / 6, 50: 2 / 6, 60: 3 / 6}
    assert all(abs(counts[cap] / 2000 - share) < 0.04 for cap, share in expected.items())
    assert sum(counts.values()) == 2000
    assert {told for cap, told in drawn if cap == 50} == {", and price lower than 50.00 dollars"}
    assert {draw_cap(30.0, catalogue.cap_draws(0, row))[0] for row in range(99)} == {50, 60, 70}
    assert {draw_cap(975.0, catalogue.cap_draws(0, row))[0] for row in range(9)} == {990.0}
    assert draw_cap(980.0, catalogue.cap_draws(0, 0)) == (NO_CAP, "")
    assert draw_cap(5e5, catalogue.cap_draws(0, 0)) == (NO_CAP, "")


def test_a_goal_for_each_way_to_choose(environment):
    """Options are in the order of their names, not of the page; texts are as in the original."""
    found = environment().shop.goals
    values = (("gold", "black | white"), ('10" small', "tall", "gold"))
    ways = [(("color", c), ("size", s)) for c, s in itertools.product(*values)]
    assert [goal.options for goal in found] == ways
    cap = found[0].cap
    assert {goal.cap for goal in found} == {cap} and cap in (40.0, 50.0, 60.0)
    assert found[4].instruction == (
        "Find me a lamp with color: black | white, and size: tall, and price lower than "
        f"{cap:.2f} dollars"
    )
    assert {goal.attributes for goal in found} == {("easy clean",)}


def test_the_generated_catalogue():
    """A prefix of a larger catalogue is the smaller catalogue, and all products differ; a title
    names two attributes, the first bullet the third; goals ask for the first two."""
    products = generate_catalogue(500, seed=2**63 - 1)
    assert products[:200] == generate_catalogue(200, seed=2**63 - 1)
    assert len({product.asin for product in products}) == 500
    assert products != generate_catalogue(500, seed=2**63 - 2)
    for product in products:
        first, second, third = product.attributes
        (wish,) = product.wishes
        assert wish.attributes == (first, second) and third == product.bullets[0]
        assert first in product.title and second in product.title and third not in product.title
        assert product.title.endswith(product.query) and 10 <= product.price <= 99
        assert product.tag == f"${product.price}" and 1 <= len(product.options) <= 2
        assert all(2 <= len(values) <= 3 for _, values in product.options)
    assert {len(product.options) for product in generate_catalogue(50, options=1)} == {0, 1}
    assert {len(product.options) for product in generate_catalogue(50, options=0)} == {0}


# ----------------------------------------------------------------------------------------- contract


def test_contract_and_registry():
    own = make_env("webshop", split="eval", products=200)
    assert isinstance(own, Environment) and isinstance(own, SolvableEnvironment)
    assert isinstance(own, GroundedEnvironment)
    assert own.actions == () and ENVS["webshop"] is WebShop and list(own.list_problems()) == []
    for word in ("search[words]", "click[label]", "[SEP]", "buy now", "next >", "< prev"):
        assert word in own.instructions
    with pytest.raises(ValueError, match=r"'human'.*accepted: products, catalogue_seed"):
        make_env("webshop", human=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"products": 0}, "products must be .*at least 1, got 0"),
        ({"products": 10**7}, "products must be .*at most 1000000, got 10000000"),
        ({"products": 3.5}, "products must be a whole number .*got 3.5"),
        ({"catalogue_seed": -1}, "catalogue_seed must be .*at least 0, got -1"),
        ({"catalogue_seed": 2**63}, "catalogue_seed must be .*at most"),
        ({"options": 3}, "options must be .*at most 2, got 3"),
        ({"per_page": 0}, "per_page must be .*at least 1, got 0"),
        ({"per_page": 51}, "per_page must be .*at most 50, got 51"),
        ({"binary": 1}, "binary must be True or False, got 1"),
        ({"show_choices": None}, "show_choices must be True or False, got None"),
        ({"show_clicked": "no"}, "show_clicked must be True or False, got 'no'"),
        ({"show_attributes": 0}, "show_attributes must be True or False, got 0"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
        ({"products": 1, "options": 0}, "split 'train' of products=1 has no goal: raise products"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        WebShop(**options)


@pytest.mark.parametrize("module, name", [("thefuzz", "thefuzz"), ("Stemmer", "PyStemmer")])
def test_a_package_that_is_missing_is_named(monkeypatch, module, name):
    there = env.search.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda m: None if m == module else there(m))
    with pytest.raises(ValueError, match=rf"webshop needs {name}: pip install 'ragen_jax\[webshop"):
        WebShop()


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            WebShop().reset(seed)
    WebShop().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    own = WebShop()
    assert len({own.reset(0), own.reset(0), own.reset(1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        own.reset(0).page = pages.BOUGHT


def test_pages_are_pinned():
    assert pages_digest() == PAGES_0_TO_49


@pytest.mark.medium
def test_goals_come_round_and_splits_share_none():
    """Successive seeds give different goals, in WebShop's and RAGEN's order."""
    splits = ("imitation", "train", "eval", None)
    own = {split: WebShop(split=split, products=200) for split in splits}
    found = {split: [x.reset(s) for s in range(1000)] for split, x in own.items()}
    identities = {s: [own[s].identity(x) for x in states] for s, states in found.items()}
    number = len(own[None].shop.goals)
    sizes = {"imitation": 0.4, "train": 0.4, "eval": 0.2, None: 1.0}
    for split, names in identities.items():
        many = len(set(names))
        assert abs(many - sizes[split] * number) < 1.5, split
        assert names[many : 2 * many] == names[: min(many, len(names) - many)]
    assert not set(identities["imitation"]) & set(identities["train"])
    assert not set(identities["eval"]) & {*identities["train"], *identities["imitation"]}
    order, permuted = list(own[None].shop.goals), list(range(number))
    random.Random(233).shuffle(order)
    random.Random(42).shuffle(permuted)
    assert [x.goal for x in found[None][:number]] == [order[place] for place in permuted]
    high = 2**63 - 1 - (2**63 - 1) % number  # a multiple of the number of goals
    assert own[None].reset(high) == own[None].reset(0) != own[None].reset(high + 1)


def test_identity_is_what_is_wanted():
    goal = Goal(0, "B1", "say it so", ("a", "b"), (("x", "1"), ("y", "2")), 30.0)
    other = Goal(0, "B1", "or so", ("b", "a"), (("y", "2"), ("x", "1")), 40.0)
    same = goals.identity(goal)
    assert goals.identity(other) == same
    changes = ({"asin": "B2"}, {"attributes": ("a",)}, {"options": ()})
    assert all(goals.identity(dataclasses.replace(goal, **change)) != same for change in changes)


# ------------------------------------------------------------------------------------------- expert


@pytest.mark.medium
@pytest.mark.parametrize("options", [{}, {"per_page": 3, "options": 1}, {"options": 0}])
def test_the_expert_buys_what_is_wanted(options):
    """From the start, and from any state that random play has reached."""
    own = WebShop(split=None, products=300, **options)
    rng = np.random.default_rng(2**60)
    for seed in range(150):
        state = own.reset(seed)
        for _ in range(int(rng.integers(8)) if seed % 2 else 0):
            actions = [a for a in own.choices(state) if a != "click[buy now]"]
            action = actions[int(rng.integers(len(actions)))]
            state = play(own, state, action.replace("<content>", own.shop.products[seed].query))
        plan = own.solve(state)
        last = play(own, state, *plan[:-1])
        step = own.step(last, plan[-1])
        assert step.done and step.info["success"], (plan, state)
        assert own.solve(step.state) == () and own.explain(step.state, ()) is not None
    assert own.solve(own.reset(7))[0].startswith("search[")


def test_a_product_that_no_search_finds_has_no_plan(environment, monkeypatch):
    lost = dataclasses.replace(LAMP, title="the", query="of", attributes=("no",))
    lost = dataclasses.replace(lost, wishes=(Wish("x", ("no",)),))
    made = small_shop((lost, *MUGS))
    monkeypatch.setattr(env, "generated_shop", lambda *_: made)
    assert WebShop().solve(WebShop().reset(0)) is None


def test_values_of_people_are_chosen_where_they_are_offered(environment, monkeypatch):
    wish = Wish("i want it", ("easy clean",), ("tall", "velvet", "gold"))
    made = small_shop((dataclasses.replace(LAMP, wishes=(wish,)),))
    monkeypatch.setattr(env, "generated_shop", lambda *_: made)
    own = WebShop()
    assert own.solve(own.reset(0))[1:] == ("click[b0lamp]", "click[gold]", "click[buy now]")
    assert own.explain(play(own, own.reset(0), "search[brass]", "click[b0lamp]"), ("click[gold]",))


def test_explanations(environment):
    own = environment(show_clicked=True)
    state = start(own)
    told, shown = [], []
    for action in ("search[easy clean desk lamps]", "click[b0lamp]", "click[tall]"):
        told.append(own.explain(state, (action,)))
        shown.append(own.render(state))
        state = play(own, state, action)
    told.append(own.explain(state, ("click[buy now]",)))
    shown.append(own.render(state))
    assert told == [
        "find easy clean desk lamps",
        "find easy clean desk lamps below 60.00 take b0lamp Brass lamp, dimmable",
        'want gold, 10" small so tall',
        'want gold, 10" small have tall so buy now',
    ]
    # "easy", "clean", "desk" and "lamps" are not in this instruction, which says "lamp".
    assert [own.count_grounded(s, t) for s, t in zip(shown, told, strict=True)] == [
        *((0, 4), (1, 5), (2, 2), (3, 3)),
    ]
    assert own.count_grounded(shown[3], "have gold want tall below 5.00 find LAMP") == (1, 4)
    for text in ("", "find", "want , ,", "have \x00 so", "find " * 10**5, shown[3]):
        right, stated = own.count_grounded(text, text)
        assert 0 <= right <= stated


def test_words_are_what_pages_and_the_expert_say():
    """With the tiny agent's tokenizer, a page has few more tokens than words."""
    from ragen_jax.model.tokenizer import build_tokenizer

    own = WebShop(per_page=3, options=1, show_choices=False, show_clicked=True)
    tokenizer = build_tokenizer(own.words)
    for seed in range(30):
        state = own.reset(seed)
        for action in own.solve(state):
            page, said = own.render(state), own.explain(state, (action,))
            assert len(tokenizer.encode(page)) < 65, page
            assert len(tokenizer.encode(f"{said}</think><answer>{action}")) < 32, said
            state = play(own, state, action)
