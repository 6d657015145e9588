"""DeepCoder: rewards by hand, the generator, splits, replies."""

import hashlib

import numpy as np
import pytest

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.deepcoder import DeepCoder, expressions, process
from ragen_jax.envs.deepcoder.env import extract_program
from ragen_jax.envs.deepcoder.problems import split_of
from ragen_jax.envs.deepcoder.tasks import FAMILIES, list_partial_expressions
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import Environment, FileEnvironment, SolvableEnvironment

# sha256 of the observations of seeds 0..49 with default options and as expressions. A
# different digest means that every problem has changed, and with it warm starts, evaluation sets
# and resumed runs.
PROBLEMS_0_TO_49 = "5f454a00b30b4358c5f88990e93448ef748780d19167882a5e9e21eefa83a465"


def problems_digest():
    texts = []
    for language in ("python", "expression"):
        env = DeepCoder(language=language)
        texts += [env.render(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def block(code):
    return f"I think so.\n```python\n{code}\n```"


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("deepcoder", tests=4, split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert isinstance(env, FileEnvironment) and list(env.list_problems()) == []
    assert env.actions == () and ENVS["deepcoder"] is DeepCoder
    assert "```python" in env.instructions and "{" not in env.instructions
    with pytest.raises(ValueError, match=r"'retries'.*accepted: language, steps"):
        make_env("deepcoder", retries=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"language": "rust"}, "language must be one of 'python', 'expression', got 'rust'"),
        ({"steps": 3}, "steps must be two whole numbers .*got 3"),
        ({"steps": (0, 2)}, "steps must be .*at least 1, got 0"),
        ({"steps": (2, 6)}, "steps must be .*at most 5, got 6"),
        ({"tests": 1}, "tests must be .*at least 2, got 1"),
        ({"tests": 10**9}, "tests must be .*at most 1000"),
        ({"time_limit_s": 0}, "time_limit_s must be seconds above 0, at most 600, got 0"),
        ({"time_limit_s": float("nan")}, "time_limit_s must be seconds .*got nan"),
        ({"time_limit_s": True}, "time_limit_s must be seconds .*got True"),
        ({"memory_mb": 8}, "memory_mb must be .*at least 64, got 8"),
        ({"sandbox": "docker"}, "sandbox must be one of 'bubblewrap', 'landlock', 'rlimits', None"),
        ({"path": 5}, "path must be the name of a file or folder or None, got 5"),
        ({"path": "x", "language": "expression"}, "'expression' is of generated problems"),
        ({"path": "no/such.parquet"}, "there is no file or folder no/such.parquet"),
        ({"max_tests": 0}, "max_tests must be .*at least 1, got 0"),
        ({"split": "test"}, "split must be one of"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DeepCoder(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            DeepCoder().reset(seed)
    state = DeepCoder().reset(np.int64(2**63 - 1))
    assert hash(state) == hash(DeepCoder().reset(2**63 - 1))


# ---- generated problems -------------------------------------------------------------------------


@pytest.mark.fast
def test_pinned_problems():
    assert problems_digest() == PROBLEMS_0_TO_49


@pytest.mark.parametrize("language", ["python", "expression"])
def test_splits_share_no_problem(language):
    found = {}
    for split in SPLITS:
        env = DeepCoder(language=language, split=split)
        states = [env.reset(seed) for seed in (*range(150), 2**62 + 5)]
        assert {split_of(state) for state in states} == {split}
        found[split] = {env.identity(state) for state in states}
    assert not found["train"] & found["eval"]
    assert not found["imitation"] & (found["train"] | found["eval"])
    assert all(len(names) > 100 for names in found.values())


def test_problems_are_of_every_kind():
    env = DeepCoder()
    states = [env.reset(seed) for seed in range(120)]
    assert {state.identity.split()[0] for state in states} == set(FAMILIES)
    assert {test.function for state in states for test in state.tests} == {"", "solve"}
    assert all(len(state.tests) == 8 for state in states)
    # No constant output passes more than five of eight tests.
    assert (
        max(
            max(map([t.output for t in s.tests].count, [t.output for t in s.tests])) for s in states
        )
        <= 5
    )


def test_the_expression_of_a_problem_is_what_it_tells():
    """Parsed from the text alone."""
    env = DeepCoder(language="expression", steps=(1, 5))
    for seed in range(200):
        state = env.reset(seed)
        for test in state.tests:
            names = dict(zip("abc", map(int, test.input.split()), strict=True))
            value = names["a"]
            start, *steps = state.text.rstrip(".").split(". ")
            assert start == "Start with a"
            for step in steps:
                last = step.split()[-1]
                n = names[last] if last in names else int(last)
                if step.startswith(("Add", "Increase")):
                    value += n
                elif step.startswith(("Subtract", "Take away")):
                    value -= n
                elif step.startswith("Multiply"):
                    value *= n
                else:
                    larger = "larger" in step or "at least" in step
                    value = max(value, n) if larger else min(value, n)
            assert test.output == f"{value}\n"
        (answer,) = env.solve(state)
        assert env.step(state, answer).reward == 1.0
        assert env.explain(state, (answer,)).split(" then ")[-1] == answer


def test_the_reasoning_goes_step_by_step():
    assert list_partial_expressions("max((a-4)*b,7)") == ["a", "a-4", "(a-4)*b", "max((a-4)*b,7)"]


# ---- expressions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [
        ("a+b*c", 7),
        ("(a+b)*c", 9),
        ("-a - -3", 2),
        ("max(a,max(b,7))", 7),
        (" min( a , b ) ", 1),
        ("a*" * 5 + "2", 2),
        ("0xb", 11),
        ("1" + "0" * 30, 10**30),
        ("1" + "0" * 30 + "*9", None),
    ],
)
def test_expressions_mean_what_they_mean_in_python(text, value):
    tree = expressions.parse(text)
    assert expressions.value(tree, {"a": 1, "b": 2, "c": 3}) == value
    if value is not None:
        assert eval(text.strip(), {}, {"a": 1, "b": 2, "c": 3}) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "d", "a b", "a**b", "a/b", "a//b", "max(a)", "max(a,b,c)", "max", "abc", "a=b", "+a"),
        *("max(*a)", "min(a,b)(c)", "max(x=a,b=b)", "a,b", "(a", "1.5", "1_000", "True"),
        *("a if b else c", "[a]", "a+" * 500 + "a", "(" * 100 + "a" + ")" * 100, "9" * 40),
        *("a\n+b", "a\0", "ａ", "\ud800", "__import__('os')", "-" * 150 + "a", "x" * 10**6),
    ],
)
def test_anything_else_is_no_expression(text):
    env = DeepCoder(language="expression")
    step = env.step(env.reset(0), text)
    assert (step.reward, step.done, step.info["readable"]) == (0.0, True, False)


