"""Countdown: answers by hand, hostile answers, the solver, the generator, files, splits."""

import dataclasses
import hashlib
import itertools
import random
import time
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.countdown import Countdown, Problem, evaluate, load_problems, split_of
from ragen_jax.envs.countdown import env as countdown_env
from ragen_jax.envs.countdown.arithmetic import MAX_NESTING, MAX_SIZE, MAX_TEXT, list_operations
from ragen_jax.envs.countdown.solver import list_reachable, solve
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import Environment, SolvableEnvironment

pytestmark = pytest.mark.fast


PROBLEM = Problem((44, 19, 35), 60)

# sha256 of the observations of seeds 0..49 with default options. A different digest means that
# every problem has changed, and with it warm starts, evaluation sets and resumed runs.
PROBLEMS_0_TO_49 = "7881eaca7c6d753e445c553cf5d05fda2457fd1189bd2ada52269e8c234301cf"


def problems_digest() -> str:
    env = Countdown()
    texts = [env.render(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def all_values(numbers, operators="+-*/") -> set:
    """All values of the numbers, each used once, by combining any two until one is left."""
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        made = {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a) / b if b else None}
        for operator in operators:
            if made[operator] is not None:
                found |= all_values([*rest, made[operator]], operators)
    return found


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("countdown", count=(3, 3), split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert env.actions == ()
    assert ENVS["countdown"] is Countdown
    assert env.render(PROBLEM) == "Numbers: 44, 19, 35\nTarget: 60"
    assert "exactly once" in env.instructions
    assert "at most once" in Countdown(allow_subset=True).instructions
    assert "<" not in env.instructions and "{" not in env.instructions
    with pytest.raises(ValueError, match=r"'numbers'.*accepted: count, largest"):
        make_env("countdown", numbers=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"count": 3}, "count must be two whole numbers .*got 3"),
        ({"count": (4, 3)}, "count must be .*at least 4, got 3"),
        ({"count": (3, 6)}, r"count must be .*at most 5, got 6"),
        ({"largest": 0}, "largest must be .*at least 1, got 0"),
        ({"largest": 10**9}, "largest must be .*at most 10000, got 1000000000"),
        ({"targets": (0, 9)}, "targets must be .*at least 1, got 0"),
        ({"targets": "12"}, "targets must be two whole numbers .*got '12'"),
        ({"operators": "+^"}, r"operators must be some of \+-\*/, got '\+\^'"),
        ({"operators": ""}, "operators must be some of"),
        ({"operators": None}, "operators must be some of"),
        ({"allow_subset": 1}, "allow_subset must be True or False, got 1"),
        ({"targets": (1, 10**12)}, "targets must be .*at most 1000000000, got 1000000000000"),
        ({"targets": (1.0, 9)}, "targets must be .*got 1.0"),
        ({"path": 5}, "path must be the name of a file or None, got 5"),
        ({"max_rows": 10**12}, "max_rows must be .*at most 10000000"),
        ({"max_rows": 0}, "max_rows must be .*at least 1, got 0"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            Countdown().reset(seed)
    Countdown().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    assert len({PROBLEM, Problem((44, 19, 35), 60), Problem((19, 44, 35), 60)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        PROBLEM.target = 3


# ---- answers ------------------------------------------------------------------------------------

# (answer, reward, info) for the numbers 44, 19, 35 and the target 60
SOLVED, WRONG, NUMBERS, READABLE, NOTHING = (
    (1.0, {"success": True, "readable": True, "right_numbers": True}),
    (0.1, {"success": False, "readable": True, "right_numbers": True}),
    (0.0, {"success": False, "readable": True, "right_numbers": True}),
    (0.0, {"success": False, "readable": True, "right_numbers": False}),
    (0.0, {"success": False, "readable": False, "right_numbers": False}),
)
ANSWERS = [
    ("44-19+35", SOLVED),
    ("(44 - 19) + 35", SOLVED),
    (" 35 - (19 - 44) \n", SOLVED),
    ("-19+44+35", SOLVED),
    ("+(+44)--35-19", SOLVED),
    ("44+19+35", WRONG),
    ("44*19/35", WRONG),
    ("44/(35-19)", WRONG),
    ("44/(19-19)+35", READABLE),
    ("60", READABLE),
    ("25+35", READABLE),
    ("44-19+35+0", READABLE),
    ("44-19+35+44-44", READABLE),
    ("(44+19+35)/0", READABLE),
    ("44-19", READABLE),
    ("44-19+35=60", NOTHING),
    ("44-19+35.0", NOTHING),
    ("44 - 19 + 035", NOTHING),
    ("44 19 35", NOTHING),
    ("44//19+35", NOTHING),
    ("44**19-35", NOTHING),
    ("44(19)(35)", NOTHING),
    ("44-19+35)", NOTHING),
    ("((44-19+35)", NOTHING),
    ("44-19,35", NOTHING),
    ("44\u00d719+35", NOTHING),
    ("\u0664\u0664-19+35", NOTHING),
    ("\uff14\uff14-19+35", NOTHING),
    ("44-1_9+35", NOTHING),
    ("0x2c-19+35", NOTHING),
    ("44-19+35 # sixty", NOTHING),
    ("the answer is 44-19+35", NOTHING),
    ("()", NOTHING),
    ("", NOTHING),
    ("   ", NOTHING),
    ("\x00", NOTHING),
    ("\ud800", NOTHING),
]


@pytest.mark.parametrize("answer, expected", ANSWERS)
def test_answers_by_hand(answer, expected):
    step = Countdown().step(PROBLEM, answer)
    assert (step.reward, step.info) == expected
    assert step.done and step.state == PROBLEM


def test_division_by_zero_of_the_right_numbers_has_no_value():
    env = Countdown()
    step = env.step(Problem((5, 3, 3), 5), "5/(3-3)")
    assert (step.reward, step.info) == NUMBERS
    assert env.step(Problem((5, 3, 3), 5), "5*(3/3)").reward == 1
    # A Python float would call this right.
    assert env.step(Problem((1, 3, 3, 1), 1), "1/3*3*1").info["success"]
    assert not env.step(Problem((10_000, 3, 1), 3333), "10000/3*1").info["success"]


def test_numbers_left_out():
    exact, subset = Countdown(), Countdown(allow_subset=True)
    problem = Problem((5, 5, 7), 10)
    assert exact.step(problem, "5+5").reward == 0
    assert subset.step(problem, "5+5").reward == 1
    assert subset.step(problem, "5+5+7").reward == 0.1
    assert subset.step(problem, "5+5+5-5").reward == 0
    assert subset.step(problem, "3+7").reward == 0
    assert subset.solve(problem) == ("5+5",) and exact.solve(problem) is None
    assert subset.solve(Problem((5, 7), 7)) == ("7",)


def test_values_are_exact():
    assert evaluate("1/3+1/6").value == Fraction(1, 2)
    assert evaluate("8/(3-8/3)").value == 24
    assert evaluate("-(2-5)*-4").value == -12
    assert evaluate("7-2-1").value == 4 and evaluate("8/4/2").value == 1
    assert evaluate("2+3*4").value == 14 and evaluate("(2+3)*4").value == 20
    assert evaluate("(44-19)*3").numbers == (44, 19, 3)
    assert evaluate("1/0").value is None and evaluate("0*(1/0)").value is None


def test_limits():
    longest = "1+" * (MAX_TEXT // 2 - 1) + "1"
    assert evaluate("+".join(["1"] * 30)).value == 30
    assert evaluate(longest) is None  # too many operations
    assert evaluate("1" + " " * MAX_TEXT) is None
    assert evaluate("(" * MAX_NESTING + "1" + ")" * MAX_NESTING).value == 1
    assert evaluate("(" * (MAX_NESTING + 1) + "1" + ")" * (MAX_NESTING + 1)) is None
    assert evaluate("-" * 150 + "1") is None
    assert evaluate(f"{MAX_SIZE}").value == MAX_SIZE
    assert evaluate(f"{MAX_SIZE + 1}") is None
    assert evaluate(f"{MAX_SIZE}*{MAX_SIZE}").value is None
    assert evaluate(f"{MAX_SIZE}+1-1").value is None
    assert evaluate(f"1/{MAX_SIZE}/2").value is None


def hostile_answers(count: int) -> list[str]:
    """Answers that would harm `eval` or a careless parser: handmade answers and mutations."""
    rng = random.Random(0)
    kinds = [
        "9**9**9**9",
        "9**" * 60 + "9",
        "2**" + "9" * 190,
        "99999999999999999999*" * 9 + "1",
        "9" * 5000,
        "9" * 100_000,
        "9" * 199,
        "(" * 10_000 + "1" + ")" * 10_000,
        "(" * 190 + "1",
        "((((((((((((((((((((" * 5 + "1" + "))))))))))))))))))))" * 5,
        "-" * 199 + "1",
        "~" * 150 + "1",
        "1+" * 99 + "1",
        "1-(1-" * 39 + "1" + ")" * 39,
        "1/(1/" * 19 + "0" + ")" * 19,
        "1/0",
        "0/0",
        "1/(44-44)",
        "5%0",
        "7//0",
        "__import__('os').system('true')",
        "exec('1')",
        "().__class__.__bases__[0].__subclasses__()",
        "[x for x in range(10**9)]",
        "(lambda: 1)()",
        "(x:=60)",
        "60 if 1 else 0",
        "numbers",
        "True+59",
        "None",
        "target",
        "'a'*10**9",
        "f'{60}'",
        "1j*1j",
        "1e999",
        "0.1+59.9",
        "0b11",
        "1_000",
        "\u0661\u0662",
        "\uff11+\uff12",
        "\u00b2+\u2460",
        "\u221a60",
        "44\u221219+35",
        "\u200b44-19+35",
        "44-19+35\u202e",
        "44-19+35\x00",
        "44-19+35\\\n",
        "44-19+35;1",
        "44-19+35#",
        "\ud83d\ude00",
        "\udcff",
        "\x00" * 300,
        "\n" * 300,
        " " * 100_000,
        "1 " * 100,
        "1(1)",
        "(1)(1)",
        "()()",
        "*44",
        "**44",
        "44+",
        ")(",
        "...",
        "<answer>44-19+35</answer>",
        "44-19+35||44-19+35",
    ]
    alphabet = "0123456789+-*/()() " + "._exj%~,=[]{}:'\"\\\n\t\u0663\u00d7\x00\ud800"
    answers = list(kinds)
    while len(answers) < count:
        if rng.random() < 0.5:
            answers.append("".join(rng.choices(alphabet[:19], k=rng.randrange(1, 220))))
            continue
        text = list(rng.choice(kinds)[: rng.choice((10, 50, 200, 5000))] or "44-19+35")
        for _ in range(rng.randrange(1, 6)):
            text.insert(rng.randrange(len(text) + 1), rng.choice(alphabet))
        answers.append("".join(text))
    return answers


def test_hostile_answers_are_harmless_and_fast():
    """1,000 of them: no exception, no warning, under a millisecond each on average (CPU time)."""
    env = Countdown()
    answers = hostile_answers(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = time.process_time()
        played = [env.step(PROBLEM, answer) for answer in answers]
        spent = time.process_time() - start
    assert spent < 1.0
    assert all(step.done and step.reward == 0 for step in played)
    readable = 0
    for answer in answers:
        reading = evaluate(answer)
        if reading is not None and reading.value is not None:
            # Python's value with exact literals; the rest is plain arithmetic.
            digits = "".join(c if c.isdigit() else f" {c} " for c in answer)
            exact = " ".join(f"Fraction({w})" if w.isdigit() else w for w in digits.split())
            assert eval(exact, {"Fraction": Fraction}) == reading.value
            readable += 1
    assert readable >= 5


@pytest.mark.medium
@given(st.text("0123456789+-*/() ", max_size=40))
@settings(max_examples=300, deadline=None)
def test_readable_means_what_python_means(text):
    """If both find a value, the values are equal; Python reads unreadable answers differently."""
    reading = evaluate(text)
    if reading is None:
        return
    exact = "".join(c if c.isdigit() else f" {c} " for c in text).split()
    expression = " ".join(f"Fraction({w})" if w.isdigit() else w for w in exact)
    try:
        value = eval(expression, {"Fraction": Fraction})
    except ZeroDivisionError:
        value = None
    assert reading.value in (value, None) and (value is not None or reading.value is None)


# ---- solver -------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("operators", ["+-", "+*", "+-*/"])
def test_solver_finds_what_there_is(operators):
    """Compared with a brute-force list of all values: reachable and unreachable targets."""
    rng = random.Random(3)
    solved = 0
    for _ in range(6):
        numbers = tuple(rng.randrange(1, 13) for _ in range(rng.choice((2, 3, 4))))
        values = all_values(numbers, operators)
        whole = list_reachable(numbers, operators=operators)
        assert whole <= values
        for target in range(0, 40):
            found = solve(numbers, target, operators=operators)
            assert (found is not None) == (target in values)
            assert (target in whole) == (
                solve(numbers, target, operators=operators, fractions=False) is not None
            )
            if found is not None:
                reading = evaluate(found)
                assert reading.value == target and sorted(reading.numbers) == sorted(numbers)
                assert set(found) <= set(operators + "()0123456789")
                solved += 1
    assert solved > 5


def test_solutions_by_hand():
    assert solve((3, 3, 8, 8), 24) == "8/(3-8/3)"
    assert solve((3, 3, 8, 8), 24, fractions=False) is None
    assert solve((3, 3, 8, 8), 24, operators="+-*") is None
    assert solve((7,), 7) == "7" and solve((7,), 8) is None
    assert solve((5, 2, 2), 0) is not None
    assert list_reachable((2, 3), operators="+-") == {5, 1, -1}
    assert list_reachable((2, 6)) == {8, 4, -4, 12, 3}


def test_steps_and_explanation():
    assert list_operations("(44-19)+35") == ["44-19=25", "25+35=60"]
    assert list_operations("2*(7-9)/3") == ["7-9=-2", "2*-2=-4", "-4/3=-4/3"]
    assert list_operations("7") == []
    for text in ("1/0", "x", ""):
        with pytest.raises(ValueError, match="not an expression with a value"):
            list_operations(text)
    env = Countdown()
    plan = env.solve(PROBLEM)
    assert env.step(PROBLEM, *plan).info["success"]
    expected = "numbers 44 19 35 target 60 plan 44-19=25 25+35=60"
    assert env.explain(PROBLEM, ["44-19+35"]) == expected


# ---- generator ----------------------------------------------------------------------------------


def test_problems_are_pinned():
    assert problems_digest() == PROBLEMS_0_TO_49


@pytest.mark.medium
@pytest.mark.parametrize(
    "options, count",
    [
        ({}, 300),
        ({"operators": "+-*/", "split": "eval"}, 40),
        ({"count": (2, 5), "largest": 20, "targets": (1, 30), "split": None}, 60),
        ({"allow_subset": True, "split": "imitation"}, 40),
    ],
)
def test_problems_are_as_asked_and_solvable(options, count):
    env = Countdown(**options)
    for seed in range(count):
        problem = env.reset(seed)
        assert env.count[0] <= len(problem.numbers) <= env.count[1]
        assert all(1 <= number <= env.largest for number in problem.numbers)
        assert env.targets[0] <= problem.target <= env.targets[1]
        assert env.split in (None, split_of(problem))
        (answer,) = env.solve(problem)
        step = env.step(problem, answer)
        assert step.reward == 1 and step.info["success"]
        assert set(answer) <= set(env.operators + "()0123456789")
        assert env.explain(problem, (answer,)).endswith(f"={problem.target}") or answer.isdigit()


def test_reset_is_pure_and_problems_vary():
    env = Countdown()
    problems = [env.reset(seed) for seed in range(300)]
    assert Countdown().reset(7) == problems[7]
    assert len({env.identity(problem) for problem in problems}) > 295
    assert {len(problem.numbers) for problem in problems} == {3, 4}


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(countdown_env, "MAX_ATTEMPTS", 50)
    env = Countdown(largest=3, targets=(50, 60), count=(2, 2))
    with pytest.raises(ValueError, match=r"50 attempts for seed=4.*targets=\(50, 60\)"):
        env.reset(4)


@pytest.mark.medium
def test_splits_share_no_problem_and_have_their_shares():
    found = {}
    # few enough problems that many repeat
    options = {"count": (2, 3), "largest": 9, "targets": (1, 20)}
    for split in SPLITS:
        env = Countdown(**options, split=split)
        found[split] = {env.identity(env.reset(seed)) for seed in range(400)}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    assert split_of(Problem((44, 19, 35), 60)) == split_of(Problem((35, 44, 19), 60))
    env = Countdown(split=None)
    drawn = [split_of(env.reset(seed)) for seed in range(1000)]
    shares = {split: drawn.count(split) / 1000 for split in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)


# ---- files --------------------------------------------------------------------------------------

ROWS = [
    Problem((44, 19, 35), 98),  # + and - suffice
    Problem((63, 95, 96), 64),  # 96+63-95
    Problem((2, 3, 7), 42),  # needs *
    Problem((95, 11, 56), 28),  # 95-11-56
    Problem((1, 2, 4), 100),  # not solvable
]


def write(path, columns):
    """A parquet file of {name: values}; skips the test where pyarrow is not installed."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture
def file(tmp_path):
    """A file in the format of the public data set, with an additional column."""
    columns = {
        "target": [row.target for row in ROWS],
        "nums": [list(row.numbers) for row in ROWS],
        "id": list(range(len(ROWS))),
    }
    return write(tmp_path / "problems.parquet", columns)


@pytest.mark.medium
def test_a_file_is_read_in_order(file):
    assert load_problems(file) == tuple(ROWS)
    assert load_problems(str(file), max_rows=2) == tuple(ROWS[:2])


@pytest.mark.medium
def test_problems_from_a_file_are_solvable_and_of_their_split(file):
    plus_minus = {ROWS[0], ROWS[1], ROWS[3]}
    env = Countdown(path=file, split=None)
    assert {env.reset(seed) for seed in range(60)} == plus_minus
    assert Countdown(path=file, split=None).reset(5) == env.reset(5)
    every = Countdown(path=file, split=None, operators="+-*/")
    assert {every.reset(seed) for seed in range(60)} == plus_minus | {ROWS[2]}
    first = Countdown(path=file, split=None, max_rows=1)
    assert {first.reset(seed) for seed in range(9)} == {ROWS[0]}
    for split in {split_of(problem) for problem in plus_minus}:
        env = Countdown(path=file, split=split)
        drawn = {env.reset(seed) for seed in range(40)}
        assert drawn == {problem for problem in plus_minus if split_of(problem) == split}


@pytest.mark.medium
def test_bad_files_are_named(tmp_path, file, monkeypatch):
    with pytest.raises(ValueError, match="there is no file .*none.parquet"):
        Countdown(path=tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="there is no file"):
        load_problems(tmp_path)
    other = write(tmp_path / "other.parquet", {"target": [1], "numbers": [[1]]})
    with pytest.raises(ValueError, match=r"lacks the column\(s\) nums; it has target, numbers"):
        load_problems(other)
    text = tmp_path / "text.parquet"
    text.write_text("target,nums\n")
    with pytest.raises(ValueError, match="text.parquet cannot be read as parquet"):
        load_problems(text)
    empty = write(tmp_path / "empty.parquet", {"target": [], "nums": []})
    with pytest.raises(ValueError, match="holds no problems"):
        load_problems(empty)
    for target, nums in (
        (None, [1]),
        ("7", [1]),
        (7, None),
        (7, []),
        (7, [1, None]),
        (7, [1.5]),
        (7, [0, 7]),
        (7, [1] * 6),
        (7, [10_001]),
    ):
        bad = write(tmp_path / "bad.parquet", {"target": [target], "nums": [nums]})
        with pytest.raises(ValueError, match="row 0 of .* is not a problem"):
            load_problems(bad)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'ragen_jax\[data\]'"):
        load_problems(file)


# ---- soak ---------------------------------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("episodes", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_answers_get_what_they_deserve(episodes):
    """Random expressions of the right numbers: 1 or 0.1, by a separately computed value."""
    rng = random.Random(1)
    kinds = [Countdown(split=None), Countdown(operators="+-*/", targets=(1, 20), largest=9)]
    rewards = []
    for episode in range(episodes):
        env = kinds[episode % 2]
        problem = env.reset(episode // 2)
        parts = [(str(n), Fraction(n)) for n in problem.numbers]
        while len(parts) > 1:
            (a, x), (b, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            operator = rng.choice("+-*/" if y else "+-*")
            value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else None}[operator]
            parts.append((f"({a}{operator}{b})", value))
        text, value = parts[0]
        step = env.step(problem, text)
        assert step.reward == (1.0 if value == problem.target else 0.1)
        assert step.info["right_numbers"]
        rewards.append(step.reward)
    assert rewards.count(1.0) > episodes / 100
