"""trackers.py: the rows that TensorBoard gets, and the cost of a tracker that fails or hangs."""

import functools
import json
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from cli_commands import call
from tensorboard_reader import hyperparameters, read_events, scalars

from ragen_jax import train
from ragen_jax.configs import base
from ragen_jax.run import log
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.log import MetricsLog
from ragen_jax.run.training import Run
from ragen_jax.storage import trackers
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.storage.trackers import TRACKERS, Kind, Opened, require

pytestmark = [
    pytest.mark.fast,
    # from commands that run in this process
    pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)"),
]

CONFIG = base.get_config().to_dict()


def row(step):
    return {"rollout/success": step / 7, "filter/kept_ratio": 1.0, "time/total": 10.0 * step}


def write(folder, steps, *names, exit_code=0):
    """Append rows of some steps to metrics.jsonl and to trackers."""
    tracked = MetricsLog(
        folder / "metrics.jsonl", last_step=steps[0] - 1, trackers=names, config=CONFIG
    )
    for step in steps:
        tracked.write(step, row(step))
    tracked.close(exit_code)


def expected(*steps):
    """Rows as `scalars` returns them, in float32."""
    return [(s, {name: float(np.float32(v)) for name, v in row(s).items()}) for s in steps]


# ---- TensorBoard --------------------------------------------------------------------------------


def test_tensorboard_has_every_row_and_the_config(tmp_path):
    write(tmp_path, range(4), "tensorboard")
    events = read_events(tmp_path / "tensorboard")
    assert events[0].file_version == "brain.Event:2"
    assert scalars(events) == expected(0, 1, 2, 3)
    given = hyperparameters(events)
    assert given["optimizer.learning_rate"] == 1e-6 and given["filter.strategy"] == "top_p"
    assert given["model.remat"] is False
    assert json.loads(given["log.trackers"]) == list(CONFIG["log"]["trackers"])
    assert set(given) >= {"seed", "env.name", "model.lora.targets", "env.options"}


def test_a_run_that_goes_on_has_no_step_twice_and_none_is_lost(tmp_path):
    write(tmp_path, range(5), "tensorboard")
    (file,) = (tmp_path / "tensorboard").iterdir()
    # as if written earlier on another machine
    file.rename(file.with_name("events.out.tfevents.1700000000.elsewhere"))
    write(tmp_path, range(3, 7), "tensorboard")  # the last checkpoint was at step 2
    events = read_events(tmp_path / "tensorboard")
    assert scalars(events) == expected(*range(7))
    # Earlier rows are as old as time/total says.
    first, *_, last = [e.wall_time for e in events if e.step or e.summary.value][2:]
    assert 59 < last - first < 61 and abs(last - time.time()) < 30


def test_a_tracker_that_is_asked_for_later_gets_the_rows_of_before(tmp_path):
    write(tmp_path, range(3))
    assert not (tmp_path / "tensorboard").exists()
    write(tmp_path, range(3, 5), "tensorboard")
    assert scalars(read_events(tmp_path / "tensorboard")) == expected(*range(5))


def test_rows_are_there_while_the_run_goes_on(tmp_path):
    def wait_for(*steps):
        limit = time.monotonic() + 20
        while True:
            files = list((tmp_path / "tensorboard").glob("*"))
            if files and scalars(read_events(tmp_path / "tensorboard")) == expected(*steps):
                return
            assert time.monotonic() < limit
            time.sleep(0.02)

    write(tmp_path, range(2))
    tracked = MetricsLog(tmp_path / "metrics.jsonl", last_step=1, trackers=["tensorboard"])
    wait_for(0, 1)  # rows from before the tracker was added
    tracked.write(2, row(2))
    wait_for(0, 1, 2)
    tracked.close()


def test_the_first_process_alone_tracks(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "is_main_process", lambda: False)
    write(tmp_path, range(3), "tensorboard")
    assert list(tmp_path.iterdir()) == []


# ---- failures -----------------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch):
    """A tracker "kept": it calls `before`, which a test may set, and keeps the row in a list."""
    found = SimpleNamespace(rows=[], closed=[], opened=0, before=lambda step: None)

    def open_kept(package, workdir, config):
        found.opened += 1

        def log_row(row, seconds):
            found.before(row["step"])
            found.rows.append(row["step"])

        return Opened(max(found.rows, default=-1), log_row, found.closed.append)

    monkeypatch.setitem(TRACKERS, "kept", Kind("json", open_kept))
    return found


