"""Send metrics.jsonl to experiment trackers: TensorBoard, Weights & Biases, MLflow, Trackio.

    metrics.jsonl -> Follower, a thread for each tracker -> the tracker's files or server

The file is authoritative, and trackers follow it: a step never waits for a tracker. A tracker that
fails is retried later from the first row that it lacks, and a resumed run sends the rows that the
earlier process did not. Packages are imported only for the trackers in use.

    tensorboard  WORKDIR/tensorboard, rewritten from metrics.jsonl by every start of a run
    wandb        set by WANDB_MODE, WANDB_PROJECT, WANDB_DIR, ...; its files are in WORKDIR/wandb
    mlflow       MLFLOW_TRACKING_URI, by default WORKDIR/mlflow.db; MLFLOW_EXPERIMENT_NAME
    trackio      TRACKIO_DIR, TRACKIO_SPACE_ID, ...; by default Trackio's folder on this machine

The last three only append: a step that they have is never changed, even if the run resumes from an
earlier checkpoint and plays the step again.
"""

import dataclasses
import importlib
import json
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ragen_jax.core.clean_text import clean_text, describe_error
from ragen_jax.core.flatten import flatten
from ragen_jax.core.types import Metrics
from ragen_jax.storage.atomic_io import atomic_write

PROJECT = "ragen_jax"  # default project, if the environment variables name none
RETRY_SECONDS = 60.0  # minimum seconds between two tries of a tracker that fails
CLOSE_SECONDS = 30.0  # time limit for all trackers together at a run's end


