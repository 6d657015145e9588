"""Records of ATIF, NeMo-Gym and rLLM: what is a reply, what is context, what is refused."""

import copy
import json

import pytest
from trainer_formats import write

from ragen_jax.score.files import read_files
from ragen_jax.score.formats import read_row

pytestmark = pytest.mark.fast
CALL = {"tool_call_id": "c0", "function_name": "add", "arguments": {"a": 2}}
WRITTEN = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def agent(message="<think>a</think>4", **other):
    return {"source": "agent", "message": message} | other


def user(message="2+2?"):
    return {"source": "user", "message": message}


def trajectory(*steps, **other):
    numbered = [{"step_id": n} | step for n, step in enumerate(steps, start=1)]
    return {"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": numbered} | other


def ids(prompt, sampled):
    return {"metrics": {"prompt_token_ids": prompt, "completion_token_ids": sampled}}


def roles(reply):
    return [message["role"] for message in reply.prompt]


def test_a_step_of_the_agent_is_its_reply_its_calls_and_their_results():
    observed = {
        "results": [
            {"source_call_id": "c0", "content": [{"type": "text", "text": "4"}]},
            {"content": "a warning"},
            {"content": None},
        ]
    }
    record = trajectory(
        {"source": "system", "message": "be brief"},
        user([{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]),
        agent("", reasoning_content="add", tool_calls=[CALL], observation=observed),
        agent("<think>b</think>4"),
        agent={"name": "a", "tool_definitions": [{"name": "add", "parameters": {}}]},
    )
    row, unread = read_row(record, "x:1")
    first, second = row.replies
    assert row.form == "ATIF" and roles(first) == ["system", "user"]
    assert first.prompt[1]["content"] == "2+2?" and first.calls == (WRITTEN,)
    assert first.tools == second.tools
    assert first.tools[0] == {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert roles(second) == ["system", "user", "assistant", "tool", "user"]
    assert second.prompt[2]["reasoning_content"] == "add"
    assert second.prompt[3:] == [
        {"role": "tool", "content": "4", "tool_call_id": "c0"},
        {"role": "user", "content": "a warning"},
    ]
    assert second.response == "<think>b</think>4"
    assert unread == {"agent.name", "steps[].step_id"}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
        {"type": "function", "name": "add", "parameters": {"type": "object"}},
        {"name": "add", "input_schema": {"type": "object"}},
        {"name": "add", "inputSchema": {"type": "object"}},
    ],
)
def test_tools_of_any_form_are_openais(tool):
    record = trajectory(user(), agent(), agent={"name": "a", "tool_definitions": [tool]})
    (reply,) = read_row(record, "x:1")[0].replies
    function = {"name": "add", "parameters": {"type": "object"}}
    assert reply.tools == ({"type": "function", "function": function},)


def test_recorded_ids_are_the_reply_unless_they_are_of_several_calls():
    record = trajectory(
        user(),
        agent(**ids([1, 2], [3])),
        user("more"),
        agent("b", **ids([1, 2, 3, 4], [5]), llm_call_count=2),
        user("more"),
        agent("c", metrics={"completion_token_ids": [6, 7]}),  # version 1.3
        user("more"),
        agent("d", **ids([], [])),
    )
    first, second, third, fourth = read_row(record, "x:1")[0].replies
    assert (first.prompt, first.response) == ([1, 2], [3])
    assert roles(second) == ["user", "assistant", "user"] and second.response == "b"
    assert roles(third)[-1] == "user" and third.response == [6, 7]
    assert fourth.response == "d"


def test_copied_steps_and_steps_without_a_call_are_context():
    record = trajectory(
        user("old") | {"is_copied_context": True},
        agent("old reply", is_copied_context=True),
        user("new"),
        agent("dispatched", llm_call_count=0),
        agent("reply", is_copied_context=None),
    )
    row, _ = read_row(record, "x:1")
    (reply,) = row.replies
    assert reply.response == "reply"
    assert [m["content"] for m in reply.prompt] == ["old", "old reply", "new", "dispatched"]
    assert row.left_out == {
        "steps copied from an earlier trajectory": 1,
        "steps without a call of the model": 1,
    }


def test_subagents_of_the_same_model_are_read():
    def named(name, *steps, **other):
        return trajectory(*steps, agent={"name": "a", "model_name": name}, **other)

    inner = named("small", user("deep"), agent("deep reply"))
    same = named("small", user("sub"), agent("sub reply"), subagent_trajectories=[inner])
    other = named("large", user("judge this"), agent("good"))
    record = named("x/small", user(), agent(), subagent_trajectories=[same, other])
    row, _ = read_row(record, "x:1")
    assert [reply.response for reply in row.replies] == [
        "<think>a</think>4",
        "sub reply",
        "deep reply",
    ]
    assert row.replies[1].prompt == [{"role": "user", "content": "sub"}]
    assert row.left_out == {"subagents with another model": 1}


