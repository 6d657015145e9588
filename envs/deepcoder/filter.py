"""The system calls that a tested program may make: a filter enforced by the kernel (seccomp).

All calls are refused except those listed here, so calls that newer kernels add are refused. A
tested program starts no process and no other program, opens no file for writing, makes no socket
and signals only itself: it can leave nothing behind, and the limits of one process cover all that
it does. Threads are allowed, since programs use a thread to raise their recursion depth.

Sources: seccomp(2) and the kernel's tables of each machine's calls; aarch64's were not tried.
"""

import platform
import struct
from dataclasses import dataclass

ALLOW, ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_*
EPERM, ENOSYS = 1, 38
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # BPF: instruction codes

WRITING = 0x3 | 0x40 | 0x200  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC
THREAD = 0x10000  # CLONE_THREAD
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
FILE_COMMANDS = (0, 1, 2, 3, 4, 1030)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX: calls such as F_SETOWN could signal others.
DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
RLIMIT_STACK = 3  # the only limit that a program may set
SIGKILL = 9
# Bit of an exit status: shells and bubblewrap set it for a process that a signal ended.
BY_SIGNAL = 0x80

OWN_PID = 0xFFFFFFFF  # placeholder for the process's own id, which is known only when it runs

# Machine -> (AUDIT_ARCH, calls without a condition, calls with a condition).
MACHINES: dict[str, tuple[int, tuple[int, ...], dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 24, 25, 28),
            *(32, 33, 35, 36, 37, 38, 39, 63, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108),
            *(110, 111, 131, 186, 201, 202, 204, 217, 218, 228, 229, 230, 262, 267, 269, 270),
            *(271, 273, 292, 309, 318, 324, 332, 334, 439),
        ),
        {
            **{"ioctl": 16, "clone": 56, "exit": 60, "fcntl": 72, "exit_group": 231, "tgkill": 234},
            **{"openat": 257, "open": 2, "prlimit64": 302, "clone3": 435},
        },
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(17, 23, 24, 48, 57, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 96, 98),
            *(99, 101, 102, 103, 113, 114, 115, 123, 124, 132, 134, 135, 139, 153, 160, 165, 168),
            *(169, 172, 173, 174, 175, 176, 177, 178, 179, 214, 215, 216, 222, 226, 233, 278, 283),
            *(291, 293, 439),
        ),
        {
            **{"ioctl": 29, "clone": 220, "exit": 93, "fcntl": 25, "exit_group": 94, "tgkill": 131},
            **{"openat": 56, "prlimit64": 261, "clone3": 435},
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Filter:
    """A seccomp filter.

    instructions: classic BPF
    pid_at: offset in bytes at which the process writes its own id
    """

    instructions: bytes
    pid_at: int


def make_call_filter(*, reading: bool) -> Filter | None:
    """Return the filter of this machine; None if the numbers of its system calls are unknown.

    reading: whether files may be opened for reading
    """
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return None
    architecture, free, numbers = MACHINES[platform.machine()]
    checks = _conditions(reading)
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, ERRNO | EPERM)]
    lines.append((LOAD, 0, 0, 0))  # the number of the call
    for number in free:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name, number in numbers.items():
        lines += [(EQUAL, 0, len(checks[name]), number), *checks[name]]
    lines.append((RETURN, 0, 0, ERRNO | EPERM))
    (own,) = [8 * index for index, line in enumerate(lines) if line[3] == OWN_PID]
    return Filter(b"".join(struct.pack("HBBI", *line) for line in lines), own + 4)


def _conditions(reading: bool) -> dict[str, list[tuple[int, int, int, int]]]:
    """Return {call: instructions that allow or refuse it by its arguments}."""
    yes, no = (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EPERM)

    def open_lines(argument: int) -> list[tuple[int, int, int, int]]:
        return [_low(argument), (ANY_BIT, 0, 1, WRITING), no, yes] if reading else [no]

    def one_of_lines(argument: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        found = [line for value in values for line in ((EQUAL, 0, 1, value), yes)]
        return [_low(argument), *found, no]

    # Refuse statuses that mean a signal: such a status then always results from a signal.
    exit_lines = [_low(0), (ANY_BIT, 0, 1, BY_SIGNAL), no, yes]
    return {
        "open": open_lines(1),
        "openat": open_lines(2),
        "ioctl": one_of_lines(1, DEVICE_COMMANDS),
        "fcntl": one_of_lines(1, FILE_COMMANDS),
        "exit": exit_lines,
        "exit_group": exit_lines,
        "clone": [_low(0), (ANY_BIT, 0, 1, THREAD), yes, no],
        # Without clone3, whose flags the filter cannot see, the C library falls back to clone.
        "clone3": [(RETURN, 0, 0, ERRNO | ENOSYS)],
        # It may signal itself, but not with SIGKILL, which would look like the machine's doing.
        "tgkill": [_low(0), (EQUAL, 0, 3, OWN_PID), _low(2), (EQUAL, 1, 0, SIGKILL), yes, no],
        # On itself: it may read any limit, and set that of its stack.
        "prlimit64": [
            *(_low(0), (EQUAL, 1, 0, 0), no),
            *(_low(1), (EQUAL, 0, 1, RLIMIT_STACK), yes),
            *(_low(2), (EQUAL, 1, 0, 0), no),
            *(_high(2), (EQUAL, 1, 0, 0), no),
            yes,
        ],
    }


def _low(argument: int) -> tuple[int, int, int, int]:
    """Load the lower half of an argument; it comes first on both machines."""
    return (LOAD, 0, 0, 16 + 8 * argument)


def _high(argument: int) -> tuple[int, int, int, int]:
    return (LOAD, 0, 0, 16 + 8 * argument + 4)
