"""The code that runs inside the sandbox: it drops its rights, then runs the tested program.

A job arrives on standard input: its length in 8 bytes, then a dictionary (marshal); the rest is the
program's input. The first line of output is "held", "bare" (no filter of system calls) or "fault"
and the reason why this process could not be confined. The rest is the program's output, or its
function's return value as one JSON value. Expected outputs are not known here. The last step before
the program is irrevocable, so a program gains nothing by changing this file's objects.

This file is run as text, with few modules, all of Python's standard library: each takes
milliseconds.
"""

import ctypes
import marshal
import os
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's calls, on every machine
READ_DIR, RIGHTS = 1 << 3, {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # version -> number of file rights

STACK = 64 << 20  # bytes: enough for deep recursion in C
FILES = 32  # maximum number of open files

# Modules of typical contest solutions, imported beforehand if no file may be opened.
MODULES = (
    "abc array ast bisect calendar cmath collections contextlib copy dataclasses datetime decimal "
    "enum fractions functools heapq inspect io itertools json keyword locale math numbers operator "
    "pprint queue random re statistics string struct textwrap threading time timeit traceback "
    "types typing unicodedata zlib concurrent.futures.thread encodings.ascii encodings.latin_1"
)
# Modules whose names are predefined for a program, in the order of LiveCodeBench's harness: a later
# module replaces names of earlier modules. The last two are not imported as modules.
PRELUDE_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
).split()
RECURSION = 50_000  # recursion limit of a program, as in LiveCodeBench's harness
# -S leaves out `quit`. Long integers may be parsed and printed, within the time limit.
PRELUDE = "\n".join(
    [
        *(f"from {name} import *" for name in PRELUDE_MODULES),
        f"import {', '.join(PRELUDE_MODULES[:-2])}",
        "quit = exit",
        f"sys.setrecursionlimit({RECURSION})",
        "sys.set_int_max_str_digits(0)",
    ]
)


class ConfinementError(Exception):
    """The kernel refused a confinement that the sandbox needs."""


def main() -> None:
    """Run one job."""
    job = marshal.loads(_read(int.from_bytes(_read(8), "big")))
    for name in PRELUDE_MODULES:  # while files can be read, and before the program's time starts
        __import__(name)
    try:
        state = confine(job)
    except (ConfinementError, OSError, ValueError) as error:
        line = f"fault {type(error).__name__}: {error}".replace("\n", " ")
        os.write(1, line.encode() + b"\n")
        os._exit(1)
    os.write(1, state + b"\n")
    if job["function"] is None:
        run_program(job["code"])
    else:
        run_function(job["code"], job["function"], job["arguments"])


def _read(size: int) -> bytes:
    """Read exactly `size` bytes of standard input: the following bytes are the program's."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(1)
        data += piece
    return data


def confine(job: dict) -> bytes:
    """Drop for good all rights that a tested program does not need; return the first line."""
    if not job["reading"]:
        for name in MODULES.split():
            __import__(name)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # die with the trainer
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise ConfinementError("no_new_privs is refused")
        if os.geteuid() == 0:
            # Version 3, this process; three sets of capabilities, two zero words each.
            header = struct.pack("Ii", 0x20080522, 0)
            if libc.capset(header, bytes(24)):
                raise ConfinementError("root's capabilities cannot be dropped")
    if job["rules"] is not None:
        apply_landlock(libc, job["rules"])
    set_limits(job["memory"], job["seconds"])
    if job["filter"] is not None and not apply_seccomp(libc, *job["filter"]):
        if job["reading"]:
            raise ConfinementError("the kernel takes no filter of system calls (seccomp)")
    elif job["filter"] is not None:
        return b"held"
    if sys.platform == "linux" and os.geteuid() == 0:
        raise ConfinementError("root needs a kernel that filters system calls (seccomp)")
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return b"bare"


def set_limits(memory: int, seconds: int) -> None:
    """Set the limits of this process: bytes of memory, seconds of processor time."""
    hard_stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = STACK if hard_stack == resource.RLIM_INFINITY else min(STACK, hard_stack)
    values = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NOFILE: (FILES, FILES),
        resource.RLIMIT_STACK: (stack, hard_stack),
        resource.RLIMIT_AS: (memory, memory),
    }
    for kind, pair in values.items():
        resource.setrlimit(kind, pair)


def apply_landlock(libc: ctypes.CDLL, rules: list[tuple[str, int]]) -> None:
    """Restrict this process to the (path, rights) of `rules`; forbid connections and signals.

    TCP is forbidden from Landlock version 4 on, abstract sockets and signals from version 6 on.
    """
    version = libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        raise ConfinementError("the kernel has no Landlock")
    rights = (1 << RIGHTS[min(version, 5)]) - 1
    words = [rights] + [3] * (version >= 4) + [3] * (version >= 6)  # TCP; sockets and signals
    attributes = struct.pack(f"{len(words)}Q", *words)
    ruleset = libc.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise ConfinementError("Landlock makes no rules")
    for path, allowed in rules:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed if os.path.isdir(path) else allowed & ~READ_DIR, place)
        if libc.syscall(ADD_RULE, ruleset, 1, rule, 0):
            raise ConfinementError(f"Landlock takes no rule for {path}")
        os.close(place)
    if libc.syscall(RESTRICT_SELF, ruleset, 0):
        raise ConfinementError("Landlock does not hold")
    os.close(ruleset)


def apply_seccomp(libc: ctypes.CDLL, instructions: bytes, pid_at: int) -> bool:
    """Install the filter of system calls; return whether the kernel accepted it."""
    own = struct.pack("I", os.getpid())
    code = instructions[:pid_at] + own + instructions[pid_at + len(own) :]
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) == 0


def make_main() -> dict:
    """Return a fresh `__main__` namespace, without anything of this file."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return vars(module)


def run_program(code: str) -> None:
    """Run a program that reads its input and prints."""
    space = make_main()
    exec(PRELUDE, space)
    exec(compile(code, "program", "exec"), space)


def run_function(code: str, name: str, arguments: list) -> None:
    """Call a function, or a method of Solution, and write its return value; discard its prints.

    Code that finds the descriptor and writes to it has thereby determined the return value.
    """
    import json

    result, space = os.dup(1), make_main()
    os.dup2(2, 1)
    write, exit_now = os.write, os._exit
    exec(PRELUDE, space)
    space["__name__"] = "solution"  # skip code under `if __name__ == "__main__"`
    exec(compile(code, "program", "exec"), space)
    owner = space["Solution"]() if hasattr(space.get("Solution"), name) else None
    function = space[name] if owner is None else getattr(owner, name)
    data = json.dumps(to_plain(function(*arguments))).encode()
    while data:
        data = data[write(result, data) :]
    exit_now(0)


def to_plain(value: object) -> object:
    """Convert a value for JSON: tuples to lists, keys to text. TypeError for other types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    raise TypeError(f"a function may return no {type(value).__name__}")


if __name__ == "__main__":
    main()
