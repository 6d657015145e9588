"""Hostile texts in every input: nothing raises, nothing is printed raw."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cli_commands import ROOT, call
from hostile_texts import HOSTILE, QUICK, raw_characters
from simulated_runs import episode as recorded_episode
from simulated_runs import write_run
from tensorboard_reader import read_events as read_tensorboard

from ragen_jax.config import command_line as command
from ragen_jax.core.clean_text import clean_text
from ragen_jax.core.types import Episode
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.envs.dataset.tools import Tools, parse_call
from ragen_jax.envs.types import Step
from ragen_jax.report.page import write_report
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.rollout.env_calls import (
    MAX_TEXT,
    EnvFailure,
    Limits,
    StepRequest,
    StepResult,
    act,
    begin,
    identify,
)
from ragen_jax.rollout.wire import from_bytes, to_bytes
from ragen_jax.run.log import MetricsLog, write_events, write_rollouts
from ragen_jax.run.run_files import read_events, read_rollouts
from ragen_jax.run.stages import errors
from ragen_jax.run.workdir import lock_workdir
from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import encode_rows, make_steps
from ragen_jax.score.files import read_files
from ragen_jax.storage.console import console
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")
every_text = pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in HOSTILE],
)


@pytest.fixture
def chat(tokenizer):
    game = SimpleNamespace(actions=("Up", "Down"), instructions="")
    settings = dict(context="single_turn", prompt="terse", actions_per_turn=2, max_actions=5)
    return make_chat(tokenizer, game, ChatFormat(**settings))


@pytest.fixture
def console_is_clean(capsys):
    """Fail a test that prints characters which a terminal interprets."""
    yield
    out, err = capsys.readouterr()
    assert not raw_characters(out + err)


class Echo:
    """An environment in which every result or error contains a text."""

    actions, instructions = (), "Echo."

    def __init__(self, text, where):
        self.text, self.where = text, where

    def _do(self, where, value):
        if self.where == where:
            raise ValueError(self.text)
        return value

    def reset(self, seed):
        return self._do("reset", seed)

    def render(self, state):
        return self._do("render", self.text)

    def identity(self, state):
        return self._do("identity", self.text)

    def step(self, state, action, rng):
        return self._do("step", Step(state, 1.0, False, {"note": self.text, self.text: 1}))


def turns_of(chat, result, make_turn):
    """Return the turns of an episode that showed a result."""
    shown = result.observation if isinstance(result, StepResult) else ""
    message = chat.observe(shown, actions_used=0, last_valid=True)
    reply = chat.reply_ids("Up</think><answer>Up</answer>")
    turn = make_turn(chat.prompt_ids([], message), reply, message=message, actions=["Up"])
    turn.info.update(result.info if isinstance(result, StepResult) else {"error": result.error})
    return (turn,)


@every_text
@pytest.mark.parametrize("where", ["reset", "render", "identity", "step", "nowhere"])
def test_environments(name, where, chat, make_turn, tmp_path, console_is_clean):
    environment, limits = Echo(HOSTILE[name], where), Limits()
    (state,) = begin(environment, [1], limits)
    if where == "reset":
        result = state
    else:
        (identity,) = identify(environment, [state], limits)
        assert isinstance(identity, EnvFailure) == (where == "identity")
        (result,) = act(environment, [StepRequest(1, ("go",), np.random.default_rng(0), 5)], limits)
        if where == "identity":
            result = identity
    long = len(HOSTILE[name]) > MAX_TEXT
    assert isinstance(result, EnvFailure) == (where != "nowhere" or long)
    turns = turns_of(chat, result, make_turn)
    error = result.traceback if isinstance(result, EnvFailure) else ""
    played = [Episode(1, 0, 0, turns, False, error), Episode(1, 0, 1, turns, False, "")]

    assert from_bytes(to_bytes(played))[0].error == error  # as sent between processes
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    write_rollouts(path, played, chat, lambda turn: 0.0, ())
    (records,) = read_rollouts(path.parent, pytest.fail).values()
    assert len(records) == 2 and records[0].get("error", "") == error
    for share in (0.0, 1.0):
        fired = errors(SimpleNamespace(name="echo", max_error_share=share), played)
        for rule in fired:
            console(f"warning: {rule.reason}")
        write_events(tmp_path / "events.jsonl", 1, fired)
        assert len(read_events(tmp_path / "events.jsonl", pytest.fail)) == bool(error)


@every_text
def test_replies(name, chat, tokenizer):
    ids = tokenizer.encode(clean_text(HOSTILE[name][:100_000]), add_special_tokens=False)
    for reply in ([*ids], [*ids, *chat.reply_ids("a</think><answer>Up</answer>"), *ids]):
        read = chat.read(np.asarray(reply, np.int32))
        assert all(action.encode() is not None for action in read.actions)


@every_text
def test_tools(name, monkeypatch):
    text = HOSTILE[name]

    def look_up(query: str) -> str:
        """Looks up.

        Args:
          query: what
        """
        if query == "raise":
            raise ValueError(text)
        return text

    module = SimpleNamespace(TOOLS=[look_up])
    monkeypatch.setitem(sys.modules, "hostile_tools", module)
    tools = Tools("tools", "hostile_tools:TOOLS")

    def called(action):
        try:
            return tools.call(*parse_call(action, ["look_up"]))
        except ValueError as error:
            return f"error: {error}"

    for query in ("a", "raise", text):
        call_ = json.dumps({"name": "look_up", "arguments": {"query": query}})
        assert clean_text(text)[:100] in called(f"<tool_call>{call_}</tool_call>")
    for call_ in (text, json.dumps({"name": text}), json.dumps({"name": "look_up", text: 1})):
        assert called(f"<tool_call>{call_}</tool_call>").encode()
    arguments = json.dumps({"name": "look_up", "arguments": {text: 1}})
    assert called(f"<tool_call>{arguments}</tool_call>").startswith("error: look_up")


def rows_of(text):
    """Return rows of other trainers that contain a text in each of their fields."""
    good = {"prompt": "a", "response": "b</think><answer>c</answer>"}
    yield from (good | {"prompt": text}, good | {"response": text}, good | {text: text})
    yield good | {"response": f"{text}</think><answer>{text}</answer>"}
    names = ("reward", "success", "step", "group", "acc", "metadata", "tools", "traces", "turns")
    yield from (good | {name: text} for name in names)
    yield {"prompt": [{"role": "user", "content": text}], "response": text}
    yield {"prompt": [{"role": text, "content": text}], "completion": [{"role": text}]}
    reply = {"role": "assistant", "content": text, "reasoning": text, text: text}
    calls = [{"function": {"name": text, "arguments": text}}]
    yield {"messages": [{"role": "user", "content": text}, reply], "metadata": {text: text}}
    yield {"messages": [{"role": "user", "content": text}, reply | {"tool_calls": calls}]} | {
        "metadata": {"tools": [{"type": "function", "function": {"name": text}}]}
    }


@every_text
def test_rows_that_are_scored(name, tokenizer, tmp_path, console_is_clean):
    """Each row is either scored, or left out, counted and named; the other rows do not change."""
    rows = [*rows_of(HOSTILE[name][:3_000_000])]  # longer than the length that is read
    path = tmp_path / "rollouts.jsonl"
    good = {"prompt": "a", "response": "b</think><answer>c</answer>"}
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, good]))
    read = read_files([str(path)])
    spoken, others = encode_rows(read.rows, Encoder(tokenizer, len(tokenizer)))
    assert len(spoken) + len(others) + len(read.broken) == len(rows) + 1
    for row in [*read.broken, *others]:
        console(f"warning: {row.place} {row.reason}")
        assert row.place.startswith(str(path)) and row.reason
    assert f"{path}:{len(rows) + 1}" in spoken
    make_steps([row for row in read.rows if row.place in spoken], spoken)


def test_rows_of_a_data_set(tmp_path, monkeypatch, console_is_clean):
    """All texts in one file, which check_data shows."""
    texts = [t for t in HOSTILE.values() if clean_text(t).strip() and len(t) < 10_000]
    lines = [json.dumps({"prompt": text, "answer": text}) + "\n" for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (tmp_path / "hostile_reward.py").write_text("def score(prompt, reply, row): return 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, err = call(
        *("ragen_jax.check_data", "--config=dataset", f"--rows={len(texts)}"),
        *("--config.env.options.path=rows.jsonl", "--config.eval.every=0"),
        "--config.env.options.reward=hostile_reward:score",
    )
    assert (code, err) == (0, "") and not raw_characters(out)
    left_out = sum(f"row {row} (" not in out for row in range(len(texts)))
    assert left_out < 10  # prompts that differ from others only in case or spaces
    assert "\\u202eevil" in out and "\\x1b[2J" in out and "推理崩溃" in out and "\ufffd" in out


@every_text
def test_messages_of_commands(name, capsys):
    with pytest.raises(SystemExit, match="2"), command.bad_input():
        raise ValueError(HOSTILE[name])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert not raw_characters(err) and len(err) < 50_000


def file_name(text):
    """Return a text as a file name, as far as possible."""
    name = clean_text(text[:100]).replace("/", "").replace("\0", "")
    return f"a{name.encode()[:200].decode(errors='ignore')}"


@every_text
def test_folders_of_runs(name, tmp_path, tokenizer, console_is_clean):
    """A run's folder has the text as its name and in its config, and its page is written."""
    text = HOSTILE[name][: 1 << 16]
    folder = tmp_path / file_name(text)
    replies = [clean_text(text)[:2000]]
    records = [
        recorded_episode(tokenizer, replies, group=g, member=m) for g in (0, 1) for m in (0, 1)
    ]
    records[0] |= {"error": text}
    records[0]["turns"][0]["messages"][0]["content"] = text
    changes = {"env.name": text, "model.path": text}
    write_run(folder, steps=2, fields=changes, episodes=[(2, records)])
    with lock_workdir(folder):
        write_events(folder / "events.jsonl", 1, [Fired("errors", "warn", text)])
        config = json.loads((folder / "config.json").read_text()) | {"also": {text: text}}
        log = MetricsLog(
            folder / "metrics.jsonl", last_step=2, trackers=["tensorboard"], config=config
        )
        log.write(3, {"time/step": 1.0, f"env/{text[:100]}": 2.0})
        log.close()
        steps = [event.step for event in read_tensorboard(folder / "tensorboard")]
        assert max(steps) == 3
    page = write_report([folder])
    console(f"report: {page}")
    assert page.read_text().startswith("<!doctype html>") and page.stat().st_size > 10_000


