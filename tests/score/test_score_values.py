"""Values as files hold them: missing values, numbers as text, byte-order marks, Parquet types.

Each test runs the command on a file and reads the figures that it writes.
"""

import codecs
import decimal
import gzip
import json

import numpy as np
import pytest
from cli_commands import call

from ragen_jax.score.files import read_files
from ragen_jax.score.formats import read_row

WORDS = ("fox", "dog", "left", "up", "brown", "over", "lazy", "quick")


def rows_of(count, **columns):
    """`count` rows, two per prompt; row i has value i of each column."""
    return [
        {
            "prompt": f"<|im_start|>user\nwhat is {i // 2}?<|im_end|>\n<|im_start|>assistant\n",
            "response": f"<think>{WORDS[i % 8]} is {i}</think><answer>{i // 2}</answer>",
        }
        | {name: values[i] for name, values in columns.items()}
        for i in range(count)
    ]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def score(model, path, *words):
    """({all figures}, [figures of each step], printed lines, warnings) of a command."""
    out = path.parent / "out" / "score.json"
    out.parent.mkdir(exist_ok=True)
    paths = f"--model={model}", f"--rollouts={path}", f"--out={out}"
    code, printed, errors = call("ragen_jax.score", *paths, *words)
    assert code == 0, errors
    found = json.loads(out.read_text())
    return found, found["steps"], printed.splitlines(), errors.splitlines()


def test_a_fractional_acc_is_a_score(language_model, tmp_path):
    """The mean of 0, 1/4, 1/2 and 1 over all rows is 0.4375, even if acc is the only score."""
    score_of = [0.0, 0.25, 0.5, 1.0] * 2
    path = tmp_path / "1.jsonl"
    path.write_text(lines(rows_of(8, score=score_of, acc=score_of, gts=["0"] * 8)))
    found, (step,), printed, errors = score(language_model, path)
    assert found["rows"] == 8 and not found["broken"] and step["rollout/return"] == 0.4375
    assert "rollout/success" not in step
    assert "fields that are not read: gts (8 rows), acc (4 rows)" in printed
    assert any(line.startswith("warning: 4 of 8 rows do not report success") for line in errors)
    path.write_text(lines(rows_of(8, acc=score_of)))
    _, (step,), printed, _ = score(language_model, path)
    assert step["rollout/return"] == 0.4375
    assert not any("not read" in line for line in printed)


@pytest.mark.parametrize(
    "missing", [float("nan"), None, "", "nan", "None", "null", " NaN ", "<NA>"]
)
def test_missing_values_keep_their_row(tmp_path, missing):
    path = tmp_path / "a.jsonl"
    columns = {"success": [True, missing], "reward": [0.5, missing], "group": [missing, 3]}
    path.write_text(lines(rows_of(2, step=[missing, missing], **columns)))
    read = read_files([str(path)])
    assert not read.broken and not read.unread
    assert [(r.success, r.reward, r.group, r.step) for r in read.rows] == [
        (True, 0.5, None, 1),
        (None, None, "3", 1),
    ]


@pytest.mark.parametrize("value", ["4", 4.0, "4.0", "global_step_4", "step_4", " 4 ", 4])
def test_a_step_of_any_spelling(language_model, tmp_path, value):
    path = tmp_path / "1.jsonl"
    path.write_text(lines(rows_of(4, step=[value] * 4, reward=["0.5", "1", "true", False])))
    if value != "4":  # the same function reads all spellings; one run with a model is enough
        assert {row.step for row in read_files([str(path)]).rows} == {4}
        return
    _, (step,), _, _ = score(language_model, path)
    assert step["step"] == 4 and step["rollout/return"] == 2.5 / 4


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"step": -1}, "has the step -1; expected a number from 0"),
        ({"step": "-1"}, "has the step '-1'; expected a number from 0"),
        ({"step": 2**70}, "expected a number from 0, below 2**32"),
        ({"step": 4.5}, "has the step 4.5; expected a whole number"),
        ({"step": True}, "has the step True; expected a whole number"),
        ({"reward": 10**400}, "as its reward; expected a finite number"),
        ({"reward": "1e999"}, "'1e999' as its reward; expected a finite number"),
        ({"reward": [1, "x"]}, "'x' as its reward; expected a finite number"),
        ({"success": "yes"}, "'yes' as its success; expected true or false"),
        ({"tools": "x", "prompt": [{"role": "user", "content": "a"}]}, "'x' as its tools"),
    ],
)
def test_a_wrong_value_names_its_row(tmp_path, fields, words):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([rows_of(1)[0] | fields]))
    (broken,) = read_files([str(path)]).broken
    assert broken.place == f"{path}:1" and words in broken.reason


@pytest.mark.parametrize(
    "value", ["abc", "Infinity", float("inf"), -float("inf"), 10**400, [1], "1e999"]
)
@pytest.mark.parametrize("name", ["accuracy_reward", "format_reward_func"])
def test_a_reward_column_of_trl_with_another_value_names_its_row(tmp_path, name, value):
    record = {"prompt": "a", "completion": "b", "step": 1, "format_reward": 0.5, name: value}
    path = tmp_path / "a.jsonl"
    path.write_text(lines([record, record | {name: None}]))
    found = read_files([str(path)])
    if name == "format_reward_func" and isinstance(value, str | list):
        assert [row.reward for row in found.rows] == [0.5, 0.5]  # it may describe the function
        return
    (broken,), (row,) = found.broken, found.rows
    assert "expected a finite number" in broken.reason and row.reward == 0.5


