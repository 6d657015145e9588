"""Wait for something with a time limit, in a process that is suspended while it waits.

Run by tests/core/test_active_time.py, which suspends it after the line "ready".

    python suspended_script.py WAIT

Prints what the wait has found.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ragen_jax.core import progress
from ragen_jax.envs.deepcoder import process
from ragen_jax.envs.metamathqa import compare
from ragen_jax.rollout import env_calls
from ragen_jax.storage import confined, heartbeat

LIMIT = 4.0  # of each wait, in seconds; what is waited for takes one or two
SLOW = "import time; time.sleep(2)"


def ready():
    print("ready", flush=True)


def work(*_):
    """Compute for a second of processor time."""
    begin = time.process_time()
    while time.process_time() < begin + 1:
        pass
    return "finished"


def step_of_an_environment():
    ready()
    (found,) = env_calls.in_threads(work, [0], env_calls.Limits(workers=1, time_limit=LIMIT))
    return found


def program():
    code = f"print('bare', flush=True); {SLOW}; print('finished')"
    limits = process.Limits(time_s=LIMIT, memory=1 << 30, output=1000)
    ready()
    return process.run([sys.executable, "-c", code], b"", limits).end


def comparison():
    code = f"{SLOW}; print('equal', flush=True)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    ready()
    return compare._read_line(worker, LIMIT).decode().strip()


def check_of_a_file():
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder) / "child.py"
        said = ['print(\'{"stage": "it"}\', flush=True)', SLOW, "print('{\"done\": true}')"]
        child.write_text("\n".join(said))
        confined.CHILD, confined.START_SECONDS = child, 0
        ready()
        confined._confine("a file", {}, int(LIMIT / 2))
    return "passed"


def other_processes():
    with tempfile.TemporaryDirectory() as folder:
        heartbeat.exit_on_stall(Path(folder), LIMIT)
        ready()
        for _ in range(3):
            time.sleep(1.5)
            progress.NOW.meetings += 1
        return "not stuck"


WAITS = {f.__name__: f for f in (step_of_an_environment, program, comparison)}
WAITS |= {f.__name__: f for f in (check_of_a_file, other_processes)}


if __name__ == "__main__":
    print(WAITS[sys.argv[1]](), flush=True)
    os._exit(0)  # whatever threads still run
