"""domains.py: the values that each kind of field accepts and refuses, and the messages."""

import dataclasses
import math
from collections.abc import Mapping

import pytest
from ml_collections import ConfigDict

from ragen_jax.core import domains
from ragen_jax.core.domains import DOMAIN, Field, ReadWhen, Section, fields_by_name, freeze

pytestmark = pytest.mark.fast

CASES = {  # name -> (field, its description, accepted values, refused values)
    "whole": (
        domains.whole(2, 0, 5),
        "a whole number from 0 to 5",
        [0, 5],
        [-1, 6, 2.0, True, "2", None],
    ),
    "number": (
        domains.number(0.5, -1, 2),
        "a number from -1 to 2",
        [-1, 2, 0.5, 0],
        [-1.01, 2.01, math.nan, math.inf, True, "1"],
    ),
    "above": (
        domains.above(0.5, 0, 2),
        "a number above 0, at most 2",
        [1e-300, 2],
        [0, 0.0, -0.0, 2.1, math.nan],
    ),
    "numbers_above": (
        domains.numbers_above((1.0,), 0, 2),
        "a tuple in which each item is a number above 0, at most 2",
        [(), [1], (1.0, 2)],
        [0.5, (0,), (1, 3), ("1",), None],
    ),
    "one_of": (domains.one_of("a", ("a", "b")), "one of a, b", ["a", "b"], ["c", "", 1, ("a",)]),
    "several_of": (
        domains.several_of(("a",), ("a", "b")),
        "a list of a, b",
        [("a",), ["a", "b"]],
        [(), [], "a", ("c",), (1,)],
    ),
    "any_of": (
        domains.any_of((), ("a", "b")),
        "a tuple in which each item is one of a, b",
        [(), ["b"]],
        ["a", ("c",), None],
    ),
    "flag": (domains.flag(True), "True or False", [True, False], [1, 0, "True", None]),
    "text": (domains.text("x"), "a text", ["x", " y "], ["", "  ", 1, None]),
    "texts": (
        domains.texts(("x",)),
        "a tuple of texts",
        [(), ("a",), [" ", "b"]],
        ["a", ("",), (1,), None],
    ),
    "section": (domains.section({}), "a section", [ConfigDict(), ConfigDict({"a": 1})], [{}, None]),
    "fractions": (
        domains.fractions({"a": 1.0}),
        "a section of fractions from 0 to 1, not all 0",
        [ConfigDict(), ConfigDict({"a": 0, "b": 0.5})],
        [ConfigDict({"a": 0}), ConfigDict({"a": 1.1}), ConfigDict({"a": "1"}), {"a": 1.0}, None],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kind_of_field(name):
    declared, words, accepted, refused = CASES[name]
    field = declared.metadata[DOMAIN]
    assert field.what == words and field.read == ()
    assert [value for value in accepted if field.accepts(value) is not True] == []
    assert [value for value in refused if field.accepts(value) is not False] == []
    default = ConfigDict(field.default) if isinstance(field.default, dict) else field.default
    assert field.accepts(default)


def test_every_kind_is_here():
    """Every public function of domains.py that takes conditions has a case above."""
    kinds = {
        name for name, x in vars(domains).items() if "read" in getattr(x, "__annotations__", {})
    }
    assert {name for name in kinds if name.islower() and name[0] != "_"} == CASES.keys()


@dataclasses.dataclass(frozen=True)
class Inner(Section):
    c: bool = domains.flag(True)


@dataclasses.dataclass(frozen=True)
class Middle(Section):
    b: Inner = Inner()
    d: str = domains.text("x")


@dataclasses.dataclass(frozen=True)
class Tree(Section):
    seed: int = domains.whole(3, 0, 9)
    a: Middle = Middle()
    parts: Mapping[str, Inner] = domains.sections(Inner)


VALUES = {"seed": 3, "a": {"b": {"c": True}, "d": "x"}, "parts": {}}


def test_a_tree_of_fields():
    assert Tree().to_dict() == VALUES
    found = fields_by_name(Tree)
    assert [*found] == ["seed", "a.b.c", "a.d", "parts"]
    assert all(isinstance(field, Field) for field in found.values())
    assert (found["a.d"].default, found["a.d"].what) == ("x", "a text")
    assert found["parts"].parts is Inner


def test_a_frozen_tree():
    values = VALUES | {"seed": 4, "parts": {"one": {"c": False}}}
    tree = freeze(Tree, ConfigDict(values))
    assert (tree.seed, tree.a.b.c, tree.parts["one"]) == (4, True, Inner(False))
    assert tree.to_dict() == values
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.seed = 5
    for wrong, message in (
        ({"seed": 4}, r"config\.a is missing"),
        (VALUES | {"b": 1}, r"config\.b is unknown"),
        (VALUES | {"sed": 1}, r"config\.sed is unknown; did you mean seed\?"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            freeze(Tree, ConfigDict(wrong))


def test_conditions_stay_with_the_field():
    timed, long = ReadWhen(("a.d",), bool), ReadWhen(("seed", "a.d"), lambda seed, d: seed > len(d))
    field = domains.number(0.0, 0, 1, timed, long).metadata[DOMAIN]
    assert field.read == (timed, long) and long.holds(3, "x") and not long.holds(1, "x")
