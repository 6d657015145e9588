"""workdir.lock_workdir: only one run uses a folder, as long as its process lives."""

import os
import subprocess
import sys

import pytest
from cli_commands import call

from ragen_jax.run.workdir import LOCK, lock_workdir

HOLDER = """
import sys
from pathlib import Path
from ragen_jax.run.workdir import lock_workdir
with lock_workdir(Path(sys.argv[1])):
    (Path(sys.argv[1]) / "something").touch()
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of the folder run/ in tmp_path."""
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_run_is_refused_while_the_first_lives(holder, tmp_path):
    folder = tmp_path / "run"
    code, _, err = call("ragen_jax.train", f"--workdir={folder}", "--config.steps=1")
    assert code == 2 and err.count("\n") == 1, err
    assert "in which a run is active" in err and f"process {holder.pid} on" in err
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "something"]
    aside = folder / f".metrics.jsonl.writing-{holder.pid}"
    aside.touch()
    holder.kill()  # as the kernel does when memory runs out
    holder.wait()
    with lock_workdir(folder):
        assert not aside.exists()
    assert [path.name for path in folder.iterdir()] == ["something"]


def test_a_folder_that_nothing_came_into_is_removed(tmp_path):
    with lock_workdir(tmp_path / "runs" / "empty"):
        assert (tmp_path / "runs" / "empty" / LOCK).exists()
    assert not (tmp_path / "runs" / "empty").exists()
    with pytest.raises(ZeroDivisionError), lock_workdir(tmp_path / "failed"):
        raise ZeroDivisionError
    assert not (tmp_path / "failed").exists()


def test_a_folder_that_cannot_be_one_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--workdir is .*file/run, which cannot be used"):
        with lock_workdir(tmp_path / "file" / "run"):
            pass


def test_the_next_command_clears_the_cache_of_what_killed_ones_left(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = tmp_path / "ragen_jax" / "models"
    folder.mkdir(parents=True)
    left, lives = (folder / f".tiny.saving-{pid}" for pid in (gone.pid, os.getppid()))
    left.mkdir()
    lives.mkdir()
    code, _, err = call("ragen_jax.export")
    assert code == 2 and "give --workdir" in err
    assert not left.exists() and lives.exists()
