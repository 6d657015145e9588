"""WebShop's files: which fields are read, the stored cache, and errors in the files."""

import itertools
import json
import random

import numpy as np
import pytest
from cli_commands import call

from ragen_jax.envs import make_env
from ragen_jax.envs.types import FileEnvironment
from ragen_jax.envs.webshop import files, shop_cache
from ragen_jax.envs.webshop.catalogue import Product, Wish, generate_catalogue
from ragen_jax.envs.webshop.files import Paths, read_products
from ragen_jax.envs.webshop.goals import Goals, make_goal

for package in ("bm25s", "Stemmer", "thefuzz"):
    pytest.importorskip(package)
pytestmark = pytest.mark.fast

HARD = "caf\u00e9 \U0001f600 </think><|im_end|> [SEP] \\ \"quoted\" \u2028 {'a': [1]}"


def item(asin="B000000001", **changes):
    """A row as in items_shuffle*.json, with additional fields that the reader ignores."""
    fields = {
        "asin": asin,
        "name": "Cotton Shirt",
        "full_description": "A shirt.",
        "small_description": ["Machine washable", "Long sleeves"],
        "pricing": "$10.99",
        "list_price": "",
        "images": ["http://x/1.jpg"],
        "customization_options": {
            "Size": [{"is_selected": False, "value": " X-Large ", "image": None}, {"value": "S/M"}],
            "Colour": None,
        },
        "category": "fashion",
        "query": " Men's Shirts ",
        "product_category": "Clothing \u203a Men \u203a Shirts",
    }
    return fields | changes


def written(folder, items, attributes=None, instructions=None, nouns=None):
    """Write the files and return their paths."""
    found = {}
    for name, content in {
        "products": items,
        "attributes": {} if attributes is None else attributes,
        "instructions": instructions,
        "nouns": nouns,
    }.items():
        if content is not None:
            found[name] = folder / f"{name}.json"
            found[name].write_text(content if isinstance(content, str) else json.dumps(content))
    return Paths(**found)


def read(folder, *contents, seed=0, **others):
    return list(read_products(written(folder, *contents, **others), seed=seed))


def test_a_product_field_by_field(tmp_path):
    said = {
        "B000000001": {
            "attributes": ["machine wash"],
            "instruction": "Find me a shirt",
            "instruction_attributes": ["machine wash"],
        }
    }
    (found,) = read(tmp_path, [item()], said)
    assert found == Product(
        asin="B000000001",
        title="Cotton Shirt",
        description="A shirt.",
        bullets=("Machine washable", "Long sleeves"),
        attributes=("machine wash",),
        options=(("size", ("x-large", "s | m")),),
        price=10.99,
        tag="$10.99",
        category="fashion",
        query="men's shirts",
        product_category="Clothing \u203a Men \u203a Shirts",
        wishes=(Wish("Find me a shirt", ("machine wash",)),),
    )


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"pricing": ""}, {"price": 100.0, "tag": "$100.0"}),
        ({"pricing": None}, {"price": 100.0, "tag": "$100.0"}),
        ({"pricing": "$1,299.00"}, {"price": 1299.0, "tag": "$1299.0"}),
        ({"pricing": "$7"}, {"price": 7.0, "tag": "$7.0"}),
        ({"pricing": "$10.99 to $12.50"}, {"tag": "$10.99 to $12.5"}),
        ({"pricing": "$1 to $2 to $9"}, {"tag": "$1.0 to $2.0"}),
        ({"small_description": "one text"}, {"bullets": ("one text",)}),
        ({"small_description": []}, {"bullets": ()}),
        ({"customization_options": {}}, {"options": ()}),
        ({"customization_options": ""}, {"options": ()}),
        ({"customization_options": {"A": [{"value": "I"}], "a": []}}, {"options": (("a", ()),)}),
        ({"name": HARD}, {"title": HARD}),
    ],
)
def test_fields_in_other_forms(tmp_path, changes, expected):
    (found,) = read(tmp_path, [item(**changes)])
    assert {name: getattr(found, name) for name in expected} == expected
    assert (found.attributes, found.wishes, found.nouns) == (("DUMMY_ATTR",), (), None)


