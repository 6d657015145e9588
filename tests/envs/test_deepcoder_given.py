"""DeepCoder's files: tests in every form, splits, and malformed files."""

import json

import pytest

from ragen_jax.envs.deepcoder import DeepCoder, file_problems
from ragen_jax.envs.deepcoder.file_problems import load_problems, normalize
from ragen_jax.envs.deepcoder.problems import Test, select_longest, split_of
from ragen_jax.envs.problems import SPLITS

DOUBLE = "```python\nprint(2 * int(input()))\n```"


@pytest.mark.parametrize(
    "raw, metadata, tests",
    [
        (
            json.dumps([{"input": "1\n", "output": "2", "testtype": "stdin_stdout"}]),
            "{}",
            [Test("1\n", "2")],
        ),
        (
            json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}]),
            '{"func_name": "add"}',
            [Test("[1]\n2", "3", "add")],
        ),
        (
            json.dumps(
                [
                    {
                        "input": "1",
                        "output": "3",
                        "testtype": "functional",
                        "metadata": {"func_name": "own"},
                    }
                ]
            ),
            {"func_name": "row"},
            [Test("1", "3", "own")],
        ),
        (
            json.dumps(
                [{"input": [1, "x"], "output": [2], "type": "function_call", "fn_name": "g"}]
            ),
            None,
            [Test('1\n"x"', "2", "g")],
        ),
        (  # LiveCodeBench's form has no extra list around the value: the function returns a list
            json.dumps([{"input": "1", "output": "[2]", "testtype": "functional"}]),
            {"func_name": "row"},
            [Test("1", "[2]", "row")],
        ),
        (  # without a function name: run as a program, as in the released code
            json.dumps([{"input": "1", "output": "3", "testtype": "functional"}]),
            "{}",
            [Test("1", "3")],
        ),
        (
            json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["a", "b"]}),
            "{}",
            [Test("1\n", "a"), Test("2\n", "b")],
        ),
        (
            json.dumps({"inputs": [[[1], 2]], "outputs": [[3]], "fn_name": "h"}),
            "{}",
            [Test("[1]\n2", "3", "h")],
        ),
        (json.dumps({"inputs": [["1", "2"]], "outputs": [["a", "b"]]}), "", [Test("1\n2", "a\nb")]),
        ([{"input": "1", "output": 2}], {}, [Test("1", "2")]),
        ("[]", "{}", []),
        ("{}", "{}", []),
    ],
)
def test_tests_of_every_form(raw, metadata, tests):
    assert file_problems.parse_tests({"tests": raw, "metadata": metadata}, "row 0") == tests


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def rows(first, last):
    return [
        {
            "problem": f"Double number {n}.",
            "tests": json.dumps(
                [
                    {"input": f"{m}\n", "output": f"{2 * m}\n", "testtype": "stdin_stdout"}
                    for m in (n, n + 1, 10 ** (n % 5))
                ]
            ),
            "metadata": "{}",
            "starter_code": "def f" if n == 1 else "",
        }
        for n in range(first, last)
    ]


def write(path, table):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(table), path)
    return path


def test_a_file_is_dealt_to_the_splits(cache, capsys):
    table = rows(0, 60) + rows(0, 1) + [{**rows(60, 61)[0], "tests": "[]"}]
    path = write(cache / "given.parquet", table)
    envs = {split: DeepCoder(path=path, split=split) for split in SPLITS}
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: row(s) left out: 1 given before, 1 without a test that can be run"
    ]
    found = list(envs["train"].list_problems())
    assert len(found) == 60 and {split for _, split, _ in found} == set(SPLITS)
    assert found[1][2].text == "Double number 1.\n\nBegin with this code:\n```python\ndef f\n```"
    for split, env in envs.items():
        assert {split_of(env.reset(seed)) for seed in range(40)} == {split}
        state = env.reset(2**63 - 1)
        assert env.step(state, DOUBLE).info["total"] == 3
        assert env.step(state, DOUBLE).reward == 1.0
        assert env.solve(state) is None and env.identity(state) == normalize(state.text)
    short = DeepCoder(path=path, max_tests=1)
    assert short.step(short.reset(0), DOUBLE).info["total"] == 1


