"""Of several processes one hangs: all end, and a line says which it was."""

import os
import subprocess
import sys
import time

import pytest
from command_line import ROOT

from ragen_jax.progress import stalled


def test_who_is_behind_is_named():
    assert stalled({0: (7, "an agreement"), 1: (5, "the stage rollout"), 2: (7, "x")}) == (
        "process 1 does not go on (last seen: the stage rollout), and all others wait for it"
    )
    assert stalled({0: (4, "x"), 1: (3, "y"), 2: (3, "y")}).startswith("process 1, 2 does not")
    assert stalled({0: (4, "x"), 1: (4, "x")}) == "no process goes on (last seen: x)"


HANGING = '''
import os
import time

from ragen_jax.envs.sokoban import Sokoban


class Hanging(Sokoban):
    """Sokoban that hangs in one of the processes, some steps after the first evaluation."""

    taken = 0

    def step(self, state, action, rng):
        Hanging.taken += 1
        while os.environ["JAX_PROCESS_ID"] == "{process}" and Hanging.taken > 200:
            time.sleep(1)
        return super().step(state, action, rng)
'''


@pytest.mark.long
@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_hangs_ends_all(agent, tmp_path, process):
    (tmp_path / "hanging.py").write_text(HANGING.replace("{process}", str(process)))
    fields = {
        **{"model.path": agent.directory, "env.name": "hanging:Hanging", "steps": 50},
        **{"eval.every": 0, "eval.episodes": 8, "report.every": 0, "rollout.groups": 4},
    }
    begin = time.monotonic()
    ended = subprocess.run(
        [
            *("launch/local_multiprocess.sh", f"--workdir={tmp_path / 'run'}"),
            *(f"--config.{name}={value}" for name, value in fields.items()),
            *("--stall_timeout=15",),
        ],
        cwd=ROOT,
        env=os.environ
        | {"NUM_PROCESSES": "2", "LOG_DIR": str(tmp_path / "logs")}
        | {"PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert time.monotonic() - begin < 200
    told = ended.stderr + (tmp_path / "logs" / "process_1.log").read_text()
    assert f"error: process {process} does not go on (last seen: " in told
