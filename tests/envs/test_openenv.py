"""Environments on OpenEnv's servers: the package's own, where it is installed, and a stand-in.

OPENENV_PYTHON may name a Python with the package `openenv` (0.10), which need not be this one.
"""

import contextlib
import gc
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from openenv_stand_in import make_app

import ragen_jax
from ragen_jax.envs import make_env
from ragen_jax.serving.loopback import on_loopback

pytestmark = pytest.mark.medium
GAMES = Path(__file__).parents[1] / "openenv_games_script.py"
HERE = sys.executable if importlib.util.find_spec("openenv") else None
PYTHON = os.environ.get("OPENENV_PYTHON", HERE)
needs_package = pytest.mark.skipif(PYTHON is None, reason="needs the package openenv")


@contextlib.contextmanager
def package_server(kind):
    """The address of a server of the package."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, str(GAMES), kind, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            assert process.poll() is None
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["stand-in", pytest.param("package", marks=needs_package)])
def numbers(request):
    if request.param == "package":
        with package_server("numbers") as url:
            yield url
    else:
        with on_loopback(make_app()) as url:
            yield url


def test_an_episode(numbers):
    environment = make_env("openenv", url=numbers)
    assert environment.instructions == (
        "Numbers environment\nYour answer is the number of your next action."
    )
    state = environment.reset(3)
    secret = state.seed % 10
    assert environment.render(state) == f"Guess from 0 to 9. Hint: {secret}"
    other = str((secret + 1) % 10)
    answers = [other, f'{{"number": "{other}"}}', "x", '{"number": 5}', str(secret)]
    shown = []
    for answer in answers:
        step = environment.step(state, answer)
        shown.append((environment.render(step.state), step.reward, step.done))
        state = step.state
    way = "lower" if int(other) > secret else "higher"
    assert shown[:3] == [
        (way, 0.0, False),
        (way, 0.0, False),
        ("error: x is no number", 0.0, False),
    ]
    assert shown[3][0].startswith("error: Invalid message; number: ")
    assert shown[4] == ("", 1.0, True) and step.info == {"success": True}


def test_members_of_a_group_play_the_same_problem(numbers):
    environment = make_env("openenv", url=numbers)
    state = environment.reset(5)
    for _ in range(3):
        step = environment.step(state, str(state.seed % 10))
        assert step.reward == 1.0


@needs_package
def test_tools_of_a_server():
    with package_server("tools") as url:
        environment = make_env("openenv", url=url)
        (tool,) = environment.tools
        assert tool["function"]["name"] == "add" and environment.instructions == "Tools environment"
        state = environment.reset(0)
        for inside, shown in (
            ('{"name": "add", "arguments": {"a": 1, "b": 2}}', "3"),
            ('{"name": "sub", "arguments": {}}', "error: no tool 'sub'; there are: add"),
            ("add", "error: a call must be JSON"),
            ('["add"]', "error: a call must be "),
        ):
            step = environment.step(state, f"<tool_call>{inside}</tool_call>")
            assert environment.render(step.state).startswith(shown) and not step.done
            state = step.state
        assert environment.step(state, "3").done


def test_a_server_that_ignores_the_seed_is_refused():
    with on_loopback(make_app(forgetful=True)) as url:
        with pytest.raises(ValueError, match="shows two problems for one seed"):
            make_env("openenv", url=url)


def test_a_server_that_is_full():
    app = make_app(capacity=1)
    with on_loopback(app) as url:
        environment = make_env("openenv", url=url, timeout=1.0)
        first = environment.step(environment.reset(0), "x")
        with pytest.raises(RuntimeError, match="CAPACITY_REACHED: full"):
            environment.step(environment.reset(1), "x")
        del first  # an episode that ended at a limit of the run
        gc.collect()
        state = environment.reset(1)
        assert environment.step(state, str(state.seed % 10)).done
        for _ in range(100):
            if not app.state.open:
                break
            time.sleep(0.02)
        assert not app.state.open


REFUSED = [
    ("", "url must begin with http"),
    ("ws://127.0.0.1:1", "url must begin with http"),
    ("http://127.0.0.1:1", "cannot be played: .*refused"),
]


@pytest.mark.parametrize(("url", "message"), REFUSED)
def test_addresses_that_are_refused(url, message):
    with pytest.raises(ValueError, match=message):
        make_env("openenv", url=url)
    with pytest.raises(ValueError, match="timeout must be above 0"):
        make_env("openenv", url="http://127.0.0.1:1", timeout=0.0)


def test_a_run_trains(numbers, language_model, tmp_path):
    fields = {
        **{"model.path": str(language_model), "env.options.url": numbers, "steps": 1},
        **{"rollout.groups": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8},
        **{"eval.every": 0, "eval.episodes": 2, "report.every": 0, "filter.strategy": "none"},
        **{"optimizer.minibatches": 1, "optimizer.micro_batch": 2, "env.max_turns": 2},
    }
    run = ragen_jax.train("openenv", workdir=tmp_path / "run", overrides=fields)
    assert run.exit_code == 0 and run.metrics["rollout/errors"].tolist() == [0]
