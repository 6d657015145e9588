"""Faults of disks: no room, no inodes, read-only, and folders that may not be written.

Each place has a small disk of its own, a tmpfs, which needs the rights to mount one.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path

from benchmarks.chaos.trial import PATIENCE, STEPS, Trial, Wrong

HOWS = ("space", "inodes", "read-only")
PLACES: dict[str, Callable[[Trial], Path]] = {  # what is written -> its folder
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
        """Lets it refuse what is written, in one of HOWS.

        Args:
          left: bytes that are still free, for "space".
        """
        if how == "inodes":
            usage = os.statvfs(self.folder)
            if self._remount(f"nr_inodes={usage.f_files - usage.f_ffree}"):
                return
        if how == "read-only" and self._remount("ro"):
            return  # otherwise a file is open for writing
        free = shutil.disk_usage(self.folder).free - left
        try:
            with self._filler.open("wb", buffering=0) as file:
                while free > 0:
                    free -= file.write(b"x" * min(free, 1 << 16))
        except OSError:
            pass  # it is full

    def free(self) -> None:
        """Lets it take what is written."""
        self._remount("rw,nr_inodes=100000")
        self._filler.unlink(missing_ok=True)

    def _remount(self, options: str) -> bool:
        command = ["mount", "-o", f"remount,{options}", str(self.folder)]
        return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path) -> Generator[Disk]:
    """Mounts a tmpfs of 48 MiB at a folder, for the duration of the body."""
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


def refused_midway(
    place: Callable[[Trial], Path], *, freed: bool, ready: Callable[[Trial], bool] | None = None
) -> Callable[[Trial], None]:
    """A disk that refuses from a step on: freed, the run continues; otherwise it ends with code 4,
    and resumes when there is room.

    Args:
      ready: when it begins to refuse; None: at a step of the first half.
    """

    def strike(trial: Trial) -> None:
        how = HOWS[trial.rng.integers(len(HOWS))]
        left = int(trial.rng.choice([0, 4096, 500_000]))
        trial.fields["checkpoint.disk_retry_seconds"] = PATIENCE if freed else 1.0
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
                _one_error(trial, code)
                if code == 0 and ready is None and place(trial) != trial.run:
                    raise Wrong(f"it ended although nothing could be written ({how})")
                disk.free()
                process = trial.start()
            trial.expect_end(process, 0)
            trial.compare()

    return strike


def refused_at_start(place: Callable[[Trial], Path], *, freed: bool) -> Callable[[Trial], None]:
    """A cache or temporary folder that is empty and refuses from the start on.

    What can do without ends well; otherwise it ends with code 4 and a line. With room, the same
    command ends well.
    """

    def strike(trial: Trial) -> None:
        folder = place(trial)
        how = HOWS[trial.rng.integers(len(HOWS))]
        trial.variables["TMPDIR"] = str(trial.folder / "tmp")
        (trial.folder / "tmp").mkdir()
        if folder.exists():
            shutil.rmtree(folder)
        trial.fields["checkpoint.disk_retry_seconds"] = PATIENCE if freed else 1.0
        with small_disk(folder) as disk:
            disk.refuse(how)
            process = trial.start()
            if freed:
                trial.wait_until(process, lambda: "retrying" in trial.output())
                time.sleep(trial.rng.uniform(0, 3))
                disk.free()
            else:
                code = trial.expect_end(process, 0, 4)
                _one_error(trial, code)
                disk.free()
                process = trial.start()
            trial.expect_end(process, 0)
            trial.compare()

    return strike


def immutable_cache(trial: Trial) -> None:
    """A cache whose folders refuse with EPERM, as root meets it too."""
    names = ["compiled", "datasets", "models"]
    folder = trial.cache / names[trial.rng.integers(len(names))]
    keeps = trial.rng.integers(2) or folder.name == "models"  # whose warm start takes a minute
    if not keeps:
        shutil.rmtree(folder)
        folder.mkdir()
    trial.fields["checkpoint.disk_retry_seconds"] = 1.0
    if subprocess.run(["chattr", "+i", str(folder)], capture_output=True).returncode:
        raise Wrong(f"{folder} cannot be made immutable: this kind needs chattr +i")
    try:
        code = trial.expect_end(trial.start(), 0, 4)
        _one_error(trial, code)
        if code and keeps:
            raise Wrong("nothing had to be written, and yet it ended with code 4")
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)
    trial.resume()


def _one_error(trial: Trial, code: int) -> None:
    """Exit code 4 comes with one line that says what cannot be written."""
    errors = [line for line in trial.output().splitlines() if line.startswith("error:")]
    if code == 4 and (len(errors) != 1 or "cannot be" not in errors[0]):
        raise Wrong(f"exit code 4 with the lines {errors}: {trial.output()[-1500:]}")


def _last_is_saved(trial: Trial) -> bool:
    return (trial.run / "checkpoints" / str(STEPS)).exists()


def _exported(trial: Trial) -> bool:
    return (trial.run / "policy").exists()


def _first_look(trial: Trial) -> bool:
    return (trial.run / "model").exists()


DISKS: dict[str, Callable[[Trial], None]] = {"a cache with EPERM": immutable_cache}
for _freed, _then in ((True, "then room"), (False, "for ever")):
    for _name, _place in PLACES.items():
        DISKS[f"no room for {_name} {_then}"] = refused_midway(_place, freed=_freed)
    for _name, _ready in (
        ("a start", _first_look),
        ("the export", _last_is_saved),
        ("the report", _exported),
    ):
        DISKS[f"no room for {_name} {_then}"] = refused_midway(
            PLACES["the run"], freed=_freed, ready=_ready
        )
    for _name, _place in CACHES.items():
        DISKS[f"no room for {_name} {_then}"] = refused_at_start(_place, freed=_freed)
