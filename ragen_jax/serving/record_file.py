"""The file to which the conversations of ended sessions are appended."""

import functools
from pathlib import Path

from ragen_jax.storage.atomic_io import append_line, with_retries


class RecordFile:
    """A JSON Lines file that is only appended to.

    Raises:
      OSError: it cannot be opened, or a line cannot be written (storage/atomic_io.py).
    """

    def __init__(self, path: Path) -> None:
        self._file = with_retries(functools.partial(path.open, "a+b", buffering=0), path)

    def write(self, lines: str) -> None:
        """Append lines, which end with a line break, all of them or none."""
        append_line(self._file, lines)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
