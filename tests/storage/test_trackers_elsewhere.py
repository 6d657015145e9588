"""trackers.py with the packages of Weights & Biases, MLflow and Trackio, without a network.

A run of five rows is killed, resumes after its third row and ends. Each tracker must have every
step once and record how the run ended. Run this when trackers.py or one of these packages changes:

    pip install -e .[wandb,trackio,mlflow]
    pytest -m slow tests/storage/test_trackers_elsewhere.py
"""

import collections
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("wandb", "mlflow", "trackio")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NAMES)),
        reason="needs .[wandb,mlflow,trackio]",
    ),
]
STEPS = list(range(8))


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder of a run that was killed after step 4 and resumed after step 2 up to step 7."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if "MLFLOW" not in name}
    environ |= {
        "WANDB_MODE": "offline",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.5",  # seconds between writes to its file
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    check = [sys.executable, Path(__file__).with_name("write_metrics_script.py"), folder]
    for first, last, end, code in ((0, 5, "killed", -9), (3, 8, "0", 0)):
        words = [*map(str, check), str(first), str(last), ",".join(NAMES), end]
        done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, timeout=300)
        assert done.returncode == code, done.stderr.decode()
        assert b"warning: tracker" not in done.stdout, done.stdout.decode()
    return folder


def wandb_records(path):
    """The records of an offline run in LevelDB's log format: blocks of 32 KiB that hold parts of
    records after crc, length and kind (1 full, 2 first, 3 middle, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, part = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place < len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(part)
            part = b""


def test_wandb_has_every_step_once_and_the_config(followed):
    steps, ids, codes, config = collections.Counter(), set(), [], {}
    of_folders = []
    folders = sorted((followed / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    for folder in folders:
        (path,) = folder.glob("run-*.wandb")
        before = steps.total()
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                for item in record.run.config.update:
                    config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            if record.HasField("exit"):
                codes.append(record.exit.exit_code)
            if record.HasField("history"):
                values = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                steps[values["step"]] += 1
                assert record.history.step.num == values["step"]
                assert values["rollout/success"] == values["step"] / 7
        of_folders.append(steps.total() - before)
    assert min(of_folders) >= 3  # the first folder was written before the run was killed
    assert steps == collections.Counter(STEPS)
    assert ids == {(followed / "trackers/wandb").read_text().strip()}
    assert codes == [0]
    assert config["optimizer"]["learning_rate"] == 1e-6


def test_mlflow_has_every_step_once_and_the_config(followed):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{followed / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "ragen_jax"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "rollout/success")
    assert sorted((p.step, p.value) for p in history) == [(s, s / 7) for s in STEPS]
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    params = run.data.params
    assert params["optimizer.learning_rate"] == "1e-06" and params["filter.strategy"] == "top_p"
    assert params["log.trackers"] == '["tensorboard"]'


def test_trackio_has_every_step_once_and_the_config(followed):
    (path,) = (followed / "trackio").glob("ragen_jax.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        configs = [json.loads(c) for (c,) in database.execute("select config from configs")]
    name = f"run-{(followed / 'trackers/trackio').read_text().strip()}"
    assert sorted(step for _, step, _ in rows) == STEPS and {run for run, *_ in rows} == {name}
    for _, step, metrics in rows:
        assert json.loads(metrics)["rollout/success"] == step / 7
    assert configs[-1]["optimizer"]["learning_rate"] == 1e-6
