"""Creates and locks the folders of runs, and sets outdated evaluations in them aside."""

import contextlib
import functools
import itertools
from collections.abc import Generator
from pathlib import Path

from ragen_jax.core.clean_text import clean_text
from ragen_jax.core.sharding import is_main_process
from ragen_jax.storage.atomic_io import PATH_ERRORS, make_folder, remove_leftovers, with_retries
from ragen_jax.storage.cache import open_locked
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links

LOCK = ".lock"  # name of the lock file in a run's folder while the run is active


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Generator[None]:
    """Lock a run's folder for the first process during the body; create the folder if needed.

    If the file system does not support locks, a warning is printed. A folder that is still empty at
    the end is removed.

    Raises:
      ValueError: another run has locked the folder, its path is not UTF-8 or not usable as a
        folder, or a link would redirect its files elsewhere (links.py).
      DiskRefused: the folder cannot be created or written.
    """
    path = str(workdir.resolve())
    if clean_text(path) != path:  # TensorStore cannot write to a path that is not UTF-8
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
        if error.errno not in PATH_ERRORS:
            raise
        raise ValueError(f"--workdir is {workdir}, which cannot be used: {error}") from None
    with file:
        try:
            with_retries(functools.partial(remove_leftovers, workdir), workdir)
            yield
        finally:
            # Closing the file releases the lock. A lock file that a failing disk cannot delete does
            # no harm, and its error must not hide an earlier disk error.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                if not any(workdir.iterdir()):  # nothing was written
                    workdir.rmdir()


def new_folder(parent: Path, name: str) -> Path:
    """Create the folder `name` in `parent`; if it exists, name-2, name-3, ... instead.

    Two commands that start in the same second therefore get two folders.
    """
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        make_folder(parent)
        with contextlib.suppress(FileExistsError):
            with_retries(path.mkdir, path)
            return path
    raise AssertionError("numbers do not end")


def set_evaluations_aside(workdir: Path, step: int) -> None:
    """Move the evaluations up to a step aside, because they were played with other settings."""
    old = workdir / "eval"
    if old.exists():
        aside = workdir / f"eval_until_step_{step:06d}"
        with_retries(functools.partial(old.rename, aside), aside)
        console(f"config.eval has changed; moved earlier evaluations to {aside}")