@pytest.mark.parametrize(
    "fields,reward,success",
    [
        ({"rewards": [0.25, 0.5]}, 0.75, None),
        ({"score": "[0.25, 0.5]"}, 0.75, None),
        ({"rewards": {"format": 0.5, "task": {"score": 1, "weight": 0.25}}}, 0.75, None),
        ({"rewards": [0.25, None]}, None, None),
        ({"reward": None, "score": "0.75"}, 0.75, None),
        ({"reward": 0.75, "success": "True"}, 0.75, True),
        ({"reward": 0.75, "success": "false"}, 0.75, False),
        ({"reward": 0.75, "success": float("nan"), "acc": "1.0"}, 0.75, True),
        ({"reward": 0.75, "success": 0.5, "correct": 0}, 0.75, False),
        ({"metadata": '{"total_reward": "0.75", "success": 1}'}, 0.75, True),
    ],
)
def test_rewards_and_success_of_any_spelling(fields, reward, success):
    row, _ = read_row(rows_of(1)[0] | fields, "a:1")
    assert (row.reward, row.success) == (reward, success)


def test_rows_of_ours_read_booleans_and_missing_actions():
    turn = {"prompt_ids": [1.0, "2"], "sampled_ids": "[3]", "actions": None, "valid": "False"}
    (reply,) = read_row({"turns": [turn]}, "a:1")[0].replies
    assert (reply.prompt, reply.response, reply.actions, reply.valid) == ([1, 2], [3], (), False)


def test_unread_fields_are_counted_with_their_objects(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = rows_of(3, note=["x", None, "y"], score=[1, 1, 1], reward=[2, 2, None])
    rows[0]["metadata"] = {"env_id": 1, "group_id": 4}
    path.write_text(lines(rows))
    read = read_files([str(path)])
    assert read.unread == {"metadata.env_id": 1, "note": 3, "score": 2}
    assert [row.reward for row in read.rows] == [2, 2, 1]


@pytest.mark.parametrize("form", ["jsonl", "json", "jsonl.gz", "json.gz", "utf-16", "middle"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, form):
    rows = rows_of(4)
    text = json.dumps(rows) if form.startswith("json.") or form == "json" else lines(rows)
    content = codecs.BOM_UTF8 + text.encode()
    if form == "middle":  # two files with byte-order marks, concatenated
        content = 2 * (codecs.BOM_UTF8 + lines(rows[:2]).encode())
        content += codecs.BOM_UTF8 + b"\n"  # followed by an empty file with a mark
    if form == "utf-16":
        content = text.encode("utf-16")
    path = tmp_path / f"step_7.{form if form.startswith('json') else 'jsonl'}"
    path.write_bytes(gzip.compress(content) if form.endswith(".gz") else content)
    read = read_files([str(path)])
    assert not read.broken and [row.step for row in read.rows] == [7] * 4
    assert read.rows[0].replies[0].prompt == rows[0]["prompt"]


def test_a_torn_file_is_named_and_the_others_are_read(tmp_path):
    whole, torn = lines(rows_of(20)).encode(), tmp_path / "a.jsonl.gz"
    torn.write_bytes(gzip.compress(whole)[:-40])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "c.jsonl").write_bytes(whole)
    read = read_files([str(tmp_path)])
    assert len(read.rows) == 20
    first, second = read.broken
    assert first.place == str(torn) and first.reason.startswith("cannot be read: ")
    assert second.place.endswith("b.parquet") and "Parquet" in second.reason


def test_rows_files_and_rewards_that_are_left_out_are_counted(language_model, tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    rows = rows_of(4, reward=[1, 0, None, 1])
    (folder / "1.jsonl").write_text(lines([*rows, rows[1]]))
    (folder / "notes.txt").write_text("x")
    again = f"--rollouts={folder / '1.jsonl'}"
    found, (step,), printed, errors = score(language_model, folder, again)
    assert found["rows"] == 5 and step["episodes"] == 5
    assert f"files that are not read: 1 in the folder {folder} (notes.txt)" in printed
    assert any("which is given twice and read once" in line for line in printed)
    assert any("1 rows repeat an earlier row" in line and "1.jsonl:5" in line for line in errors)
    assert any(line.startswith("warning: 1 of 5 rows have no reward;") for line in errors)
    _, _, _, errors = score(language_model, folder, "--reward=rewrad")
    assert any("5 of 5 rows have no reward (rewrad)" in line for line in errors)


def test_parquet_types(language_model, tmp_path):
    """NaN, decimals, arrays, nested JSON, and structs whose other rows have more fields."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    nan = float("nan")
    messages = [{"role": "user", "content": "<|im_start|>what"}]
    rows = rows_of(
        8,
        success=[0.0, 1.0, nan, nan, 0.0, 1.0, nan, nan],
        reward=[decimal.Decimal(i % 2) / 2 for i in range(8)],
        step=list(np.full(8, 3.0)),
        tool=[{"a": 1} if i % 2 else {"b": 2} for i in range(8)],
    )
    for row in rows:
        row["prompt"] = json.dumps([messages[0] | {"content": row["prompt"][-40:-30]}])
    path = tmp_path / "completions_00009.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found, (step,), printed, errors = score(language_model, path)
    assert found["rows"] == 8 and not found["broken"] and found["prompts"] == {"messages": 8}
    assert step["step"] == 3 and step["rollout/return"] == 0.25
    assert "fields that are not read: tool (8 rows)" in printed
    assert any(line.startswith("warning: 4 of 8 rows do not report success") for line in errors)
    read = read_files([str(path)])
    assert [row.success for row in read.rows] == [False, True, None, None] * 2