def test_which_products_are_left_out(tmp_path):
    """Products called "nan", with ids of more than ten characters, or with a repeated id."""
    names = ["B1", "nan", "B2", "12345678901", "B1", "1234567890"]
    found = read(tmp_path, [item(name) for name in names])
    assert [(x.asin, x.row) for x in found] == [("B1", 0), ("B2", 2), ("1234567890", 5)]


def test_an_attributes_file_that_says_nothing(tmp_path):
    said = {"B1": {"attributes": []}, "B2": {"instruction": None, "attributes": ["a"]}, "B3": {}}
    found = read(tmp_path, [item(name) for name in ("B1", "B2", "B3")], said)
    assert [x.attributes for x in found] == [(), ("a",), ("DUMMY_ATTR",)]
    assert not any(x.wishes for x in found)


def test_what_people_asked_for(tmp_path):
    """These replace the wishes in the attributes file; wishes without an attribute are left out."""
    said = {"B1": {"attributes": ["a"], "instruction": "no", "instruction_attributes": ["a"]}}
    person = {"instruction": "i want it.", "instruction_attributes": ["a"]}
    people = {
        "B1": [
            person | {"instruction_options": ["red", "x-large"]},
            person | {"instruction_attributes": [], "instruction_options": []},
            person | {"instruction": "again", "instruction_options": []},
        ]
    }
    found = read(tmp_path, [item("B1"), item("B2")], said, instructions=people)
    wishes = (Wish("i want it.", ("a",), ("red", "x-large")), Wish("again", ("a",), ()))
    assert [x.wishes for x in found] == [wishes, ()]
    first, second = (make_goal(found[0], 0, number, seed=5) for number in range(2))
    # without the final full stop
    assert first.instruction.startswith("i want it, and price lower than ")
    assert first.options == ("red", "x-large") and second.options == ()
    with pytest.raises(IndexError):
        make_goal(found[0], 0, 2, seed=5)


def test_nouns_are_given_for_every_product_or_none(tmp_path):
    (found,) = read(tmp_path, [item("B1")], nouns={"B1": ["Cotton", "shirt", "shirt"]})
    assert found.nouns == ("cotton", "shirt", "shirt")
    with pytest.raises(ValueError, match=r"nouns.json has no nouns of 'B1', row 0 \('B1'\) of "):
        read(tmp_path, [item("B1")], nouns={"B2": []})


def test_prices_in_a_range_are_drawn_from_the_seed(tmp_path):
    rows = [item(f"B{i}", pricing="$10 to $30") for i in range(400)]
    prices = [x.price for x in read(tmp_path, rows, seed=2**63 - 1)]
    assert prices == [x.price for x in read(tmp_path, rows, seed=2**63 - 1)]
    assert prices != [x.price for x in read(tmp_path, rows, seed=2**63 - 2)]
    assert len(set(prices)) == 400 and 10 <= min(prices) < 11 and 29 < max(prices) < 30
    assert abs(np.mean(prices) - 20) < 1
    # Each row has its own draw, which does not depend on earlier rows.
    assert read(tmp_path, [item("nan"), *rows[1:]], seed=2**63 - 1)[0].price == prices[1]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_file_is_read_piece_by_piece(tmp_path, monkeypatch, chunk):
    """A piece may end anywhere: in a number, a name, an escape, between two rows."""
    rows = [item(f"B{i}", name=f"{HARD} {i}", number=-1.5e-7, n=123456) for i in range(3)]
    said = {f"B{i}": {"attributes": [HARD]} for i in range(3)}
    plain = read(tmp_path, rows, said)
    assert [x.title for x in plain] == [f"{HARD} {i}" for i in range(3)]
    monkeypatch.setattr(files, "_CHUNK", chunk)
    paths = written(tmp_path, rows, said)
    for indent, ensure_ascii in itertools.product((None, 2), (False, True)):
        for path, content in ((paths.products, rows), (paths.attributes, said)):
            text = json.dumps(content, indent=indent, ensure_ascii=ensure_ascii)
            path.write_text(f"\ufeff\n {text} \n", encoding="utf-8")
        assert list(read_products(paths, seed=0)) == plain


GOOD = json.dumps([item()])


