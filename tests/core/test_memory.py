"""memory.py: garbage of commands is collected less often, and still collected."""

import json
import os
import subprocess
import sys

import pytest

COMMAND = """
import gc, json, weakref
from ragen_jax.config import command_line

class Node:
    pass

def main(argv):
    frozen, before = gc.get_freeze_count(), gc.get_stats()
    kept = [[] for _ in range(300_000)]  # like programs
    runs = [now["collections"] - then["collections"] for now, then in zip(gc.get_stats(), before)]
    node = Node()
    node.own, found = node, weakref.ref(node)
    del node
    made = 0
    while found() is not None and made < 10**7:
        kept.append([])
        made += 1
    print(json.dumps({"frozen": frozen, "runs": runs, "made": made}))

command_line.define_config()
command_line.run_command(main)
"""


@pytest.mark.medium
def test_commands_collect_garbage_less_often(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], env=env, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["frozen"] > 50_000  # the objects of the modules
    young, middle, old = found["runs"]  # Python's own thresholds: about 390, 38 and 1
    assert 5 <= young + middle <= 20 and old == 0
    assert found["made"] < 50_000  # a cycle is found when the next objects are made


@pytest.mark.fast
@pytest.mark.parametrize(
    ("first", "module", "expected"),
    [("-m", "ragen_jax.train", 500_000), ("-m", "mine.train", 700), ("train", "ragen_jax", 700)],
)
def test_only_commands_import_without_collecting_garbage(first, module, expected):
    code = (
        f"import gc, sys; sys.argv[0] = {first!r}; import ragen_jax; print(gc.get_threshold()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, module], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == expected
