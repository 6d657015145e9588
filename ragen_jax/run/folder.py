"""The folder of a run that goes on in it: still at its path, renamed, or removed."""

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

    path: its path when the run began
    descriptor: of the open folder, which stays the same when it is renamed
    """

    path: Path
    descriptor: int

    def whereabouts(self) -> Path | None:
        """Return the folder's path now, or None if it is removed or the system does not say."""
        ours = os.fstat(self.descriptor)
        with contextlib.suppress(OSError):  # of a path that leads nowhere now
            if os.path.samestat(os.stat(self.path), ours):
                return self.path
        if not ours.st_nlink:
            return None
        try:
            return Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:  # no Linux
            return None

    def here(self) -> Path:
        """Return its path, for writing something there.

        Raises:
          FolderGone: another folder, or none, is at the path. Writing there would make a second
            folder with a part of the run.
        """
        if gone := self.gone():
            raise FolderGone(gone)
        return self.path

    def gone(self) -> str | None:
        """Say what has become of a folder that is no longer at its path; None: it is there."""
        place = self.whereabouts()
        if place == self.path:
            return None
        if place is None:
            return f"{self.path} was removed or renamed while its run was active"
        return f"{self.path} was renamed to {place} while its run was active"

    def remove_stray_checkpoint(self) -> None:
        """Remove a folder at the old path that holds nothing but checkpoints/.

        A save that was under way when the folder was renamed makes its path again, and a second
        folder with a part of the run would look like the run. Call it when no save is under way.
        """
        if not self.gone() or not self.path.is_dir():
            return
        if os.listdir(self.path) == ["checkpoints"]:
            with contextlib.suppress(OSError):  # the run ends with another error in any case
                shutil.rmtree(self.path)


@contextlib.contextmanager
def open_folder(path: Path) -> Generator[RunFolder]:
    """Keeps the folder of a run open; of several processes, one may come here before it is made."""
    make_folder(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield RunFolder(path, descriptor)
    finally:
        os.close(descriptor)
