"""Check whether other users can put files at a path: a folder of code to run, or trust.py's key."""

import errno
import grp
import os
import pwd
import stat
from pathlib import Path

MAX_LINKS = 40  # maximum number of links in the resolution of a path, as in Linux


def exposure(path: Path) -> str | None:
    """Return a sentence about how other users can put files at a path, or None if they cannot.

    The file or folder at the path must belong to this user or to root, and other users must not be
    able to write it. They must not be able to rename the entries of a folder above it: each such
    folder must belong to this user or to root, and must either not be writable by others or have
    the sticky bit, like /tmp. Links in the path are followed, and the folders of the links are
    checked. Members of a group count as others unless the group is this user's private group.
    Access control lists beyond the mode bits are not read.

    Raises:
      OSError: the path does not exist, or a folder above it cannot be read.
    """
    # The owner of / is root, even if its number differs inside a container.
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
        found = _describe_foreign_owner(entry, entry.lstat(), trusted)
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
    return _describe_foreign_owner(path, status, trusted)


def _describe_foreign_owner(path: Path, status: os.stat_result, trusted: set[int]) -> str | None:
    if status.st_uid in trusted:
        return None
    return f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()})"


def _is_own_group(number: int) -> bool:
    """Return whether a group is this user's private group.

    Many systems make a group with the user's name for each user. It must have no other members.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:  # a container may not list the user or the group
        return False
    own = number == user.pw_gid and group.gr_name == user.pw_name
    return own and set(group.gr_mem) <= {user.pw_name}