@pytest.mark.parametrize(
    "items, message",
    [
        ("", "products.json must hold a list of products: expected '[', got ''"),
        ("{}", "products.json must hold a list of products: expected '[', got '{'"),
        (GOOD[:-1], "at row 1: expected ',' or ']', got '', the end of the file"),
        (GOOD[:50], "products.json cannot be read as JSON at row 0: "),
        (GOOD[:-1] + "{}]", "at row 1: expected ',' or ']', got '{'"),
        (GOOD[:-1] + ",]", "products.json cannot be read as JSON at row 1: "),
        ("[" * 100_000, "products.json cannot be read as JSON at row 0: "),
        ([item(), 7], "row 1 of FILE is not a product: 7"),
        ([item(), {"name": "x"}], "row 1 of FILE lacks the field asin"),
        ([item("B1", name=None)], "field name of row 0 ('B1') of FILE must be text, got None"),
        ([item("B1", query=["a"])], "field query of row 0 ('B1') of FILE must be text, got ['a']"),
        (
            [item("B1", name="\ud83d")],
            "field name of row 0 ('B1') of FILE must be text, got '\\ud83d",
        ),
        ([item("B1", pricing="10.99")], "field pricing of row 0 ('B1') of FILE must be like $9.99"),
        ([item("B1", pricing="$")], "field pricing of row 0 ('B1') of FILE must be like $9.99"),
        ([item("B1", pricing=5)], "field pricing of row 0 ('B1') of FILE must be text, got 5"),
        (
            [item("B1", small_description=[None])],
            "field small_description of row 0 ('B1') of FILE must be a list of texts, got [None]",
        ),
        (
            [item("B1", customization_options=["red"])],
            "field customization_options of row 0 ('B1') of FILE must be names with lists of value",
        ),
        (
            [item("B1", customization_options={"color": [{"image": ""}]})],
            "field customization_options of row 0 ('B1') of FILE must be names with lists of value"
            ", got 'color': [{'image': ''}]",
        ),
    ],
)
def test_bad_products_are_named(tmp_path, items, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, items)
    assert message.replace("FILE", str(tmp_path / "products.json")) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named(tmp_path):
    optional = {"pricing"}
    for field in set(files.FIELDS) - optional - {"customization_options"}:
        row = item("B1")
        del row[field]
        with pytest.raises(ValueError, match=f"row 0.* of .*products.json lacks the field {field}"):
            read(tmp_path, [row])


def test_an_endless_row_is_refused_before_the_file_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_ELEMENT", 3 << 20)
    paths = written(tmp_path, '[{"asin": "' + "x" * (6 << 20))
    with pytest.raises(ValueError, match="cannot be read as JSON at row 0: Unterminated string"):
        list(read_products(paths, seed=0))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("attributes", "[]", "attributes.json must hold an object of asins: expected '{', got '['"),
        ("attributes", '{"B1": {}', "at what follows 'B1': expected ',' or '}', got ''"),
        ("attributes", '{"B1": 5}', "'B1' of FILE must be an object, got 5"),
        ("attributes", '{"B1" {}}', "must hold a colon after 'B1': expected ':', got '{'"),
        ("attributes", "{5: {}}", "attributes.json has 5 where an asin must be"),
        (
            "attributes",
            '{"B1": {"attributes": "a"}}',
            "field attributes of 'B1' of FILE must be a list of texts, got 'a'",
        ),
        (
            "attributes",
            '{"B1": {"instruction": "x", "instruction_attributes": []}}',
            "field instruction_attributes of 'B1' of FILE must not be empty",
        ),
        ("instructions", '{"B1": {}}', "'B1' of FILE must be a list of instructions, got {}"),
        (
            "instructions",
            '{"B1": [{"instruction": "x", "instruction_attributes": ["a"]}]}',
            "field instruction_options of 'B1' of FILE must be a list of texts, got None",
        ),
        ("nouns", '{"B1": ["a", 1]}', "field nouns of 'B1' of FILE must be a list of texts"),
    ],
)
def test_bad_files_beside_are_named(tmp_path, name, content, message):
    with pytest.raises(ValueError) as error:
        read(tmp_path, [item("B1")], **{name: content})
    assert message.replace("FILE", str(tmp_path / f"{name}.json")) in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    paths = written(tmp_path, [item()])
    paths.products.write_bytes(b"[\xff")
    with pytest.raises(ValueError, match="products.json cannot be read at .*utf-8"):
        list(read_products(paths, seed=0))


