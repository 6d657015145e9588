"""Of environments, what the tests of several go through and ask for."""

import os
import subprocess
import sys
from pathlib import Path

from ragen_jax.envs import ENVS

# Those that need an option to be built are tested where they are wrapped.
OURS = [name for name in ENVS if name not in ("gymnasium", "reasoning_gym", "textarena")]
TESTS = Path(__file__).parent


def of_a_fresh_process(file: str, function: str) -> str:
    """What a function of a test file returns in another process, whose hashes are others."""
    code = f"import runpy; print(runpy.run_path({file!r})[{function!r}]())"
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    fresh = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return fresh.stdout.strip()
