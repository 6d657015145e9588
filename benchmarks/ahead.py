"""Steps of whole runs with rollouts ahead of the updates, against rollouts and updates in turn.

Real runs of `train` are continued in turn, some steps at a time (a piece), in a process with four
CPU devices, or in two processes with two each. The time of a step is the time between two rows of
metrics.jsonl, including saving and writing. The first and the last step of every piece are left
out: there, a rollout or an update runs alone.

Rollouts are made as long as updates by an environment that waits, as an environment over a network
does. The waiting time is the time by which updates take longer than a rollout without waiting.
"""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ml_collections import ConfigDict

from benchmarks.episodes import ROOM_SIZE, tiny_setting
from benchmarks.measure import Row, summarise
from ragen_jax import train
from ragen_jax.config.command_line import join_processes
from ragen_jax.configs import sokoban
from ragen_jax.core.sharding import is_main_process, main_process_first
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.storage.metrics_reader import read_metrics

STEPS = 5  # number of steps of a piece of a run; all but the first and the last are measured
TURNS, WORKERS = 3, 16


class WaitingSokoban(Sokoban):
    """Sokoban with delayed observations."""

    def __init__(self, *, split="train", wait=0.0):
        super().__init__(size=ROOM_SIZE, split=split)
        self.wait = wait  # seconds before each observation

    def render(self, state):
        time.sleep(self.wait)
        return super().render(state)


def make_config(model, *, wait, groups, members, tokens, ahead=0, sampling_devices=0):
    """Return the config of a run without evaluation and diagnosis; the policy may be bad."""
    config = sokoban.get_config()
    config.model.path = model
    config.env.name = "benchmarks.ahead:WaitingSokoban"
    config.env.options = ConfigDict({"wait": wait})
    config.env.update(max_turns=TURNS, time_limit=60.0, workers=WORKERS, context="full")
    config.rollout.update(
        groups=groups, group_size=members, max_new_tokens=tokens, save_every=0, ahead=ahead
    )
    config.sampling_mesh.devices = sampling_devices
    config.algorithm.mismatch_cap = 2.0  # on both sides, so that its extra pass makes no difference
    config.filter.strategy = "none"
    config.optimizer.update(minibatches=2, micro_batch=16)
    config.eval.episodes = 1
    config.diagnose.every = config.eval.every = config.report.every = 0
    config.checkpoint.export = False
    config.log.trackers = ()
    for rule in config.stopping.values():
        rule.action = "off"
    config.regimes.action = "off"
    return config


class RunInPieces:
    """A run that continues one piece at a time."""

    def __init__(self, workdir, config):
        self.workdir, self.config = Path(workdir), config
        config.steps = 0

    def run_piece(self):
        """Run the next piece and return its rows; "wall" is the seconds since the previous row."""
        before = self.config.steps
        self.config.steps = before + STEPS
        if train.train(self.config, self.workdir):
            raise RuntimeError(f"{self.workdir} did not reach step {self.config.steps}")
        rows = [row for row in read_metrics(self.workdir / "metrics.jsonl") if row["step"] > before]
        for earlier, row in zip(rows, rows[1:], strict=False):
            row["wall"] = row["time/total"] - earlier["time/total"]
        return rows[1:-1]


def median(rows, name="wall"):
    return statistics.median(row[name] for row in rows)


