"""Programs that are compiled before they are needed, several at a time.

    at the start          what a run surely needs until its first row, which waits for them
    behind the first step what a later step will need, beside the steps in between

JAX finds what a thread has compiled as if it had been called. Tracing holds Python's lock, XLA's
compiler does not.
"""

import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from ragen_jax.config.per_task import per_task_configs, turns_shown
from ragen_jax.core.compilation import compiled, struct_of
from ragen_jax.core.padding import length_bucket, row_bucket
from ragen_jax.core.sharding import data_shards, is_main_process, row_shards
from ragen_jax.core.types import Params
from ragen_jax.programs.monitor import THREAD, CompileMonitor
from ragen_jax.programs.shapes import RowLengths, host, struct
from ragen_jax.programs.shapes import RunShapes as Shapes
from ragen_jax.programs.training import training_programs
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.expected import (
    ExpectedProgram,
    ProgramLengths,
    expected_lengths,
    expected_programs,
)
from ragen_jax.rollout.pages import cache_sizes
from ragen_jax.rollout.sample import decode, episode_keys, prefill
from ragen_jax.rollout.task import Task
from ragen_jax.storage.console import console
from ragen_jax.update.learner import Learner
from ragen_jax.update.state import TrainState

THREADS = 8  # at most, and no more than there are cores
WORTH_A_LINE = 1.0  # seconds that compiling them took


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A program that is to be compiled."""

    name: str
    compile: Callable[[], Any]


class Precompiler:
    """The threads that compile, and what they are at."""

    def __init__(self, compiling: CompileMonitor) -> None:
        self.compiling = compiling
        self.pool = concurrent.futures.ThreadPoolExecutor(
            min(os.cpu_count() or 1, THREADS), thread_name_prefix=THREAD
        )
        self.background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self.under_way: list[concurrent.futures.Future[None]] = []

    def compile_now(self, programs: Sequence[PlannedProgram]) -> None:
        """Compiles all of them and waits, with a progress bar on a terminal."""
        start = time.perf_counter()
        futures = [self.pool.submit(_compile, program) for program in programs]
        bar = tqdm(
            concurrent.futures.as_completed(futures),
            total=len(futures),
            desc="compiling",
            leave=False,
            disable=None if is_main_process() else True,  # None: on a terminal
        )
        for future in bar:
            future.result()
        seconds = time.perf_counter() - start
        self.compiling.add_wait(seconds)
        if seconds >= WORTH_A_LINE:
            console(f"compiled {len(futures)} programs in {seconds:.1f} s")

    def begin(self, program: PlannedProgram) -> None:
        """Has something compiled beside what follows, behind what was begun before."""
        self.under_way.append(self.background.submit(_compile, program))

    def wait(self) -> None:
        """Returns when all that was begun is there."""
        start = time.perf_counter()
        waiting = [future for future in self.under_way if not future.done()]
        for future in self.under_way:
            future.result()
        self.under_way = []
        if waiting:
            self.compiling.add_wait(time.perf_counter() - start)

    def close(self) -> None:
        """Begins nothing more; what is under way ends by itself."""
        for pool in (self.pool, self.background):
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(program: PlannedProgram) -> None:
    """Compiles one. Where it cannot be, the run will say so where it calls it."""
    try:
        program.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        console(f"warning: {program.name} was not precompiled: {reason}")


# ------------------------------------------------------------------------------ which


def start_programs(
    config: ConfigDict,
    learner: Learner,
    state: TrainState,
    policy: Params,
    tasks: "Sequence[Task]",
) -> list[PlannedProgram]:
    """What a run in one process surely needs for its first evaluation and its first update, and
    with slots all that its rollouts and updates may ever need.

    In lock step that is every first turn and, where each turn reads a prompt of its own, every
    number of rows that compaction can leave; of updates, where a row is one turn, the length of a
    prompt with the longest reply. In the order in which they are needed; none in several processes,
    and none of a model that sees.
    """
    # Several would have to compile in the same order; how large tables of images are is not known.
    if jax.process_count() > 1 or any(
        task.settings.chat.images.tower is not None for task in tasks
    ):
        return []
    shapes = describe(config, learner, state, policy)
    planned: dict[Any, PlannedProgram] = {}
    lengths: set[int] = set()  # of rows
    known = True
    for task, c in zip(tasks, per_task_configs(config).values(), strict=True):
        alone, first = turns_shown(c.env) == 1, task.first_prompts
        if task.settings.slots or task.settings.chunk:
            expected = expected_lengths(task.settings.chat, task.first_plays, task.settings.budgets)
            programs = slot_programs(shapes, task, expected)
            longest = max(expected.prompts) + task.settings.budgets.max_new_tokens
            lengths |= {length_bucket(n) for n in range(first[0] + 1, longest + 1)}
        else:
            programs = rollout_starts(shapes, task, length_bucket(first[-1]), alone=alone)
            lengths.add(length_bucket(first[-1] + task.settings.budgets.max_new_tokens))
            known &= alone
        for program in programs:
            planned.setdefault(program.name, program)
    for length in sorted(lengths, reverse=True) if known else ():
        at = dataclasses.replace(shapes, at=_rows_of(length))
        for program in training_programs(at):
            # The optimizer's step is the same for all.
            key = program.name, *((x.shape, x.dtype) for x in program.arguments)
            name = f"{program.name} of rows of {length}"
            planned.setdefault(key, PlannedProgram(name, lambda p=program: p.lower().compile()))
    return list(planned.values())


def describe(config: ConfigDict, learner: Learner, state: TrainState, policy: Params) -> Shapes:
    """A run's arrays as preflight describes them, of those that are there."""
    structs = functools.partial(jax.tree.map, struct_of)
    return Shapes(
        config=config,
        model=learner.model,
        at={},
        mesh=learner.mesh,
        sampling_mesh=learner.sampling_mesh,
        optimizer=learner.optimizer,
        state=structs(state),
        reference=structs(learner.reference),
        frozen=structs(learner.frozen),
        policy=structs(policy),
        base={},
        cast=False,
        copied=False,
        held=None,
        images={},
    )


