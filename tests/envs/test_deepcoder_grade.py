"""DeepCoder's grader: programs with known grades, machine faults, the choice of the sandbox."""

import os
import random
import signal
import sys
import threading
import time

import pytest

from ragen_jax.envs.deepcoder import DeepCoder, SandboxFault, grade, process, sandbox
from ragen_jax.envs.deepcoder.grade import is_same_text, is_same_value

PRINT = [{"input": f"{n}\n", "output": f"{2 * n}\n", "testtype": "stdin_stdout"} for n in range(4)]


def function(given, right, name="f"):
    return [
        {
            "input": given,
            "output": right,
            "testtype": "functional",
            "metadata": {"func_name": name},
        }
    ]


# ---- the grader ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, outcomes",
    [
        ("print(2 * int(input()))", ["passed"] * 4),
        ("print(int(input()) ** 2)", ["passed", "wrong", "passed", "wrong"]),
        ("n = int(input())\nprint(2 * n, end='  \\n\\n')", ["passed"] * 4),
        (
            "n = int(input())\nif n == 1: raise ValueError\nprint(2 * n)",
            ["passed", "error", "passed", "passed"],
        ),
        (
            "n = int(input())\nwhile n == 3: pass\nprint(2 * n)",
            ["passed", "passed", "passed", "time"],
        ),
        ("import sys\nprint(2 * int(sys.stdin.read())); sys.exit()", ["passed"] * 4),
        ("if __name__ == '__main__':\n    print(2 * int(input()))", ["passed"] * 4),
        ("print(input())", ["passed", "wrong", "wrong", "wrong"]),
        ("import helper", ["error"] * 4),
    ],
)
def test_each_test_counts_by_itself(code, outcomes):
    found = grade(code, PRINT, time_limit_s=1.0)
    assert list(found.outcomes) == outcomes
    assert (found.passed, found.total) == (outcomes.count("passed"), 4)
    assert found.reward == found.passed / 4


@pytest.mark.parametrize(
    "code, given, right, outcome",
    [
        ("def f(a, b): return a + b", "1\n2", "3", "passed"),
        ("def f(a, b): return a + b", [1, 2], 3, "passed"),
        ("def f(a, b): return a + b", [[1], [2]], [1, 2], "passed"),
        ("def f(a, b): return a + b", '"x"\n"y"', '"xy"', "passed"),
        ("class Solution:\n    def f(self, a: List[int]): return sum(a)", "[1, 2]", "3", "passed"),
        ("def f(a): return (a, {1: a})", "1", '[1, {"1": 1}]', "passed"),
        ("def f(a): return a / 3", "1.0", "0.3333333333", "passed"),
        ("def f(a): return a / 3", "1.0", "0.33", "wrong"),
        ("def f(a): return a > 1", "2", "true", "passed"),
        ("def f(a): return a > 1", "2", "True", "passed"),
        ("def f(a): return str(a)", "5", "5", "passed"),  # both are read as 5
        ("def f(a): return None", "5", "null", "passed"),
        ("def f(a): return ''", "5", "", "passed"),
        ("def f(a): return [a]", "5", "5", "wrong"),
        ("def f(a): return [a, a]", "5", "[5]", "wrong"),
        ("def f(a): a.append(1)", "[5]", "null", "passed"),
        ("def g(a): return a", "5", "5", "error"),
        ("f = 5", "5", "5", "error"),
        ("def f(): return 5", "5", "5", "error"),
        ("def f(a): print(5); return 5", "5", "5", "passed"),
        (
            "def f(a): return heapq.nsmallest(1, a) + sorted(Counter(a))",
            "[2, 1]",
            "[1, 1, 2]",
            "passed",
        ),
    ],
)
def test_functions_by_their_value(code, given, right, outcome):
    assert grade(code, function(given, right)).outcomes == (outcome,)


# ---- programs that LiveCodeBench's harness passes, and similar programs --------------------------

LONG = 10**5000
SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"  # `str.splitlines` splits at each of them


