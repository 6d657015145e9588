"""Formats with one list of token ids and a mask of the sampled ones; and slime's converter."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import trainer_files
from trainer_formats import write

from ragen_jax.score.files import read_files
from ragen_jax.score.folders import step_of
from ragen_jax.score.formats import read_row

pytestmark = pytest.mark.fast
SCRIPT = Path(__file__).parents[2] / "examples/slime_to_jsonl.py"


def nemo(ids=(1, 2, 3, 4, 5, 0, 0), mask=(0, 0, 1, 0, 1, 0, 0), length=5, **other):
    row = {"token_ids": [list(ids)], "token_loss_mask": [list(mask)], "input_lengths": [length]}
    return row | {"rewards": [0.5], "idx": 0} | other


def export(ids=(1, 2, 3, 4, 5), mask=(False, False, True, False, True), **other):
    return {"token_ids": list(ids), "loss_mask": list(mask), "export_step": 3, "step": 9} | other


def sample(**other):
    return {"tokens": [1, 2, 3, 4, 5], "response_length": 3, "loss_mask": [1, 0, 1]} | other


def path(ids=(1, 2, 3, 4, 5), mask=(0, 0, 1, 0, 1), role="agent"):
    return {"role": role, "input_ids": list(ids), "loss_mask": list(mask)}


def capture(*paths):
    return {"session_id": "s", "turns": [{"node_id": "n"}], "sequences": list(paths)}


@pytest.mark.parametrize(
    "record,form",
    [
        (nemo(), "NeMo-RL"),
        (nemo(mask=[0, 0, 1.0, False, True, 0, 0]), "NeMo-RL"),
        (nemo(ids=[1, 2, 3, 4, 5], mask=[0, 0, 1, 0, 1]), "NeMo-RL"),
        (export(), "token-export"),
        (sample(), "slime"),
        (sample(loss_mask="[1, 0, 1]"), "slime"),
    ],
)
def test_spans_of_sampled_tokens_are_turns(record, form):
    row, _ = read_row(record, "x:1")
    assert row.form == form and row.group is None
    assert [(reply.prompt, reply.response) for reply in row.replies] == [
        ([1, 2], [3]),
        ([1, 2, 3, 4], [5]),
    ]


@pytest.mark.parametrize(
    "rewards,expected",
    [([0.5] * 5, 0.5), ([None, 0.5, None, 0.5, 0.5], 0.5), ([None] * 5, None), (None, None)],
)
def test_a_token_export_repeats_its_reward(rewards, expected):
    row, _ = read_row(export(rewards=rewards), "x:1")
    assert row.reward == expected and row.step == 3  # the step of its run, as in its folder


@pytest.mark.parametrize(
    "fields,group,reward",
    [
        ({"group_index": 0, "reward": 0.25}, "0", 0.25),
        ({"group_index": 7, "reward": {"reward": 1, "b": 3}}, "7", 1),
        ({"reward": {"score": 1}}, None, 1),
        ({"reward": None}, None, None),
    ],
)
def test_group_and_reward_of_a_sample_of_slime(fields, group, reward):
    row, _ = read_row(sample(**fields, status="truncated"), "x:1")
    assert (row.group, row.reward) == (group, reward)


def test_a_sample_without_a_mask_is_one_reply():
    (reply,) = read_row(sample(loss_mask=None), "x:1")[0].replies
    assert (reply.prompt, reply.response) == ([1, 2], [3, 4, 5])


def test_paths_of_a_capture_share_their_first_calls():
    longer = path((1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 0, 1, 0, 1))
    record = capture(path(role="auxiliary"), path(), longer, path(role="discarded"))
    row, _ = read_row(record, "x:1")
    assert row.form == "OpenEnv"
    assert [reply.response for reply in row.replies] == [[3], [5], [7]]
    assert row.left_out == {"auxiliary sequences": 1, "discarded sequences": 1}


@pytest.mark.parametrize(
    "record,words",
    [
        (nemo(length=8), "8 as its input_lengths, with 7 token_ids"),
        (nemo(length=None), "None as its input_lengths"),
        (nemo(token_ids=[1, 2, 3]), "expected a list of one value"),
        (nemo(token_ids=[[1], [2]]), "expected a list of one value"),
        (nemo(mask=[0, 1]), "7 token ids, but 2 values in its token_loss_mask"),
        (nemo(mask=[0] * 7), "has no sampled token"),
        (nemo(mask=[0, 0, 0, 0, 0, 1, 1]), "has no sampled token"),  # only in the padding
        (nemo(mask=[1] * 7), "begins with a sampled token"),
        (nemo(mask=[0, 0, None, 0, 0, 0, 0]), "None in its token_loss_mask"),
        (nemo(token_loss_mask=["x"]), "'x' as its token_loss_mask"),
        (nemo(ids=[1, -2, 3, 4, 5, 0, 0]), "as its token_ids; expected token ids"),
        (export(mask=[1]), "5 token ids, but 1 values"),
        (export(rewards=[0.5, 1, 1, 1, 1]), "expected one reward, repeated per token"),
        (sample(response_length=6), "6 as its response_length, with 5 tokens"),
        (sample(response_length=0), "3 values in its loss_mask for 0 tokens"),
        (sample(response_length=5, loss_mask=None), "begins with a sampled token"),
        (sample(status="aborted"), "was aborted"),
        (sample(reward={"a": 1, "b": 2}), "the rewards 'a', 'b'"),
        (capture(path(role="auxiliary")), "no sequence of the role 'agent'"),
        (capture(), "[] as its sequences"),
        (capture(path(mask=[0] * 5)), "has no sampled token"),
    ],
)
def test_a_masked_row_that_cannot_be_read_says_why(record, words):
    with pytest.raises(ValueError) as caught:
        read_row(record, "x:1")
    assert words in str(caught.value)


def test_the_rewards_of_a_sample_are_named():
    row, _ = read_row(sample(reward={"a": 1, "b": 2}), "x:1", ("a", "b"))
    assert row.reward == 3


def test_a_pickle_of_slime_is_not_opened(tmp_path):
    (tmp_path / "P1.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"P1.pt is a pickle; .*examples/slime_to_jsonl.py"):
        read_files([str(tmp_path / "P1.pt")])


def test_the_converter_needs_only_torch():
    tree = ast.parse(SCRIPT.read_text())
    names = {
        each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names
    }
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - sys.stdlib_module_names == {"torch", "numpy"}  # numpy only if it is there


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_converter_of_slimes_pickles(tmp_path):
    import torch

    prompt = {"prompt_ids": [1, 2], "sampled_ids": [3, 4], "reward": 0.5}
    samples = list(trainer_files.slime_samples([{"group": 3, "turns": [prompt]}]))
    torch.save({"rollout_id": 12, "samples": samples}, tmp_path / "P12.pt")
    torch.save({"rollout_id": 12, "samples": [Path]}, tmp_path / "bad.pt")
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "P12.pt"], capture_output=True)
    assert done.returncode == 0, done.stderr
    (row,) = read_files([str(tmp_path / "P12.jsonl")]).rows
    assert (row.form, row.step, row.group, row.reward) == ("slime", 12, "3", 0.5)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "bad.pt"], capture_output=True)
    assert done.returncode == 1 and b"could run code; it is not opened" in done.stderr


def test_files_of_the_trainers(tmp_path):
    write(tmp_path / "train_data_step12.jsonl", [nemo()])
    write(tmp_path / "val_data_step12.jsonl", [{"content": ["a"], "rewards": [1.0]}])
    found = read_files([str(tmp_path)])
    assert [row.step for row in found.rows] == [12] and not found.broken
    assert found.others == [f"1 in the folder {tmp_path} (val_data_step12.jsonl)"]
    assert found.unread == {"idx": 1}


@pytest.mark.parametrize(
    "name,step",
    [
        ("step_7/rank_0.jsonl", 7),
        ("global_step_8_evals/a.jsonl", 8),
        ("train_step_9_epoch_0/a.jsonl", 9),
        ("step_7/train_data_step10.jsonl.gz", 10),
        ("eval_only/a.jsonl", None),
        ("step_7_old/a.jsonl", None),
        (f"step_{'9' * 30}/a.jsonl", None),
    ],
)
def test_the_step_in_the_name_of_a_file_or_folder(name, step):
    assert step_of(Path(name)) == step


def test_rows_of_parquet_are_those_of_json(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for record in (nemo(), export(rewards=[0.5] * 5), sample(reward=1.0), capture(path())):
        parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
        write(tmp_path / "a.jsonl", [record])
        one, other = (read_files([str(tmp_path / f"a.{end}")]) for end in ("parquet", "jsonl"))
        assert not one.broken and one.rows[0].replies == other.rows[0].replies
        assert one.rows[0].reward == other.rows[0].reward