def _rows_of(length: int) -> dict[str, RowLengths]:
    """Preflight's lengths of rows so long, for programs that read no other."""
    return {"": RowLengths(*[length] * len(dataclasses.fields(RowLengths)))}


def rollout_starts(
    shapes: Shapes, task: "Task", first: int, *, alone: bool
) -> Iterator[PlannedProgram]:
    """Prefill, keys and decode of first turns, of training and of evaluation.

    Args:
      first: tokens of a first prompt, padded.
      alone: whether every turn reads a prompt of its own, which the rows that are left do.
    """
    mesh, G = shapes.sampling_mesh, task.groups
    shards = data_shards(mesh)
    B = -(-G * task.group_size // shards) * shards
    sizes = [B]
    if alone and task.settings.compact:
        per_shard = B // shards
        sizes = sorted({shards * row_bucket(n, per_shard) for n in range(1, per_shard + 1)})[::-1]
    # Their temperature is not part of a program.
    samplings = {dataclasses.replace(s, temperature=1.0): s for s in _samplings(task)}

    def turn(prompts, rows, sampling):
        compile = functools.partial(_compile_turn, shapes, task, prompts, rows, first, sampling)
        settings = f"top_k {sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}"
        return PlannedProgram(f"{prompts} prompts of {first}, {rows} rows, {settings}", compile)

    for rows in sizes:
        yield PlannedProgram(
            f"keys of {rows} rows", functools.partial(_compile_keys, shapes, task, rows)
        )
        yield from (turn(rows, rows, sampling) for sampling in samplings.values())
    if B == G * task.group_size and G % shards == 0:
        yield turn(G, B, task.settings.sampling)


def _samplings(task: "Task") -> tuple[Sampling, ...]:
    """How a run draws tokens of a task: in evaluations, if it has any, and in training."""
    return (
        (task.settings.sampling,)
        if task.heldout is None
        else (task.eval_sampling, task.settings.sampling)
    )


def slot_programs(
    shapes: Shapes, task: "Task", lengths: ProgramLengths
) -> Iterator[PlannedProgram]:
    """All that rollouts in slots may need, of training and of evaluation."""
    mesh, episodes = shapes.sampling_mesh, task.groups * task.group_size
    samplings = _samplings(task)
    with jax.set_mesh(mesh):
        shards, _ = row_shards()
        sizes = cache_sizes(
            slots=task.settings.slots,
            chunk=task.settings.chunk,
            episodes=episodes,
            prompt=task.first_prompts[-1],
            max_new_tokens=task.settings.budgets.max_new_tokens,
            compact=task.settings.compact,
        )
        listed = [
            program
            for sampling in {dataclasses.replace(s, temperature=1.0): s for s in samplings}
            for program in expected_programs(
                shapes.model,
                shapes.policy,
                sizes,
                lengths,
                max_new_tokens=task.settings.budgets.max_new_tokens,
                sampling=sampling,
                stop_ids=task.settings.chat.stop_ids,
            )
        ]
    for rows in sizes.rows[::-1]:
        compile = functools.partial(_compile_keys, shapes, task, shards * rows)
        yield PlannedProgram(f"keys of {shards * rows} rows", compile)
    for program in listed:
        yield PlannedProgram(program.name, functools.partial(_compile_expected, mesh, program))


def _compile_expected(mesh: Mesh, program: ExpectedProgram) -> None:
    with jax.set_mesh(mesh):
        program.lower().compile()


def _compile_keys(shapes: Shapes, task: "Task", rows: int) -> None:
    with jax.set_mesh(shapes.sampling_mesh):
        episode_keys(task.key, [0] * rows, [0] * rows, 0)


def _compile_turn(
    shapes: Shapes, task: "Task", prompts: int, rows: int, first: int, sampling: Sampling
) -> None:
    """Compiles prefill of so many prompts, then decode of so many rows behind them."""
    model, policy, mesh = shapes.model, shapes.policy, shapes.sampling_mesh

    def rows_of(*shape, dtype=jnp.int32):
        return struct(mesh, shape, dtype, "rows")

    with jax.set_mesh(mesh):
        segment, logits = compiled(
            prefill, model, policy, rows_of(prompts, first), rows_of(prompts)
        )
        compiled(
            decode,
            model,
            policy,
            segment,
            logits,
            rows_of(rows, dtype=task.key.dtype),
            rows_of(rows),
            host((), jnp.float32),
            settings=sampling.decode_settings(
                task.settings.chat.stop_ids, task.settings.budgets.max_new_tokens
            ),
        )
