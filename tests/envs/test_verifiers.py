"""Tasksets of the package verifiers, where it is installed, and the process that plays them.

VERIFIERS_PYTHON may name a Python with the package `verifiers` (0.4), which need not be this one.
"""

import gc
import importlib.util
import json
import os
import re
import shlex
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from chat_families import TOOL_TEMPLATE, family
from transformers import PreTrainedTokenizerFast

import ragen_jax
from ragen_jax.envs import make_env
from ragen_jax.envs.types import HarnessEnvironment, HarnessResult, ModelAccess
from ragen_jax.envs.verifiers_tasks import process
from ragen_jax.envs.verifiers_tasks.env import Task
from ragen_jax.rollout.rows import Endings
from ragen_jax.serving.conversation import make_conversation
from ragen_jax.serving.engine import Sampled
from ragen_jax.serving.loopback import on_loopback
from ragen_jax.serving.server import Served, make_app
from ragen_jax.serving.sessions import Budget, Sessions

pytestmark = pytest.mark.medium
TESTS = Path(__file__).parents[1]
HERE = sys.executable if importlib.util.find_spec("verifiers") else None
PYTHON = os.environ.get("VERIFIERS_PYTHON", HERE)
needs_package = pytest.mark.skipif(PYTHON is None, reason="needs the package verifiers")


# ------------------------------------------------------------------------------ the process


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """make_env of the stand-in, which counts its starts in the file `starts`."""
    python = tmp_path / "python"
    words = [sys.executable, str(TESTS / "verifiers_stand_in_script.py")]
    python.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    python.chmod(0o755)
    (tmp_path / "starts").write_text("")
    monkeypatch.setenv("STAND_IN_STATE", str(tmp_path / "starts"))

    def make(taskset="tasks", split=None, **options):
        return make_env("verifiers", taskset=taskset, python=str(python), split=split, **options)

    make.starts = lambda: len((tmp_path / "starts").read_text())
    return make


def access(over=None, key="key"):
    calls = over if over is not None else []
    return ModelAccess("http://127.0.0.1:1/v1", key, lambda: None, calls.append)


def task(environment, kind):
    """The state of the first task of a kind."""
    seeds = (environment.reset(seed) for seed in range(1000))
    return next(state for state in seeds if environment.render(state) == kind)


def test_tasks_are_played_next_to_each_other(stand_in):
    environment = stand_in()
    assert isinstance(environment, HarnessEnvironment) and environment.actions == ()
    late, fine = task(environment, "late"), task(environment, "fine")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(environment.play, late, access(key="a"))
        time.sleep(0.05)
        second = environment.play(fine, access(key="b"))
        assert not first.done()
    assert second == HarnessResult(1.0, True, info={"key": "b"})
    assert first.result().info == {"key": "a"}
    with pytest.raises(RuntimeError, match="RuntimeError: no"):
        environment.play(task(environment, "fails"), access())
    assert not stand_in(success=2.0).play(fine, access()).success
    assert stand_in.starts() == 1  # all with the same tasks share a process


def test_splits_are_disjoint(stand_in):
    found = {}
    for split in ("imitation", "train", "eval"):
        environment = stand_in(split=split)
        found[split] = {environment.identity(environment.reset(seed)) for seed in range(200)}
    assert found["train"] == found["imitation"] and not found["train"] & found["eval"]
    assert len(found["train"]) + len(found["eval"]) == 30


def test_a_process_that_dies_is_started_again(stand_in):
    environment = stand_in()
    with pytest.raises(RuntimeError, match="ended with status 1: it died"):
        environment.play(task(environment, "dies"), access())
    assert environment.play(task(environment, "fine"), access()).reward == 1.0
    assert stand_in.starts() == 2
    changing = stand_in("changing")
    with pytest.raises(RuntimeError, match="it died"):
        changing.play(task(changing, "dies"), access())
    with pytest.raises(RuntimeError, match="listed other tasks after a restart"):
        changing.play(task(changing, "fine"), access())


