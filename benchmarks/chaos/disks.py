"""Faults of disks: no room, no inodes, read-only, and folders without write permission.

Each place gets a small disk, a tmpfs. Mounting it needs root.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path

from benchmarks.chaos.trial import MAX_WAIT, STEPS, Failure, Trial

HOWS = ("space", "inodes", "read-only")
PLACES: dict[str, Callable[[Trial], Path]] = {  # written data -> its folder
    "the run": lambda trial: trial.run,
    "checkpoints": lambda trial: trial.run / "checkpoints",
    "rollouts": lambda trial: trial.run / "rollouts",
    "scores": lambda trial: trial.run / "diagnostics",
    "evaluations": lambda trial: trial.run / "eval",
}
CACHES: dict[str, Callable[[Trial], Path]] = {
    "cached problems": lambda trial: trial.cache / "datasets",
    "the tiny agent": lambda trial: trial.cache / "models",
    "kept programs": lambda trial: trial.cache / "compiled",
    "temporary files": lambda trial: trial.folder / "tmp",
}


@dataclasses.dataclass(frozen=True)
class Disk:
    """A small disk."""

    folder: Path

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def refuse(self, how: str, left: int = 0) -> None:
        """Make the disk refuse writes, in one of the ways of HOWS.

        Args:
          left: number of bytes that stay free, for "space".
        """
        if how == "inodes":
            usage = os.statvfs(self.folder)
            if self._remount(f"nr_inodes={usage.f_files - usage.f_ffree}"):
                return
        if how == "read-only" and self._remount("ro"):
            return  # otherwise a file is open for writing: fill the disk instead
        free = shutil.disk_usage(self.folder).free - left
        try:
            with self._filler.open("wb", buffering=0) as file:
                while free > 0:
                    free -= file.write(b"x" * min(free, 1 << 16))
        except OSError:
            pass  # the disk is full

    def free(self) -> None:
        """Make the disk accept writes."""
        self._remount("rw,nr_inodes=100000")
        self._filler.unlink(missing_ok=True)

    def _remount(self, options: str) -> bool:
        command = ["mount", "-o", f"remount,{options}", str(self.folder)]
        return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path) -> Generator[Disk]:
    """Mount a tmpfs of 48 MiB at a folder, for the duration of the body."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=48m,nr_inodes=100000,mode=700",
        "tmpfs",
        str(folder),
    ]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def refuse_midway(
    place: Callable[[Trial], Path], *, freed: bool, ready: Callable[[Trial], bool] | None = None
) -> Callable[[Trial], None]:
    """Return a fault: the disk refuses writes from a moment of the run on.

    If the disk is freed, the run continues. Otherwise the run ends with code 4, and resumes when
    there is room.

    Args:
      place: folder of the disk.
      freed: whether the disk is freed after some seconds.
      ready: whether to begin to refuse; None: at a random step of the first half.
    """

    def strike(trial: Trial) -> None:
        how = HOWS[trial.rng.integers(len(HOWS))]
        left = int(trial.rng.choice([0, 4096, 500_000]))
        trial.fields["checkpoint.disk_retry_seconds"] = MAX_WAIT if freed else 1.0
        with small_disk(place(trial)) as disk:
            process = trial.start()
            if ready is None:
                trial.wait_for_step(process, int(trial.rng.integers(0, STEPS // 2)))
            else:
                trial.wait_until(process, lambda: ready(trial))
            disk.refuse(how, left if place(trial) == trial.run else 0)
            if freed:
                trial.wait_until(process, lambda: "retrying" in trial.output())
                time.sleep(trial.rng.uniform(0, 3))
                disk.free()
            else:
                code = trial.expect_end(process, 4, 0)
                _expect_one_error(trial, code)
                if code == 0 and ready is None and place(trial) != trial.run:
                    raise Failure(f"the run ended with code 0 although no write worked ({how})")
                disk.free()
                process = trial.start()
            trial.expect_end(process, 0)
            trial.compare()

    return strike


def refuse_at_start(place: Callable[[Trial], Path], *, freed: bool) -> Callable[[Trial], None]:
    """Return a fault: a cache or temporary folder is empty and refuses writes from the start on.

    The run ends with code 0 if it does not need the folder, otherwise with code 4 and a message.
    With room, the same command ends with code 0.
    """

    def strike(trial: Trial) -> None:
        folder = place(trial)
        how = HOWS[trial.rng.integers(len(HOWS))]
        trial.variables["TMPDIR"] = str(trial.folder / "tmp")
        (trial.folder / "tmp").mkdir()
        if folder.exists():
            shutil.rmtree(folder)
        trial.fields["checkpoint.disk_retry_seconds"] = MAX_WAIT if freed else 1.0
        with small_disk(folder) as disk:
            disk.refuse(how)
            process = trial.start()
            if freed:
                trial.wait_until(process, lambda: "retrying" in trial.output())
                time.sleep(trial.rng.uniform(0, 3))
                disk.free()
            else:
                code = trial.expect_end(process, 0, 4)
                _expect_one_error(trial, code)
                disk.free()
                process = trial.start()
            trial.expect_end(process, 0)
            trial.compare()

    return strike


def make_cache_immutable(trial: Trial) -> None:
    """Make the folders of a cache refuse writes with EPERM, even for root."""
    names = ["compiled", "datasets", "models"]
    folder = trial.cache / names[trial.rng.integers(len(names))]
    keeps = trial.rng.integers(2) or folder.name == "models"  # a new warm start would take a minute
    if not keeps:
        shutil.rmtree(folder)
        folder.mkdir()
    trial.fields["checkpoint.disk_retry_seconds"] = 1.0
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode:
        raise Failure(f"{folder} cannot be made immutable: this kind needs chattr +i")
    try:
        code = trial.expect_end(trial.start(), 0, 4)
        _expect_one_error(trial, code)
        if code and keeps:
            raise Failure("the run ended with code 4 although it had nothing to write")
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    trial.resume()


def _expect_one_error(trial: Trial, code: int) -> None:
    """Raise Failure unless exit code 4 comes with one line that names the file not written."""
    errors = [line for line in trial.output().splitlines() if line.startswith("error:")]
    if code == 4 and (len(errors) != 1 or "cannot be" not in errors[0]):
        raise Failure(f"exit code 4 with the lines {errors}: {trial.output()[-1500:]}")


def _expect_saved(trial: Trial) -> bool:
    return (trial.run / "checkpoints" / str(STEPS)).exists()


def _exported(trial: Trial) -> bool:
    return (trial.run / "policy").exists()


def _first_look(trial: Trial) -> bool:
    return (trial.run / "model").exists()


DISKS: dict[str, Callable[[Trial], None]] = {"a cache with EPERM": make_cache_immutable}
for _freed, _then in ((True, "then room"), (False, "for ever")):
    for _name, _place in PLACES.items():
        DISKS[f"no room for {_name} {_then}"] = refuse_midway(_place, freed=_freed)
    for _name, _ready in (
        ("a start", _first_look),
        ("the export", _expect_saved),
        ("the report", _exported),
    ):
        DISKS[f"no room for {_name} {_then}"] = refuse_midway(
            PLACES["the run"], freed=_freed, ready=_ready
        )
    for _name, _place in CACHES.items():
        DISKS[f"no room for {_name} {_then}"] = refuse_at_start(_place, freed=_freed)
