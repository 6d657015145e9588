"""A full disk: the run waits, then ends with everything that was saved; no file is half written."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cli_commands import ROOT

from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.storage.atomic_io import (
    DiskRefused,
    append_line,
    atomic_write,
    retry_disk_errors,
    with_retries,
)
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update.state import TrainState

MEGABYTE = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """disk(megabytes) -> a folder on a separate file system of that size."""
    mounted = []

    def make(megabytes):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder, left=0):
    """Fill a disk except for `left` bytes; return the file that fills it."""
    filler = folder / "filler"
    free = shutil.disk_usage(folder).free - left
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while free > 0:
            free -= file.write(b"x" * min(free, 4096))
    return filler


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_to_a_full_disk_is_as_before(disk):
    folder = disk(1)
    page, rows = folder / "report.html", folder / "metrics.jsonl"
    atomic_write(page, "before")
    with rows.open("w+b", buffering=0) as file:
        append_line(file, "one\n")
        filler = fill(folder)
        for write in (
            lambda: atomic_write(page, "after" * 1000),
            lambda: append_line(file, "x" * 9000 + "\n"),  # part of it may still fit
        ):
            with pytest.raises(DiskRefused, match="cannot be written .No space left on device"):
                write()
        assert page.read_text() == "before" and rows.read_text() == "one\n"
        assert names(folder) == ["filler", "metrics.jsonl", "report.html"]
        filler.unlink()
        append_line(file, "two\n")
    assert rows.read_text() == "one\ntwo\n"


def test_a_full_disk_is_waited_for(disk):
    folder, messages = disk(1), []
    filler, path = fill(folder), folder / "eval" / "step_000001.json"
    timer = threading.Timer(1.5, filler.unlink)
    timer.start()
    with retry_disk_errors(60, messages.append):
        atomic_write(path, "[]")
    timer.join()
    assert path.read_text() == "[]"
    assert messages == [
        f"warning: {path} cannot be written (No space left on device): retrying for 60 s",
        "written after 2 s",
    ]
    fill(folder)
    begin = time.monotonic()
    with retry_disk_errors(2, messages.append), pytest.raises(DiskRefused):
        atomic_write(path, "[1, 2]" * 1000)
    assert 2 <= time.monotonic() - begin < 10
    with pytest.raises(DiskRefused):  # this time without waiting
        atomic_write(path, "[1, 2]" * 1000)
    assert len(messages) == 3 and path.read_text() == "[]"


@pytest.mark.parametrize(
    "error, raised",
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), ConnectionResetError),
        # a text that another library raised
        (ValueError("[Errno 28] No space left on device"), ValueError),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 28 bytes"), RuntimeError),
        (IsADirectoryError(errno.EISDIR, "is a folder"), IsADirectoryError),
        (FileNotFoundError(errno.ENOENT, "no folder"), DiskRefused),  # raised without waiting
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_other_errors_are_raised_at_once(error, raised):
    calls = []

    def write():
        calls.append(1)
        raise error

    with retry_disk_errors(60, pytest.fail), pytest.raises(raised):
        with_retries(write, "it")
    assert len(calls) == 1


def state_of(number):
    rng = np.random.default_rng(number)
    params = {"w": jnp.asarray(rng.standard_normal((256, 1024)), jnp.float32)}  # 1 MB
    return TrainState(
        params=params,
        opt_state={"count": jnp.int32(number)},
        step=jnp.int32(number),
        seed_cursor={"sokoban": jnp.uint32(0)},
        kl_scale=jnp.float32(1),
    )


def test_a_checkpoint_waits_for_room_and_leaves_none_half(disk, capfd):
    folder = disk(8)
    checkpoints = Checkpoints(folder / "checkpoints", keep=3)
    checkpoints.save(1, state_of(1), wait=True)
    filler = fill(folder, left=MEGABYTE // 2)
    with pytest.raises(DiskRefused, match="checkpoints/2 cannot be written"):
        checkpoints.save(2, state_of(2))
    threading.Timer(1.5, filler.unlink).start()
    with retry_disk_errors(60, lambda line: None):
        checkpoints.save(2, state_of(2), wait=True)
    assert checkpoints.steps() == [1, 2] and checkpoints.failed() is None
    checkpoints.check(2)
    restored = checkpoints.restore(2, state_of(0))
    np.testing.assert_array_equal(restored.params["w"], state_of(2).params["w"])
    checkpoints.close()
    assert names(folder / "checkpoints") == ["1", "2"]
    assert "Traceback" not in capfd.readouterr().err


# TensorStore's threads report to an event loop that Orbax has already closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_fails_in_the_background_is_told_and_nothing_is_left(disk, monkeypatch):
    folder = disk(8)
    checkpoints = Checkpoints(folder / "checkpoints", keep=3)
    checkpoints.save(1, state_of(1), wait=True)
    filler = fill(folder, left=MEGABYTE // 2)
    with monkeypatch.context() as patch:  # as with a quota, which the free space does not show
        patch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1 << 40))
        checkpoints.save(2, state_of(2))
        deadline = time.monotonic() + 60
        while not (message := checkpoints.failed()) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert message.startswith("the checkpoint of step 2 was not saved: ")
    assert message.endswith("cannot be written (No space left on device)")
    assert names(folder / "checkpoints") == ["1"] and checkpoints.failed() is None
    filler.unlink()
    checkpoints.save(3, state_of(3), wait=True)
    assert checkpoints.steps() == [1, 3]
    checkpoints.close()


# ---- a whole run --------------------------------------------------------------------------------

QUICK = {
    **{"steps": 5, "rollout.groups": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 22},
    **{"eval.every": 2, "eval.episodes": 8, "checkpoint.every": 2, "report.every": 0},
    **{"rollout.save_every": 1, "diagnose.scores_every": 1, "env.max_turns": 2},
    "optimizer.micro_batch": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("freed", [True, False], ids=["freed", "not freed"])
def test_a_run_on_a_disk_that_fills_up(agent, disk, tmp_path, freed):
    environment = os.environ | {"XDG_CACHE_HOME": str(agent.home), "JAX_PLATFORMS": "cpu"}

    def begin(workdir, **fields):
        given = {"model.path": agent.directory} | QUICK | fields
        words = [f"--config.{name}={value}" for name, value in given.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "ragen_jax.train", f"--workdir={workdir}", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    twin, workdir = tmp_path / "twin", disk(40) / "run"
    undisturbed = begin(twin)
    assert undisturbed.wait(300) == 0, undisturbed.stderr.read()
    run = begin(workdir, **{"checkpoint.disk_retry_seconds": 120.0 if freed else 2.0})
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line.startswith("step 3/"):
            filler = fill(workdir.parent)
        if "cannot be written" in line and freed:
            filler.unlink()
    errors = run.stderr.read()
    if freed:
        assert run.wait(300) == 0, errors
        assert any("retrying for 120 s" in line for line in lines)
    else:
        assert run.wait(300) == 4
        last = errors.rstrip().splitlines()[-1]
        assert last.startswith("error: ") and "No space left on device" in last
        assert last.endswith(f"step 2 is saved; resume with --workdir={workdir}")
        assert "Traceback" not in errors
        filler.unlink()
        again = begin(workdir)
        assert again.wait(300) == 0, again.stderr.read()

    def rows(folder):
        of_the_clock = ("time/", "throughput/", "memory/")
        return [
            {name: value for name, value in row.items() if not name.startswith(of_the_clock)}
            for row in read_metrics(folder / "metrics.jsonl")
        ]

    assert rows(workdir) == rows(twin) and len(rows(twin)) == 6
    for folder in ("eval", "rollouts"):
        for path in filter(Path.is_file, (twin / folder).rglob("*")):
            assert (workdir / path.relative_to(twin)).read_text() == path.read_text(), path
