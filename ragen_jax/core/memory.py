"""The process's memory: keep freed blocks for the next step, and measure the memory in use."""

import ctypes
import gc
import os
import sys
from pathlib import Path

import jax

from ragen_jax.core.types import Metrics

# glibc's mallopt parameters (malloc.h).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory(one_arena: bool = False) -> None:
    """Make glibc's malloc reuse large blocks; do nothing except on Linux with glibc.

    XLA's CPU backend allocates the temporary buffers of every call anew. glibc serves blocks of
    some megabytes by mmap and unmaps them when freed, so that each step of the tiny agent faults
    in and zeroes hundreds of megabytes: with this, a training step takes 0.71 s instead of 1.09 s
    (benchmarks/NOTES.md).

    Args:
      one_arena: make all threads share one pool from now on. A per-thread pool always serves
        blocks of more than 64 MiB by mmap. Sharing makes a rollout of the tiny agent with full
        history 1.2 times faster, and an update of a 0.5B model 1.3 times faster at 1.4 times the
        memory; the tiny agent's single-turn step, with smaller blocks, becomes 1.2 times slower.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        if one_arena:
            libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never, however much is free
        libc.mallopt(M_TOP_PAD, 64 << 20)


def collect_garbage_less_often() -> None:
    """Make Python look for unreachable objects less often, and never among those that exist now.

    Python looks after every 700 new objects, and through all objects whenever their number has
    grown by a quarter. Programs are large numbers of small objects, so that a start looked through
    half a million of them again and again: a fifth of its time (benchmarks/NOTES.md). Objects are
    freed as before when nothing refers to them; only cycles of objects wait longer.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


STATM = Path("/proc/self/statm")  # pages of this process: all, resident, ...


def memory_metrics() -> Metrics:
    """Return the memory in use, in GiB.

    throughput/host_memory_gib is this process's RAM. For its fullest device,
    device_memory_gib is the current value and device_memory_peak_gib the peak since the start.
    Figures that the system does not report are left out: CPU devices have no separate memory.
    """
    metrics = {}
    if STATM.exists():
        pages = int(STATM.read_text().split()[1])
        metrics["throughput/host_memory_gib"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    statistics = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    for name, key in (
        ("device_memory", "bytes_in_use"),
        ("device_memory_peak", "peak_bytes_in_use"),
    ):
        used = [stats[key] for stats in statistics if key in stats]
        if used:
            metrics[f"throughput/{name}_gib"] = max(used) / 2**30
    return metrics
