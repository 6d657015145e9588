"""Folders that are what was written: the CRC-32 of each file in checksums.json, beside them.

A bit that has flipped, a file that is cut short or gone is damage, found before anything is read
from the folder. CRC-32 finds every single flip and every burst of up to 32 bits; it is no guard
against who damages on purpose.
"""

import concurrent.futures
import json
import zlib
from pathlib import Path

from ragen_jax.whole import write_whole

CHECKSUMS = "checksums.json"
PIECE_BYTES = 1 << 20  # of one read: it stays in the cache while it is summed


def write_checksums(folder: Path) -> None:
    """Writes the CRC-32 of all files below a folder into its checksums.json."""
    write_whole(folder / CHECKSUMS, json.dumps({"crc32": _checksums(folder)}, indent=2) + "\n")


def damage(folder: Path) -> str | None:
    """What is not as `write_checksums` found it: a sentence that names the file, or None.

    Files that were added since are none of it. A folder without checksums.json has no damage that
    could be known.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        written = json.loads(path.read_bytes())["crc32"]
        found = _checksums(folder)
        for name, total in written.items():
            if name not in found:
                return f"{folder / name} is gone"
            if found[name] != total:
                return f"{folder / name} is not what was written"
    except (ValueError, KeyError, AttributeError, TypeError):
        return f"{path} is damaged"
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    return None


def _checksums(folder: Path) -> dict[str, int]:
    """{name below the folder: CRC-32} of its files, without checksums.json and hidden ones."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    names = {name: path for name, path in sorted(names.items()) if _is_summed(name)}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # zlib lets other threads run
        return dict(zip(names, pool.map(_crc32, names.values()), strict=True))


def _is_summed(name: str) -> bool:
    return name != CHECKSUMS and not any(part.startswith(".") for part in name.split("/"))


def _crc32(path: Path) -> int:
    total = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(PIECE_BYTES):
            total = zlib.crc32(piece, total)
    return total