@pytest.mark.parametrize(
    "record,words",
    [
        (trajectory(user()), "no step of the agent"),
        (trajectory(agent()), "without a prompt"),
        (trajectory(), "[] as its steps"),
        (trajectory(user(), agent()) | {"schema_version": "ATIF-v2.0"}, "'ATIF-v2.0'"),
        (trajectory(user(), {"source": "robot", "message": "a"}), "source is 'robot'"),
        (trajectory(user([{"type": "image", "source": {}}]), agent(**ids([1], [2]))), "only text"),
        (trajectory(user(), agent(**ids([1], ["x"]))), "['x'] as its completion_token_ids"),
        (trajectory(user(), agent(tool_calls=[{"arguments": {}}])), "has no name"),
        (trajectory(user(), agent(tool_calls="x")), "'x' as its tool_calls"),
        (trajectory(user(), agent(observation={"results": [4]})), "[4] as its results"),
        (trajectory(user(), agent(llm_call_count=-1)), "llm_call_count"),
        (trajectory(user(), agent()) | {"trial": {"rewards": {"a": 1, "b": 2}}}, "'a', 'b'"),
    ],
)
def test_a_trajectory_that_cannot_be_read_says_why(record, words):
    with pytest.raises(ValueError) as caught:
        read_row(record, "x:1")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "rewards,named,expected",
    [
        ({"reward": 0.5, "style": 1}, (), 0.5),
        ({"score": "0.25"}, (), 0.25),
        ({}, (), None),
        (None, (), None),
        ({"a": 1, "b": 2}, ("a", "b"), 3),
        ({"a": 1, "b": None}, (), 1),
    ],
)
def test_the_reward_of_a_trial(rewards, named, expected):
    record = trajectory(user(), agent()) | {"trial": {"task_name": "sum", "rewards": rewards}}
    row, _ = read_row(record, "x:1", named)
    assert (row.reward, row.group) == (expected, "sum")


def output(text, **other):
    return (
        {"type": "message", "role": "assistant"}
        | other
        | {"content": [{"type": "output_text", "text": text, "annotations": []}]}
    )


def tokens(prompt, sampled):
    return {"prompt_token_ids": prompt, "generation_token_ids": sampled}


THOUGHT = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
ADD = {"type": "function_call", "name": "add", "call_id": "c0", "arguments": '{"a": 2}'}
RESULT = {"type": "function_call_output", "call_id": "c0", "output": "4"}


def gym(*items, **request):
    request = {"input": [{"role": "developer", "content": "be brief"}]} | request
    return {"responses_create_params": request, "response": {"output": list(items)}, "reward": 1}


def test_ids_are_on_the_last_item_of_a_call():
    record = gym(
        THOUGHT,
        output("a"),
        ADD | tokens([1], [2, 3]),
        RESULT,
        THOUGHT | tokens([1, 2, 3, 4], [5]),
        output("no ids"),
    )
    row, _ = read_row(record | {"_ng_task_index": 0, "_ng_rollout_index": 3}, "x:1")
    first, second, third = row.replies
    assert (row.form, row.group, row.reward) == ("NeMo-Gym", "0", 1)
    assert (first.prompt, first.response) == ([1], [2, 3])
    assert (second.prompt, second.response) == ([1, 2, 3, 4], [5])
    assert third.response == "no ids"
    assert roles(third) == ["developer", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "given",
    [
        "[2+2?]",
        '[{"a": 1}]',
        [{"role": "user", "content": "[2+2?]", "type": "message"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "[2+2?]"}]}],
    ],
)
def test_items_without_ids_are_messages(given):
    tool = {"type": "function", "name": "add", "parameters": {}, "strict": True}
    refusal = {"type": "message", "content": [{"type": "refusal", "refusal": "I won't"}]}
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    record = gym(THOUGHT, ADD, RESULT, search, refusal, input=given, instructions="i", tools=[tool])
    row, _ = read_row(record, "x:1")
    first, second = row.replies
    assert roles(first) == ["system", "user"]
    assert first.prompt[1]["content"] == (given if isinstance(given, str) else "[2+2?]")
    assert first.calls == (WRITTEN,) and "hm" in first.response
    function = {"name": "add", "parameters": {}, "strict": True}
    assert first.tools == ({"type": "function", "function": function},)
    assert roles(second) == ["system", "user", "assistant", "tool"]
    assert second.prompt[3] == {"role": "tool", "content": "4", "tool_call_id": "c0"}
    assert second.response == "I won't" and row.left_out == {
        "items of the type 'web_search_call'": 1
    }


def test_a_request_that_holds_earlier_turns():
    given = [{"role": "user", "content": "q"}, THOUGHT, ADD, RESULT]
    (reply,) = read_row(gym(output("b"), input=given), "x:1")[0].replies
    assert roles(reply) == ["user", "assistant", "tool"]
    assert reply.prompt[1]["reasoning_content"] == "hm"
    assert reply.prompt[1]["tool_calls"] == [WRITTEN]


