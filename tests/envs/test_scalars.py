"""envs/scalars.py: scalars of every library, through reward functions and steps."""

import json
import math
import sys
from decimal import Decimal
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import make_env
from ragen_jax.envs.scalars import plain_scalar, real_number
from ragen_jax.envs.types import Step
from ragen_jax.rollout.env_calls import NO_LIMITS, EnvFailure, StepRequest, act

REAL = {  # a function's return value -> the exact reward
    "bool": (True, 1.0),
    "int": (1, 1.0),
    "numpy bool": (np.bool_(True), 1.0),
    "numpy false": (np.bool_(False), 0.0),
    "numpy int8": (np.int8(-3), -3.0),
    "numpy uint64": (np.uint64(7), 7.0),
    "numpy float16": (np.float16(0.5), 0.5),
    "numpy float32": (np.float32(0.25), 0.25),
    "numpy longdouble": (np.longdouble(0.75), 0.75),
    "0-d array": (np.array(0.5), 0.5),
    "0-d array of bool": (np.array(True), 1.0),
    "0-d array of objects": (np.array(Fraction(1, 4), dtype=object), 0.25),
    "jax float32": (jnp.float32(0.5), 0.5),
    "jax 0-d array": (jnp.asarray(2), 2.0),
    "jax bool": (jnp.asarray(True), 1.0),
    "jax bfloat16": (jnp.asarray(0.5, jnp.bfloat16), 0.5),
    "Decimal": (Decimal("0.125"), 0.125),
    "Fraction": (Fraction(3, 4), 0.75),
}
NO_NUMBER = {
    "complex": 1j,
    "numpy complex": np.complex64(1),
    "0-d complex": np.array(1j),
    "jax complex": jnp.asarray(1j),
    "text": "1",
    "numpy text": np.str_("1"),
    "0-d text": np.array("1"),
    "bytes": b"1",
    "None": None,
    "array of one": np.ones(1),
    "jax array of one": jnp.ones(1),
    "list": [1.0],
    "date": np.datetime64("2024-01-01"),
    "duration": np.timedelta64(1, "ns"),
}
NOT_FINITE = {
    "nan": math.nan,
    "inf": -math.inf,
    "numpy nan": np.float32("nan"),
    "0-d inf": np.array(np.inf),
    "jax nan": jnp.asarray(jnp.nan),
    "Decimal nan": Decimal("nan"),
    "signalling": Decimal("snan"),
    "Decimal inf": Decimal("-inf"),
    "huge int": 10**400,
    "huge Fraction": Fraction(-(10**400)),
    "huge Decimal": Decimal("1e400"),
}


@pytest.fixture
def paying(tmp_path, monkeypatch):
    """A data set whose reward functions return `paying.value`."""
    rows = [{"prompt": f"question {i}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "paying.py").write_text(
        "value, right = None, False\n"
        "def score(prompt, reply, row): return value\n"
        "def facts(prompt, reply, row): return {'reward': value, 'success': right}\n"
        "def go_on(messages, row): return {'reward': value}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "paying", raising=False)
    environments = [
        make_env("dataset", path="rows.jsonl", reward="paying:score"),
        make_env("dataset", path="rows.jsonl", reward="paying:facts"),
        make_env("dataset", path="rows.jsonl", step="paying:go_on"),
    ]
    module = sys.modules["paying"]

    def play(value):
        """The results if each of the three functions pays a reply with a value."""
        module.value = value
        asked = [
            (env, StepRequest(env.reset(0), ("x",), np.random.default_rng(0), 1))
            for env in environments
        ]
        return [act(env, [job], NO_LIMITS)[0] for env, job in asked]

    yield play
    sys.modules.pop("paying", None)


def test_every_finite_real_scalar_is_a_reward(paying):
    for name, (value, reward) in REAL.items():
        for acted in paying(value):
            assert not isinstance(acted, EnvFailure), (name, acted)
            assert acted.reward == reward and type(acted.reward) is float, name
        said = [acted.info["success"] for acted in paying(value)]
        assert said == [reward >= 1, False, reward >= 1], name


def test_what_is_no_real_scalar_is_refused_in_one_line(paying):
    for name, value in NO_NUMBER.items():
        score, facts, step = paying(value)
        must = "must return a number or a dict with `reward`, a number; got "
        assert score.error.startswith(f"TypeError: paying:score {must}"), name
        assert "\n" not in score.error and "\n" not in facts.error
        assert facts.error.startswith(f"TypeError: paying:facts {must}"), name
        assert "`message`, `reward` and `success`; got " in step.error, name


def test_what_is_not_finite_is_refused_in_one_line(paying):
    for name, value in NOT_FINITE.items():
        for broken in paying(value):
            assert "Step.reward must be a number from -1e+06 to 1e+06, got" in broken.error, name


def test_success_of_any_library(paying):
    for value in (np.bool_(True), np.array(True), jnp.asarray(True)):
        sys.modules["paying"].right = value
        assert paying(1)[1].info == {"success": True}
    for value in (np.array(1), "yes", np.ones(1, bool)):
        sys.modules["paying"].right = value
        assert "must give success as True or False, got" in paying(1)[1].error


class Pays:
    """An environment whose step returns given values."""

    actions, instructions = (), ""

    def __init__(self, **parts):
        self._step = Step(**({"state": 0, "reward": 0.0, "done": True, "info": {}} | parts))

    def reset(self, seed):
        return 0

    def render(self, state):
        return "."

    def step(self, state, action, rng):
        return self._step


def acted(**parts):
    return act(Pays(**parts), [StepRequest(0, ("x",), None, 1)], NO_LIMITS)[0]


def test_an_environments_own_step_may_hold_them():
    for name, (value, reward) in REAL.items():
        assert acted(reward=value).reward == reward, name
    for name, value in (NO_NUMBER | NOT_FINITE).items():
        error = acted(reward=value).error
        assert error.startswith("ValueError: Step.reward must be a number"), name
    assert acted(done=np.array(True)).done is True
    assert acted(done=jnp.asarray(True)).done is True
    assert "Step.done must be a bool" in acted(done=np.array(1)).error


def test_facts_of_any_library_are_kept():
    info = {"n": np.int64(3), "x": np.array(0.5), "ok": jnp.asarray(True), "nan": np.float32("nan")}
    kept = acted(info=info | {"array": np.ones(2), "text": np.str_("a")}).info
    assert kept == {"n": 3, "x": 0.5, "ok": True, "text": "a"}
    assert {type(value) for value in kept.values()} == {int, float, bool, str}


def test_values_that_are_no_scalars_are_unchanged():
    for value in ([], "x", np.ones(1), None, np.timedelta64(1, "ns")):
        assert plain_scalar(value) is value
    assert real_number(np.array(2.0)) == 2.0 and real_number("2") is None
