"""Heartbeat lines while nothing is printed; if one of several processes hangs, all end."""

import os
import re
import subprocess
import sys
import threading
import time
import types

import pytest
from cli_commands import ROOT, call

import ragen_jax
from ragen_jax import api, train
from ragen_jax.configs import sokoban
from ragen_jax.core import progress
from ragen_jax.run import imitate
from ragen_jax.storage import heartbeat
from ragen_jax.storage.console import console
from ragen_jax.storage.heartbeat import describe_stall


def test_who_is_behind_is_named():
    assert describe_stall({0: (7, "an agreement"), 1: (5, "rollout"), 2: (7, "x")}) == (
        'process 1 is stuck in "rollout"; the others are waiting for it'
    )
    assert describe_stall({0: (4, "x"), 1: (3, "y"), 2: (3, "y")}).startswith(
        "process 1, 2 is stuck"
    )
    assert (
        describe_stall({0: (4, "x"), 1: (4, "x")}) == 'no process makes progress (last phase: "x")'
    )


def test_a_counted_phase_shows_how_far_it_is(passing, capsys):
    progress.note_output()
    progress.enter_phase("evaluating", total=512, unit="episodes")
    passing(0.9)
    progress.advance(96)
    passing(9)
    lines = capsys.readouterr().err.splitlines()
    assert "evaluating: 0 of 512 episodes, 1 s so far" in lines
    assert lines[-1] == "evaluating: 96 of 512 episodes, about 43 s left"
    progress.advance(416)
    passing(0.5)
    assert (
        capsys.readouterr().err.splitlines()[-1] == "evaluating: 512 of 512 episodes, 10 s so far"
    )
    progress.enter_phase("counting again", total=3)
    passing(0.4)
    assert capsys.readouterr().err.splitlines()[-1] == "counting again: 0 of 3"


def test_parts_of_a_phase_count_together_or_not_at_all(passing):
    progress.enter_phase("rollout")
    count = progress.begin_count(8, "episodes")
    count(3)
    progress.begin_count(5, "calls")(2)  # another unit, within the first
    progress.begin_count(5, "episodes")(2)  # the same unit: a part of them
    assert (progress.NOW.done, progress.NOW.total) == (5, 8)
    found = []
    thread = threading.Thread(target=lambda: found.append(progress.begin_count(9, "episodes")))
    thread.start()
    thread.join()
    found[0](7)  # it works beside the phase
    assert (progress.NOW.done, progress.NOW.total) == (5, 8)
    count(3)
    progress.begin_count(2, "calls")(1)
    assert (progress.NOW.done, progress.NOW.total, progress.NOW.unit) == (1, 2, "calls")


