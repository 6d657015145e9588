"""atomic_io.py: a file has its old or its new contents, even if the writing process dies."""

import fcntl
import os
import subprocess
import sys

import pytest

from ragen_jax.storage.atomic_io import atomic_open, atomic_write, remove_leftovers

pytestmark = pytest.mark.fast


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_replaces_what_was_there(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("before")
    atomic_write(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    with atomic_open(path, "wb") as file:
        file.write(b"\x00\xff")
        assert path.read_bytes() == "naïve\n".encode()  # until the new file is complete
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["rows.jsonl"]


def test_who_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), atomic_open(path) as file:
        file.write("half")
        raise ZeroDivisionError
    assert path.read_text() == "before" and names(tmp_path) == ["config.json"]


KILLED = """
import os, signal, sys
from ragen_jax.storage.atomic_io import atomic_open
with atomic_open(sys.argv[1]) as file:
    file.write("half" * 100_000)
    os.fsync = lambda number: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_is_killed_leaves_what_was_there_and_its_rest_is_removed(tmp_path):
    path = tmp_path / "eval" / "step_000002.json"
    path.parent.mkdir()
    path.write_text("before")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -9
    assert path.read_text() == "before" and len(names(path.parent)) == 2
    remove_leftovers(tmp_path)
    assert path.read_text() == "before" and names(path.parent) == ["step_000002.json"]


def dead():
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_what_a_dead_writer_left_beside_a_file_goes_with_the_next_write(tmp_path):
    """As with a killed `score` command, whose output is in no folder of this package."""
    gone, odd = dead(), tmp_path / "sc*re [1].json"
    left = [tmp_path / f".{odd.name}.writing-{gone}", tmp_path / f".score.json.writing-{gone}"]
    lives = tmp_path / f".{odd.name}.writing-{os.getppid()}"
    for path in (*left, lives):
        path.touch()
    atomic_write(odd, "figures")
    assert not left[0].exists() and left[1].exists() and lives.exists()


def test_what_is_left_over_in_a_shared_folder_goes_and_what_is_being_written_stays(tmp_path):
    gone, lives = dead(), os.getppid()
    for pid in (gone, lives):
        (tmp_path / f"datasets/a/.checksums.json.writing-{pid}").parent.mkdir(
            parents=True, exist_ok=True
        )
        (tmp_path / f"datasets/a/.checksums.json.writing-{pid}").touch()
        (tmp_path / f"models/.tiny.saving-{pid}/part").mkdir(parents=True)
    # the name does not begin with a dot, so it is not a leftover
    (tmp_path / f"models/tiny_2.replaced-{gone}").touch()
    (tmp_path / f"models/.lost.replaced-{gone}").mkdir()
    (tmp_path / f"models/.there.replaced-{gone}").mkdir()
    (tmp_path / "models/there").mkdir()
    # written on another machine, as its lock shows
    (tmp_path / f"models/.made.saving-{gone}").mkdir()
    lock = (tmp_path / "models/made.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"models/.link.saving-{gone}").symlink_to(tmp_path / "elsewhere")
    remove_leftovers(tmp_path)
    assert names(tmp_path / "datasets/a") == [f".checksums.json.writing-{lives}"]
    assert names(tmp_path / "models") == sorted(
        [
            *(f".tiny.saving-{lives}", "lost", "there", f"tiny_2.replaced-{gone}"),
            *(f".made.saving-{gone}", "made.lock"),
        ]
    )
    lock.close()
    assert (tmp_path / "elsewhere").exists()


def test_a_link_stays_one_and_what_is_no_file_is_written_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link, pipe = tmp_path / "elsewhere" / "a", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    atomic_write(link, "one")
    atomic_write(link, "two")
    assert link.is_symlink() and target.read_text() == "two"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write(pipe, "three")
    assert os.read(reading, 99) == b"three" and pipe.is_fifo()
    os.close(reading)
    with pytest.raises(IsADirectoryError):
        atomic_write(tmp_path / "elsewhere", "four")
    assert names(tmp_path) == ["elsewhere", "link", "pipe"]
