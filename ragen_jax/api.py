"""The commands as functions, for notebooks and scripts.

    run = ragen_jax.train("sokoban", workdir="runs/first")
    run.metrics["rollout/success"], run.plot("eval/success")
    ragen_jax.evaluate(run, samples=8)
    ragen_jax.report(run)
    ragen_jax.score("rollouts.jsonl", model="DIR")

They write the same files and the same figures as the commands, and raise ValueError for unusable
input instead of ending the process. Signal handlers are as before when they return.
"""

import contextlib
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.config.command_line import DEFAULT_CONFIG, find_config, python_caller
from ragen_jax.config.messages import with_overrides
from ragen_jax.config.stored import read_run_config, require_run_folder
from ragen_jax.configs.base import Config
from ragen_jax.core.types import Metrics
from ragen_jax.run.load import Policy, for_sampling, restore_run
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.heartbeat import heartbeat
from ragen_jax.storage.metrics_reader import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OnStep = Callable[[Metrics], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder, finished or not: `rows`, `metrics`, `policy()` and `plot()`.

    Args:
      workdir: the folder.
      exit_code: of the training that returned it: 0 finished, 3 stopped by a rule, 130 and above
        stopped by a signal; None: the folder was opened, not trained.

    Raises:
      ValueError: the folder holds no run.
    """

    workdir: Path
    exit_code: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "workdir", Path(self.workdir))
        require_run_folder(self.workdir)

    @property
    def rows(self) -> list[Metrics]:
        """The rows of metrics.jsonl: one per step, and row 0 for the evaluation before them."""
        return read_metrics(self.workdir / "metrics.jsonl")

    @functools.cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Metric -> float64 array with an entry for each row; NaN where a row does not have it."""
        rows = self.rows
        names = dict.fromkeys(name for row in rows for name in row)
        return {n: np.array([row.get(n, np.nan) for row in rows], np.float64) for n in names}

    def policy(self, step: int | None = None) -> Policy:
        """Return the policy of a checkpoint: model, parameters, tokenizer and tasks.

        Args:
          step: step of a kept checkpoint; None: the newest.
        """
        return for_sampling(restore_run(self.workdir, step=step))

    def plot(self, *metrics: str) -> "Figure":
        """Return a figure with a chart for each metric; without any, the charts of the report.

        Raises:
          ValueError: the run has no such metric.
        """
        from ragen_jax.plot import draw_figure, select_charts
        from ragen_jax.report.runs import read_run

        runs = [read_run(self.workdir)]
        return draw_figure(runs, select_charts(runs, metrics))


def train(
    config: str | ConfigDict | Config | None = None,
    *,
    workdir: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
) -> Run:
    """Train, or resume the run in `workdir`, as `python -m ragen_jax.train` does.

    Args:
      config: a config, or a name as in --config: "sokoban:tiny+ppo", "my_config.py:preset". None:
        that of the run in `workdir` or, without a run there, "sokoban".
      workdir: folder of the run; None: a new folder in runs/.
      overrides: values of dotted fields, such as {"optimizer.learning_rate": 1e-4}.
      on_step: called with the metrics of each row when it is written, row 0 included. If it raises,
        the run ends, and can be resumed from its newest checkpoint.

    Returns:
      the `Run`. A run that a stopping rule or a signal ended is returned as well: see exit_code.

    Raises:
      ValueError: the config or the folder cannot be used.
      DiskRefused: as in `ragen_jax.train.train`.
    """
    from ragen_jax.train import default_workdir
    from ragen_jax.train import train as train_in

    config = _find_config(config, workdir)
    if overrides:
        if isinstance(config, Config):
            raise ValueError("overrides cannot change a frozen Config; pass a ConfigDict or a name")
        config = with_overrides(config, overrides)
    with _as_command():
        folder = Path(workdir) if workdir is not None else default_workdir(config)
        return Run(folder, train_in(config, folder, on_step=on_step))


def _find_config(
    config: str | ConfigDict | Config | None, workdir: str | Path | None
) -> ConfigDict | Config:
    """Return the config that `train` was given, or the default."""
    if config is None:
        if workdir is not None and (Path(workdir) / "config.json").exists():
            return read_run_config(str(workdir))
        config = DEFAULT_CONFIG
    if isinstance(config, str):
        return find_config(config)
    if not isinstance(config, ConfigDict | Config):
        raise ValueError(
            'config must be a name such as "sokoban:tiny", a ConfigDict or a Config, got '
            f"{type(config).__name__}; values of single fields are overrides={{FIELD: VALUE}}"
        )
    return config


def evaluate(run: "Run | str | Path", *, samples: int = 1, step: int | None = None) -> Metrics:
    """Evaluate a run on its held-out problems, as `python -m ragen_jax.evaluate` does.

    Args:
      run: a run or its folder.
      samples: episodes per problem.
      step: step of a kept checkpoint; None: the newest.

    Returns:
      eval/*, and collapse/* of the evaluation's reasoning.

    Raises:
      ValueError: the folder holds no run, or samples is below 1.
    """
    from ragen_jax.evaluate import evaluate_policy

    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1")
    with _as_command():
        trained = restore_run(_folder(run), step=step, heldout=True)
        metrics, _ = evaluate_policy(trained.config, for_sampling(trained), samples)
    return {name: float(value) for name, value in metrics.items()}


def report(*runs: "Run | str | Path", out: str | Path | None = None) -> Path:
    """Write the report of one or several runs, and return its path.

    Args:
      runs: runs or their folders.
      out: the HTML file; None: report.html in the first folder.

    Raises:
      ValueError: no run, or one without a finished step.
    """
    from ragen_jax.report.page import write_report

    if not runs:
        raise ValueError("report needs at least one run")
    with python_caller():
        return write_report([_folder(run) for run in runs], None if out is None else Path(out))


def score(
    rollouts: str | Path | Sequence[Mapping[str, Any]],
    model: "str | Path | Run",
    *,
    out: str | Path | None = None,
    **options: Any,
) -> list[Metrics]:
    """Diagnose rollouts of any trainer, as `python -m ragen_jax.score` does.

    Args:
      rollouts: a file or folder, or rows as dicts (docs/score.md has the formats).
      model: the model that scores: a directory, a hub id, or a run, whose exported policy is used.
      out: JSON file for all metrics, with a page next to it; None: no files.
      options: fields of `score.run.ScoreSettings`, such as think=("<think>", "</think>").

    Returns:
      the metrics of each step.

    Raises:
      ValueError: the model cannot be read, or no row can be used.
    """
    from ragen_jax.score.run import ScoreSettings, score_files

    directory = str(_folder(model))
    files, rows = (), ()
    if isinstance(rollouts, str | Path):
        files = (str(rollouts),)
    else:
        rows = tuple(rollouts)
    with _as_command():
        settings = ScoreSettings(
            model=directory,
            rollouts=files,
            rows=rows,
            out=None if out is None else Path(out),
            **options,
        )
        return list(score_files(settings).rows)


def _folder(run: "Run | str | Path") -> Path:
    return run.workdir if isinstance(run, Run) else Path(run)


@contextlib.contextmanager
def _as_command() -> Generator[None]:
    """Cache compiled programs, raise errors of the input, and restore signal handlers afterwards.

    Lines of progress are printed as by the commands. Outside the main thread, there are no handlers
    to restore.
    """
    enable_compilation_cache()
    with heartbeat(), _restored_handlers(), python_caller():
        yield


@contextlib.contextmanager
def _restored_handlers() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
