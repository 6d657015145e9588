"""Find the line of the user's code that a traceback ends in."""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import ragen_jax
from ragen_jax import configs, envs
from ragen_jax.envs.own_code import is_installed

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


class Frame(NamedTuple):
    """A call in a traceback."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def frames(traceback: str) -> list[Frame]:
    """Return the calls of a formatted traceback, the innermost last."""
    return [Frame(*found) for found in _FRAME.findall(traceback)]


def user_frame(traceback: str) -> Frame | None:
    """Return the innermost call in the user's code.

    The user's code is outside ragen_jax, installed packages and the standard library. None: the
    traceback has no such call.
    """
    own = [frame for frame in frames(traceback) if _is_users(frame.file)]
    return own[-1] if own else None


@functools.cache
def is_ours(name: str) -> bool:
    """Whether a file belongs to ragen_jax."""
    folders = [Path(package.__file__).parent for package in (ragen_jax, envs, configs)]
    return any(Path(name).absolute().is_relative_to(folder) for folder in folders)


@functools.cache
def _is_users(name: str) -> bool:
    return not (name.startswith("<") or is_ours(name) or is_installed(Path(name).absolute()))
