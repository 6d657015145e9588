"""Files that are whole or absent: written aside, synced to the disk, then renamed.

Who is killed in the writing leaves the file of before.
"""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

ASIDE = ".{name}.writing-{pid}"


@contextlib.contextmanager
def whole(path: str | Path, mode: str = "w") -> Generator[IO[Any]]:
    """Yields an open file that becomes `path` at the end, if nothing failed.

    Args:
      mode: "w" (UTF-8) or "wb".
    """
    path = Path(path)
    aside = path.with_name(ASIDE.format(name=path.name, pid=os.getpid()))
    try:
        with aside.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file that is whole or absent."""
    with whole(path) as file:
        file.write(text)


def remove_left_over(folder: Path) -> None:
    """Removes what killed writers of files below a folder have left aside.

    For the folder's owner: it would take away what another process is writing.
    """
    for path in folder.rglob(ASIDE.format(name="*", pid="*")):
        path.unlink(missing_ok=True)
