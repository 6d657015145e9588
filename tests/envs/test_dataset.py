"""Prompts from a file and user functions: what they may hold and return, and training on them."""

import copy
import json
import pickle
import random
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from chat_families import TOOL_TEMPLATE, family
from cli_commands import call
from transformers import AutoTokenizer

from ragen_jax.config.build_environment import build_chat, build_environment, build_limits
from ragen_jax.configs import dataset as dataset_config
from ragen_jax.core.types import Turn
from ragen_jax.envs import make_env
from ragen_jax.envs.problems import SPLITS, split_by_hash
from ragen_jax.envs.types import Environment, FileEnvironment, SolvableEnvironment, ToolEnvironment
from ragen_jax.rollout.env_calls import NO_LIMITS, EnvFailure, Limits, StepRequest, act
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")

DOCS = Path(__file__).parents[2] / "docs/environments/prompts.md"
ROWS = [
    {"prompt": f"Which is larger: {a} or {b}?", "answer": str(max(a, b)), "level": a}
    for a in range(20)
    for b in range(20)
    if a != b
]
FUNCTIONS = '''
    def score(prompt, reply, row):
        return 1.0 if reply == row["answer"] else 0.25

    def exact(prompt, reply, row):
        return 1.0 if reply.strip() == row["answer"] else 0.0

    def told(prompt, reply, row):
        return {"reward": len(reply), "success": reply == "yes", "length": len(reply)}

    def odd(prompt, reply, row):
        if reply == "raise":
            raise KeyError("answers")
        return {"none": None, "text": "1", "nan": float("nan"), "huge": 1e9, "yes": True,
                "dict": {}, "unsure": {"reward": 1, "success": "yes"}, "exit": exit}[reply]

    def spoil(prompt, reply, row):
        row["answer"] = "spoilt"
        return 1.0

    def again(messages, row):
        right = messages[-1]["content"] == row["answer"]
        assert [m["role"] for m in messages[-2:]] == ["user", "assistant"]
        if right or len(messages) >= 6:
            return None
        return "No, not " + messages[-1]["content"] + "."

    def paying(messages, row):
        if len(messages) > 2:
            return {"reward": 2.0, "success": True}
        return {"message": "Go on.", "reward": 1.5}

    def wrong(messages, row):
        return 5

    def two(prompt, reply):
        return 0.0

    def larger(a: int, b: int) -> int:
        """The larger of two numbers.

        Args:
            a: one
            b: the other
        """
        return max(int(a), int(b))

    def facts(name: str = "all") -> dict:
        """What is known.

        Args:
            name: of what
        """
        if name == "hang":
            __import__("time").sleep(30)
        return {"name": name, "of": [1, None]}

    def bare(a):
        return a

    def of_trl(completions, answer, **columns):
        assert columns["prompts"][0] and isinstance(columns["level"], list)
        return [1.0 if c == a else 0.25 for c, a in zip(completions, answer, strict=True)]

    def of_trl_chat(completions, **columns):
        return [float(len(c[0]["content"])) for c in completions]

    def of_trl_short(prompts, completions):
        return []

    def of_trl_none(completions, **columns):
        return [None]

    def of_trl_state(completions, completion_ids, trainer_state, log_extra=None):
        return [1.0]

    async def of_trl_async(completions, **columns):
        return [1.0]

    def of_verl(data_source, solution_str, ground_truth, extra_info=None):
        assert (data_source, extra_info) == ("", None)
        return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}

    def of_verl_row(data_source, solution_str, ground_truth):
        return 1.0 if (data_source, solution_str) == ("math", ground_truth) else 0.0

    TOOLS = [larger, facts]
    BARE = [bare]
    TWICE = [larger, larger]
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's folder with rows and functions, and a separate cache."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    write(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def build(**options):
    return make_env("dataset", **dict(path="rows.jsonl", reward="mine:score") | options)


def test_splits_share_no_prompt_and_problems_are_the_same_again(own):
    found = {}
    for split in SPLITS:
        environment = build(split=split, solution="answer")
        again = build(split=split, solution="answer")
        states = [environment.reset(seed) for seed in range(400)]
        assert states == [again.reset(seed) for seed in range(400)]
        assert pickle.loads(pickle.dumps(states[:3])) == states[:3] and len({*states[:3]}) > 1
        found[split] = {environment.identity(state) for state in states}
        for state in states[:20]:
            assert environment.render(state) == ROWS[state.row]["prompt"] == state.prompt
            dealt = split_by_hash("dataset", environment.identity(state))
            assert dealt == split
    assert not found["train"] & found["eval"] and not found["imitation"] & found["eval"]
    assert not found["train"] & found["imitation"]
    with pytest.raises(ValueError, match=re.escape("seed must be a whole number of at least 0")):
        environment.reset(-1)


def test_what_would_be_imitated_trains_where_nothing_is(own):
    solved, plain = build(solution="answer"), build()
    assert isinstance(solved, SolvableEnvironment) and isinstance(solved, FileEnvironment)
    assert isinstance(plain, FileEnvironment) and isinstance(plain, Environment)
    assert not isinstance(plain, SolvableEnvironment)
    dealt = [split_by_hash("dataset", " ".join(row["prompt"].lower().split())) for row in ROWS]
    assert [split for _, split, _ in solved.list_problems()] == dealt
    assert [split for _, split, _ in plain.list_problems()] == [
        "train" if split == "imitation" else split for split in dealt
    ]
    assert (plain.fields, solved.fields) == (("prompt",), ("prompt", "answer"))
    assert [row for row, _, _ in build(max_rows=7).list_problems()] == list(range(7))


def test_one_reply_is_paid(own):
    environment = build()
    state = environment.reset(3)
    right = ROWS[state.row]["answer"]
    step = environment.step(state, right, None)
    assert (step.reward, step.done, step.info) == (1.0, True, {"success": True})
    assert step.state.messages == (("assistant", right),) and state.messages == ()
    step = environment.step(state, "none", None)
    assert (step.reward, step.done, step.info) == (0.25, True, {"success": False})
    assert build(success=0.25).step(state, "none", None).info["success"]
    step = build(reward="mine:told").step(state, "yes", None)
    assert (step.reward, step.info) == (3.0, {"success": True, "length": 3})


def test_functions_of_trl_and_verl_are_called_as_their_trainers_do(own):
    environment = build(reward="mine:of_trl")
    state = environment.reset(3)
    right = ROWS[state.row]["answer"]
    assert environment.step(state, right, None).reward == 1.0
    assert environment.step(state, "none", None).reward == 0.25
    write(own / "rows.jsonl", [row | {"ground_truth": row["answer"]} for row in ROWS])
    step = build(reward="mine:of_verl").step(state, right, None)
    assert (step.reward, step.info) == (1.0, {"success": True, "acc": True})
    assert build(reward="mine:of_verl").step(state, "none", None).reward == 0.0
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "data_source": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        }
        for row in ROWS
    ]
    write(own / "rows.jsonl", rows)
    assert build(reward="mine:of_verl_row").step(state, right, None).reward == 1.0
    assert build(reward="mine:of_trl_chat").step(state, "four", None).reward == 4.0
    assert build(reward="mine:of_trl_none").step(state, "four", None).reward == 0.0
    with pytest.raises(ValueError, match="needs completion_ids and trainer_state, which only TRL"):
        build(reward="mine:of_trl_state")
    with pytest.raises(ValueError, match="mine:of_trl_async is an async function"):
        build(reward="mine:of_trl_async")
    asked = StepRequest(state, ("x",), np.random.default_rng(0), 1)
    (broken,) = act(build(reward="mine:of_trl_short"), [asked], NO_LIMITS)
    assert "a list with one number for each of them; for one completion it returned []" in (
        broken.error
    )


def test_a_function_cannot_change_the_rows(own):
    environment = build(reward="mine:spoil", solution="answer")
    state = environment.reset(0)
    environment.step(state, "x", None)
    assert environment.solve(state) == (ROWS[state.row]["answer"],)
    assert environment._rows.row(state.row) == ROWS[state.row]


def test_nonsense_costs_its_episode_alone(own):
    environment = build(reward="mine:odd")
    said = ["yes", "none", "text", "nan", "huge", "dict", "unsure", "raise", "exit", "yes"]
    state, rng = environment.reset(0), np.random.default_rng(0)
    acted = act(environment, [StepRequest(state, (text,), rng, 1) for text in said], NO_LIMITS)
    assert [isinstance(x, EnvFailure) for x in acted] == [False, *[True] * 8, False]
    assert acted[0].reward == 1.0 and acted[0].info == {"success": True}
    told = [x.error for x in acted[1:-1]]
    number = "TypeError: mine:odd must return a number or a dict with `reward`, a number; got "
    assert told[0] == number + "None" and told[1] == number + "'1'" and told[4] == number + "{}"
    assert "Step.reward must be a number" in told[2] and "Step.reward must be" in told[3]
    assert told[5] == "TypeError: mine:odd must give success as True or False, got 'yes'"
    assert told[6] == "KeyError: 'answers'"
    acted = act(build(step="mine:wrong"), [StepRequest(state, ("a",), rng, 1)], NO_LIMITS)
    assert acted[0].error.endswith("`message`, `reward` and `success`; got 5")


def test_the_user_answers(own):
    environment = build(step="mine:again")
    state = environment.reset(5)
    shown, right = environment.render(state), ROWS[state.row]["answer"]
    first = environment.step(state, "none", None)
    assert (first.reward, first.done, first.info["success"]) == (0.0, False, False)
    assert environment.render(first.state) == "No, not none."
    second = environment.step(first.state, right, None)
    assert (second.reward, second.done, second.info["success"]) == (1.0, True, True)
    # Another member of the group acts differently from the same state, and its third reply ends it.
    other = environment.step(environment.step(first.state, "a", None).state, "b", None)
    assert (other.reward, other.done, other.info["success"]) == (0.25, True, False)
    assert environment.render(state) == shown and environment.identity(other.state) == (
        environment.identity(state)
    )


def test_a_turn_may_pay_by_itself(own):
    environment = build(reward="", step="mine:paying")
    first = environment.step(environment.reset(0), "a", None)
    assert (first.reward, first.done, environment.render(first.state)) == (1.5, False, "Go on.")
    assert first.info == {"success": False}  # the task is not over
    last = environment.step(first.state, "b", None)
    assert (last.reward, last.done, last.info) == (2.0, True, {"success": True})
    environment = build(reward="", step="mine:again")
    right = ROWS[environment.reset(0).row]["answer"]
    with pytest.raises(TypeError, match="mine:again returned None, but the rows have no reward"):
        environment.step(environment.reset(0), right, None)


def called(name, /, **arguments):
    return f"<tool_call>{json.dumps(dict(name=name, arguments=arguments))}</tool_call>"


ASKED = called("larger", a=9, b=17)


def test_a_reply_may_call_a_function(own):
    environment = build(tools="mine:TOOLS")
    assert isinstance(environment, ToolEnvironment)
    names = [tool["function"]["name"] for tool in environment.tools]
    first = environment.tools[0]["function"]
    assert names == ["larger", "facts"] and first["description"] == "The larger of two numbers."
    assert first["parameters"]["properties"]["a"] == {"type": "integer", "description": "one"}
    state = environment.reset(2)
    right = ROWS[state.row]["answer"]
    asked = re.findall(r"[0-9]+", state.prompt)
    step = environment.step(state, called("larger", a=asked[0], b=asked[1]), None)
    assert (step.reward, step.done, step.info) == (0.0, False, {"success": False})
    assert environment.render(step.state) == right
    last = environment.step(step.state, right, None)
    assert last.reward == 1.0 and last.done and last.info["success"]
    assert [role for role, _ in last.state.messages] == ["assistant", "tool", "assistant"]
    step = environment.step(
        state, f"<tool_call>\n{json.dumps({'name': 'facts'})}\n</tool_call>", None
    )
    assert environment.render(step.state) == '{"name": "all", "of": [1, null]}'
    # Without the option the same text is an ordinary answer.
    assert build().tools == () and build().step(state, called("larger", a=1, b=2), None).done


def test_a_call_goes_through_the_chat_and_back(own):
    """As in a rollout: the reply is parsed and run with the environment's limits, and its result is
    the next message, in the template's role for results."""
    config = dataset_config.get_config()
    options = dict(path="rows.jsonl", reward="mine:score", tools="mine:TOOLS")
    config.env.options.update(options)
    config.env.update(max_turns=3, max_actions=3, time_limit=5.0)
    environment = build_environment(config.env, "train")
    tokenizer = copy.deepcopy(family("qwen").tokenizer)
    tokenizer.chat_template = TOOL_TEMPLATE
    chat = build_chat(config, tokenizer, environment)
    state = environment.reset(1)
    message = chat.observe(environment.render(state), actions_used=0, last_valid=True)
    prompt, sampled = chat.prompt_ids([], message), chat.reply_ids(f"so</think>{ASKED}")
    assert '"name": "larger"' in chat.text(prompt)
    reply = chat.read(sampled)
    asked = StepRequest(state, reply.actions, np.random.default_rng(0), 3)
    (acted,) = act(environment, [asked], build_limits(config.env))
    assert acted.observation == "17" and not acted.done and acted.actions == (ASKED,)
    message = chat.observe(acted.observation, actions_used=1, last_valid=reply.valid)
    turn = Turn(prompt, "", sampled, None, reply.reasoning, reply.answer, (), True, 0.0, {})
    shown = chat.text(chat.prompt_ids([turn], message))
    result = "17\nYou have 2 call(s) or answer(s) left."
    assert shown.endswith(
        f"{ASKED}<|im_end|>\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n<think>"
    )


def test_a_function_that_hangs_costs_its_episode_alone(own):
    environment, rng = build(tools="mine:TOOLS"), np.random.default_rng(0)
    state = environment.reset(1)
    asked = [StepRequest(state, (text,), rng, 3) for text in (called("facts", name="hang"), ASKED)]
    late, fine = act(environment, asked, Limits(time_limit=0.3, workers=2))
    assert late.error == "TimeoutError: a step took longer than 0.3 s"
    assert fine.observation == "17"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("<tool_call>larger(1, 2)</tool_call>", "error: a call must be JSON: Expecting value"),
        ("<tool_call>[1]</tool_call>", 'error: a call must be {"name": ..., "arguments": {...}}'),
        (called("smaller"), "error: no tool 'smaller'; there are: larger, facts"),
        (called(["larger"]), "error: no tool ['larger']; there are: larger, facts"),
        ('<tool_call>{"name": "larger", "arguments": "1"}</tool_call>', "error: arguments must be"),
        (called("larger", a=1), "error: larger: missing a required argument: 'b'"),
        (called("larger", a=1, b="x"), "error: larger: ValueError: invalid literal for int()"),
    ],
)
def test_what_a_call_does_wrong_is_told_to_the_agent(own, call, told):
    environment = build(tools="mine:TOOLS")
    step = environment.step(environment.reset(0), call, None)
    assert environment.render(step.state).startswith(told) and not step.done


def test_prompts_may_be_messages(own):
    system = {"role": "system", "content": "Be brief."}
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "b."}]
    rows = [
        {"q": [system, {"role": "user", "content": f"Say a{i}."}], "answer": f"a{i}"}
        for i in range(9)
    ]
    write(own / "rows.jsonl", [*rows, {"q": [{"role": "user", "content": parts}], "answer": "b"}])
    environment = build(prompt="q", step="mine:again", split=None)
    states = [state for _, _, state in environment.list_problems()]
    assert states[3].prompt == "Be brief.\n\nSay a3." and states[9].prompt == "Say b."
    assert environment.step(states[3], "a3", None).reward == 1.0


def test_the_same_rows_in_any_format(own):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), own / "rows.parquet")
    (own / "rows.json").write_text("\ufeff " + json.dumps(ROWS), encoding="utf-8-sig")
    (own / "rows.json").write_text(json.dumps(ROWS, indent=1))
    states = [[*build(path=f"rows.{e}").list_problems()] for e in ("jsonl", "json", "parquet")]
    assert states[0] == states[1] == states[2] and len(states[0]) == len(ROWS)


def test_splits_of_a_field(own, capsys):
    rows = [{"prompt": f"Say {i}.", "answer": "", "part": "train"} for i in range(6)]
    rows += [{"prompt": "say  0.", "answer": "", "part": "test"}]
    rows += [{"prompt": "Say 9.", "answer": "", "part": "validation"}]
    rows += [{"prompt": "Say 9. ", "answer": "", "part": "train"}]
    write(own / "rows.jsonl", rows)
    environment = build(split_field="part")
    assert [(row, split) for row, split, _ in environment.list_problems()] == [
        *((i, "train") for i in range(1, 6)),
        (6, "eval"),
        (7, "eval"),
    ]
    told = "rows.jsonl: 2 row(s) left out, because their prompts are in another split"
    assert capsys.readouterr().out.strip() == told
    assert {environment.reset(seed).row for seed in range(100)} == {1, 2, 3, 4, 5}
    held_out = build(split_field="part", split="eval")
    assert {held_out.reset(seed).row for seed in range(100)} == {6, 7}
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="no row of split 'imitation' .0 of imitation, 5 of train"):
        build(split_field="part", split="imitation")


def test_a_data_set_that_datasets_finds(own, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(own / "hf"))
    (own / "hub").mkdir()
    write(own / "hub" / "train.jsonl", ROWS)
    write(own / "hub" / "test.jsonl", ROWS[:30])
    hub = dict(path=None, hub=str(own / "hub"))
    assert [*build(**hub).list_problems()] == [*build().list_problems()]
    assert len([*build(**hub, hub_split="test").list_problems()]) == 30
    with pytest.raises(ValueError, match="datasets.load_dataset finds no .*hub/dev: ValueError: "):
        build(**hub, hub_split="dev")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "rows.jsonl holds no rows"),
        ("[]", "rows.jsonl holds no rows"),
        ("[1,", "rows.jsonl cannot be read as JSON: "),
        ('{"prompt": "a"}\n{', "row 1 of rows.jsonl cannot be read as JSON: "),
        ('{"prompt": "a"}\n5', "row 1 of rows.jsonl must be an object with fields, got 5"),
        (
            '{"question": "a", "b": 1}',
            "row 0 of rows.jsonl lacks the field prompt (option prompt); it has question, b",
        ),
        ('{"prompt": " "}', "field prompt of row 0 of rows.jsonl must be text of 1 to 100000"),
        ('{"prompt": 5}', "field prompt of row 0 of rows.jsonl must be text of 1 to 100000"),
        ('{"prompt": []}', "messages of field prompt of row 0 of rows.jsonl must end with one of"),
        (
            '{"prompt": [{"role": "assistant", "content": "a"}]}',
            "message 0 of field prompt of row 0 of rows.jsonl has role 'assistant'; accepted: ",
        ),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}',
            "message 0 of field prompt of row 0 of rows.jsonl must have text as content, got ",
        ),
        ('{"prompt": ["a"]}', "rows.jsonl must have role and content, got 'a'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_row_and_field(own, text, said):
    (own / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        build()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(path="nowhere.jsonl"), "there is no file nowhere.jsonl"),
        (dict(path=None), "give path, a file, or hub, a data set: got None and ''"),
        (dict(path=None, hub="pandas"), "hub='pandas' reads pickles, which are code; give JSON"),
        (dict(hub="a/b"), "give path, a file, or hub, a data set: got 'rows.jsonl' and 'a/b'"),
        (dict(reward=""), "reward must be MODULE:FUNCTION of (prompt, reply, row), got ''"),
        (dict(reward="mine"), "reward must be MODULE:FUNCTION, got 'mine'"),
        (dict(reward="mine:no"), "must be MODULE:FUNCTION, got 'mine:no': no function no"),
        (dict(reward="nowhere:f"), "reward 'nowhere' cannot be imported: ModuleNotFoundError"),
        (dict(reward="mine:two"), "reward 'mine:two' must take (prompt, reply, row): too many"),
        (dict(step="mine:score"), "step 'mine:score' must take (messages, row): missing a"),
        (dict(success="1"), "success must be a number from -1e+06 to 1e+06, got '1'"),
        (dict(max_rows=0), "max_rows must be a whole number of at least 1, got 0"),
        (dict(solution="no"), "row 0 of rows.jsonl lacks the field no (option solution); it has"),
        (dict(solution="level"), "field level of row 0 of rows.jsonl must be text of 1 to"),
        (dict(split_field="level"), "field level (option split_field) of row 0 of rows.jsonl must"),
        (dict(split="test"), "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
        (dict(tools="mine:NONE"), "tools 'mine:NONE' must be a list of functions, got None"),
        (dict(tools="mine"), "tools must be MODULE:LIST, got 'mine'"),
        (dict(tools="mine:BARE"), "tools 'mine:BARE': bare has no JSON schema: "),
        (dict(tools="mine:TWICE"), "tools 'mine:TWICE' has two functions of the same name"),
        (dict(prompt=5), "prompt must be a text, got 5"),
        (dict(max_rows=1), "rows.jsonl has no row of split "),
    ],
)
def test_options_that_cannot_be_used_are_named(own, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        build(**options)
        build(**options, split="eval")


def test_the_command_that_looks_at_data(own):
    words = ["ragen_jax.check_data", "--config=dataset", "--config.eval.episodes=20", "--rows=1"]
    words += ["--config.env.options.path=rows.jsonl", "--config.env.options.reward=mine:score"]
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    held_out = [row for row, split, _ in build().list_problems() if split == "eval"]
    assert out.splitlines()[:6] == [
        "dataset: rows.jsonl",
        "  fields      prompt",
        "  problems    380 available",
        "  imitation   0, 0 of them distinct",
        f"  train       {380 - len(held_out)}, {380 - len(held_out)} of them distinct",
        f"  eval        {len(held_out)}, {len(held_out)} of them distinct",
    ]
    code, out, err = call(*words, "--config.env.options.reward=mine:no")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: config.env.options of 'dataset': reward must be MODULE:FUNCTION")


def blocks():
    """The code blocks of the page, with their languages, in order."""
    return re.findall(r"```(\w+)\n(.*?)```", DOCS.read_text(), re.S)


@pytest.fixture
def documented(own):
    """A folder with the page's module, its rows and similar rows."""
    code = "\n\n".join(text for language, text in blocks() if language == "python")
    (own / "lengths.py").write_text(code)
    lines = next(text for language, text in blocks() if language == "json").splitlines()
    others = [{"prompt": f"Name animal {i}.", "length": 3 + i % 5} for i in range(60)]
    write(own / "prompts.jsonl", [*map(json.loads, lines), *others])
    sys.modules.pop("lengths", None)
    yield own
    sys.modules.pop("lengths", None)


def commands():
    """The arguments of the page's training commands, after `python -m`."""
    found = [text for language, text in blocks() if language == "bash"]
    return [shlex.split(text.replace("\\\n", " "))[2:] for text in found]


def test_the_example_of_the_page_is_short_and_pays(documented):
    assert sum(len(text.splitlines()) for kind, text in blocks()[:3] if kind != "json") < 20
    options = dict(path="prompts.jsonl", reward="lengths:score")
    environment = build(**options)
    states = {state.prompt: state for _, _, state in environment.list_problems()}
    state = states["Name a colour in five letters."]
    assert environment.step(state, "green", None).info == {"success": True}
    assert environment.step(state, "red", None).reward == pytest.approx(0.6)
    environment = build(**options, step="lengths:guide")
    first = environment.step(state, "red", None)
    assert environment.render(first.state) == "red has 3 letters." and not first.done
    assert environment.step(first.state, "green", None).reward == 1.0


SHORT = [
    *("--config.steps=1", "--config.rollout.groups=2", "--config.rollout.group_size=2"),
    *("--config.rollout.max_new_tokens=8", "--config.rollout.compact=False"),
    *("--config.optimizer.minibatches=1", "--config.optimizer.micro_batch=2"),
    *("--config.eval.episodes=4", "--config.diagnose.flow_every=0"),
]


@pytest.fixture
def tool_model(language_model, tmp_path):
    """The small language model with a chat template that supports tools."""
    folder = tmp_path / "tool_model"
    shutil.copytree(language_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "checksums.json").unlink()  # the folder changes on purpose
    return folder


@pytest.mark.long
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_the_commands_of_the_page_train(documented, number, language_model, tool_model):
    model = tool_model if number == 2 else language_model
    words = [word.replace("DIR_OR_HUB_ID", str(model)) for word in commands()[number]]
    code, _, err = call(*words, *SHORT, "--workdir=run")
    assert code == 0, err
    rows = read_metrics(documented / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1] and "eval/success" in rows[1]
    assert rows[1]["rollout/errors"] == 0


@pytest.mark.long
def test_a_run_that_is_continued_learns_the_same(documented, language_model):
    """With rows from a file: two steps at once, and one plus one, give the same figures."""
    words = [word.replace("DIR_OR_HUB_ID", str(language_model)) for word in commands()[0]]
    words += [*SHORT, "--config.model.dtype=float32", "--config.seed=536870911"]
    for steps, folder in ((2, "whole"), (1, "parts"), (2, "parts")):
        code, _, err = call(*words, f"--config.steps={steps}", f"--workdir={folder}")
        assert code == 0, err
    whole, parts = (
        {
            name: value
            for name, value in read_metrics(documented / folder / "metrics.jsonl")[-1].items()
            if not name.startswith(("time/", "throughput/"))
        }
        for folder in ("whole", "parts")
    )
    assert whole["step"] == 2 and len(whole) > 30 and parts == whole


def test_the_tiny_agent_is_told_which_field_to_imitate(own):
    options = ("path=rows.jsonl", "reward=mine:score")
    words = [f"--config.env.options.{option}" for option in options]
    code, _, err = call("ragen_jax.train", "--config=dataset:tiny", *words)
    assert code == 2 and "--config.env.options.solution=FIELD" in err.splitlines()[-1]


def test_tools_need_a_template_that_shows_them(documented, language_model):
    words = [word.replace("DIR_OR_HUB_ID", str(language_model)) for word in commands()[2]]
    code, _, err = call(*words, *SHORT, "--workdir=run")
    assert code == 2 and err.count("\n") == 1 and "does not show tool calls as" in err


@pytest.mark.slow
def test_the_tiny_agent_learns_a_file(own):
    """With only rows and a function: 0.715 -> 0.789 of 256 held-out problems when written."""
    numbers = [(a, b) for a in range(60) for b in range(60) if a != b]
    random.Random(0).shuffle(numbers)
    asked = [(f"Which is larger: {a} or {b}?", str(max(a, b))) for a, b in numbers]
    write(own / "larger.jsonl", [{"prompt": prompt, "answer": right} for prompt, right in asked])
    options = dict(path="larger.jsonl", reward="mine:exact", solution="answer")
    words = [f"--config.env.options.{name}={value}" for name, value in options.items()]
    words += ["--config.steps=50", "--config.eval.episodes=256", "--workdir=run"]
    code, _, err = call("ragen_jax.train", "--config=dataset:tiny", *words)
    assert code == 0, err
    rows = read_metrics(own / "run" / "metrics.jsonl")
    assert rows[-1]["eval/success"] > rows[0]["eval/success"] + 0.03