@pytest.mark.parametrize(
    "record,words",
    [
        (gym(output("a")) | {"_ng_failure_class": "timeout"}, "is a failed attempt"),
        (gym(RESULT), "no item of the model"),
        (gym(), "[] as its output"),
        (gym(output("a"), input=[]), "[] as its input"),
        (gym(output("a"), input=7), "7 as its input"),
        (gym(output("a")) | {"response": "gone"}, "has no object as its"),
        (gym(ADD | {"name": None}), "has no name"),
        (gym(THOUGHT | {"summary": [{"text": 4}]}), "expected texts"),
        (gym(THOUGHT | {"summary": 4}), "expected texts"),
        (gym(output("a") | tokens([1], "x")), "'x' as its generation_token_ids"),
        (gym(output("a"), input=[{"role": "user", "content": [{"type": "input_image"}]}]), "text"),
    ],
)
def test_a_row_of_nemo_gym_that_cannot_be_read_says_why(record, words):
    with pytest.raises(ValueError) as caught:
        read_row(record, "x:1")
    assert words in str(caught.value)


ASKED = {"role": "user", "content": "2+2?"}


def call(messages, **other):
    return {
        "chat_completions": messages,
        "model_response": "",
        "thought": "",
        "reward": 0.0,
    } | other


def rllm_episode(*steps, **other):
    solver = {"name": "solver", "reward": 0.5, "steps": list(steps)}
    return {"episode_id": "7:0", "trajectories": [solver], "task_hash": "ab"} | other


@pytest.mark.parametrize(
    "step,reply",
    [
        (call([ASKED, {"role": "assistant", "content": "4"}]), "4"),
        (call([ASKED], model_response="4"), "4"),
        # The agent cuts the thinking out of its messages.
        (
            call(
                [ASKED, {"role": "assistant", "content": "4"}], model_response="<think>a</think>4"
            ),
            "<think>a</think>4",
        ),
        (
            call([ASKED], model_response="<think>a</think>4", thought="a"),
            "<think>a</think>4",
        ),
        (call([ASKED], model_response="4", thought="a"), "\x00reasoning\x00a\x00/reasoning\x004"),
        (
            call([ASKED, {"role": "assistant", "content": "4", "reasoning": "a"}]),
            "\x00reasoning\x00a\x00/reasoning\x004",
        ),
        (call([ASKED]), ""),
    ],
)
def test_the_reply_of_a_step_of_rllm(step, reply):
    row, _ = read_row(rllm_episode(step, training_step=3, is_correct=True), "x:1")
    assert row.replies[0].prompt == [ASKED] and row.replies[0].response == reply
    assert (row.form, row.group, row.step, row.reward, row.success) == ("rLLM", "ab", 3, 0.5, True)


def test_several_agents_of_rllm_are_a_row():
    record = rllm_episode(call([ASKED], model_response="4"))
    judge = {"name": "judge", "reward": 1, "steps": [call([ASKED], model_response="yes")]}
    silent = {"name": "none", "reward": 0, "steps": []}
    row, _ = read_row(record | {"trajectories": [*record["trajectories"], judge, silent]}, "x:1")
    assert [reply.response for reply in row.replies] == ["4", "yes"] and row.reward == 1.5
    unrewarded = judge | {"reward": None}
    row, _ = read_row(record | {"trajectories": [*record["trajectories"], unrewarded]}, "x:1")
    assert row.reward is None


@pytest.mark.parametrize(
    "record,words",
    [
        (rllm_episode(), "has no step"),
        (rllm_episode(call([])), "[] as its chat_completions"),
        (rllm_episode(call([{"role": "assistant", "content": "4"}])), "without a prompt"),
        (rllm_episode(call([ASKED], model_response=4)), "4 as its model_response"),
        (rllm_episode(call([ASKED], thought=["a"])), "['a'] as its thought"),
        (rllm_episode(trajectories=[]), "[] as its trajectories"),
    ],
)
def test_an_episode_of_rllm_that_cannot_be_read_says_why(record, words):
    with pytest.raises(ValueError) as caught:
        read_row(record, "x:1")
    assert words in str(caught.value)


def test_rows_of_parquet_are_those_of_json(tmp_path):
    """In a Parquet column, an item has the fields of all items, as nulls."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    gym_rows = [
        gym(THOUGHT, ADD | tokens([1], [2]), RESULT, output("b")),
        gym(output("c"), input=[ASKED]),
    ]
    steps = [
        trajectory(user(), agent(tool_calls=[CALL])),
        trajectory(user(), agent(**ids([1], [2]))),
    ]
    for name, records in (("gym", gym_rows), ("atif", steps)):
        table = pyarrow.Table.from_pylist(copy.deepcopy(records))
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        write(tmp_path / f"{name}.jsonl", records)
        found = [read_files([str(tmp_path / f"{name}.{end}")]) for end in ("parquet", "jsonl")]
        assert not found[0].broken, found[0].broken
        one, other = ([row.replies for row in each.rows] for each in found)
        assert json.dumps(one, default=vars) == json.dumps(other, default=vars)
