"""Lanes: parts of a batch that are sampled at the same time, on the cores of a CPU.

A token of a small model takes XLA's CPU backend some hundred small operations, one after the other
on one core. So the groups of a rollout are divided into lanes. Each is sampled in a thread, and
what happens on the host between two turns (environments, prompts) stays in the caller's thread,
lane after lane, always in the same order:

    host      lane 1 | lane 2 |        lane 1 | lane 2 |
    thread 1         | sample turn 1 |        | sample turn 2
    thread 2                  | sample turn 1 |        | sample turn 2

As many lanes as cores run at a time. The problems of an evaluation are in more lanes; one begins
when another ends, and the last one may have fewer rows.

A lane has at least LEAST_ROWS rows, since XLA's products round differently with fewer. The episodes
are then the same with any number of lanes, except for last digits: the first prompts of a lane are
read together, and there are fewer of them.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from ragen_jax.core.padding import LEAST_ROWS
from ragen_jax.core.sharding import process_count, row_shards


class Job(NamedTuple):
    """Work on the device, for a lane's thread."""

    # Names the programs that it calls. The first job with a name runs alone, as two threads would
    # both compile its programs.
    name: Hashable
    run: Callable[[], Any]


# Yields a lane's jobs and receives their results; it returns its own.
Lane = Generator[Job, Any, Any]

_run_before: set[Hashable] = set()  # names of jobs


def cores() -> int:
    """Return the number of CPU cores that this process may use for lanes.

    It is 1 if the programs run on several devices or on accelerators, which compute all rows at
    once.
    """
    if jax.default_backend() != "cpu" or jax.device_count() > 1:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lane_count(most: int, groups: int, group_size: int) -> int:
    """Return the number of lanes of a rollout on the mesh in use: equal numbers of whole groups.

    Args:
      most: the most lanes.
      groups, group_size: of the rollout.
    """
    if row_shards()[0] > 1 or process_count() > 1:
        return 1
    most = min(most, groups * group_size // LEAST_ROWS)
    return next((n for n in range(most, 1, -1) if groups % n == 0), 1)


def take_turns(lanes: Iterable[Lane], most: int) -> list[Any]:
    """Run lanes to their ends: their jobs in threads, under the mesh in use, all else here.

    Args:
      most: number of lanes that run at the same time; a later one begins when another ends.

    Returns:
      what each lane returns.
    """
    mesh = jax.sharding.get_mesh()

    def work(job):
        with contextlib.nullcontext() if mesh.empty else jax.set_mesh(mesh):
            return job.run()

    def submit(job: Job) -> Future[Any]:
        if most > 1:
            if job.name in _run_before:
                return pool.submit(work, job)
            _run_before.add(job.name)
        done: Future[Any] = Future()
        done.set_result(job.run())
        return done

    results: dict[int, Any] = {}

    def next_job(number: int, lane: Lane, result: Any) -> Job | None:
        """Continue a lane; return its next job, or None if it has ended."""
        try:
            return lane.send(result)
        except StopIteration as end:
            results[number] = end.value
            return None

    later = iter(enumerate(lanes))
    waiting: deque[tuple[int, Lane, Future[Any]]] = deque()

    def begin_one() -> None:
        """Begin the next lane that has a job, if any."""
        for number, lane in later:
            job = next_job(number, lane, None)
            if job is not None:
                waiting.append((number, lane, submit(job)))
                return

    with ThreadPoolExecutor(most, thread_name_prefix="lane") as pool:
        for _ in range(most):
            begin_one()
        while waiting:
            number, lane, future = waiting.popleft()
            job = next_job(number, lane, future.result())
            del future  # it holds the caches of its turn
            if job is None:
                begin_one()
            else:
                waiting.append((number, lane, submit(job)))
    return [results[number] for number in sorted(results)]
