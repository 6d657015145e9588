"""A second Ctrl-C ends a run at once, and says what is saved."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from ragen_jax.run.preemption import Preemption

SCRIPT = """
import ctypes, os, signal, sys
from pathlib import Path
from ragen_jax.run.preemption import Preemption

signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest may ignore it
preemption = Preemption(Path(sys.argv[1]))
preemption.saves = True
os.kill(os.getpid(), signal.SIGINT)
os.kill(os.getpid(), signal.SIGTERM)  # a request like the first one
print(preemption.signal, flush=True)
# Wait in C for a lock that is never released, as for a device. No Python handler runs meanwhile.
lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
library.pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize("saved", [(), (25, 75)])
def test_a_second_ctrl_c_quits_at_once_and_says_what_is_saved(saved, tmp_path):
    for step in saved:
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first = process.stdout.readline()
        assert first.startswith("stopping after this step (it will be saved); press Ctrl-C again")
        assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    what = f"step 75 is saved; resume with --workdir={tmp_path}" if saved else "no step is saved"
    assert (process.returncode, err) == (130, f"quit at once; {what}\n")


def test_a_run_that_has_ended_leaves_nothing_behind(tmp_path):
    before = threading.active_count()
    preemption = Preemption(tmp_path)
    preemption.saves = True
    signal.raise_signal(signal.SIGINT)
    assert preemption.signal == signal.SIGINT and threading.active_count() == before + 1
    reader = signal.set_wakeup_fd(-1)
    assert reader >= 0
    signal.set_wakeup_fd(reader)
    preemption.close()
    assert signal.set_wakeup_fd(-1) == -1 and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    with pytest.raises(OSError):
        os.fstat(reader)
    preemption.close()  # as by a run without a signal
