"""whole.py: a file is the one of before or the one of after, whoever dies in its writing."""

import os
import subprocess
import sys

import pytest

from ragen_jax.whole import remove_left_over, whole, write_whole

pytestmark = pytest.mark.fast


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_replaces_what_was_there(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("before")
    write_whole(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    with whole(path, "wb") as file:
        file.write(b"\x00\xff")
        assert path.read_bytes() == "naïve\n".encode()  # until it is whole
    assert path.read_bytes() == b"\x00\xff"
    assert names(tmp_path) == ["rows.jsonl"]


def test_who_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), whole(path) as file:
        file.write("half")
        raise ZeroDivisionError
    assert path.read_text() == "before" and names(tmp_path) == ["config.json"]


KILLED = """
import os, signal, sys
from ragen_jax.whole import whole
with whole(sys.argv[1]) as file:
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
    remove_left_over(tmp_path)
    assert path.read_text() == "before" and names(path.parent) == ["step_000002.json"]


def test_a_link_stays_one_and_what_is_no_file_is_written_to(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link, pipe = tmp_path / "elsewhere" / "a", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    write_whole(link, "one")
    write_whole(link, "two")
    assert link.is_symlink() and target.read_text() == "two"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "three")
    assert os.read(reading, 99) == b"three" and pipe.is_fifo()
    os.close(reading)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "elsewhere", "four")
    assert names(tmp_path) == ["elsewhere", "link", "pipe"]
