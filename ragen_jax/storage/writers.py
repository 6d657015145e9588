"""Write arrays and figures to files, and report disk errors with their reason.

NumPy does not: for a large array on a full disk it reports only the number of missing items, and
writing to a memory-mapped file ends the process (SIGBUS).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ragen_jax.storage.atomic_io import atomic_open, with_retries

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import DTypeLike


class _Plain:
    """A binary file with only the method `write`, so that NumPy does not bypass Python's file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes, /) -> object:
        return self._file.write(data)


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as a .npy file, in place.

    Raises:
      DiskRefused: the disk refuses it.
    """

    def save() -> None:
        with path.open("wb") as file:
            np.lib.format.write_array(_Plain(file), array, allow_pickle=False)

    with_retries(save, path)


def map_array(path: Path, dtype: "DTypeLike", shape: tuple[int, ...]) -> np.memmap:
    """Create a .npy file and map it into memory for writing; its disk space is reserved first.

    Args:
      shape: shape of the array, with at least one item.

    Raises:
      DiskRefused: the disk has too little space.
    """

    def create() -> np.memmap:
        array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return array

    return with_retries(create, path)


def save_figure(figure: "Figure", path: str | Path, *, dpi: int) -> None:
    """Write a matplotlib figure in the format given by the ending of `path`.

    Raises:
      DiskRefused: the disk refuses it.
    """
    path = Path(path)
    with atomic_open(path, "wb") as file:
        figure.savefig(file, dpi=dpi, format=path.suffix.removeprefix("."))
