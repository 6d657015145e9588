"""Writes the report page of an active run in a separate process, so that training does not wait."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ragen_jax.config.per_task import is_due
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process
from ragen_jax.storage.console import console

NICENESS = 19  # lowest priority: the run's processes go first


class Reports:
    """Writer of a run's report.html.

    A separate process writes it at regular intervals, and the run itself at the end. An error is
    reported once and never stops the run.
    """

    def __init__(
        self, workdir: Path, *, every: int, write_page: Callable[[list[Path]], Path]
    ) -> None:
        """
        Args:
          every: steps between two pages; 0: only the last page.
          write_page: writes the page of runs in folders and returns its path
            (report.page.write_report).
        """
        self.workdir = workdir
        self.every = every
        self.write_page = write_page
        self.process: subprocess.Popen[str] | None = None
        self.warned = False

    def write_if_due(self, step: int) -> None:
        """Start the process that writes a step's page, unless the previous process still runs."""
        if self._working() or not is_due(self.every, step) or not is_main_process():
            return
        command = [sys.executable, "-m", "ragen_jax.report", str(self.workdir)]
        # The report process must not use the run's accelerator or join its group of processes.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        try:
            self.process = subprocess.Popen(
                command,
                env=environment | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # signals to the run do not interrupt it
            )
            os.setpriority(os.PRIO_PROCESS, self.process.pid, NICENESS)
        except OSError as error:
            self._warn(str(error))

    def write_last(self) -> None:
        """Write the page of a run that has ended, after stopping a process that still writes."""
        if not is_main_process():
            return
        if self.process is not None:
            self._end()
        enter_phase("writing the report")
        try:
            console(f"report: {self.write_page([self.workdir])}")
        except Exception as error:  # a failed page must not fail the run
            self._warn(f"{type(error).__name__}: {error}")

    def _working(self) -> bool:
        """Return whether a process is running; report once if the last process failed."""
        if self.process is None:
            return False
        if self.process.poll() is None:
            return True
        self._end()
        return False

    def _end(self) -> None:
        """Collect the result of the process; kill it if it is still running."""
        assert self.process is not None
        working = self.process.poll() is None
        if working:
            self.process.kill()  # the last page replaces its page
        _, errors = self.process.communicate()
        if self.process.returncode and not working:
            self._warn(errors.strip().splitlines()[-1] if errors.strip() else "unknown reason")
        self.process = None

    def _warn(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            console(f"warning: {self.workdir / 'report.html'} was not written: {reason}")