def test_of_a_folder_test_files_evaluate(cache, capsys):
    folder = cache / "data"
    write(folder / "one" / "train-00000-of-00002.parquet", rows(0, 20))
    write(folder / "two" / "train-00001-of-00002.parquet", rows(20, 30))
    write(folder / "two" / "test-00000-of-00001.parquet", rows(25, 40))
    env = DeepCoder(path=folder, split="eval")
    assert "5 of train* that are in test*" in capsys.readouterr().out
    found = {"train": set(), "eval": set()}
    for _, split, state in env.list_problems():
        found[split].add(state.text.partition("\n")[0])
    assert found["train"] == {f"Double number {n}." for n in range(25)}
    assert found["eval"] == {f"Double number {n}." for n in range(25, 40)}
    assert env.reset(7).text in found["eval"]
    assert DeepCoder(path=folder, split="train").reset(7).text.split("\n")[0] in found["train"]
    with pytest.raises(ValueError, match="data, a folder, has no problems to be imitated"):
        DeepCoder(path=folder, split="imitation")
    # The cache depends on the folder's contents, not on its path.
    before = len(list((cache / "cache").rglob("deepcoder_*")))
    folder.rename(cache / "other")
    DeepCoder(path=cache / "other")
    assert len(list((cache / "cache").rglob("deepcoder_*"))) == before
    write(cache / "other" / "two" / "test-00000-of-00001.parquet", rows(25, 41))
    DeepCoder(path=cache / "other")
    assert len(list((cache / "cache").rglob("deepcoder_*"))) > before


@pytest.mark.parametrize(
    "table, message",
    [
        ([{"problem": "x"}], r"lacks the column\(s\) tests; it has problem"),
        ([*rows(0, 2), {**rows(2, 3)[0], "tests": "{"}], "field tests of row 2 of .*is not JSON"),
        ([{**rows(0, 1)[0], "metadata": "{"}], "field metadata of row 0 of .* is not JSON"),
        (
            [{**rows(0, 1)[0], "tests": '[{"input": 1}]'}],
            "test 0 of row 0 of .*lacks input or outp",
        ),
        ([*rows(0, 1), {**rows(1, 2)[0], "problem": " "}], "field problem of row 1 of .* must be"),
        ([{**rows(0, 1)[0], "tests": "[]"}], "no row has a problem with tests"),
    ],
)
def test_malformed_files_are_named(table, message, cache):
    path = write(cache / "given.parquet", table)
    with pytest.raises(ValueError, match=message):
        load_problems(path)


def test_files_that_cannot_be_read_are_named(cache, monkeypatch):
    (cache / "text.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="text.parquet cannot be read as parquet"):
        load_problems(cache / "text.parquet")
    (cache / "empty").mkdir()
    with pytest.raises(ValueError, match="no folder with parquet files .*empty"):
        load_problems(cache / "empty")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'ragen_jax\[data\]'"):
        load_problems(cache / "text.parquet")


def test_a_file_is_converted_once(cache, monkeypatch):
    path = write(cache / "given.parquet", rows(0, 5))
    assert len(load_problems(path)) == 5
    monkeypatch.setattr(file_problems, "_rows", None)
    again = load_problems(path)
    assert [problem.text for problem in again][4] == "Double number 4."
    assert again.tests(4) == (Test("4\n", "8\n"), Test("5\n", "10\n"), Test("10000\n", "20000\n"))


def test_the_widest_tests_are_kept_in_their_order():
    tests = [Test("1", "a"), Test("333", "b"), Test("22", "c"), Test("4", "d")]
    assert [t.output for t in select_longest(tests, 2)] == ["b", "c"]
    assert [t.output for t in select_longest(tests, 3)] == ["a", "b", "c"]
    assert list(select_longest(tests, None)) == tests