@pytest.mark.parametrize("kind", ["waits", "hangs"])
def test_an_episode_that_is_given_up_ends(stand_in, monkeypatch, kind):
    """At once, or with the process, if that hangs."""
    monkeypatch.setattr(process, "PATIENCE", 0.5)
    environment, over = stand_in(), []
    with ThreadPoolExecutor() as pool:
        playing = pool.submit(environment.play, task(environment, kind), access(over))
        while not over:
            time.sleep(0.01)
        start = time.monotonic()
        over[0]()
        said = "given up" if kind == "waits" else "ended with status -9"
        with pytest.raises(RuntimeError, match=said):
            playing.result()
        assert time.monotonic() - start < 5
    assert environment.play(task(environment, "fine"), access()).reward == 1.0
    assert stand_in.starts() == (1 if kind == "waits" else 2)


def test_a_process_ends_with_its_environments(stand_in):
    environment = stand_in()
    (player,) = [environment._player]
    running = player._link._process
    del environment, player
    gc.collect()
    assert running.wait(5) == 0


REFUSED = [
    ({"taskset": ""}, "taskset must be the id of a taskset"),
    ({"taskset": "broken"}, "taskset 'broken' cannot be loaded by .*: ValueError: it is broken$"),
    ({"taskset": "silent"}, "ended with status 1: no luck"),
    ({"arguments": 3}, "arguments must be a section of fields, got 3"),
    ({"settings": {"a": {1, 2}}}, "settings must hold numbers, texts, lists and sections"),
    ({"limit": -1}, "limit must be"),
    ({"success": float("nan")}, "success must be"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_are_refused(stand_in, options, message):
    with pytest.raises(ValueError, match=message):
        stand_in(**options)


def test_a_python_without_the_package_is_refused():
    with pytest.raises(ValueError, match="'/no/python' cannot be started"):
        make_env("verifiers", taskset="x", python="/no/python")
    if HERE is None:
        with pytest.raises(ValueError, match="No module named 'verifiers'; pip install 'ragen_jax"):
            make_env("verifiers", taskset="x")


# ------------------------------------------------------------------------------ the package


class Scripted:
    """The engine of an endpoint: replies that a function chooses from the text of a prompt."""

    failure = None

    def __init__(self, tokenizer, reply):
        self._tokenizer, self._reply, self.prompts = tokenizer, reply, []

    def submit(self, ticket):
        self.prompts.append(self._tokenizer.decode(ticket.prompt))
        text = self._reply(self.prompts[-1])
        ids = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.end]
        future = Future()
        future.set_result(Sampled(np.array(ids, np.int32), np.full(len(ids), -1, np.float32)))
        return future

    @property
    def end(self):
        return self._tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.fixture
def tasksets(monkeypatch):
    monkeypatch.chdir(TESTS / "verifiers_tasksets")

    def make(taskset, **options):
        return make_env("verifiers", taskset=taskset, python=PYTHON, split=None, **options)

    return make


def play(environment, reply, tasks, calls=10):
    """(result or error of each task, the calls of each, the engine), played at once."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=family("qwen").tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        chat_template=TOOL_TEMPLATE,
    )
    engine = Scripted(tokenizer, reply)
    conversation = make_conversation(tokenizer, thinks=False)
    sessions = Sessions(Budget(calls), write=None)
    served = Served(
        engine=engine,
        conversation=conversation,
        sessions=sessions,
        name="policy",
        positions=4096,
        vocabulary=len(tokenizer),
        most=100,
        endings=Endings((engine.end,), ()),
        admin_key="admin",
        listed=set(),
    )
    keys = [sessions.open() for _ in tasks]

    def one(index, key):
        try:
            return environment.play(Task(index), ModelAccess(url, key, lambda: None, lambda _: 0))
        except RuntimeError as error:
            return str(error)

    with on_loopback(make_app(served)) as base:
        url = f"{base}/v1"
        with ThreadPoolExecutor(len(tasks)) as pool:
            results = list(pool.map(one, tasks, keys))
    return results, [sessions.find(key).calls for key in keys], engine


@needs_package
def test_a_taskset_of_one_turn(tasksets):
    environment = tasksets("letters-taskset", arguments={"tasks": 9, "letter": "o"})
    assert len({environment.identity(environment.reset(seed)) for seed in range(200)}) == 9
    results, calls, engine = play(environment, lambda prompt: "good", [0, 1, 2])
    for number, (result, (call,)) in enumerate(zip(results, calls, strict=True)):
        assert result.reward == 0.5 and not result.success
        assert result.info == {"reward_share": 0.5, "metric_length": 4.0}
        assert [m.text for m in call.shown] == ["Write a word.", f"problem {number}", "good"]
        assert call.tools == ()  # in particular no shell, which is the package's default


@needs_package
def test_a_taskset_with_an_environment_of_its_own(tasksets):
    environment = tasksets("guess-taskset", limit=10)
    right = {0: 1.0, 4: 0.25, 7: 1.0}
    results, calls, engine = play(
        environment, lambda prompt: "7" if prompt.count("Guess again") == 1 else "0", right
    )
    assert [result.reward for result in results] == [*right.values()]
    assert [result.success for result in results] == [True, False, True]
    assert [len(each) for each in calls] == [1, 3, 2]
    assert [call.continues for call in calls[1]] == [None, 0, 1]  # token by token
    limited, _, _ = play(environment, lambda prompt: "x", [3], calls=2)
    assert "the session has used its 2 calls" in limited[0]


@needs_package
def test_a_taskset_with_a_tool(tasksets):
    environment = tasksets("adder-taskset-script")
    asks = '<tool_call>{"name": "adder_add", "arguments": {"a": 5, "b": 2}}</tool_call>'
    results, calls, engine = play(
        environment, lambda prompt: "It is 7." if "<tool_response>" in prompt else asks, [5]
    )
    assert results[0] == HarnessResult(2.0, True, info={"reward_turns": 2.0})
    ((first, second),) = calls
    assert second.continues == 0 and first.tools == second.tools
    assert [m.role for m in second.shown] == ["user", "assistant", "tool", "assistant"]
    assert "7" in second.shown[2].text


@needs_package
def test_the_example_of_the_page(tasksets, tmp_path, monkeypatch):
    page = (TESTS.parent / "docs/environments/verifiers.md").read_text()
    (tmp_path / "capitals.py").write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    monkeypatch.chdir(tmp_path)
    environment = tasksets("capitals")
    results, _, _ = play(environment, lambda prompt: "It is Lima.", [0, 1, 2])
    assert [result.reward for result in results] == [0.0, 1.0, 0.0]


UNTRAINED = {"id": "user-sim"}


@needs_package
def test_agents_that_are_not_to_be_trained_need_a_model_of_their_own(tasksets):
    environment = tasksets("letters-taskset", settings=UNTRAINED)
    results, _, _ = play(environment, lambda prompt: "###DONE###", [0])
    assert "env.options.settings.user.model and .client" in results[0]


@needs_package
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taskset": "nowhere"}, "taskset 'nowhere' not found"),
        ({"taskset": "guess-taskset"}, "has no end; give limit"),
        ({"taskset": "letters-taskset", "arguments": {"bad": 1}}, "taskset.bad"),
        ({"taskset": "letters-taskset", "settings": {"bad": 1}}, "bad Extra inputs"),
    ],
)
def test_tasksets_that_are_refused(tasksets, options, message):
    with pytest.raises(ValueError, match=message):
        tasksets(**options)


@needs_package
@pytest.mark.long
@pytest.mark.parametrize("taskset", ["letters-taskset", "guess-taskset"])
def test_a_run_trains(tasksets, language_model, tmp_path, taskset):
    fields = {
        **{"model.path": str(language_model), "steps": 2, "model.dtype": "float32"},
        **{"env.options.taskset": taskset, "env.options.python": PYTHON, "env.options.limit": 12},
        **{"rollout.groups": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8},
        **{"eval.every": 0, "report.every": 0, "filter.strategy": "none", "env.max_context": 512},
        **{"optimizer.minibatches": 1, "optimizer.micro_batch": 4, "rollout.save_every": 1},
    }
    run = ragen_jax.train("verifiers", workdir=tmp_path / "run", overrides=fields)
    assert run.exit_code == 0 and run.metrics["rollout/errors"].tolist() == [0, 0]
    if taskset == "guess-taskset":
        assert run.metrics["rollout/prefix_reuse"].tolist() == [1.0, 1.0]
    for line in (run.workdir / "rollouts/step_000002.jsonl").read_text().splitlines():
        turns = json.loads(line)["turns"]
        said = turns[-1]["messages"][-1]["content"]
        reward = turns[-1]["reward"]
        if taskset == "letters-taskset":
            assert reward == pytest.approx(said.count("e") / max(len(said), 1))
        else:
            assert reward in (0.25, 1.0)
    assert not [t for t in threading.enumerate() if t.name == "server"]
