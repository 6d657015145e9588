"""Folders: the cache, and what a run's folder says about the run that it holds."""

import contextlib
import functools
import itertools
from collections.abc import Generator
from pathlib import Path

from ragen_jax.core.clean_text import clean_text
from ragen_jax.core.sharding import is_main_process
from ragen_jax.storage.atomic_io import OF_A_PATH, make_folder, remove_leftovers, with_retries
from ragen_jax.storage.cache import open_locked
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links

LOCK = ".lock"  # in a run's folder, while a process has it


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Generator[None]:
    """Holds a run's folder, which is made if need be, for the first process as long as it lives.

    Where the file system has no locks, a warning says so. A folder that nothing came into is
    removed.

    Raises:
      ValueError: another run has it, its path is no UTF-8 or cannot be that of a folder, or what is
        written there would be written elsewhere (links.py).
      DiskRefused: it cannot be made or written.
    """
    path = str(workdir.resolve())
    if clean_text(path) != path:  # which TensorStore cannot write
        raise ValueError(f"--workdir is {path}, which is not UTF-8; use another folder")
    if not is_main_process():
        yield
        return
    path = workdir / LOCK
    try:
        refuse_links(workdir)
        file = with_retries(functools.partial(open_locked, path), workdir)
    except BlockingIOError:
        holder = path.read_text().strip() or "another process"
        raise ValueError(
            f"--workdir is {workdir}, in which a run is active ({holder}); wait for it, or use "
            "another folder"
        ) from None
    except OSError as error:
        if error.errno not in OF_A_PATH:
            raise
        raise ValueError(f"--workdir is {workdir}, which cannot be used: {error}") from None
    with file:
        try:
            with_retries(functools.partial(remove_leftovers, workdir), workdir)
            yield
        finally:
            # The lock ends with the file: one that a failing disk keeps is in nobody's way, and
            # must not hide what the disk refused before.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                if not any(workdir.iterdir()):  # nothing came of it
                    workdir.rmdir()


def new_folder(parent: Path, name: str) -> Path:
    """Makes the folder `name` of `parent`, or the first of name-2, name-3, ... that is not there.

    Two commands that begin in the same second have two folders.
    """
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        make_folder(parent)
        with contextlib.suppress(FileExistsError):
            with_retries(path.mkdir, path)
            return path
    raise AssertionError("numbers do not end")


def set_evaluations_aside(workdir: Path, step: int) -> None:
    """Begins held-out success anew behind a step: what is there was played by other settings."""
    old = workdir / "eval"
    if old.exists():
        aside = workdir / f"eval_until_step_{step:06d}"
        with_retries(functools.partial(old.rename, aside), aside)
        console(f"config.eval has changed; moved earlier evaluations to {aside}")
