"""Run commands in processes with several devices: JAX fixes their number when it starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELPERS = (ROOT / "tests", ROOT / "tests" / "model")  # as in pyproject.toml


def on_devices(count, command, **environ):
    """Start a command that sees `count` virtual devices and can import the test helpers.

    NPROC is set because XLA's collectives wait for each other in threads, and XLA starts one thread
    per core.
    """
    flags = f"--xla_force_host_platform_device_count={count} {os.environ.get('XLA_FLAGS', '')}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "NPROC": "32"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=env | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *HELPERS)))} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def in_two_processes(words, *, devices, logs, timeout, **environ):
    """Run train in two processes of `devices` virtual devices each, until both have exited with 0.

    Args:
      words: train's arguments.
      logs: folder for the output of the second process.
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
