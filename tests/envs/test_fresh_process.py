"""Problems are the same in another process with other hash seeds."""

import os
import subprocess
import sys
from pathlib import Path

from env_names import OURS

HERE = Path(__file__).parent
# Each test file pins the problems of its environment. A single process reads all of them, because
# a process takes seconds to start.
CODE = """
import runpy, sys
folder, *names = sys.argv[1:]
for name in names:
    tests = runpy.run_path(f"{folder}/test_{name}.py")
    (pinned,) = [value for key, value in tests.items() if key.endswith("_0_TO_49")]
    (digest,) = [value for key, value in tests.items() if key.endswith("s_digest")]
    print(name, digest() == pinned)
"""


def test_pinned_problems_are_the_same_in_a_fresh_process():
    folders = (HERE.parents[1], HERE.parent, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, folders))
    fresh = subprocess.run(
        [sys.executable, "-c", CODE, str(HERE), *OURS],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fresh.stdout.splitlines() == [f"{name} True" for name in OURS]