def test_a_tracker_that_raises_warns_once_and_gets_its_rows_later(
    tmp_path, monkeypatch, capsys, kept
):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.0)
    fails = [2, 2, 4]  # step 2 fails again when it is retried

    def before(step):
        if step in fails:
            fails.remove(step)
            raise ConnectionError("no\nroute")

    kept.before = before
    tracked = MetricsLog(tmp_path / "metrics.jsonl", last_step=-1, trackers=["kept"])
    for step in range(6):
        tracked.write(step, row(step))
        time.sleep(0.05)
    tracked.close()
    assert kept.rows == [0, 1, 2, 3, 4, 5] and fails == [] and kept.opened == 4
    assert kept.closed == [0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "warning: tracker kept fails (ConnectionError: no route); the run continues"
    )


@pytest.mark.medium
def test_a_tracker_that_always_raises_is_not_tried_all_the_time(tmp_path, capsys, kept):
    def before(step):
        raise OSError(28, "No space left on device")

    kept.before = before
    tracked = MetricsLog(tmp_path / "metrics.jsonl", last_step=-1, trackers=["kept"])
    for step in range(50):
        tracked.write(step, row(step))
        time.sleep(0.01)
    tracked.close()
    assert kept.opened <= 2 and kept.closed == []  # at the start, and when the run ends
    assert capsys.readouterr().out.count("No space left on device") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 50


def test_tensorboard_without_a_folder_does_not_stop_the_run(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("a file")
    write(tmp_path, range(3), "tensorboard")
    assert capsys.readouterr().out.count("warning: tracker tensorboard fails (FileExists") == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_a_tracker_that_hangs_costs_the_steps_nothing(tmp_path, monkeypatch, capsys, kept):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.3)
    freed = threading.Event()
    kept.before = lambda step: freed.wait()
    tracked = MetricsLog(tmp_path / "metrics.jsonl", last_step=-1, trackers=["kept"])
    start = time.perf_counter()
    for step in range(200):
        tracked.write(step, row(step))
    assert time.perf_counter() - start < 1.0
    tracked.close()
    assert time.perf_counter() - start < 3.0
    assert "warning: tracker kept did not finish within 0.3 s" in capsys.readouterr().out
    freed.set()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 200


def test_trackers_are_told_how_a_run_ends(tmp_path, monkeypatch, kept):
    def run(end):
        tracked = MetricsLog(tmp_path / "metrics.jsonl", last_step=-1, trackers=["kept"])
        parts = SimpleNamespace(
            log=tracked,
            checkpoints=Checkpoints(tmp_path / "checkpoints"),
            precompiler=SimpleNamespace(close=lambda: None),
            preemption=SimpleNamespace(close=lambda: None),
        )
        parts.close = functools.partial(Run.close, parts)
        monkeypatch.setattr(train, "start", lambda *_, **__: (parts, None, None))
        monkeypatch.setattr(train, "learn", end)
        return train.train(base.get_config(), tmp_path)

    assert [run(lambda *_, code=code: code) for code in (0, 3, 143)] == [0, 3, 143]
    with pytest.raises(ZeroDivisionError):
        run(lambda *_: 1 / 0)
    assert kept.closed == [0, 3, 143, 1]


# ---- refusals -----------------------------------------------------------------------------------


def test_a_package_that_is_missing_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"has 'tensorboard'.*tensorboardX.*ragen_jax\[tensorb"):
        require(["tensorboard"])
    require([])
    word = "--config.log.trackers=tensorboard"
    code, _, err = call("ragen_jax.train", f"--workdir={tmp_path / 'run'}", word)
    assert code == 2 and err.count("\n") == 1, err
    assert err.startswith("error: config.log.trackers has 'tensorboard', which needs the package")
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused(tmp_path):
    word = "--config.log.trackers=('tensorboard', 'neptune')"
    code, _, err = call("ragen_jax.train", f"--workdir={tmp_path / 'run'}", word)
    assert code == 2 and err.startswith("error: config.log.trackers is ('tensorboard', 'neptune')")
