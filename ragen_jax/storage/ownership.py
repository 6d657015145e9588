"""Find who else may put files at a path: a folder of code to run, or the key of `trust`."""

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

MAX_LINKS = 40  # on the way to a path, as Linux allows


def exposure(path: Path) -> str | None:
    """Say who else could put files of theirs at a path, or return None if nobody can.

    The file or folder at the path must belong to this user or to root, and nobody else may write
    it. A folder above it must be one whose entries nobody else may rename: owned by this user or
    root, and either not writable by others or with the sticky bit, as /tmp has it. Links on the way
    are followed, and the folders that they are in are judged too. A group counts as others unless
    it is this user's own. Access control lists beyond the mode bits are not read.

    Raises:
      OSError: there is nothing at the path, or a folder above it cannot be read.
    """
    # The owner of / is root, whatever its number looks like from inside a container.
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}
    at, links = Path("/"), 0
    names = list(reversed(path.absolute().parts[1:]))
    found = _fault(at, trusted, last=not names)
    while names and found is None:
        name = names.pop()
        if name == "..":
            at = at.parent
            continue
        entry = at / name
        if not entry.is_symlink():
            at = entry
            found = _fault(entry, trusted, last=not names)
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        found = _foreign(entry, entry.lstat(), trusted)
        target = Path(os.readlink(entry))
        if target.is_absolute():
            at = Path("/")
        names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return found


def _fault(path: Path, trusted: set[int], *, last: bool) -> str | None:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    shared = mode & stat.S_IWOTH or mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if shared and (last or not mode & stat.S_ISVTX):
        return (
            f"other users can write {path} (mode {mode:04o}); remove that permission (chmod "
            "go-w), or use another folder"
        )
    return _foreign(path, status, trusted)


def _foreign(path: Path, status: os.stat_result, trusted: set[int]) -> str | None:
    if status.st_uid in trusted:
        return None
    return f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()})"


def _is_own_group(number: int) -> bool:
    """Whether a group is of this user alone: of the same name, as many systems make one for each
    user, and without other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:  # of a container, which lists neither
        return False
    own = number == user.pw_gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}
