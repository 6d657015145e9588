"""Detect damaged files in a folder by their CRC-32s, which are in its checksums.json.

Damage is a flipped bit or a truncated or missing file; it is detected before anything is read from
the folder. CRC-32 detects every single flipped bit and every burst error of up to 32 bits. It does
not protect against deliberate changes.
"""

import concurrent.futures
import json
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from ragen_jax.storage.atomic_io import atomic_write, disk_error_message
from ragen_jax.storage.limits import read_json

CHECKSUMS = "checksums.json"
PIECE_BYTES = 1 << 20  # size of one read: it fits in the processor's cache


def write_checksums(folder: Path) -> None:
    """Write the CRC-32 of all files below a folder into its checksums.json."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    hidden = [any(part.startswith(".") for part in path.parts) for path in files]
    names = [path.as_posix() for path, left in zip(files, hidden, strict=True) if not left]
    found = _checksums(folder, sorted(set(names) - {CHECKSUMS}))
    atomic_write(folder / CHECKSUMS, json.dumps({"crc32": found}, indent=2) + "\n")


def is_below(name: object) -> bool:
    """Return whether a name in a file is a path below the folder of that file.

    Only the name counts, not the target of a link with that name: in the Hugging Face hub's cache,
    every file of a model is a link to ../../blobs.
    """
    if not isinstance(name, str) or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def damage(folder: Path) -> str | None:
    """Return a sentence that names a damaged file, or None if all files have their checksums.

    Files that were added later are ignored. A folder without checksums.json counts as undamaged.
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
        if disk_error_message(error) is not None:  # too many open files: no fault of this file
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
    """Return {name: CRC-32} of files below a folder."""
    with concurrent.futures.ThreadPoolExecutor() as pool:  # zlib lets other threads run
        totals = pool.map(_crc32, [folder / name for name in names])
        return dict(zip(names, totals, strict=True))


def _crc32(path: Path) -> int:
    total = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            total = zlib.crc32(piece, total)
    return total