# ------------------------------------------------------------------------------------- stored cache


def as_files(folder, catalogue):
    """Write a generated catalogue in the format of the data set's files."""
    items = [
        item(
            product.asin,
            name=product.title,
            full_description=product.description,
            small_description=list(product.bullets),
            pricing=product.tag,
            customization_options={
                name: [{"value": value} for value in values] for name, values in product.options
            },
            category=product.category,
            query=product.query,
            product_category=product.product_category,
        )
        for product in catalogue
    ]
    said = {
        product.asin: {
            "attributes": product.attributes,
            "instruction": wish.text,
            "instruction_attributes": wish.attributes,
        }
        for product in catalogue
        for wish in product.wishes
    }
    return written(folder, items, said)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def given(tmp_path, cache):
    """(catalogue, options of the environment) of 600 products."""
    catalogue = generate_catalogue(600, seed=3)
    paths = as_files(tmp_path, catalogue)
    return catalogue, {"path": str(paths.products), "attributes_path": str(paths.attributes)}


@pytest.mark.medium
def test_files_are_what_they_were_written_from(given, capsys):
    """All products and goals are the same as without files, and so are the search and its lists."""
    catalogue, options = given
    shop = make_env("webshop", split="train", **options).shop
    assert [shop.products[i] for i in range(600)] == list(catalogue) and len(shop.products) == 600
    generated = make_env("webshop", split="train", products=600, catalogue_seed=3).shop
    assert shop.find("slim fit cotton lining shirt").tolist() == (
        generated.find("slim fit cotton lining shirt").tolist()
    )
    for query in ("<a> slim fit", "<c> fashion", "<q> shirt", "<q> nothing", "<r>"):
        assert shop.find(query).tolist() == generated.find(query).tolist()
    assert set(shop.lists) == set(generated.lists)
    assert len(shop.goals) == len(generated.goals) > 1500
    told = capsys.readouterr().out
    assert told.count("webshop: reading ") == 1
    make_env("webshop", split="eval", **options)
    shop_cache._open.cache_clear()
    make_env("webshop", split="eval", **options)
    assert "reading" not in capsys.readouterr().out  # read only once


@pytest.mark.medium
def test_splits_are_those_of_the_released_wrapper(given):
    """Compared with WebShop's and RAGEN's Python generators."""
    catalogue, options = given
    envs = {split: make_env("webshop", split=split, **options) for split in ("imitation", "eval")}
    envs["train"] = env = make_env("webshop", split="train", **options)
    goals = [make_goal(p, i, n, seed=0) for i, p in enumerate(catalogue) for n in range(count(p))]
    assert list(env.shop.goals) == goals
    random.seed(233)
    random.shuffle(goals)
    permuted = list(range(len(goals)))
    random.Random(42).shuffle(permuted)
    for seed in (0, 1, 499, 500, 12_345, 2**62 + 987_654_321, 2**63 - 1):
        assert envs["imitation"].reset(seed).goal == goals[permuted[seed % 500]]
        assert envs["eval"].reset(seed).goal == goals[permuted[500 + seed % 1000]]
        assert env.reset(seed).goal == goals[permuted[1500 + seed % (len(goals) - 1500)]]
    told = list(env.list_problems())
    assert [state.goal for _, _, state in told] == list(env.shop.goals)
    assert [row for row, _, _ in told] == sorted(row for row, _, _ in told)
    deal = {split: {env.identity(s) for _, of, s in told if of == split} for split in envs}
    assert {split: len(found) for split, found in deal.items()} == {
        **{"imitation": 500, "eval": 1000, "train": len(goals) - 1500}
    }
    assert not any(a & b for a, b in itertools.combinations(deal.values(), 2))
    assert isinstance(env, FileEnvironment)


def count(product):
    return int(np.prod([len(values) for _, values in product.options]))


