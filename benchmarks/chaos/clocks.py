"""Faults of clocks: the time of day jumps during a run, or between two starts."""

import os
from collections.abc import Callable

from benchmarks.chaos.trial import Trial

DAY = 86400.0
# Imported by every Python process at its start. CHAOS_CLOCK: error of the clock in seconds, seconds
# until it jumps, and error of the clock after the jump.
SITE = """\
import os
import time

_first, _until, _then = map(float, os.environ.get("CHAOS_CLOCK", "0 1e9 0").split())
_begin, _time, _time_ns = time.monotonic(), time.time, time.time_ns
_localtime, _gmtime = time.localtime, time.gmtime


def _shift():
    return _first if time.monotonic() - _begin < _until else _then


time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
time.localtime = lambda seconds=None: _localtime(time.time() if seconds is None else seconds)
time.gmtime = lambda seconds=None: _gmtime(time.time() if seconds is None else seconds)
"""


def _jump(trial: Trial) -> float:
    """Return random seconds, from an hour to three years, forwards or backwards."""
    days = float(trial.rng.choice([1 / 24, 1.0, 40.0, 1000.0]))
    return days * DAY * float(trial.rng.choice([-1, 1]))


def jump_during_run(trial: Trial) -> None:
    """Let the clock jump at a random moment of the run."""
    (trial.code / "sitecustomize.py").write_text(SITE)
    jump_seconds = trial.rng.uniform(3, 25)
    trial.variables["CHAOS_CLOCK"] = f"0 {jump_seconds:.2f} {_jump(trial):.0f}"
    trial.expect_end(trial.start(), 0)
    trial.compare()


def jump_before_resume(trial: Trial) -> None:
    """Resume a killed run with a wrong clock, which is corrected during the run."""
    (trial.code / "sitecustomize.py").write_text(SITE)
    trial.kill_midway()
    trial.variables["CHAOS_CLOCK"] = f"{_jump(trial):.0f} {trial.rng.uniform(3, 25):.2f} 0"
    trial.resume()


def change_file_times(trial: Trial) -> None:
    """Give every file of the run and of the cache a time in the past or in the future."""
    trial.kill_midway()
    for folder in (trial.run, trial.cache):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_nlink > 1:  # shared with other trials
                trial.rewrite(path, path.read_bytes())
            timestamp = path.stat().st_mtime + _jump(trial)
            os.utime(path, (timestamp, timestamp))
    trial.resume()


CLOCKS: dict[str, Callable[[Trial], None]] = {
    "the clock jumps during a run": jump_during_run,
    "the clock jumps before a resume": jump_before_resume,
    "files of the past and the future": change_file_times,
}