@dataclasses.dataclass(frozen=True)
class Opened:
    """A tracker that is ready for rows. Its functions may raise any exception."""

    last_step: int  # the newest step that it has; -1: none
    log: Callable[[Metrics, float], None]  # takes a row and its time in seconds since the epoch
    close: Callable[[int], None]  # called after the last row with the run's exit code


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of tracker: its package, and the function that opens it."""

    package: str
    open: Callable[[Any, Path, dict[str, Any]], Opened]  # takes (package, workdir, run's config)


# ------------------------------------------------------------------------------ the trackers


def open_tensorboard(package: Any, workdir: Path, config: dict[str, Any]) -> Opened:
    """Open event files in WORKDIR/tensorboard, replacing the files of earlier starts.

    Each row is one record. The HParams page shows the config.
    """
    # Not with SummaryWriter: a full disk silently ends its thread.
    events, summaries = package.proto.event_pb2, package.proto.summary_pb2
    folder = workdir / "tensorboard"
    folder.mkdir(exist_ok=True)
    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer = package.event_file_writer.EventsWriter(str(folder / "events"))

    def write(seconds, **what):
        writer.write_event(events.Event(wall_time=seconds, **what))

    # The START record makes a running TensorBoard discard the steps of the earlier files.
    write(time.time(), session_log=events.SessionLog(status=events.SessionLog.START))
    started, session, _ = package.summary.hparams(_texts(config), {})
    write(time.time(), summary=started)
    write(time.time(), summary=session)
    writer.flush()

    def log(row, seconds):
        values = [
            summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "step"
        ]
        write(seconds, step=row["step"], summary=summaries.Summary(value=values))
        writer.flush()

    return Opened(-1, log, lambda exit_code: writer.close())


def open_wandb(wandb: Any, workdir: Path, config: dict[str, Any]) -> Opened:
    """Open a run of Weights & Biases.

    Offline, each start of the run makes a separate folder; `wandb sync` joins them.
    """
    id_ = _kept_id(workdir, "wandb") or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:12]
    folder = os.environ.get("WANDB_DIR", str(workdir))
    record = wandb.proto.wandb_internal_pb2.Record
    earlier = sorted(Path(folder).glob(f"wandb/offline-run-*-{id_}/run-{id_}.wandb"))
    run = wandb.init(
        id=id_,
        resume="allow",
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", workdir.resolve().name),
        dir=folder,
        config=config,
        allow_val_change=True,  # some fields may change when a run resumes
        settings=wandb.Settings(console=os.environ.get("WANDB_CONSOLE", "off")),
    )
    _keep_id(workdir, "wandb", id_)
    run.define_metric("*", step_metric="step")
    # The newest step is that of the server or, offline, of the files of earlier starts: a killed
    # process loses the rows of its last seconds.
    last_step = run.step - 1 if run.resumed else -1
    if run.settings.mode != "online":
        last_step = max((_last_step(path, record) for path in earlier), default=-1)

    def log(row, seconds):
        run.log(dict(row), step=row["step"], commit=True)

    return Opened(last_step, log, lambda exit_code: run.finish(exit_code=exit_code))


def _last_step(path: Path, record: Any) -> int:
    """Return the newest step in the intact part of a W&B file; -1 if there is none.

    The file is a LevelDB log: blocks of 32 KiB that contain parts of records. Each part follows its
    CRC, length and kind (1 whole, 2 first, 3 middle, 4 last).

    Args:
      record: protobuf message class of the records.
    """
    data, place, part, last_step = path.read_bytes(), 7, b"", -1  # after the file's header
    while True:
        left = 2**15 - place % 2**15
        place += left if left < 7 else 0
        if place + 7 > len(data):
            return last_step
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += 7 + length
        if kind not in (1, 2, 3, 4) or place > len(data):
            return last_step
        part += data[place - length : place]
        if kind in (1, 4):
            found, part = record.FromString(part), b""
            if found.HasField("history"):
                last_step = max(last_step, found.history.step.num)


def open_mlflow(mlflow: Any, workdir: Path, config: dict[str, Any]) -> Opened:
    """Open a run of MLflow, with the config as its parameters."""
    entities = mlflow.entities
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    artifacts = None if uri else (workdir / "mlruns").resolve().as_uri()
    database = (workdir / "mlflow.db").resolve()
    if not uri and not database.exists():
        # Made under another name, then renamed: MLflow never completes a half-made database.
        fresh = database.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        mlflow.MlflowClient(f"sqlite:///{fresh}").search_experiments()
        fresh.replace(database)
    client = mlflow.MlflowClient(uri or f"sqlite:///{database}")
    id_, last_step = _kept_id(workdir, "mlflow"), -1
    if id_:
        client.update_run(id_, status="RUNNING")
        history = client.get_metric_history(id_, "step")
        last_step = max((point.step for point in history), default=-1)
    else:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = client.get_experiment_by_name(name)
        experiment_id = (
            client.create_experiment(name, artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        id_ = client.create_run(experiment_id, run_name=workdir.resolve().name).info.run_id
        params = [entities.Param(k, str(v)[:MLFLOW_TEXT]) for k, v in _texts(config).items()]
        for first in range(0, len(params), MLFLOW_PARAMS):
            client.log_batch(id_, params=params[first : first + MLFLOW_PARAMS])
        _keep_id(workdir, "mlflow", id_)

    def log(row, seconds):
        # `step` is last: if MLflow has it, it has the whole row.
        names = [*(name for name in row if name != "step"), "step"]
        at = round(1000 * seconds)
        points = [entities.Metric(name, float(row[name]), at, row["step"]) for name in names]
        for first in range(0, len(points), MLFLOW_METRICS):
            client.log_batch(id_, metrics=points[first : first + MLFLOW_METRICS])

    def close(exit_code):
        status = {0: "FINISHED", 143: "KILLED"}.get(exit_code, "FAILED")
        client.set_terminated(id_, status)

    return Opened(last_step, log, close)


# MLflow's limits: parameters and metrics per request, and characters of a parameter's value.
MLFLOW_PARAMS, MLFLOW_METRICS, MLFLOW_TEXT = 100, 1000, 6000


def open_trackio(trackio: Any, workdir: Path, config: dict[str, Any]) -> Opened:
    """Open a run of Trackio, named after the workdir and an id."""
    id_ = _kept_id(workdir, "trackio") or uuid.uuid4().hex[:12]
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{workdir.resolve().name}-{id_}",
        config=config,
        resume="allow",
    )
    _keep_id(workdir, "trackio", id_)

    def log(row, seconds):
        # Without `step`, a name that Trackio reserves.
        values = {name: value for name, value in row.items() if name != "step"}
        run.log(values, step=row["step"])

    return Opened(run._next_step - 1, log, lambda exit_code: run.finish())


TRACKERS = {
    "tensorboard": Kind("tensorboardX", open_tensorboard),
    "wandb": Kind("wandb", open_wandb),
    "mlflow": Kind("mlflow", open_mlflow),
    "trackio": Kind("trackio", open_trackio),
}


def require(names: Iterable[str]) -> None:
    """Import the packages of trackers, before anything compiles.

    Raises:
      ValueError: a package is missing, or cannot be used as it is set up.
    """
    for name in names:
        package = TRACKERS[name].package
        try:
            module: Any = importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"config.log.trackers has {name!r}, which needs the package {package} "
                f"({error}): pip install 'ragen_jax[{name}]', or remove it from "
                "config.log.trackers"
            ) from error
        if name == "wandb" and module.setup().settings.mode == "online":
            # Without a key, W&B would ask for a key at the terminal in the middle of the run.
            if not module.login(prompt=False):
                raise ValueError(
                    "config.log.trackers has 'wandb', which is not logged in; run `wandb "
                    "login`, or set WANDB_API_KEY or WANDB_MODE=offline"
                )


# ------------------------------------------------------------------------------ following


class Follower:
    """A thread that sends the rows of metrics.jsonl to a tracker."""

    def __init__(
        self, name: str, path: Path, config: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        """Start the thread.

        Args:
          name: a key of TRACKERS.
          path: metrics.jsonl, in the workdir.
          say: prints a line the first time that the tracker fails.
        """
        self.name = name
        self._path, self._config, self._say = path, config, say
        self._news = threading.Event()
        self._exit_code: int | None = None
        # A daemon, so that a hanging tracker does not keep the process alive.
        self._thread = threading.Thread(target=self._follow, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Signal a new row; return at once."""
        self._news.set()

    def end(self, exit_code: int) -> None:
        """Signal that no row will follow; return at once."""
        self._exit_code = exit_code
        self._news.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the thread; return whether it ended within `seconds`."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _follow(self) -> None:
        tracker, place, last_step = None, 0, -1
        warned, next_try = False, 0.0
        while True:
            self._news.wait()
            self._news.clear()
            exit_code = self._exit_code  # read before the rows, so that no row is missed
            if exit_code is None and time.monotonic() < next_try:
                continue
            try:
                if tracker is None:
                    kind = TRACKERS[self.name]
                    package = importlib.import_module(kind.package)
                    tracker = kind.open(package, self._path.parent, self._config)
                    place, last_step = 0, tracker.last_step
                rows, place = _rows_from(self._path, place)
                for row, seconds in zip(rows, _times(rows), strict=True):
                    if row["step"] > last_step:
                        tracker.log(row, seconds)
                        last_step = row["step"]
                if exit_code is not None:
                    tracker.close(exit_code)
            except Exception as error:  # from the tracker's package, its disk or its network
                tracker, next_try = None, time.monotonic() + RETRY_SECONDS
                if not warned:
                    why = describe_error(error)
                    self._say(
                        f"warning: tracker {self.name} fails ({why}); the run continues and "
                        "retries it from time to time; metrics.jsonl has every row"
                    )
                warned = True
            if exit_code is not None:
                return