@pytest.mark.parametrize(
    "code, given, right",
    [
        ("def f(n): return min(inf, reduce(gcd, accumulate([n])), comb(n, 1))", "4", "4"),
        (
            "@cache\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)",
            "90",
            str(2880067194370816120),
        ),
        (
            "def f(a):\n    heapify(a)\n    return [heappop(a), bisect_left(a, 3)]",
            "[3, 1]",
            "[1, 0]",
        ),
        (
            "def f(n): return [mean([n]), itemgetter(0)([n]), ascii_lowercase[n]]",
            "2",
            '[2, 2, "c"]',
        ),
        (
            "def f(n): return [json.dumps(n), deepcopy(n), bool(match('a', 'ab'))]",
            "2",
            '["2", 2, 1]',
        ),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "30000", "30000"),
        ("@lru_cache(None)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", "5000", "5000"),
        ("def f(n): return n", "9" * 5000, "9" * 5000),
        ("def f(n): return n[0] % 10 + len(str(n[0]))", f"[1{'2' * 4999}]", "5002"),
        ("def f(n): return [-n]", "9" * 5000, f"[-{'9' * 5000}]"),
        ("def f(n): return n + 1", [LONG], [LONG + 1]),
        ("def f(n): return str(n)", "9" * 5000, f'"{"9" * 5000}"'),
        ("def f(n): return n", "5", [5]),  # the expected value is wrapped in a list
        ("def f(n): return [n]", "5", [5]),  # or the list itself is expected
        ("def f(n): return [n]", "5", [[5]]),
        ("def f(n): return [n, n]", "5", ["[5, 5]"]),
        # JSON text may contain these characters
        ("def f(a): return len(a)", '"a\u2028\u2029\x85b"', "5"),
        ("def f(a): return (a, (a, [a]))", "1", "[1, [1, [1]]]"),
        ("def f(n): return float('nan')", "1", "NaN"),
        ("def f(n): return [-inf]", "1", "[-Infinity]"),
        ("def f(n): return 0.1 + 0.2 - 0.3", "1", "0.0"),
    ],
)
def test_right_functions_pass(code, given, right):
    assert grade(code, function(given, right)).outcomes == ("passed",)


@pytest.mark.parametrize(
    "code, given, right",
    [
        ("def f(n): return n", "9" * 5000, "9" * 4999 + "8"),
        ("def f(n): return float(10**20)", "1", "100000000000000000001"),
        ("def f(n): return n", "5", "[5]"),  # as text it is not unwrapped: a list is expected
        ("def f(n): return n", "5", [5, 6]),
        ("def f(n): return 1e-10", "1", "5e-10"),  # both tiny, but different
        ("def f(n): return inf", "1", "1e308"),
        ("def f(n): return nan", "1", "1.0"),
        ("def f(n): return 10**400", "1", "0.5"),  # too large for a float
        ("def f(n): return 3.0000000001", "1", "3"),
    ],
)
def test_wrong_functions_do_not_pass(code, given, right):
    assert grade(code, function(given, right)).outcomes == ("wrong",)


@pytest.mark.parametrize(
    "code, given, right",
    [
        ("print(comb(4, 2), sep='')", "", "6"),
        ("print(gcd(*map(int, stdin.readline().split())))\nquit()", "4 6", "2"),
        ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(30000))\nexit()", "", "30000"),
        ("print(10**5000)", "", str(1) + "0" * 5000),
        ("print(int(input()) % 10)", "1" + "2" * 4999, "2"),
        ("print(2.0)", "", "2"),
        ("print(2)", "", "2.0"),
        ("print('0.50   1e3')", "", "0.5 1000"),
        ("print(1/3)", "", "0.333333333333"),
        ("print(1e-17)", "", "0.0"),
        ("print('  5\\r\\n 6 \\r\\n\\n')", "", "5\n6"),
        ("print(' *\\n***')", "", "*\n***"),
        ("print(input())", f"a{SEPARATORS}b", f"a{SEPARATORS}b"),
    ],
)
def test_right_programs_pass(code, given, right):
    assert grade(code, [{"input": given, "output": right, "testtype": "stdin_stdout"}]).passed == 1


def test_a_long_number_is_right_as_an_object():
    for right, passed in ((LONG + 1, 1), (LONG + 2, 0)):
        assert grade("def f(n): return n + 1", function([LONG], right)).passed == passed


