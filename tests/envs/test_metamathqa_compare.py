"""Whether an answer is right: the comparing process, math-verify's verdicts, hostile answers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from math_answers import OTHER, SAME

from ragen_jax.envs.metamathqa import MetaMathQA, Question, compare
from ragen_jax.envs.metamathqa.compare import MAX_TEXT, Judge, Verdict, judge_answer
from ragen_jax.envs.metamathqa.env import Attempt
from ragen_jax.envs.metamathqa.worker import _WORDED, MEMORY

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]

# Stands for worker.py: answers are equal if written the same; some hang, kill or confuse it.
STAND_IN = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    right, said = json.loads(line)
    if said == "hang":
        time.sleep(60)
    if said == "kill":
        os._exit(3)
    if said == "error":
        print(json.dumps({"error": "RecursionError"}), flush=True)
    else:
        print(json.dumps({"equal": right == said, "readable": True}), flush=True)
"""
HANGS = Verdict(False, False, "no answer within 0.5 s")
DIES = Verdict(False, False, "the comparison ended its process")


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setattr(compare, "LIMIT", 0.5)
    return Judge((sys.executable, "-c", STAND_IN))


@pytest.fixture
def real(monkeypatch):
    """math-verify, with a shorter time limit than in a run."""
    pytest.importorskip("math_verify", reason="needs math-verify (extra math)")
    monkeypatch.setattr(compare, "LIMIT", 2)
    judge = Judge()
    monkeypatch.setattr(compare, "_judge", lambda process: judge)
    return judge


def alive(process):
    """Whether a process still runs (a zombie process does not)."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] not in "ZX"


# ---- the process --------------------------------------------------------------------------------


@pytest.mark.medium
def test_what_hangs_or_dies_costs_its_own_answer_alone(judge):
    assert judge._worker is None  # no process until there is an answer to compare
    workers = []
    for said, expected in (
        *(("5", Verdict(True, True)), ("6", Verdict(False, True))),
        *(("hang", HANGS), ("5", Verdict(True, True))),
        *(("kill", DIES), ("kill", DIES), ("5", Verdict(True, True))),
        *(("hang", HANGS), ("kill", DIES), ("\ud800\n", Verdict(False, True))),
        *(("error", Verdict(False, False, "RecursionError")), ("5", Verdict(True, True))),
    ):
        start = time.monotonic()
        assert judge.compare("5", said) == expected
        assert time.monotonic() - start < 10
        workers.append(judge._worker.pid)
    # A new process after each that hung or died; otherwise the same process.
    assert [a == b for a, b in zip(workers, workers[1:], strict=False)] == [
        *(True, True, False, True, False, False, True, False, False, True, True)
    ]
    assert [alive(worker) for worker in set(workers)].count(True) == 1


def test_a_worker_that_died_between_two_answers_is_replaced(judge):
    assert judge.compare("5", "5").right
    os.kill(judge._worker.pid, signal.SIGKILL)
    judge._worker.wait()
    assert judge.compare("5", "5").right


def test_a_worker_ends_with_its_judge(judge):
    judge.compare("5", "5")
    worker = judge._worker
    judge._end()
    assert worker.returncode == -signal.SIGKILL and not alive(worker.pid)


def test_a_worker_that_does_not_start_is_an_error():
    with pytest.raises(RuntimeError, match="does not start: the comparison ended its process"):
        Judge((sys.executable, "-c", "1/0")).compare("5", "5")


@pytest.mark.medium
def test_an_error_is_in_the_info_of_a_step(judge, monkeypatch):
    pytest.importorskip("math_verify", reason="needs math-verify (extra math)")
    monkeypatch.setattr(compare, "_judge", lambda process: judge)
    env = MetaMathQA(compare="math_verify")
    state = Attempt(Question("How many?", "5", "how many"))
    step = env.step(state, "hang")
    assert (step.reward, step.done) == (0.0, False)
    assert step.info == {"success": False, "readable": False, "error": HANGS.error}
    step = env.step(step.state, " 5 ")
    assert (step.reward, step.done) == (0.5, True)
    assert step.info == {"success": True, "readable": True}


def test_what_needs_no_comparison_is_not_asked(monkeypatch):
    monkeypatch.setattr(compare, "_judge", None)
    assert judge_answer("X + 1", "x+1", "math_verify") == Verdict(True, True)
    assert judge_answer("5", " \n", "math_verify") == Verdict(False, False)
    assert judge_answer("5", "9" * (MAX_TEXT + 1), "math_verify") == Verdict(False, False)
    assert judge_answer("9" * 10**6, "9" * 10**6, "math_verify") == Verdict(True, True)
    assert judge_answer("1/2", "0.5", "string") == Verdict(False, True)


ORPHAN = """
import os, sys, threading, time
from ragen_jax.envs.metamathqa import compare
said, question = [], ("1/2", "0.5", "math_verify")
thread = threading.Thread(target=lambda: said.append(compare.judge_answer(*question)))
thread.start()
thread.join()
judge = compare._judge(os.getpid())
maps = open(f"/proc/{judge._worker.pid}/maps").read()
print(judge._worker.pid, said[0].right, "jaxlib" in maps, flush=True)
if sys.argv[1] == "hang":
    compare.LIMIT = 600
    judge.compare("5", "9^{9^{9^{9}}}")
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("then", ["wait", "hang"])
def test_the_worker_compares_for_a_thread_has_no_jax_and_ends_with_the_run(then):
    pytest.importorskip("math_verify", reason="needs math-verify (extra math)")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, then],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    worker, right, jax = run.stdout.readline().split()
    assert (right, jax) == ("True", "False")
    time.sleep(0.5)
    assert alive(worker)
    run.kill()
    run.communicate()
    end = time.monotonic() + 60
    while alive(worker) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(worker)