def test_a_folder_that_is_not_utf_8_is_refused(tmp_path, capsys):
    """TensorStore, which writes the checkpoints, cannot use such names."""
    folder = tmp_path / os.fsdecode(b"run\xff")
    with pytest.raises(SystemExit, match="2"), command.bad_input(), lock_workdir(folder):
        pass
    err = capsys.readouterr().err
    assert "run\\udcff, which is not UTF-8; use another folder" in err
    assert not folder.exists()


CONFIG = """
import asyncio
import sys

sys.path.insert(0, {tests!r})
from hostile_texts import HOSTILE

from ragen_jax import envs
from ragen_jax.configs import base
from ragen_jax.envs.types import Step

TEXTS = [text for text in HOSTILE.values() if len(text) < 20_000]


class Mute(BaseException):
    def __str__(self):
        raise GeneratorExit


KINDS = (ValueError, asyncio.CancelledError, GeneratorExit, Mute, SystemExit, RecursionError)


class Hostile:
    actions, instructions = ("1", "2"), "Say a number. \\ud800"

    def __init__(self, *, split):
        self.first = 0 if split == "train" else 1

    def reset(self, seed):
        return 2 * (seed % 1000) + self.first

    def render(self, state):
        text = TEXTS[state % len(TEXTS)]
        print(text)
        if state % 3 == 0 and self.first == 0:
            raise KINDS[state // 6 % 6](text)
        return f"{{state}} {{text}}"

    def identity(self, state):
        return f"{{state}}\\ud800"

    def step(self, state, action, rng):
        return Step(state, 1.0, True, {{"success": True}})


envs.ENVS["hostile"] = Hostile


def get_config():
    config = base.get_config()
    config.env.update(name="hostile", max_turns=2, actions_per_turn=1, max_actions=2)
    config.env.max_error_share = 1.0
    config.model.path = {model!r}
    config.steps = 1
    config.rollout.update(groups=36, group_size=2, max_new_tokens=4, save_every=1, compact=False)
    config.optimizer.update(minibatches=1, micro_batch=18)
    config.diagnose.update(flow_every=0, every=0)
    config.eval.update(episodes=4, every=1)
    for rule in ("variance", "success", "empty"):
        config.stopping[rule].action = "off"
    return config
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "redirection",
    [
        pytest.param(x, marks=pytest.mark.slow)
        for x in ("> /dev/full", "| head -1", "0<&- 1>&- 2>&-", "> seen")
    ],
)
def test_a_run_ends_as_if_nothing_had_happened(redirection, tmp_path, language_model):
    """Use all texts in observations and in errors of every kind, on consoles of every kind."""
    config = tmp_path / "hostile.py"
    config.write_text(CONFIG.format(tests=str(ROOT / "tests"), model=str(language_model)))
    words = [sys.executable, "-m", "ragen_jax.train", f"--config={config}", "--workdir=run"]
    done = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}', "bash", *words],
        capture_output=True,
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row, _) = read_metrics(tmp_path / "run" / "metrics.jsonl")[::-1]
    assert row["step"] == 1 and 24 <= row["rollout/errors"] < 40  # some texts are too long as well
    records = read_rollouts(tmp_path / "run" / "rollouts", pytest.fail)[1]
    lines = [record["error"].rpartition("\n")[2] for record in records if "error" in record]
    kinds = {line.partition(":")[0] for line in lines}
    assert kinds >= {"ValueError", "CancelledError", "GeneratorExit", "Mute", "SystemExit"}
    events = read_events(tmp_path / "run" / "events.jsonl", pytest.fail)
    failed = [event["reason"] for event in events if event["rule"] == "console"]
    why = {"> /dev/full": "No space left on device", "| head -1": "Broken pipe"}.get(redirection)
    expected = f"standard output cannot be written ({why}); its output is lost"
    assert failed == ([expected] if why else [])
    assert (tmp_path / "run" / "report.html").exists()
    if redirection == "> seen":
        shown = (tmp_path / "seen").read_bytes() + done.stderr
        assert not raw_characters(shown.decode("latin-1")) and b"\\x1b" in shown