@pytest.mark.parametrize(
    "said, right",
    [
        *(("2.0000000001", "2"), ("1e20", "100000000000000000001"), ("2 0", "20"), ("2", "2 2")),
        *(("0.33", "0.333333333333"), ("5e-11", "5e-10"), ("NaN", "1.0"), ("1e999", "1e308")),
        *(
            ("1e999", "1e998"),
            ("1_000", "1000"),
            ("\uff12", "2"),
            ("True", "true"),
            ("1.0", "True"),
        ),
        *(("1\u20282", "1\n2"), ("1\u20282", "1 2"), ("1\r2", "1\n2"), ("1\n\n2", "1\n2")),
        *(("1\x0c2", "1\n2"), ("1", ""), ("", "0"), ("a 2.0", "a 2"), ("infinity", "1e999")),
        *(("1e99999999999999999999", "1e99999999999999999998"), ("9" * 5000, "9" * 4999 + "8")),
    ],
)
def test_wrong_text_does_not_pass(said, right):
    assert not is_same_text(right, said.encode())


def test_long_output_is_compared_in_little_time():
    start = time.process_time()
    for said in ("9" * 10**6, "9 " * 5 * 10**5, "9." * 5 * 10**5, "1e" + "9" * 10**6):
        assert not is_same_text("1.5", said.encode())
        assert not is_same_text("15", said.encode())
    assert not is_same_value("1.5", b"9" * 10**6) and not is_same_value(
        "[15]", b"[" + b"9" * 10**6 + b"]"
    )
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "tests, message",
    [
        ([], "tests is empty"),
        ([{"input": "", "output": ""}], "test 0 lacks the field testtype"),
        ([*PRINT, 5], "test 4 lacks the field input: 5"),
        ([{**PRINT[0], "testtype": "unit"}], "testtype must be one of stdin_stdout, functional"),
        ([{**PRINT[0], "testtype": "functional"}], "test 0 is of a function and lacks metadata"),
        ([{**PRINT[0], "input": 5}], "test 0: field input of printed text must be text: 5"),
        ([{**PRINT[0], "output": "\ud800"}], "test 0: field output .* must be text"),
    ],
)
def test_malformed_tests_are_named(tests, message):
    with pytest.raises(ValueError, match=message):
        grade("", tests)


def test_much_input_and_output_go_through():
    text = "".join(f"{n}\n" for n in range(300_000))
    test = {"input": text, "output": text, "testtype": "stdin_stdout"}
    assert grade("import sys\nsys.stdout.write(sys.stdin.read())", [test]).passed == 1
    assert grade("print('x')", [test]).outcomes == ("wrong",)  # the program does not read its input


def test_what_depends_on_the_order_of_sets_is_the_same_each_time():
    test = {"input": "", "output": "", "testtype": "stdin_stdout"}
    code = "print(*set('abcdefghijklmnop'))"
    said = {
        sandbox.run(
            sandbox.find_sandbox(), code=code, stdin=b"", limits=process.Limits(3.0, 1 << 29, 999)
        ).output
        for _ in range(3)
    }
    assert len(said) == 1 and grade(code, [test]).passed == 0


def test_faults_of_the_machine_are_no_grades(monkeypatch):
    env, name = DeepCoder(), sandbox.find_sandbox()
    monkeypatch.setattr(sandbox, "_command", lambda name: ["/no/such/program"])
    with pytest.raises(SandboxFault, match="no process starts"):
        env.step(env.reset(0), "```python\nprint(1)\n```")
    monkeypatch.setattr(
        sandbox, "_command", lambda name: [sys.executable, "-c", "print('fault x')"]
    )
    with pytest.raises(SandboxFault, match="fault x"):
        grade("print(1)", PRINT, sandbox=name)
    monkeypatch.setattr(sandbox, "_command", lambda name: [sys.executable, "-c", ""])
    with pytest.raises(SandboxFault, match="ended before the program, with status 0"):
        grade("print(1)", PRINT, sandbox=name)
    monkeypatch.setattr(process, "START_LIMIT", 0.2)
    wait = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(sandbox, "_command", lambda name: wait)
    with pytest.raises(SandboxFault, match="did not begin within 0.2 s"):
        grade("print(1)", PRINT, sandbox=name)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_program_that_somebody_else_ends_has_no_grade(monkeypatch):
    """As when the system runs out of memory."""

    def kill(pid):
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        return pid

    here = [name for name in sandbox.SANDBOXES if not sandbox._try(name)]
    find = process._last_descendant
    monkeypatch.setattr(process, "_last_descendant", lambda pid: kill(find(pid)))
    for name in here:
        with pytest.raises(SandboxFault, match="killed from outside"):
            grade("while True: pass", PRINT[:1], sandbox=name)


