"""Signals that end a run: it saves the step and stops, or at a second Ctrl-C quits at once."""

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType

from ragen_jax.config.command_line import called_from_python
from ragen_jax.run.checkpoint import newest
from ragen_jax.storage.console import console


class Stopped(KeyboardInterrupt):
    """Raised by a signal that ends the run at once.

    It is not a SystemExit, because a SystemExit raised by an environment only breaks its episode.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Preemption:
    """Records a request by SIGTERM, SIGHUP or Ctrl-C to save after the current step and stop.

    signal: number of the received signal; 0: none
    saves: whether the run has reached its first step; until then a signal ends it at once
    """

    def __init__(self, workdir: Path) -> None:
        self.signal = 0
        self.saves = False
        self._workdir = workdir
        self._pipe = -1  # descriptor to which signals are written after the first Ctrl-C; -1: none
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # not under nohup or &
                signal.signal(number, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        if not self.saves:
            console("stopped before the first step since this start; nothing to save")
            raise Stopped(exit_code(signum))
        self.signal = signum
        if signum == signal.SIGINT:
            if called_from_python():  # a second one ends the cell of a notebook
                signal.signal(signal.SIGINT, signal.default_int_handler)
            else:
                self._quit_at_the_next()
            console(
                "stopping after this step (it will be saved); press Ctrl-C again to quit "
                "without saving"
            )

    def _quit_at_the_next(self) -> None:
        """End the process at the next Ctrl-C, even while the main thread waits for a device.

        Python calls handlers only between two instructions of the main thread, but writes the
        number of a signal to a descriptor at once. A thread reads it.
        """
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        signal.set_wakeup_fd(self._pipe)
        signal.signal(signal.SIGINT, lambda *_: None)
        threading.Thread(target=self._quit, args=(reader,), daemon=True).start()

    def _quit(self, reader: int) -> None:
        while (received := os.read(reader, 1)) != bytes([signal.SIGINT]):
            if not received:  # closed
                os.close(reader)
                return
        step = newest(self._workdir / "checkpoints")
        saved = f"step {step} is saved; resume with --workdir={self._workdir}"
        line = f"quit at once; {saved if step else 'no step is saved'}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))  # the main thread may hold stderr
        os._exit(exit_code(signal.SIGINT))

    def close(self) -> None:
        """Stop waiting for a second Ctrl-C."""
        if self._pipe >= 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            os.close(self._pipe)
            self._pipe = -1


def exit_code(signum: int) -> int:
    """Return the exit code after a signal: 143 for SIGTERM, 129 for SIGHUP, 130 for Ctrl-C."""
    return 128 + signum