def test_a_wait_shows_what_the_other_thread_has_done(passing, capsys):
    def play():
        progress.enter_phase_beside("rollout")
        progress.begin_count(8, "episodes")(2)

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    progress.enter_phase("update", total=3, unit="rows")
    passing(0.4)
    progress.enter_phase("waiting for episodes", waits=True)
    passing(0.6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "update: 0 of 3 rows"
    assert lines[-1] == "waiting for episodes (rollout): 2 of 8 episodes, about 3 s left"


@pytest.mark.parametrize(
    "seconds, words",
    [(0, "0 s"), (99.4, "99 s"), (99.5, "2 min"), (3600, "60 min"), (5969, "99 min")]
    + [(5970, "1.7 h"), (90_000, "25.0 h")],
)
def test_durations_have_a_readable_unit(seconds, words):
    assert progress.duration(seconds) == words


def test_seconds_are_those_of_the_whole_phase(passing, capsys):
    progress.enter_phase("update 1")
    since = progress.NOW.since
    passing(2)
    progress.enter_phase("update 2", since=since)
    passing(1)
    assert capsys.readouterr().err.splitlines()[-1] == "update 2: 3 s so far"


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(progress, "NOW", progress.Progress())
    monkeypatch.setattr(heartbeat, "EVERY", 0.3)
    monkeypatch.setattr(heartbeat, "TICK", 0.01)


@pytest.fixture
def passing(monkeypatch):
    """passing(seconds): advance the clock, and look at it every hundredth of a second."""
    clock, limit = types.SimpleNamespace(now=100.0), 0.3
    for module in (progress, heartbeat):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    for name in ("NOW", "BESIDE"):
        monkeypatch.setattr(progress, name, progress.Progress())

    def go(seconds):
        nonlocal limit
        for _ in range(round(seconds / 0.01)):
            clock.now += 0.01
            limit = heartbeat._write_heartbeat(limit)

    return go


def test_where_nothing_is_printed_a_line_says_what_goes_on(passing, capsys):
    def lines():
        return capsys.readouterr().err.splitlines()

    progress.note_output()
    passing(0.2)
    console("a line")
    passing(0.2)
    assert lines() == []
    progress.enter_phase("building the house")
    passing(1.2)
    found = lines()
    assert 3 <= len(found) <= 4 and set(found) <= {
        "building the house",
        "building the house: 1 s so far",
    }
    progress.enter_phase("painting door 7 of 9")
    passing(0.4)
    assert "painting door 7 of 9" in lines()
    progress.note_output(begun=True)  # after a first step, the user knows how long a step takes
    passing(2.5)
    assert 2 <= len(lines()) <= 3  # after 0.3, 0.6 and 1.2 s


def test_signs_end_with_what_they_are_of(hasty, capsys):
    with heartbeat.heartbeat():
        time.sleep(1.0)
    assert "starting" in capsys.readouterr().err
    time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_a_heartbeat_within_another_is_the_same(hasty, capsys):
    with heartbeat.heartbeat(), heartbeat.heartbeat():
        progress.enter_phase("sleeping")
        threads = [t for t in threading.enumerate() if "watch" in t.name]
    assert len(threads) == 1 and progress.NOW.place == "sleeping"
    with heartbeat.heartbeat():  # the next one begins anew
        assert progress.NOW.place == "starting"


def wait(*about, **settings):
    time.sleep(1.0)
    raise ValueError("done")


@pytest.mark.parametrize("call", ["api.evaluate", "train.train", "tiny_model"])
def test_functions_give_signs_of_life_as_the_commands_do(
    call, tmp_path, monkeypatch, hasty, capsys
):
    config = sokoban.get_config()
    monkeypatch.setattr(api, "restore_run", wait)
    monkeypatch.setattr(imitate, "imitate", wait)
    monkeypatch.setattr(train, "start", wait)
    functions = {
        "api.evaluate": lambda: ragen_jax.evaluate(tmp_path),
        "train.train": lambda: train.train(config, tmp_path / "run"),
        "tiny_model": lambda: imitate.tiny_model(config, tmp_path),
    }
    with pytest.raises(ValueError, match="done"):
        functions[call]()
    assert "starting" in capsys.readouterr().err


@pytest.mark.slow
def test_a_command_gives_signs_of_life(agent, tmp_path, monkeypatch, hasty):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    code, _, err = call(
        *("ragen_jax.train", f"--config.model.path={agent.directory}", "--config.steps=0"),
        *(f"--workdir={tmp_path / 'run'}", "--config.eval.episodes=8"),
    )
    assert code == 0
    places = "loading|building the (environments|learner)|generating held-out problems|eval"
    assert re.search(f"^({places})", err, re.M), err


HANGING = '''
import os
import time

from ragen_jax.envs.sokoban import Sokoban


class Hanging(Sokoban):
    """Sokoban that hangs in one of the processes, some steps after the first evaluation."""

    taken = 0

    def step(self, state, action, rng):
        Hanging.taken += 1
        while os.environ["JAX_PROCESS_ID"] == "{process}" and Hanging.taken > 200:
            time.sleep(1)
        return super().step(state, action, rng)
'''


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_hangs_ends_all(agent, tmp_path, process):
    (tmp_path / "hanging.py").write_text(HANGING.replace("{process}", str(process)))
    fields = {
        **{"model.path": agent.directory, "env.name": "hanging:Hanging", "steps": 50},
        **{"eval.every": 0, "eval.episodes": 8, "report.every": 0, "rollout.groups": 4},
    }
    begin = time.monotonic()
    ended = subprocess.run(
        [
            *("launch/local_multiprocess.sh", f"--workdir={tmp_path / 'run'}"),
            *(f"--config.{name}={value}" for name, value in fields.items()),
            *("--stall_timeout=15",),
        ],
        cwd=ROOT,
        env=os.environ
        | {"NUM_PROCESSES": "2", "LOG_DIR": str(tmp_path / "logs")}
        | {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert time.monotonic() - begin < 200
    output = ended.stderr + (tmp_path / "logs" / "process_1.log").read_text()
    assert f'error: process {process} is stuck in "' in output
