"""Commands that see several devices: their number is fixed when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def on_devices(count, command, **environ):
    """Runs a command with so many virtual devices; NPROC, because XLA's collectives wait for each
    other in threads, of which it starts one a core."""
    flags = f"--xla_force_host_platform_device_count={count} {os.environ.get('XLA_FLAGS', '')}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "32"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_two_processes(words, *, devices, logs, timeout, **environ):
    """Runs train in two processes of so many virtual devices each; returns when it has ended well.

    Args:
      words: those behind the module's name. logs: folder for what the second process prints.
    """
    done = subprocess.run(
        ["launch/local_multiprocess.sh", *words],
        cwd=ROOT,
        env=os.environ
        | {"NUM_PROCESSES": "2", "DEVICES_PER_PROCESS": str(devices), "LOG_DIR": str(logs)}
        | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