@pytest.mark.medium
def test_a_seed_of_its_own_draws_other_caps_and_keeps_another_folder(given, cache):
    _, options = given
    one, other = (
        make_env("webshop", split="train", catalogue_seed=s, **options) for s in (0, 2**63 - 1)
    )
    caps = [[x.reset(seed).goal.cap for seed in range(50)] for x in (one, other)]
    assert 10 < sum(a != b for a, b in zip(*caps, strict=True)) < 40
    assert len(list((cache / "ragen_jax" / "datasets").glob("webshop_*[!k]"))) == 2


def test_too_few_goals_are_named_and_nothing_is_kept(tmp_path, cache):
    paths = as_files(tmp_path, generate_catalogue(20))
    options = {"path": paths.products, "attributes_path": paths.attributes}
    with pytest.raises(ValueError) as error:
        make_env("webshop", split="train", **options)
    assert str(error.value).startswith(f"{paths.products} and {paths.attributes}: RAGEN's splits")
    assert not [p for p in (cache / "ragen_jax/datasets").iterdir() if p.is_dir()]
    paths.products.write_text("[]")
    with pytest.raises(ValueError, match="products.json holds no product"):
        make_env("webshop", split="train", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"path": "gone.json", "attributes_path": "b"}, "there is no file gone.json"),
        ({"path": "gone.json"}, "files are read if both path (items_shuffle*.json) and attributes"),
        ({"nouns_path": "n.json"}, "files are read if both path"),
        ({"path": 5, "attributes_path": "b"}, "path must be the name of a file or None, got 5"),
    ],
)
def test_files_that_are_missing_are_named(options, message):
    with pytest.raises(ValueError) as error:
        make_env("webshop", split="train", **options)
    assert message in str(error.value)


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")
def test_check_data_tells_what_is_in_the_files(given, tmp_path):
    catalogue, options = given
    words = [f"--config.env.options.{name}={value}" for name, value in options.items()]
    words = ["ragen_jax.check_data", "--config=webshop:llm", "--rows=1", *words]
    code, out, err = call(*words)
    assert code == 0, err
    told, *lines = out.splitlines()
    goals = sum(map(count, catalogue))
    assert told.startswith(f"webshop: reading {options['path']} (once; kept in ")
    assert lines[:6] == [
        f"webshop: {options['path']}",
        f"  fields      {', '.join(files.FIELDS)}",
        f"  problems    {goals} available",
        "  imitation   500, 500 of them distinct",
        f"  train       {goals - 1500}, {goals - 1500} of them distinct",
        "  eval        1000, 1000 of them distinct",
    ]
    assert lines[6].startswith("  row 0 (") and lines[7].startswith("    WebShop [SEP] Instruction")
    (plan,) = [line for line in lines if line.startswith("    -> ")]
    assert plan.startswith("    -> search[") and plan.endswith("click[buy now]")
    assert lines[-1] == "  give --config.model.path=DIR_OR_HUB_ID to see what the model reads"
    code, out, err = call(*words, "--config.eval.episodes=1001", "--plays=2")
    assert code == 0 and "  played eval by the expert: 2 of 2 problems to their end" in out
    line = "  eval.episodes=1001 is an upper bound: the 1000 held-out problems are played"
    assert line in out.splitlines()
    (tmp_path / "products.json").write_text(json.dumps([item("B1", name=5)]))
    code, out, err = call(*words)
    assert (code, len(err.splitlines())) == (2, 1)
    path = options["path"]
    expected = f"'webshop': field name of row 0 ('B1') of {path} must be text, got 5\n"
    assert err.endswith(expected)


def test_goals_are_found_by_number():
    catalogue = generate_catalogue(40, seed=2**62)
    ends = np.cumsum([count(product) for product in catalogue])
    goals = Goals(catalogue, ends, 0)
    assert len(goals) == ends[-1] == len(list(goals))
    for product, last in zip(catalogue, ends.tolist(), strict=True):
        mine = [goals[number] for number in range(last - count(product), last)]
        names = sorted(name for name, _ in product.options)
        ways = itertools.product(*(dict(product.options)[name] for name in names))
        assert [goal.options for goal in mine] == [
            tuple(zip(names, way, strict=True)) for way in ways
        ]
        assert {goal.asin for goal in mine} == {product.asin}
        assert len({goal.cap for goal in mine}) == 1
    with pytest.raises(IndexError):
        goals[int(ends[-1])]
