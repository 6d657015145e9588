"""What other trainers write beside the plain rows: groups, judges, compactions, folders."""

import json

import pytest

from ragen_jax.score.files import read_files
from ragen_jax.score.formats import read_row

pytestmark = pytest.mark.fast
SAID = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>4</think>4"}]


def rows(tmp_path, *records):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = read_files([str(path)])
    assert not found.broken, found.broken
    return found.rows


def test_a_chat_log_is_read(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "5"}
    plain, tools = rows(
        tmp_path,
        {"messages": SAID},
        {"messages": [SAID[0], called, result, SAID[1]], "tools": [tool], "reward": 0.5},
    )
    (reply,) = plain.replies
    assert reply.prompt == SAID[:1] and reply.response == "<think>4</think>4"
    first, second = tools.replies
    assert first.calls and first.tools == second.tools and tools.reward == 0.5
    assert [message["role"] for message in second.prompt] == ["user", "assistant", "tool"]
    assert second.prompt[1]["tool_calls"]


@pytest.mark.parametrize(
    "uid, group",
    [
        ("7f2a_0_0", "7f2a"),
        ("7f2a_11_3", "7f2a"),
        ("a_b_1_2", "a_b"),
        ("0b5c7e3a-8f1d-4c1e-9a51-2f0c5b7d9e10", "0b5c7e3a-8f1d-4c1e-9a51-2f0c5b7d9e10"),
        ("prompt_3", "prompt_3"),
    ],
)
def test_verls_rows_of_a_prompt_are_a_group(uid, group):
    row, _ = read_row({"input": "2+2?", "output": "4", "score": 1.0, "uid": uid}, "x:1")
    assert row.group == group
    named, _ = read_row({"prompt": "2+2?", "response": "4", "uid": uid}, "x:1")
    assert named.group == uid  # only verl names its rows so


def node(role, text, parent, *, sampled=False, links=()):
    found = {"message": {"role": role, "content": text}, "sampled": sampled}
    found |= {} if parent is None else {"parent": parent}
    return found | ({"semantic_parents": list(links)} if links else {})


def trace(*nodes, reward=1.0, trainable=None):
    agent = {} if trainable is None else {"agent": {"name": "a", "trainable": trainable}}
    return {"nodes": list(nodes), "rewards": {"task": {"score": reward}}, **agent}


TALK = (node("user", "2+2?", None), node("assistant", "<think>4</think>4", 0, sampled=True))


def test_a_judge_is_not_the_policy():
    judge = trace(
        node("user", "is it 4?", None), node("assistant", "yes", 0, sampled=True), reward=7
    )
    record = {"traces": [trace(*TALK, trainable=True), judge | {"agent": {"trainable": False}}]}
    row, unread = read_row(record, "x:1")
    assert [reply.response for reply in row.replies] == ["<think>4</think>4"]
    assert row.reward == 1.0 and "traces[].agent.name" in unread
    assert row.left_out == {"traces of agents that are not trained": 1}
    with pytest.raises(ValueError, match="has no trace of an agent that is trained"):
        read_row({"traces": [trace(*TALK, trainable=False)]}, "x:1")


@pytest.mark.parametrize("run", [{"step": 7}, {"work": {"step": 7}}, {"work": {"step": None}}])
def test_the_step_of_an_episode_of_verifiers(run):
    row, _ = read_row({"traces": [trace(*TALK)], "run": run}, "x:1")
    assert row.step == (None if run == {"work": {"step": None}} else 7)


def test_a_compaction_that_was_given_up_is_left_out():
    attempt = {"type": "compaction_attempt", "node": 1}
    summary = node("assistant", "summary", 1, sampled=True, links=[attempt])
    given_up = trace(*TALK, summary)
    row, _ = read_row({"traces": [given_up]}, "x:1")
    assert row.left_out == {"summaries from which the harness did not continue": 1}
    assert [reply.response for reply in row.replies] == ["<think>4</think>4"]
    root = node("user", "go on: summary", None, links=[{"type": "compaction", "node": 2}])
    went_on = trace(*TALK, summary, root, node("assistant", "Up", 3, sampled=True))
    row, _ = read_row({"traces": [went_on]}, "x:1")
    assert [reply.response for reply in row.replies] == ["<think>4</think>4", "summary", "Up"]


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"parent": [0]}, "has the parent [0]"),
        ({"mask": 4, "token_ids": [1]}, "has 4 as its mask"),
        ({"semantic_parents": [{"type": ["a"], "node": {}}]}, "has the node {}"),
    ],
)
def test_a_node_that_cannot_be_read_says_why(changes, words):
    with pytest.raises(ValueError) as caught:
        read_row({"traces": [trace(TALK[0], TALK[1] | changes)]}, "x:1")
    assert words in str(caught.value)


def test_prime_rls_folder_of_rollouts(tmp_path):
    for step, kind, subset, text in (
        (10, "train", "all", "ten"),
        (2, "train", "all", "two"),
        (2, "train", "effective", "two"),
        (2, "eval", "all", "held out"),
    ):
        folder = tmp_path / "rollouts" / f"step_{step}" / kind / subset
        folder.mkdir(parents=True)
        said = node("assistant", f"<think>{text}</think>", 0, sampled=True)
        record = {"traces": [trace(TALK[0], said)]}
        (folder / "traces.jsonl").write_text(json.dumps(record) + "\n")
    found = read_files([str(tmp_path / "rollouts")])
    assert [(row.step, row.replies[0].response) for row in found.rows] == [
        (2, "<think>two</think>"),
        (10, "<think>ten</think>"),
    ]
    (line,) = found.others
    assert line.startswith("2 in the folder") and "step_2/eval/all/traces.jsonl" in line
    one = read_files([str(tmp_path / "rollouts/step_2")])
    assert [row.step for row in one.rows] == [2]
