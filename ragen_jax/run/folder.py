"""The folder of an active run, which may be renamed or removed during the run."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from ragen_jax.storage.atomic_io import make_folder


class FolderGone(Exception):
    """The message says where the folder is now."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A run's folder, open for as long as the run lasts.

    path: the folder's path when the run began
    descriptor: file descriptor of the open folder, which stays valid when the folder is renamed
    """

    path: Path
    descriptor: int

    def whereabouts(self) -> Path | None:
        """Return the folder's current path; None if it was removed or the path is unknown."""
        ours = os.fstat(self.descriptor)
        with contextlib.suppress(OSError):  # nothing is at the old path
            if os.path.samestat(os.stat(self.path), ours):
                return self.path
        if not ours.st_nlink:
            return None
        try:
            return Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:  # only Linux has /proc/self/fd
            return None

    def require_path(self) -> Path:
        """Return the folder's path, to write files there.

        Raises:
          FolderGone: the folder is no longer at its path. Writing there would create a second
            folder with a part of the run.
        """
        if gone := self.explain_absence():
            raise FolderGone(gone)
        return self.path

    def explain_absence(self) -> str | None:
        """Return a message that says the folder was renamed or removed; None if it was not."""
        place = self.whereabouts()
        if place == self.path:
            return None
        if place is None:
            return f"{self.path} was removed or renamed while its run was active"
        return f"{self.path} was renamed to {place} while its run was active"

    def remove_stray_checkpoint(self) -> None:
        """Remove a folder at the old path that contains only checkpoints/.

        A save in progress when the folder is renamed creates the old path again. That second folder
        would look like the run. Call this when no save is in progress.
        """
        if not self.explain_absence() or not self.path.is_dir():
            return
        if os.listdir(self.path) == ["checkpoints"]:
            with contextlib.suppress(OSError):  # the run ends with another error anyway
                shutil.rmtree(self.path)


@contextlib.contextmanager
def open_folder(path: Path) -> Generator[RunFolder]:
    """Keep the folder of a run open."""
    make_folder(path)  # several processes may reach this before the folder exists
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield RunFolder(path, descriptor)
    finally:
        os.close(descriptor)
