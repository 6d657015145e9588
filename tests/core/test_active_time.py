"""core/active_time.py: limits leave out the time in which a process was suspended."""

import os
import signal
import subprocess
import sys
import time

import pytest
from suspended_script import LIMIT

from ragen_jax.core import active_time

pytestmark = pytest.mark.fast

FOUND = {
    "step_of_an_environment": "finished",
    "program": "exit",
    "comparison": "equal",
    "check_of_a_file": "passed",
    "other_processes": "not stuck",
}


def test_a_gap_between_two_readings_is_left_out(monkeypatch):
    now = 100.0
    monkeypatch.setattr(active_time.time, "monotonic", lambda: now)
    clock = active_time.ActiveTime(interval=5.0)
    begin = clock.seconds()
    for passed, counted in ((3.0, 3.0), (6.0, 6.0), (3600.0, 5.0), (0.5, 0.5)):
        before, now = clock.seconds(), now + passed
        assert clock.seconds() - before == pytest.approx(counted)
    assert clock.seconds() - begin == pytest.approx(14.5)


@pytest.fixture(scope="module")
def found():
    """The last line that each wait printed, of processes that were suspended meanwhile."""
    script = os.path.join(os.path.dirname(__file__), "suspended_script.py")
    processes = {
        wait: subprocess.Popen(
            [sys.executable, script, wait],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for wait in FOUND
    }
    try:
        for process in processes.values():
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        for process in processes.values():
            # What it waits for is suspended as well, except in a session of its own.
            os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(2 * LIMIT)
        for process in processes.values():
            os.killpg(process.pid, signal.SIGCONT)
        return {name: process.communicate(timeout=60)[0] for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()


@pytest.mark.medium
@pytest.mark.parametrize("wait", FOUND)
def test_a_suspended_process_exceeds_no_limit(found, wait):
    assert found[wait].splitlines()[-1:] == [FOUND[wait]], found[wait]