# ---- choice of the sandbox ----------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch):
    """without(NAME, ...): these sandboxes do not work on this machine."""

    def lack(*names):
        real = sandbox._try.__wrapped__
        monkeypatch.setattr(sandbox, "_try", lambda n: "not here" if n in names else real(n))

    sandbox._warn.cache_clear()
    yield lack
    sandbox._warn.cache_clear()


def test_a_machine_with_the_weakest_alone_says_so_once(without, capsys):
    without("bubblewrap", "landlock")
    for _ in range(3):
        assert sandbox.find_sandbox() == "rlimits"
        DeepCoder()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        "warning: tested programs are held by limits of their process alone "
        "(bubblewrap: not here; landlock: not here)"
    )
    # the user asked for it, so there is no warning
    assert sandbox.find_sandbox("rlimits") == "rlimits"
    assert capsys.readouterr().out == ""


def test_a_sandbox_that_is_demanded_must_be_there(without):
    without("bubblewrap")
    with pytest.raises(ValueError, match=r"no sandbox .*\(bubblewrap: not here\): install bubblew"):
        DeepCoder(sandbox="bubblewrap")
    assert DeepCoder(language="expression", sandbox="bubblewrap")  # expressions run no program


def test_a_machine_without_any_refuses(without):
    without(*sandbox.SANDBOXES)
    with pytest.raises(ValueError, match="landlock: not here; rlimits: not here.*sandbox"):
        DeepCoder()
    with pytest.raises(ValueError, match="no sandbox for programs on this machine"):
        grade("print(1)", PRINT)


def test_what_is_missing_is_told(monkeypatch):
    monkeypatch.setattr(sandbox, "find_bubblewrap", lambda: None)
    assert sandbox._try.__wrapped__("bubblewrap") == "command bwrap not found"
    monkeypatch.setattr(sandbox, "make_call_filter", lambda reading: None)
    assert "needs Linux on x86_64 or aarch64" in sandbox._try.__wrapped__("landlock")


# ---- two hundred honest programs ----------------------------------------------------------------


def honest(count):
    """(program, tests, right outcomes) of generated problems: right, partly right, wrong, slow and
    failing programs. The number of a test decides what a program does, and the program looks the
    number up by its input, so its grade is known."""
    env, rng = DeepCoder(tests=4, split=None), random.Random(0)
    for seed in range(count):
        state = env.reset(seed)
        given = [test.input for test in state.tests]
        plan = ["passed", "wrong", "error"]
        kind = seed % 5
        if kind == 0:
            want = ["passed"] * 4
        elif kind == 1:
            want = [rng.choice(plan) for _ in given]
        elif kind == 2:
            want = ["wrong"] * 4
        elif kind == 3:
            want = ["passed", "passed", "time" if seed % 20 == 3 else "wrong", "passed"]
        else:
            want = [rng.choice(plan[:2]) for _ in given]
        todo = {text: outcome for text, outcome in zip(given, want, strict=True)}
        if len(todo) < 4:
            continue
        if state.tests[0].function:
            code = (
                f"{state.solution}\nright = solve\nTODO = {todo!r}\n"
                "def solve(*x):\n"
                "    kind = TODO['\\n'.join(map(repr, x))]\n"
                "    if kind == 'error': raise ValueError\n"
                "    while kind == 'time': pass\n"
                "    return right(*x) if kind == 'passed' else [right(*x), 0]"
            )
        else:
            lines = state.solution.replace("\n", "\n    ")
            code = (
                f"import io, sys\ntext = sys.stdin.read()\nkind = {todo!r}[text]\n"
                "if kind == 'error': raise ValueError\n"
                "while kind == 'time': pass\n"
                "sys.stdin = io.StringIO(text)\n"
                f"if kind == 'passed':\n    {lines}\nelse:\n    print('no')"
            )
        yield code, [test.to_graded() for test in state.tests], want


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
def test_two_hundred_honest_programs_get_their_grades(first):
    """One in ten runs in every test run, and the others run in CI's longer tests."""
    programs = list(honest(205))
    assert len(programs) >= 200
    seen = 0
    for code, tests, want in programs[first::10]:
        found = grade(code, tests, time_limit_s=0.5)
        assert list(found.outcomes) == want, code
        assert found.passed == want.count("passed")
        seen += 1
    assert seen >= 20
