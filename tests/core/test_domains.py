"""domains.py: the values that each kind of field accepts and refuses, and the messages."""

import math

import pytest
from ml_collections import ConfigDict

from ragen_jax.core import domains
from ragen_jax.core.domains import ReadWhen, default_values, fields_by_name

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
    field, words, accepted, refused = CASES[name]
    assert field.what == words and field.read == ()
    assert [value for value in accepted if field.accepts(value) is not True] == []
    assert [value for value in refused if field.accepts(value) is not False] == []
    default = ConfigDict(field.default) if isinstance(field.default, dict) else field.default
    assert field.accepts(default)


def test_every_kind_is_here():
    """Every function of domains.py that returns a `Field` has a case above."""
    made = {
        name
        for name, function in vars(domains).items()
        if getattr(function, "__annotations__", {}).get("return") is domains.Field
    }
    assert made == CASES.keys()


TREE = {
    "seed": domains.whole(3, 0, 9),
    "a": {"b": {"c": domains.flag(True)}, "d": domains.text("x")},
}


def test_a_tree_of_fields():
    assert default_values(TREE) == {"seed": 3, "a": {"b": {"c": True}, "d": "x"}}
    found = fields_by_name(TREE)
    assert [*found] == ["seed", "a.b.c", "a.d"] and found["a.d"] is TREE["a"]["d"]


def test_conditions_stay_with_the_field():
    timed, long = ReadWhen(("a.d",), bool), ReadWhen(("seed", "a.d"), lambda seed, d: seed > len(d))
    field = domains.number(0.0, 0, 1, timed, long)
    assert field.read == (timed, long) and long.holds(3, "x") and not long.holds(1, "x")