def test_an_expression_earns_the_share_of_its_tests():
    env = DeepCoder(language="expression", tests=50)
    state = next(s for s in map(env.reset, range(500)) if "larger" in s.text and len(s.steps) == 3)
    whole = env.solve(state)[0]
    assert env.step(state, whole).info == {
        **{"success": True, "readable": True, "passed": 50, "total": 50}
    }
    shares = set()
    for text in (*list_partial_expressions(whole), "0", "a", "b"):
        values = [
            eval(text, {}, dict(zip("abc", map(int, t.input.split()), strict=True)))
            for t in state.tests
        ]
        right = sum(v == int(t.output) for v, t in zip(values, state.tests, strict=True))
        step = env.step(state, text)
        assert step.reward == right / 50 and step.info["success"] == (right == 50)
        shares.add(right)
    assert len(shares) > 2


# ---- replies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, program",
    [
        ("print(1)", None),
        ("", None),
        ("```python\nprint(1)\n```", "print(1)"),
        ("so\n```python\n1\n```\nor\n```py\n2\n```\nend", "2"),
        ("```python\n1\n```\n```python\n2", "1"),  # the code block is not closed
        ("```\n1\n```", None),
        ("```c\n1\n```", None),
        ("```python\n```", ""),
        ("```python\nx = '```'\n```", "x = '```'"),
        ("  ```Python\n1\n  ```", "1"),
    ],
)
def test_the_last_block_is_the_program(reply, program):
    assert extract_program(reply) == program


def test_reading_a_reply_takes_time_by_its_length():
    assert extract_program("```python\n" * 10**5) is None
    assert extract_program("`" * 10**6) is None


def test_a_reply_without_a_program_starts_no_process(monkeypatch):
    env = DeepCoder()
    monkeypatch.setattr(process, "run", None)
    for reply in ("", "print(1)", "x" * 10**6, "\ud800", "```python\n\ud800\n```"):
        step = env.step(env.reset(3), reply)
        assert (step.reward, step.done, step.info["success"]) == (0.0, True, False)


def test_rewards_are_shares_of_tests():
    env = DeepCoder()
    state = next(s for s in map(env.reset, range(99)) if s.identity.startswith("numbers"))
    (right,) = env.solve(state)
    assert env.step(state, right).reward == 1.0
    assert env.step(state, right).info["success"] is True
    outputs = [test.output for test in state.tests]
    half = state.tests[0].input.split()[0]
    code = extract_program(right)
    if state.tests[0].function:
        code += f"\nsolve_ = solve\ndef solve(*x): return solve_(*x) if x[0] <= {half} else None"
    else:
        code = (
            f"import sys, io\nt = input()\nsys.stdin = io.StringIO(t)\n"
            f"if int(t.split()[0]) <= {half}:\n    " + code.replace("\n", "\n    ")
        )
    good = sum(int(test.input.split()[0]) <= int(half) for test in state.tests)
    step = env.step(state, block(code))
    assert 0 < good < len(outputs) or good == len(outputs)
    assert step.info == {
        "success": good == 8,
        "readable": True,
        "passed": good,
        "total": 8,
    }
    assert step.reward == good / 8
