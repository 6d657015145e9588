"""Pages of a run that goes on: written beside it, so that training neither waits nor fails."""

import os
import subprocess
import sys
from pathlib import Path

from ragen_jax.config.per_task import is_due
from ragen_jax.core.sharding import is_main_process
from ragen_jax.report.page import write_report
from ragen_jax.storage.console import console

NICENESS = 19  # the processors are the run's before they are the page's


class Reports:
    """report.html of a run: every so many steps by a process of its own, at the end by the run's.

    What goes wrong with a page is said once and stops nothing.
    """

    def __init__(self, workdir: Path, *, every: int) -> None:
        """every: steps between two pages; 0: the last alone."""
        self.workdir = workdir
        self.every = every
        self.process: subprocess.Popen[str] | None = None
        self.warned = False

    def write_if_due(self, step: int) -> None:
        """Starts the process of a step's page, unless the one before is still at work."""
        if self._working() or not is_due(self.every, step) or not is_main_process():
            return
        command = [sys.executable, "-m", "ragen_jax.report", str(self.workdir)]
        # The accelerator, and the address of a run of several processes, are the run's own.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        try:
            self.process = subprocess.Popen(
                command,
                env=environment | {"JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # what interrupts the run does not tear a page
            )
            os.setpriority(os.PRIO_PROCESS, self.process.pid, NICENESS)
        except OSError as error:
            self._warn(str(error))

    def write_last(self) -> None:
        """Writes the page of a run that has ended, when no process is at work on one."""
        if not is_main_process():
            return
        if self.process is not None:
            self._end()
        try:
            console(f"report: {write_report([self.workdir])}")
        except Exception as error:  # of whatever kind: the run has done its work
            self._warn(f"{type(error).__name__}: {error}")

    def _working(self) -> bool:
        """Whether a process is at work; says once if the last one failed."""
        if self.process is None:
            return False
        if self.process.poll() is None:
            return True
        self._end()
        return False

    def _end(self) -> None:
        """Takes leave of the process: of one still at work after it was told to stop."""
        assert self.process is not None
        working = self.process.poll() is None
        if working:
            self.process.kill()  # the last page has more in it
        _, errors = self.process.communicate()
        if self.process.returncode and not working:
            self._warn(errors.strip().splitlines()[-1] if errors.strip() else "unknown reason")
        self.process = None

    def _warn(self, reason: str) -> None:
        if not self.warned:
            self.warned = True
            console(f"warning: {self.workdir / 'report.html'} was not written: {reason}")
