"""Folders that are what was written: the CRC-32 of each file in checksums.json, beside them.

A bit that has flipped, a file that is cut short or gone is damage, found before anything is read
from the folder. CRC-32 finds every single flip and every burst of up to 32 bits; it is no guard
against who damages on purpose.
"""

import concurrent.futures
import json
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ragen_jax.storage.atomic_io import atomic_write, disk_error_message
from ragen_jax.storage.limits import read_json

CHECKSUMS = "checksums.json"
PIECE_BYTES = 1 << 20  # of one read: it stays in the cache while it is summed


def write_checksums(folder: Path) -> None:
    """Write the CRC-32 of all files below a folder into its checksums.json."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    hidden = [any(part.startswith(".") for part in path.parts) for path in files]
    names = [path.as_posix() for path, left in zip(files, hidden, strict=True) if not left]
    found = _checksums(folder, sorted(set(names) - {CHECKSUMS}))
    atomic_write(folder / CHECKSUMS, json.dumps({"crc32": found}, indent=2) + "\n")


def is_below(name: object) -> bool:
    """Whether a name that a file gives stays below the folder that the file is in.

    The name alone is judged, not where a link of that name leads: in the Hugging Face hub's cache,
    every file of a model is a link to ../../blobs.
    """
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def damage(folder: Path) -> str | None:
    """What is not as `write_checksums` found it: a sentence that names the file, or None.

    Files that were added since are none of it. A folder without checksums.json has no damage that
    could be known.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        written = dict(read_json(path)["crc32"])
        if not all(map(is_below, written)):
            raise ValueError("it names a file outside its folder")
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{path} is damaged"
    except OSError as error:
        if disk_error_message(error) is not None:  # too many open files say nothing about this one
            raise
        return f"{path} cannot be read: {error}"
    try:
        found = _checksums(folder, written)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        if disk_error_message(error) is not None:
            raise
        return f"{error.filename} cannot be read: {error}"
    changed = [name for name in written if found[name] != written[name]]
    return f"{folder / changed[0]} has changed since it was written" if changed else None


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """{name: CRC-32} of files below a folder."""
    with concurrent.futures.ThreadPoolExecutor() as pool:  # zlib lets other threads run
        totals = pool.map(_crc32, [folder / name for name in names])
        return dict(zip(names, totals, strict=True))


def _crc32(path: Path) -> int:
    total = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            total = zlib.crc32(piece, total)
    return total
