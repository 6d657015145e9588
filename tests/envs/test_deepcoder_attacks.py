"""The attacks of tests/sandbox_attacks.py on every sandbox that works on this machine."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest
from sandbox_attacks import ENDS, FUNCTIONS, TRIES

from ragen_jax.envs.deepcoder import grade
from ragen_jax.envs.deepcoder.sandbox import SANDBOXES, SOURCE, find_sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

ANSWER = "7321-held"
LIMIT = 0.3  # seconds, for programs that never end


def available():
    """The best sandbox in every test run, the others only in CI's longer tests."""
    found = []
    for name in SANDBOXES:
        try:
            found.append(find_sandbox(name))
        except ValueError:
            continue
    return [pytest.param(name, marks=[pytest.mark.long] * bool(i)) for i, name in enumerate(found)]


def left_processes():
    """Return {id: program} of processes left by a grader: children of this process, and orphans."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if parent in (1, os.getpid()) and (SOURCE.encode() in words or b"sleep" in words):
            found[int(folder.name)] = words[0]
    return found


def resident():
    """The resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def touched(path):
    """The properties that change if anyone writes to the file."""
    stat = path.stat()
    return stat.st_ino, stat.st_mode, stat.st_nlink, stat.st_mtime_ns


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The attacked files, as lines that a program reads; at the end they must be unchanged."""
    folder = tmp_path_factory.mktemp("target")
    folder.chmod(0o777)
    secret = folder / "answer"
    secret.write_text(ANSWER)
    secret.chmod(0o666)
    before = touched(secret)
    places = [Path(place) for place in ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev", ".", "~")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        os.environ["SECRET_OF_PARENT"] = ANSWER
        try:
            port = server.getsockname()[1]
            yield f"{os.getpid()}\n{folder}\n{port}\n{secret}\n"
        finally:
            del os.environ["SECRET_OF_PARENT"]
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [path.name for path in folder.iterdir()] == ["answer"]
    assert secret.read_text() == ANSWER and touched(secret) == before
    for place in places:
        assert not (place.expanduser() / "left_behind_by_attack").exists()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process, no descriptor, and no memory of a program's output may be left."""
    descriptors, memory = len(os.listdir("/proc/self/fd")), resident()
    yield
    # Processes that end with their parent may take a moment. Other orphans come and go: those of
    # graders that other workers test.
    end, left = time.monotonic() + 10.0, left_processes()
    while left and time.monotonic() < end:
        time.sleep(0.01)
        left = {process: left[process] for process in left_processes() if process in left}
    assert left == {}
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resident() - memory < 64 << 20


def check(code, deserved, sandbox, **test):
    """Grade a program by one test, with a short time limit if it should run out of time."""
    test = {"input": "", "output": "held", "testtype": "stdin_stdout"} | test
    limit = LIMIT if deserved == "time" else 10.0
    found = grade(code, [test], memory_mb=256, sandbox=sandbox, time_limit_s=limit)
    assert found.outcomes == (deserved,)
    assert (found.passed, found.total) == (int(deserved == "passed"), 1)


@pytest.mark.parametrize("sandbox", available())
@pytest.mark.parametrize("name", TRIES)
def test_what_is_tried_fails(name, sandbox, target):
    check(TRIES[name], "passed", sandbox, input=target)


@pytest.mark.parametrize("sandbox", available())
@pytest.mark.parametrize("name", ENDS)
def test_what_is_done_is_scored_as_it_deserves(name, sandbox):
    check(*ENDS[name], sandbox)


@pytest.mark.parametrize("sandbox", available())
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_scored_by_what_they_return(name, sandbox):
    function = {"testtype": "functional", "metadata": {"func_name": "f"}}
    check(*FUNCTIONS[name], sandbox, input="1", output="[42]", **function)


def test_there_are_forty_attacks_and_more():
    assert len({*TRIES, *ENDS, *FUNCTIONS}) >= 40