def end_all(followers: Sequence[Follower], exit_code: int, say: Callable[[str], None]) -> None:
    """End followers, all together within CLOSE_SECONDS; report the followers that were late."""
    for follower in followers:
        follower.end(exit_code)
    limit = time.monotonic() + CLOSE_SECONDS
    for follower in followers:
        if not follower.wait(limit - time.monotonic()):
            say(
                f"warning: tracker {follower.name} did not finish within {CLOSE_SECONDS:g} s "
                "after the run's end; metrics.jsonl has the missing rows, and a resumed run "
                "sends them"
            )


def _rows_from(path: Path, place: int) -> tuple[list[Metrics], int]:
    """Return (rows of the whole lines after an offset in bytes, the offset after these lines)."""
    with path.open("rb") as file:
        file.seek(place)
        whole, newline, _ = file.read().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()], place + len(whole + newline)


def _times(rows: Sequence[Metrics]) -> list[float]:
    """Return the times at which rows were written, in seconds since the epoch.

    The last row counts as written now, and earlier rows earlier according to time/total.
    """
    now, clock = time.time(), "time/total"
    newest = rows[-1].get(clock, 0.0) if rows else 0.0
    return [now - (newest - row.get(clock, newest)) for row in rows]


def _kept_id(workdir: Path, name: str) -> str | None:
    """Return the id of a workdir's run in the tracker, or None if it has none yet."""
    path = workdir / "trackers" / name
    return path.read_text().strip() if path.exists() else None


def _keep_id(workdir: Path, name: str, id_: str) -> None:
    path = workdir / "trackers" / name
    atomic_write(path, f"{id_}\n")


def _texts(config: dict[str, Any]) -> dict[str, Any]:
    """Return {"a.b": value} of a nested config, with clean strings.

    Values that are not numbers, bools or strings are written as JSON.
    """
    found = {}
    for name, value in flatten(config).items():
        if isinstance(value, str):
            value = clean_text(value)
        elif not isinstance(value, (bool, int, float)):
            value = json.dumps(value)
        found[clean_text(name)] = value
    return found