def run_here(folder, processes, repeats, groups, members, tokens):
    """Return {"wait": seconds, "pairs": {case: [[ours, other], ...]}, ...}.

    The pairs are medians of pieces that run in turn. "rollout", "update" and "idle" are medians
    over the measured steps of all pieces.

    Args:
      folder: of the runs. All `processes` call this with the same arguments.
    """
    sizes = dict(groups=groups, members=members, tokens=tokens)
    if processes > 1:
        join_processes(os.environ)
    with tiny_setting(context="full", turns=(TURNS,)) as (_, own_model):
        model = f"{folder}/model"  # the same path in all processes
        with main_process_first("model"):
            if is_main_process():
                shutil.copytree(own_model, model)

        def make_run(name, wait, **fields):
            return RunInPieces(f"{folder}/{name}", make_config(model, wait=wait, **sizes, **fields))

        probe = make_run("without", 0.0, sampling_devices=2)
        probe.run_piece()
        rows = probe.run_piece()
        extra_seconds = median(rows, "time/update") - median(rows, "time/rollout")
        waves = TURNS * -(-groups * members // WORKERS // processes)
        wait = round(max(0.0, extra_seconds) / waves, 4)
        cases = {
            "waits": (wait, dict(sampling_devices=2)),
            "waits, all four": (wait, dict(sampling_devices=0)),
            "computes": (0.0, dict(sampling_devices=2)),
        }
        if processes > 1:
            cases = {"waits": cases["waits"]}
        found = {"wait": wait, "pairs": {}, "rollout": {}, "update": {}, "idle": {}}
        for case, (seconds, fields) in cases.items():
            ours = make_run(f"{case} ahead", seconds, ahead=1, sampling_devices=2)
            other = make_run(f"{case} in turn", seconds, **fields)
            pairs, other_rows, our_rows = [], [], []
            for _ in range(1 + repeats):
                our_piece, other_piece = ours.run_piece(), other.run_piece()
                pairs.append([median(our_piece), median(other_piece)])
                our_rows.append(our_piece)
                other_rows.append(other_piece)
            found["pairs"][case] = pairs[1:]
            flat = [row for rows in other_rows[1:] for row in rows]
            found["rollout"][case] = median(flat, "time/rollout")
            found["update"][case] = median(flat, "time/update")
            flat = [row for rows in our_rows[1:] for row in rows]
            found["idle"][case] = median(flat, "time/idle_share")
    return found


def measure_in(processes, *sizes):
    """Return the result of `run_here` in this number of processes with four CPU devices in all."""
    program = "import json, sys; from benchmarks.ahead import run_here\n"
    program += "print(json.dumps(run_here(sys.argv[1], *map(int, sys.argv[2:]))))"
    devices = f"--xla_force_host_platform_device_count={4 // processes}"
    # NPROC: collectives wait for each other in threads, and XLA starts one thread per core.
    environ = {"JAX_PLATFORMS": "cpu", "NPROC": "32", "JAX_NUM_PROCESSES": str(processes)}
    environ["XLA_FLAGS"] = f"{devices} {os.environ.get('XLA_FLAGS', '')}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as home:  # for the held-out problems, which are never played
        environ["XDG_CACHE_HOME"] = home
        command = [sys.executable, "-c", program, f"{home}/runs", str(processes), *map(str, sizes)]
        started = [
            subprocess.Popen(
                command,
                env=os.environ | environ | {"JAX_PROCESS_ID": str(process)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for process in range(processes)
        ]
        with contextlib.ExitStack() as stack:
            for process in started:
                stack.callback(process.kill)
            outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a process of the benchmark failed")
    return json.loads(outputs[0].splitlines()[-1])


def ahead(repeats, *, groups=4, members=8, tokens=24):
    """Rollouts ahead of updates on 2 + 2 CPU devices against both in turn, equally long or not."""
    one, two = (measure_in(processes, repeats, groups, members, tokens) for processes in (1, 2))
    names = {
        "waits": (f"2 + 2 ahead, observations {1e3 * one['wait']:.3g} ms late", "2 + 2 in turn"),
        "waits, all four": ("the same", "4 in turn"),
        "computes": ("2 + 2 ahead, observations at once", "2 + 2 in turn"),
    }
    cases = [(one, case, *names[case]) for case in names]
    late = f"observations {1e3 * two['wait']:.3g} ms late"
    cases.append((two, "waits", f"1 + 1 of each of two processes ahead, {late}", "1 + 1 in turn"))
    return [
        Row(
            name=f"{name} (in turn: rollout {found['rollout'][case]:.2f} s, "
            f"updates {found['update'][case]:.2f} s; ahead: idle {found['idle'][case]:.0%})",
            other_name=other,
            target=1.25 if case == "waits" else None,
            work=1,
            unit="steps",
            **summarise(found["pairs"][case]),
        )
        for found, case, name, other in cases
    ]
