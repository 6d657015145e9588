"""Refuse links in a run's folder through which files elsewhere would be written."""

import os
from pathlib import Path


def refuse_links(folder: Path, *paths: Path) -> None:
    """Refuse a run's folder if a write in it could change something outside of it.

    The causes are a link to anywhere outside the folder, and an entry that is neither a file nor a
    folder. Links in the path of the folder are accepted, and so are links within the folder, which
    trackers make.

    Args:
      folder: folder of a run; it may be absent.
      paths: paths below it that will be written; if none are given, every entry is checked.

    Raises:
      ValueError: there is such an entry.
    """
    root = folder.resolve()
    for path in paths or _entries(folder):
        for entry in (path, *path.parents):
            if entry == folder or not entry.is_relative_to(folder):
                break
            _refuse(entry, root)


def _entries(folder: Path) -> list[Path]:
    return [
        Path(inside) / name
        for inside, folders, files in os.walk(folder)  # does not follow links
        for name in (*folders, *files)
    ]


def _refuse(entry: Path, root: Path) -> None:
    if entry.is_symlink():
        target = Path(os.path.realpath(entry))
        if not target.is_relative_to(root):
            raise ValueError(
                f"{entry} is a link to {target}, outside the run's folder, where the run would "
                "write; replace it with its target, or remove it"
            )
    elif entry.exists() and not entry.is_file() and not entry.is_dir():
        raise ValueError(f"{entry} is neither a file nor a folder; remove it")
