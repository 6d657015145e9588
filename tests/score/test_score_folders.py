"""Folders that trainers write, the files next to a trajectory, and --format."""

import json
import os

import pytest
import trainer_files
from cli_commands import call
from trainer_formats import write

from ragen_jax.score.files import read_files
from ragen_jax.score.formats import FORMATS

pytestmark = pytest.mark.fast
ATIF = {
    "schema_version": "ATIF-v1.7",
    "agent": {"name": "a"},
    "steps": [
        {"source": "user", "message": "2+2?"},
        {"source": "agent", "message": "<think>a</think>4"},
    ],
}
MORE = {"source": "user", "message": "more"}, {"source": "agent", "message": "<think>b</think>5"}


def put(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


def replies(found):
    return [[reply.response for reply in row.replies] for row in found.rows]


def test_the_reward_of_a_trial_is_in_its_files(tmp_path):
    trials = {
        "result": ("result.json", {"task_name": "t", "verifier_result": {"rewards": {"x": 0.25}}}),
        "text": ("verifier/reward.txt", " 0.5\n"),
        "json": ("verifier/reward.json", {"reward": 0.75, "style": 1}),
        "failed": ("result.json", {"task_name": "t", "verifier_result": None}),
        "torn": ("result.json", '{"task_name'),
        "list": ("result.json", [1]),
        "none": ("config.json", {}),
        "odd": ("verifier/reward.txt", "passed"),
    }
    for name, (file, value) in trials.items():
        put(tmp_path / name / "agent/trajectory.json", ATIF)
        put(tmp_path / name / file, value)
    put(tmp_path / "text/verifier/reward.json", {"a": 1, "b": 2})  # details, next to the reward
    put(tmp_path / "crashed/result.json", {"task_name": "t"})
    put(tmp_path / "crashed/agent/log.txt", "")
    put(tmp_path / "result.json", {"id": "the job's"})
    found = read_files([str(tmp_path)])
    rows = {row.place.split("/")[-3]: (row.reward, row.group) for row in found.rows}
    assert rows == {
        "result": (0.25, "t"),
        "text": (0.5, None),
        "json": (0.75, None),
        "failed": (None, "t"),
        "torn": (None, None),
        "list": (None, None),
        "none": (None, None),
    }
    (odd,) = found.broken
    assert "odd" in odd.place and "'passed" in odd.reason
    assert {row.step for row in found.rows} == {1}  # the trials are one file in the order of files
    lines = sorted(line.replace(str(tmp_path), "") for line in found.others)
    assert lines[0] == "/list/result.json: is not an object"
    assert lines[1].startswith("/torn/result.json: is not JSON: ")
    assert lines[2] == "1 (crashed) in the folder : trials without agent/trajectory.json"
    one = read_files([str(tmp_path / "text/agent/trajectory.json")])
    assert [row.reward for row in one.rows] == [0.5]


def test_ids_that_harbor_recorded_in_the_result(tmp_path):
    chat = {"prompt_token_ids": [[1, 2], [1, 2, 3, 4]], "completion_token_ids": [[3], [5]]}
    for name, details in (("a", [chat]), ("b", [chat | {"prompt_token_ids": [[1]]}]), ("c", [])):
        put(tmp_path / name / "agent/trajectory.json", ATIF)
        put(tmp_path / name / "result.json", {"agent_result": {"rollout_details": details}})
    found = read_files([str(tmp_path)])
    assert replies(found) == [[[3], [5]], ["<think>a</think>4"]]
    assert found.rows[0].replies[1].prompt == [1, 2, 3, 4]
    assert "1 prompts and 2 completions" in found.broken[0].reason


def test_files_that_continue_a_trajectory(tmp_path):
    agent = tmp_path / "trial/agent"
    put(agent / "trajectory.json", ATIF | {"continued_trajectory_ref": "t.2.json"})
    put(agent / "t.2.json", ATIF | {"steps": [*MORE], "continued_trajectory_ref": "t.3.json"})
    copied = [{"source": "user", "message": "summary", "is_copied_context": True}]
    put(agent / "t.3.json", ATIF | {"steps": [*copied, MORE[1]]})
    found = read_files([str(tmp_path)])
    assert replies(found) == [["<think>a</think>4", "<think>b</think>5", "<think>b</think>5"]]
    _, second, third = found.rows[0].replies
    assert [message["content"] for message in second.prompt] == [
        "2+2?",
        "<think>a</think>4",
        "more",
    ]
    assert third.prompt == [{"role": "user", "content": "summary"}]  # it repeats its context
    assert not found.others and not found.broken


@pytest.mark.parametrize(
    "name",
    [
        "gone.json",
        "../secret.json",
        "/etc/passwd",
        "trajectory.json",
        "link.json",
        "",
        7,
        [1],
        "..",
    ],
)
def test_a_trajectory_opens_only_files_of_its_folder(tmp_path, name):
    put(tmp_path / "trial/secret.json", ATIF)
    put(tmp_path / "trial/agent/trajectory.json", ATIF | {"continued_trajectory_ref": name})
    os.symlink(tmp_path / "trial/secret.json", tmp_path / "trial/agent/link.json")
    found = read_files([str(tmp_path)])
    assert replies(found) == [["<think>a</think>4"]]
    assert len(found.others) == (name != "")
    assert all("no such file in its folder" in line for line in found.others)


def test_a_circle_of_continuations_ends(tmp_path):
    agent = tmp_path / "trial/agent"
    put(agent / "trajectory.json", ATIF | {"continued_trajectory_ref": "t.2.json"})
    put(agent / "t.2.json", ATIF | {"continued_trajectory_ref": "t.2.json"})
    assert len(read_files([str(tmp_path)]).rows[0].replies) == 2


RECORDS = [
    {
        "group": group,
        "success": True,
        "turns": [{"prompt_ids": [1, group + 5], "sampled_ids": [3, 4], "reward": 0.5}],
    }
    for group in (0, 0, 1)
]


def test_evaluations_of_rllm_are_left_out_unless_they_are_named(tokenizer, tmp_path):
    folder = trainer_files.rllm(tmp_path, RECORDS, tokenizer)
    found = read_files([str(folder)])
    assert len(found.rows) == 3 and not found.broken
    (line,) = found.others
    assert line.startswith("2 in the folder") and "val_step_1_epoch_0/episode_hash000" in line
    assert "batch_summary.json" in line
    assert len(read_files([str(folder / "val_step_1_epoch_0")]).rows) == 1


def test_a_folder_of_two_layouts_is_read_once(tokenizer, tmp_path):
    """prime-rl writes its rollouts and its token exports below one folder."""
    trainer_files.token_exports(tmp_path, RECORDS + RECORDS[:1], tokenizer)
    node = {"message": {"role": "user", "content": "a"}}
    said = {"message": {"role": "assistant", "content": "b"}, "sampled": True, "parent": 0}
    path = tmp_path / "run/rollouts/step_2/train/all/traces.jsonl"
    put(path, {"traces": [{"nodes": [node, said]}]})
    found = read_files([str(tmp_path / "run")])
    assert [(row.form, row.step) for row in found.rows] == [("prime-rl", 2)]
    (line,) = found.others
    assert line.startswith("2 in the folder") and "token_exports/step_1/rank_0.jsonl" in line
    found = read_files([str(tmp_path / "run/token_exports")])
    assert [row.step for row in found.rows] == [1] * 4 and not found.others


def test_files_next_to_rollouts_are_left_out(tokenizer, tmp_path):
    trainer_files.nemo_gym(tmp_path, RECORDS, tokenizer)
    failed = {"responses_create_params": {}, "response": {}, "_ng_failure_class": "timeout"}
    for name in ("rollouts_failures", "rollouts_materialized_inputs", "other_failures"):
        write(tmp_path / f"{name}.jsonl", [failed])
    found = read_files([str(tmp_path)])
    assert len(found.rows) == 3
    assert [broken.place.rpartition("/")[2] for broken in found.broken] == [
        "other_failures.jsonl:1"
    ]
    (line,) = found.others
    assert line.endswith("(rollouts_failures.jsonl, rollouts_materialized_inputs.jsonl)")
    folder = trainer_files.skyrl(tmp_path / "sky", RECORDS, tokenizer)
    for named in (folder, folder / "global_step_1_evals"):
        found = read_files([str(named)])
        assert [row.step for row in found.rows] == [1] * 3 and not found.broken
        assert "aggregated_results.jsonl" in found.others[0]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_torn_document_is_one_broken_row(tmp_path, name):
    import gzip

    for place, text in enumerate((json.dumps(ATIF, indent=2)[:-9], "{\n", "[\n 1,\n")):
        path = tmp_path / f"{place}{name}"
        content = text.encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        (broken,) = read_files([str(path)]).broken
        assert broken.place == f"{path}:1" and "is not JSON" in broken.reason


def test_a_folder_without_rollouts_is_refused(tmp_path):
    put(tmp_path / "notes/result.json", {})
    with pytest.raises(
        ValueError, match=r"is a folder without \.jsonl or .* and without the folde"
    ):
        read_files([str(tmp_path)])


def test_a_format_that_is_named(tmp_path):
    """A row of verl with a further field `messages` would be one of RAGEN."""
    row = {"input": "2+2?", "output": "4", "messages": [], "metadata": {}, "score": 1}
    path = write(tmp_path / "1.jsonl", [row, {"input": "a"}, {"prompt": "a", "response": "b"}])
    assert [row.form for row in read_files([str(path)]).rows] == ["plain"]
    found = read_files([str(path)], form="VERL")
    assert [row.form for row in found.rows] == ["verl"]
    assert [broken.reason for broken in found.broken] == [
        "has no field 'output', which the format verl needs",
        "has no field 'input', which the format verl needs",
    ]
    with pytest.raises(ValueError) as caught:
        read_files([str(path)], form="verll")
    assert str(caught.value) == f"--format=verll is not a format; accepted: {', '.join(FORMATS)}"


def test_the_command_prints_formats_prompts_and_missing_values(language_model, tmp_path):
    rows = [
        {
            "prompt": f"<|im_start|>user\n{i // 2}<|im_end|>\n<|im_start|>assistant\n",
            "response": f"<think>{i}</think><answer>a</answer>",
            "reward": i % 2,
        }
        for i in range(4)
    ]
    masked = {"token_ids": [[1, 2, 3]], "token_loss_mask": [[0, 0, 1]], "input_lengths": [3]}
    path = write(tmp_path / "1.jsonl", [*rows, masked, {"text": "x"}])
    out = tmp_path / "score.json"
    words = f"--model={language_model}", f"--rollouts={path}", f"--out={out}"
    code, printed, errors = call("ragen_jax.score", *words)
    assert code == 0, errors
    assert printed.splitlines()[:4] == [
        f"read 4 rows of plain, 1 row of NeMo-RL from {path}",
        "prompts: 1 with recorded token ids, 4 of text with its control tokens",
        "4 rows of plain record no success or group: equal prompts are a group",
        "1 row of NeMo-RL records no reward, success or group: equal prompts are a group",
    ]
    assert "1.jsonl:6 has the fields 'text'" in errors
    assert json.loads(out.read_text())["formats"] == {"plain": 4, "NeMo-RL": 1}
    code, _, errors = call("ragen_jax.score", *words, "--format=verll")
    assert code == 2 and "--format=verll is not a format; accepted: OpenEnv, " in errors
    code, _, errors = call("ragen_jax.score", *words, "--format=nemo-rl")
    assert code == 2 and "1.jsonl:1 has no field 'token_ids', which the format NeMo-RL" in errors