# ---- math-verify --------------------------------------------------------------------------------

EQUAL = [
    *(("1/2", "0.5"), ("\\frac{1}{2}", "0.5"), ("\\frac{1}{2}", "1/2"), ("0.5", "\\frac12")),
    *(("1,000", "1000"), ("1000", "1,000"), ("5", "5 dollars"), ("5 dollars", "5"), ("5", "$5$")),
    *(("5", "5."), ("$5", "5"), ("5", "the answer is 5"), ("5", "\\boxed{5}"), ("50%", "0.5")),
    *(("50\\%", "50"), ("x^2+1", "1+x^2"), ("\\sqrt{8}", "2\\sqrt{2}"), ("x=5", "5")),
    *(("\\text{(B)}", "B"), ("-\\frac{3}{4}", "-0.75"), ("(1,2)", "(1, 2)"), ("2\\pi", "\\pi*2")),
]
DIFFERENT = [
    *(("5", "6"), ("5", "-5"), ("1", "1+x^2"), ("1+x^2", "1"), ("(3,4)", "4"), ("5x", "5")),
    *(("5", "5x"), ("5", "5 pi"), ("5\\pi", "5"), ("5", "3 or 5"), ("5", "$5$ or $6$")),
    *(("1/2", "0.51"), ("\\frac{1}{3}", "0.33"), ("1000", "1.000"), ("12", "1,2"), ("5", "x")),
    *(("5", "?"), ("5", "\ud800"), ("5", "\x00")),
]


@pytest.mark.medium
def test_what_means_the_same_is_right(real):
    for right, said in EQUAL:
        assert judge_answer(right, said, "math_verify") == Verdict(True, True), (right, said)
    for right, said in DIFFERENT:
        verdict = judge_answer(right, said, "math_verify")
        assert not verdict.right and not verdict.error, (right, said, verdict)
    assert not judge_answer("5", "\u202e", "math_verify").readable


@pytest.mark.long
def test_words_and_marks_around_an_answer_count(real):
    """All right and wrong answers of math_answers.py."""
    pairs = [(right, said, True) for right in SAME for said in SAME[right]]
    pairs += [(right, said, False) for right in OTHER for said in OTHER[right]]
    assert len(pairs) > 350
    judge_answer("1/2", "0.5", "math_verify")  # starts the process
    found = [judge_answer(right, said, "math_verify").right for right, said, _ in pairs]
    wrong = [pair for pair, got in zip(pairs, found, strict=True) if got != pair[2]]
    assert wrong == []


