"""Links in a run's folder: nothing is written through them to anywhere else."""

import os
from pathlib import Path


def refuse_links(folder: Path, *written: Path) -> None:
    """Refuses a run's folder through which something outside of it would be written.

    That is a link that leads out of the folder, wherever to, or an entry that is neither a file nor
    a folder. The folder's own path may have links, and links may lead from one place in it to
    another, as trackers make them.

    Args:
      folder: of a run; it may be absent.
      written: paths below it that will be written; none given: everything below it is checked.

    Raises:
      ValueError: there is such an entry.
    """
    root = folder.resolve()
    for path in written or _entries(folder):
        for entry in (path, *path.parents):
            if entry == folder or not entry.is_relative_to(folder):
                break
            _refuse(entry, root)


def _entries(folder: Path) -> list[Path]:
    return [
        Path(inside) / name
        for inside, folders, files in os.walk(folder)  # which follows no links
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
