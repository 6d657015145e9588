"""MetaMathQA: rewards by hand, the generator, the file, splits."""

import dataclasses
import hashlib
import itertools
import json
import re

import numpy as np
import pytest

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.metamathqa import MetaMathQA, Question, load_questions, split_of
from ragen_jax.envs.metamathqa import env as metamathqa_env
from ragen_jax.envs.metamathqa.env import MAX_SHOWN, Attempt
from ragen_jax.envs.metamathqa.questions import normalize
from ragen_jax.envs.metamathqa.stories import NAMES, THINGS, identity, values
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import Environment, GroundedEnvironment, SolvableEnvironment
from ragen_jax.run import datasets

pytestmark = pytest.mark.fast


FACTS = (("has", 12), ("gets", 5), ("loses", 3))
TEXT = "Anna has 12 pens. Anna gets 5 more. Anna loses 3. How many pens does Anna have now?"
START = Attempt(Question(TEXT, "14", identity(FACTS), FACTS))

# sha256 of the observations of seeds 0..49 with default options. A different digest means that
# every problem has changed, and with it warm starts, evaluation sets and resumed runs.
PROBLEMS_0_TO_49 = "91dc86e0d3f8a8ea96190af58072762fab43175eec674c9e1f0c864aae08902c"


def problems_digest() -> str:
    env = MetaMathQA()
    texts = [env.render(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def told(text) -> int:
    """The answer of a generated question, computed from its text alone."""
    value, question = None, False
    for sentence in re.split(r"(?<=[.?]) ", text):
        numbers = [int(word) for word in re.findall(r"\d+", sentence)]
        assert not question and len(numbers) == (0 if sentence.endswith("?") else 1)
        match sentence.split()[1]:
            case "has":
                (value,) = numbers
            case "gets" | "finds" | "buys":
                assert sentence.endswith(" more.")
                value += numbers[0]
            case "gives" | "loses" | "sells":
                value -= numbers[0]
            case "friend":
                assert sentence.endswith(" times as many.")
                value *= numbers[0]
            case "splits":
                assert sentence.endswith(" equal parts and keeps one.")
                value, rest = divmod(value, numbers[0])
                assert rest == 0
            case _:
                question = re.fullmatch(r"How many \w+ does \w+ have now\?", sentence)
                assert question
        assert value >= 0
    assert question
    return value


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("metamathqa", operations=(2, 2), split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert isinstance(env, GroundedEnvironment)
    assert env.actions == ()
    assert ENVS["metamathqa"] is MetaMathQA
    assert env.render(START) == f"Question: {TEXT}"
    assert "<" not in env.instructions and "{" not in env.instructions
    for symbol in ("Wrong:", "Attempt:"):
        assert symbol in env.instructions
    with pytest.raises(ValueError, match=r"'attempts'.*accepted: operations, largest"):
        make_env("metamathqa", attempts=3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"operations": 3}, "operations must be two whole numbers .*got 3"),
        ({"operations": (3, 2)}, "operations must be .*at least 3, got 2"),
        ({"operations": (0, 2)}, "operations must be .*at least 1, got 0"),
        ({"operations": (2, 7)}, "operations must be .*at most 6, got 7"),
        ({"largest": 9}, "largest must be .*at least 10, got 9"),
        ({"largest": 10**9}, "largest must be .*at most 1000000, got 1000000000"),
        ({"largest": float("nan")}, "largest must be .*got nan"),
        ({"operators": "+^"}, r"operators must be some of \+-\*/, got '\+\^'"),
        ({"operators": ""}, "operators must be some of"),
        ({"operators": None}, "operators must be some of"),
        ({"compare": "sympy"}, "compare must be one of 'string', 'math_verify', got 'sympy'"),
        ({"compare": None}, "compare must be one of"),
        ({"path": 5}, "path must be the name of a file or None, got 5"),
        ({"max_rows": 0}, "max_rows must be .*at least 1, got 0"),
        ({"max_rows": 10**12}, "max_rows must be .*at most 10000000"),
        ({"types": None}, "types must be a text, got None"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MetaMathQA(**options)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    MetaMathQA()
    with pytest.raises(ValueError, match=r"needs math-verify: pip install 'ragen_jax\[math\]'"):
        MetaMathQA(compare="math_verify")


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            MetaMathQA().reset(seed)
    MetaMathQA().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    assert len({START, dataclasses.replace(START), dataclasses.replace(START, tries=1)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        START.tries = 3


# ---- answers ------------------------------------------------------------------------------------


def test_each_wrong_answer_halves_what_the_right_one_earns():
    env = MetaMathQA()
    for wrong, reward in ((0, 1.0), (1, 0.5), (2, 0.25), (3, 0.125), (2000, 0.0)):
        state = START
        for attempt in range(wrong):
            step = env.step(state, str(attempt % 10))
            assert (step.reward, step.done) == (0.0, False)
            assert step.info == {"success": False, "readable": True}
            state = step.state
        step = env.step(state, "14")
        assert (step.reward, step.done) == (reward, True)
        assert step.info == {"success": True, "readable": True}
        assert step.state == Attempt(START.question, wrong + 1, "")
    assert START == Attempt(START.question)


@pytest.mark.parametrize(
    "answer, shown",
    [
        ("9", "9"),
        ("  9\n\tor 8 ", "9 or 8"),
        ("9\nAttempt: 1", "9 Attempt: 1"),
        ("", ""),
        ("x" * MAX_SHOWN, "x" * MAX_SHOWN),
        ("x" * (MAX_SHOWN + 1), "x" * (MAX_SHOWN - 3) + "..."),
        ("9" * 10**6, "9" * (MAX_SHOWN - 3) + "..."),
        ("\ud800", "?"),
        ("\u0661\u00bd", "\u0661\u00bd"),
    ],
)
def test_a_wrong_answer_is_shown(answer, shown):
    env = MetaMathQA()
    state = env.step(START, answer).state
    assert env.render(state) == f"Question: {TEXT}\nWrong: {shown}\nAttempt: 2"
    assert env.render(env.step(state, "8").state).endswith("\nWrong: 8\nAttempt: 3")
    env.render(state).encode()


@pytest.mark.parametrize(
    "answer, right, readable",
    [
        ("14", True, True),
        (" 1 4\n", True, True),
        ("14.", False, True),
        ("14.0", False, True),
        ("014", False, True),
        ("fourteen", False, True),
        ("14 pens", False, True),
        ("", False, False),
        (" \n", False, False),
        ("\ud800", False, True),
    ],
)
def test_the_released_rule(answer, right, readable):
    step = MetaMathQA().step(START, answer)
    assert step.info == {"success": right, "readable": readable}
    assert step.done == right and step.reward == right


def test_case_does_not_matter():
    state = Attempt(Question("Who?", "Anna B", "who"))
    assert MetaMathQA().step(state, "anna b").info["success"]


# ---- generator ----------------------------------------------------------------------------------


def test_problems_are_pinned():
    assert problems_digest() == PROBLEMS_0_TO_49


@pytest.mark.medium
@pytest.mark.parametrize(
    "options, operators",
    [
        ({}, "+-*/"),
        ({"operations": (1, 6), "largest": 1000, "split": None}, "+-*/"),
        ({"operations": (2, 2), "largest": 30, "operators": "+-", "split": "eval"}, "+-"),
        ({"operators": "/*", "split": "imitation"}, "*/"),
    ],
)
def test_problems_are_as_asked_and_their_answers_right(options, operators):
    env = MetaMathQA(**options)
    seen, counts = set(), set()
    for seed in range(300):
        state = env.reset(seed)
        question = state.question
        (answer,) = env.solve(state)
        assert told(question.text) == int(answer) <= env.largest
        assert all(1 <= value <= env.largest for value in values(question.facts))
        assert env.split in (None, split_of(question))
        assert env.step(state, answer).info["success"]
        *_, plan = env.explain(state, (answer,)).partition(" plan ")
        for operation in plan.split():
            left, symbol, n, result = re.fullmatch(r"(\d+)(\D)(\d+)=(\d+)", operation).groups()
            assert eval(f"{left} {symbol} {n}") == int(result)
            seen.add(symbol)
        assert int(result) == int(answer)
        counts.add(len(plan.split()))
    assert seen == set(operators)
    assert counts == set(range(env.operations[0], env.operations[1] + 1))


@pytest.mark.medium
def test_reset_is_pure_and_problems_vary():
    env = MetaMathQA()
    states = [env.reset(seed) for seed in range(300)]
    assert MetaMathQA().reset(7) == states[7]
    assert len({env.identity(state) for state in states}) > 290
    text = " ".join(state.question.text for state in states)
    assert all(word in text for word in (*NAMES, *THINGS))
    tiny = MetaMathQA(operations=(2, 2), largest=30, operators="+-", split="eval")
    assert len({tiny.identity(tiny.reset(seed)) for seed in range(2000)}) >= 1024


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(metamathqa_env, "MAX_ATTEMPTS", 50)
    env = MetaMathQA(operations=(6, 6), largest=10, operators="*")
    with pytest.raises(ValueError, match=r"50 attempts for seed=4, operations=\(6, 6\)"):
        env.reset(4)


def test_identity_is_what_it_is_about():
    def content(*facts):
        return identity((("has", 12), *facts))

    assert content(("gets", 5), ("loses", 3)) == content(("sells", 3), ("buys", 5))
    assert content(("makes", 2), ("splits", 3)) == content(("splits", 3), ("makes", 2))
    assert content(("gets", 5), ("makes", 3)) != content(("makes", 3), ("gets", 5))
    assert content(("gets", 5)) != content(("loses", 5)) != content(("loses", 6))
    assert identity((("has", 12), ("gets", 3))) != identity((("has", 13), ("gets", 3)))


@pytest.mark.medium
def test_splits_share_no_problem_and_have_their_shares():
    found = {}
    # few enough problems that many repeat
    options = {"operations": (1, 2), "largest": 12, "operators": "+-"}
    for split in SPLITS:
        env = MetaMathQA(**options, split=split)
        found[split] = {env.identity(env.reset(seed)) for seed in range(400)}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    env = MetaMathQA(split=None)
    drawn = [split_of(env.reset(seed).question) for seed in range(1000)]
    shares = {split: drawn.count(split) / 1000 for split in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)


@pytest.mark.medium
def test_what_is_imitated_has_second_attempts_too():
    env = MetaMathQA(split="imitation")
    states = [env.reset(seed) for seed in range(400)]
    again = [state for state in states if state.tries]
    assert len(again) == pytest.approx(100, abs=35)
    assert all(state.tries == 1 and state.last_wrong != state.question.answer for state in again)
    for split in ("train", "eval", None):
        env = MetaMathQA(split=split)
        assert not any(env.reset(seed).tries for seed in range(100))


def test_explanations():
    env = MetaMathQA()
    thought = "has 12 gets 5 loses 3 plan 12+5=17 17-3=14"
    assert env.explain(START, ("14",)) == thought
    assert env.explain(Attempt(Question("Why?", "so", "why")), ("so",)) == "plan so"
    assert env.count_grounded(env.render(START), thought) == (3, 3)


# ---- file ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def row(number, **fields):
    return {
        "type": ("MATH_AnsAug", "GSM_Rephrased")[number % 2],
        "query": f"{'xyzuv'[number % 5]} = {number}, \u221a?\n",
        "original_question": f"Original {number // 2}",
        "response": f"The answer is: no.\n#### {number}\nThe answer is: \\frac{{{number}}}{{2}}",
        **fields,
    }


ROWS = [row(number) for number in range(60)]


def write(path, rows):
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "questions.json", ROWS)


@pytest.mark.medium
def test_a_file_is_read_in_order_and_converted_once(file, tmp_path, cache, monkeypatch):
    expected = [
        Question(
            text=f"{'xyzuv'[number % 5]} = {number}, \u221a?",
            answer=f"\\frac{{{number}}}{{2}}",
            identity=f"original{number // 2}",
            kind=("MATH_AnsAug", "GSM_Rephrased")[number % 2],
        )
        for number in range(60)
    ]
    assert list(load_questions(file)) == expected
    (made,) = (cache / "ragen_jax" / "datasets").glob("metamathqa_*/")
    monkeypatch.setattr("ragen_jax.envs.metamathqa.questions._rows", None)  # it is not read again
    moved = file.rename(tmp_path / "other.json")
    assert list(load_questions(str(moved))) == expected
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    write(moved, ROWS[:7])
    assert len(load_questions(moved)) == 7
    assert len(list(made.parent.glob("metamathqa_*/"))) == 2


@pytest.mark.medium
def test_questions_from_a_file_are_of_their_split(file):
    def drawn(seeds=300, **options):
        env = MetaMathQA(path=file, **options)
        return {env.reset(seed).question for seed in range(seeds)}

    every = set(load_questions(file))
    assert drawn(600, split=None) == every
    env = MetaMathQA(path=file, split=None)
    assert env.reset(5) == MetaMathQA(path=str(file), split=None).reset(5)
    assert env.count_grounded(env.render(env.reset(5)), "has 5 gets 3") == (0, 0)
    parts = [drawn(split=split) for split in SPLITS]
    assert set.union(*parts) == every
    originals = [{question.identity for question in part} for part in parts]
    assert all(not a & b for a, b in itertools.combinations(originals, 2))
    assert all(parts)
    assert {q.kind for q in drawn(split=None, types="MATH_")} == {"MATH_AnsAug"}
    assert drawn(split=None, max_rows=2) == set(load_questions(file)[i] for i in (0, 1))


def test_nothing_of_the_types_is_an_error(file, monkeypatch):
    monkeypatch.setattr(metamathqa_env, "MAX_ATTEMPTS", 50)
    with pytest.raises(ValueError, match="50 attempts.*path=.*questions.json.*types='AQUA'"):
        MetaMathQA(path=file, types="AQUA").reset(0)


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path, capsys):
    rows = [*ROWS[:3], row(3, response="It is 5."), row(4, response="The answer is: "), ROWS[5]]
    file = write(tmp_path / "some.json", rows)
    assert [question.answer for question in load_questions(file)][2:] == [
        "\\frac{2}{2}",
        "",
        "",
        "\\frac{5}{2}",
    ]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("some.json: 2 row(s) without 'The answer is: ' are left out")
    env = MetaMathQA(path=file, split=None)
    assert {env.reset(seed).question.answer for seed in range(50)} == {
        f"\\frac{{{number}}}{{2}}" for number in (0, 1, 2, 5)
    }
    assert [row for row, _, _ in env.list_problems()] == [0, 1, 2, 5]
    assert capsys.readouterr().out == ""
    file = write(tmp_path / "none.json", rows[3:5])
    with pytest.raises(ValueError, match="none of the 2 rows of .*none.json has 'The answer is: '"):
        load_questions(file)


def test_originals_are_told_apart_by_their_content():
    assert normalize("A football team's  16 players?\n") == normalize(
        "a football team\u2019s 16 players"
    )
    assert normalize("What is $1+2$?") != normalize("What is $1-2$?")
    assert normalize("What is 12?") != normalize("What is 13?")


@pytest.mark.medium
@pytest.mark.parametrize(
    "rows, message",
    [
        ("[1, 2", "bad.json cannot be read as JSON: "),
        ("\udc80".encode("utf-8", "surrogatepass").decode("latin-1"), "cannot be read as JSON"),
        ("[" * 100_000, "bad.json cannot be read as JSON: "),
        ({"query": "a"}, "bad.json must hold a list of questions, got {'query'"),
        ([], r"bad.json must hold a list of questions, got \[\]"),
        ([ROWS[0], 5], "row 1 of .*bad.json is not a question: 5"),
        ([{"query": "a"}], "row 0 of .*bad.json lacks the field type"),
        (
            [ROWS[0], {k: v for k, v in ROWS[1].items() if k != "original_question"}],
            "row 1 of .*bad.json lacks the field original_question",
        ),
        ([row(0, response=None)], "field response of row 0 of .*bad.json must be text: None"),
        ([row(0, query=["a"])], "field query of row 0 of .*bad.json must be text"),
    ],
)
def test_bad_files_are_named(tmp_path, rows, message):
    file = write(tmp_path / "bad.json", rows)
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as error:
            MetaMathQA(path=file)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400


def test_missing_files_are_named(tmp_path, cache):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=f"there is no file {path}"):
            MetaMathQA(path=path)
    assert not cache.exists()


def test_a_file_is_imitated_and_held_out(file, tmp_path):
    env = MetaMathQA(path=file, split="imitation")
    budgets = dict(plan_moves=1, actions_per_turn=1, max_turns=2, max_actions=2)
    shown = list(datasets.play_expert(env, range(5), **budgets))
    assert len(shown) == 5
    assert all(re.fullmatch(r"plan (.*)</think><answer>\1</answer>", e["reply"]) for e in shown)
    _, states = datasets.heldout_problems(
        MetaMathQA(path=file, split="eval"), count=3, seed=0, settings={}, directory=tmp_path
    )
    assert len({state.question.identity for state in states}) == 3