@pytest.mark.medium
@pytest.mark.parametrize(
    "right, said, same",
    [
        *(("5", "minus 5", False), ("-5", "minus 5", True), ("2", "log 100", True)),
        *(("3", "3 million", False), ("3000000", "3 million", True), ("5", "5 is wrong", False)),
        *(("3", "\\boxed{3} and \\boxed{4", False), ("73", "**73**", True), ("5", "2x = 5", False)),
        *(("1/2004!", "1/2006!", False), ("0", "1/2004!", False), ("5", "5 \\foo", False)),
    ],
)
def test_an_answer_is_read_as_a_whole(real, right, said, same):
    env = MetaMathQA(compare="math_verify")
    step = env.step(Attempt(Question("How many?", right, "how many")), said)
    assert step.info["success"] is same and step.reward == float(same)


@pytest.mark.medium
def test_what_cannot_be_read_is_said_to_be_so(real):
    for said in ("5 is wrong", "\\boxed{5", "\\boxed{}", "not 5", "5 or more", "5\u4e2a"):
        assert judge_answer("5", said, "math_verify") == Verdict(False, False), said
    # A right answer that cannot be read does not equal another answer either.
    assert judge_answer("at least 5", "5", "math_verify") == Verdict(False, True)
    assert judge_answer("at least 5", "At least  5", "math_verify") == Verdict(True, True)


HOSTILE = {
    "long": "9" * 10**6,
    "digits": "9" * MAX_TEXT,
    "nested brackets": "(" * 240 + "1" + ")" * 240,
    "open braces": "{" * 250,
    "fractions": "\\frac{1}{" * 40 + "1" + "}" * 40,
    "bare fractions": "\\frac" * 90,
    "roots": "\\sqrt{" * 60 + "2" + "}" * 60,
    "boxes": "\\boxed{" * 60,
    "power": "9^9^9^9",
    "braced power": "9^{9^{9^{9}}}",
    "factorials": "(((9!)!)!)!",
    "sum": "\\sum_{n=1}^{10^{9}} n^{n}",
    "binomial": "\\binom{10^9}{10^8}",
    "polynomial": "(x+y+z+w)^{60}-1",
    "signs": "-" * 400 + "1",
    "equations": "=" * 300,
    "dollars": "$" * 400,
    "words": "aa " * 160 + "!",
    "unicode": "\u00bd \uff15 \u0665 \u00b2 \u202e \U0001f600",
    "surrogates": "\ud800\udfff\ud800",
    "nulls": "\x00" * 300,
    "lines": '["5", "5"]\n{"equal": true, "readable": true}\n',
    "python": "__import__('os').system('true')",
}


@pytest.mark.slow
def test_hostile_answers_end_within_the_limit_and_cost_nothing_else(real):
    judge_answer("1/2", "0.5", "math_verify")  # starts the process
    hung = []
    for name, said in HOSTILE.items():
        start = time.monotonic()
        verdict = judge_answer("\\frac{7}{2}", said, "math_verify")
        # includes the start of a new process
        assert time.monotonic() - start < compare.LIMIT + 15, name
        assert not verdict.right, name
        if verdict.error:
            hung.append(name)
    assert {"braced power", "factorials"} <= set(hung)
    assert judge_answer("1/2", "0.5", "math_verify") == Verdict(True, True)


@pytest.mark.medium
def test_memory_is_limited(real):
    judge_answer("1/2", "0.5", "math_verify")
    limits = Path(f"/proc/{real._worker.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) == MEMORY


@pytest.mark.parametrize(
    "text, number",
    [
        ("5 dollars", "5"),
        ("$1,000", "1,000"),
        ("The answer is: 5.", "5"),
        ("1/2 cup", "1/2"),
        ("-5 degrees celsius", "-5"),
        ("5 x", None),
        ("5 pi", None),
        ("x = 5", None),
        ("5 or 6", None),
    ],
)
def test_a_number_among_words(text, number):
    found = _WORDED.fullmatch(text)
    assert (found and found[1]) == number


def test_a_number_among_words_is_looked_for_in_linear_time():
    start = time.process_time()
    words = "aa " * 10_000
    for text in (f"{words}!", "9," * 10_000 + "x", f"5 {words}5", "a" * 9999):
        assert not _WORDED.fullmatch(text)
    assert time.process_time() - start < 1
