"""The vectors of a corpus on disk, a row per document: a NumPy file, or a flat index of faiss."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DTYPES = ("float16", "float32")  # accepted dtypes of a NumPy file


@dataclass(frozen=True)
class Vectors:
    """A matrix on disk that is read in parts.

    read: (start, stop) -> the rows from start to stop, [stop - start, width], in the file's dtype
    """

    path: Path
    rows: int
    width: int
    read: Callable[[int, int], np.ndarray]


def open_vectors(path: str | Path) -> Vectors:
    """Return the `Vectors` of a file: faiss's if its name ends in .index, else NumPy's (.npy).

    Only its header is read, so files of any size open at once.

    Raises:
      ValueError: there is no such file, it has another format or is not a matrix of numbers, or
        faiss is missing.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"no vectors at {path}: expected a .npy file or an .index of faiss")
    return _faiss(path) if path.suffix == ".index" else _numpy(path)


def _numpy(path: Path) -> Vectors:
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:  # EOFError: an empty file
        raise ValueError(f"{path} is not a complete .npy file: {error}") from None
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype.name not in DTYPES:
        found = getattr(matrix, "dtype", type(matrix).__name__)
        raise ValueError(
            f"{path} must be a matrix [documents, width] of {' or '.join(DTYPES)}, got "
            f"{found} of shape {list(getattr(matrix, 'shape', ()))}"
        )
    return Vectors(path, *_at_least_one(path, *matrix.shape), lambda i, j: matrix[i:j])


def _faiss(path: Path) -> Vectors:
    if importlib.util.find_spec("faiss") is None:
        raise ValueError(f"reading {path} needs faiss: pip install 'ragen_jax[faiss]'")
    import faiss  # imported here because nothing else needs it

    try:
        # The vectors stay in the file, memory-mapped.
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"{path} is not an index that faiss can read: {reason}") from None
    if not isinstance(index, faiss.IndexFlat):
        raise ValueError(f"{path} must be a flat index of faiss, got {type(index).__name__}")
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ValueError(f"{path} must be an index of inner products (IndexFlatIP)")
    rows, width = _at_least_one(path, index.ntotal, index.d)
    return Vectors(path, rows, width, lambda i, j: index.reconstruct_n(i, j - i))


def _at_least_one(path: Path, rows: int, width: int) -> tuple[int, int]:
    if not rows or not width:
        raise ValueError(f"{path} holds no vectors: its shape is [{rows}, {width}]")
    return rows, width
