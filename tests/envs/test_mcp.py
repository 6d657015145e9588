"""Tools of MCP servers in environment `dataset`, with real servers of the package `mcp`."""

import gc
import json
import subprocess
import sys
import time

import pytest
from chat_families import TOOL_TEMPLATE

import ragen_jax
from ragen_jax.envs import make_env
from ragen_jax.model import hf

pytest.importorskip("mcp")
pytestmark = pytest.mark.medium

SERVER = """
from mcp.server.mcpserver import Image, MCPServer

server, count = MCPServer("numbers"), 0

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    global count
    count += 1
    return a + b

@server.tool()
def used() -> str:
    "How often add was called."
    return str(count)

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no luck")

@server.tool()
def stop() -> str:
    "End the server."
    import os
    os._exit(1)

@server.tool()
def picture() -> Image:
    "A picture."
    return Image(data=b"x", format="png")

server.run("stdio")
"""
FUNCTIONS = '''
def score(prompt, reply, row):
    return float(reply == row["answer"])


def add(x: int) -> int:
    """Add one.

    Args:
        x: a number
    """
    return x + 1


TOOLS = [add]
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with rows, a reward function and an MCP server."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "paying.py").write_text(FUNCTIONS)
    rows = [json.dumps({"prompt": f"What is {i} + 2?", "answer": str(i + 2)}) for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "paying", raising=False)
    yield tmp_path
    sys.modules.pop("paying", None)


def command(folder):
    return f"{sys.executable} {folder / 'server.py'}"


def build(folder, **options):
    given = dict(path="rows.jsonl", reward="paying:score", mcp=(command(folder),))
    return make_env("dataset", **given | options)


def ask(environment, state, name, **arguments):
    """(the state after a call, the text shown)"""
    call = json.dumps({"name": name, "arguments": arguments})
    step = environment.step(state, f"<tool_call>{call}</tool_call>")
    assert not step.done and step.reward == 0.0
    return step.state, environment.render(step.state)


def running(folder):
    found = subprocess.run(
        ["pgrep", "-f", str(folder / "server.py")], capture_output=True, text=True
    )
    return len(found.stdout.split())


def wait_until_none_runs(folder):
    for _ in range(100):
        if not running(folder):
            return
        time.sleep(0.05)
    raise AssertionError(f"{running(folder)} servers are left")


def test_results_are_shown_and_errors_are_the_agents_to_see(folder):
    environment = build(folder)
    names = [tool["function"]["name"] for tool in environment.tools]
    assert names == ["add", "used", "fail", "stop", "picture"]
    assert set(environment.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
    assert not running(folder)  # the session that listed the tools is over
    state = environment.reset(0)
    state, shown = ask(environment, state, "add", a=1, b=2)
    assert shown == "3" and running(folder) == 1
    for name, arguments, expected in (
        ("add", {"a": "q"}, "error: Error executing tool add"),
        ("used", {}, "1"),
        ("fail", {}, "error: Error executing tool fail"),
        ("picture", {}, "(image)"),
        ("nothing", {}, "error: no tool 'nothing'; there are: add, used, fail, stop, picture"),
    ):
        state, shown = ask(environment, state, name, **arguments)
        assert shown.startswith(expected), (name, shown)
    answer = environment.step(state, "2")
    assert answer.done
    wait_until_none_runs(folder)


def test_each_episode_has_its_own_server(folder):
    environment = build(folder)
    first = environment.reset(0)  # the members of a group share it
    one, _ = ask(environment, first, "add", a=1, b=2)
    two, _ = ask(environment, first, "used")
    assert environment.render(two) == "0" and running(folder) == 2
    assert ask(environment, one, "used")[1] == "1"
    del one, two  # episodes that end at a limit of the run are only forgotten
    gc.collect()
    wait_until_none_runs(folder)


def test_a_server_that_ends_is_an_error_of_its_episode(folder):
    environment = build(folder)
    state, shown = ask(environment, environment.reset(0), "stop")
    assert shown.startswith("error: stop: ")
    _, shown = ask(environment, state, "used")
    assert shown.startswith("error: used: ")
    assert ask(environment, environment.reset(0), "used")[1] == "0"


def test_a_function_with_the_name_of_a_tool_is_refused(folder):
    with pytest.raises(ValueError, match="paying:TOOLS and an mcp tool have the same name"):
        build(folder, tools="paying:TOOLS")


REFUSED = [
    ("no_such_program", "mcp server 'no_such_program' cannot be used: .*no_such_program"),
    ("'", "mcp must be command lines, got"),
    ("", "mcp must be command lines, got ''"),
    (f"{sys.executable} -c pass", "mcp server .* cannot be used"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_commands_that_are_refused(folder, words, message):
    with pytest.raises(ValueError, match=message):
        build(folder, mcp=(words,))


def test_two_servers_with_the_same_tools_are_refused(folder):
    with pytest.raises(ValueError, match="two mcp tools have the name 'add'"):
        build(folder, mcp=(command(folder), command(folder)))


def test_a_run_trains(folder, language_model):
    model, params, tokenizer = hf.load(language_model)
    tokenizer.chat_template = TOOL_TEMPLATE
    hf.save(folder / "model", model, params, tokenizer)
    fields = {
        **{"model.path": "model", "env.options.path": "rows.jsonl", "steps": 1},
        **{"env.options.reward": "paying:score", "env.options.mcp": (command(folder),)},
        **{"rollout.groups": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8},
        **{"eval.every": 0, "eval.episodes": 2, "report.every": 0, "filter.strategy": "none"},
        **{"optimizer.minibatches": 1, "optimizer.micro_batch": 2, "env.max_turns": 2},
    }
    run = ragen_jax.train("dataset", workdir=folder / "run", overrides=fields)
    assert run.exit_code == 0 and run.metrics["rollout/errors"].tolist() == [0]
