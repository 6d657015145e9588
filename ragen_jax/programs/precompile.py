"""Compile programs before they are needed, several at a time.

    at the start          the programs that a run needs before its first row; the run waits
    after the first step  the programs of later steps, in parallel with the steps before them

JAX finds a program that a thread has compiled as if it had been called before. Tracing holds
Python's global lock; XLA's compiler does not.
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
from tqdm import tqdm

from ragen_jax.config.per_task import (
    minibatch_rows,
    per_task_configs,
    step_rows,
    turns_per_prompt,
)
from ragen_jax.configs.base import Config
from ragen_jax.core.compilation import compiled, struct_of
from ragen_jax.core.padding import length_bucket, row_bucket
from ragen_jax.core.progress import begin_count, enter_phase
from ragen_jax.core.sharding import data_shards, is_main_process, row_shards
from ragen_jax.core.types import Params
from ragen_jax.envs.types import HarnessEnvironment
from ragen_jax.model.segments import Segment
from ragen_jax.programs.monitor import THREAD, CompileMonitor
from ragen_jax.programs.rows import expects_trees, plain_shapes
from ragen_jax.programs.shapes import RunShapes as Shapes
from ragen_jax.programs.shapes import host, struct
from ragen_jax.programs.training import training_programs
from ragen_jax.rollout import counted
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.expected import (
    ExpectedProgram,
    ProgramLengths,
    expected_lengths,
    expected_programs,
)
from ragen_jax.rollout.lanes import lane_count
from ragen_jax.rollout.pages import cache_sizes
from ragen_jax.rollout.play import has_prefix
from ragen_jax.rollout.sample import decode, episode_keys, prefill, read_prefix
from ragen_jax.rollout.task import Task
from ragen_jax.storage.console import console
from ragen_jax.update.learner import Learner
from ragen_jax.update.state import TrainState

THREADS = 8  # maximum number of threads; the number of cores is another limit
APPLY = ("apply", "critic_apply")  # programs that do not depend on the rows
WORTH_A_LINE = 1.0  # minimum compile time that is printed, in seconds


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """A program to compile."""

    name: str
    compile: Callable[[], Any]


class Precompiler:
    """Threads that compile programs."""

    def __init__(self, compiling: CompileMonitor) -> None:
        self.compiling = compiling
        self.pool = concurrent.futures.ThreadPoolExecutor(
            min(os.cpu_count() or 1, THREADS), thread_name_prefix=THREAD
        )
        self.background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self.under_way: list[concurrent.futures.Future[None]] = []

    def compile_now(self, programs: Sequence[PlannedProgram]) -> None:
        """Compile all programs and wait, with a progress bar on a terminal."""
        start = time.perf_counter()
        enter_phase("compiling")
        count = begin_count(len(programs), "programs")
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
            count(1)
        seconds = time.perf_counter() - start
        self.compiling.add_wait(seconds)
        if seconds >= WORTH_A_LINE:
            console(f"compiled {len(futures)} programs in {seconds:.1f} s")

    def begin(self, program: PlannedProgram) -> None:
        """Compile a program in the background, after the programs begun earlier."""
        self.under_way.append(self.background.submit(_compile, program))

    def wait(self) -> None:
        """Wait for all programs that were begun."""
        start = time.perf_counter()
        waiting = [future for future in self.under_way if not future.done()]
        for future in self.under_way:
            future.result()
        self.under_way = []
        if waiting:
            self.compiling.add_wait(time.perf_counter() - start)

    def close(self) -> None:
        """Cancel programs that have not started; do not wait for the running ones."""
        for pool in (self.pool, self.background):
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(program: PlannedProgram) -> None:
    """Compile a program. Warn if that fails: the run raises the error when it calls the program."""
    try:
        program.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        console(f"warning: {program.name} was not precompiled: {reason}")


# ------------------------------------------------------------------------------ planning


def start_programs(
    config: Config,
    learner: Learner,
    state: TrainState,
    policy: Params,
    tasks: "Sequence[Task]",
) -> list[PlannedProgram]:
    """Return the programs that a run surely needs for its first evaluation and first update.

    With slots, return all programs that its rollouts can ever need.

    Without slots the list has the programs of first turns. If each turn reads a separate prompt, it
    has them for every number of rows that compaction can leave. If it is known how long rows are,
    it has the optimizer's step and, unless rows are packed as trees, the gradients: the sizes of
    trees depend on the sampled replies.

    The programs are in the order in which they are needed. The list is empty if there are several
    processes or the model has a vision tower.
    """
    # Several processes would have to compile in the same order. The sizes of image tables are not
    # known in advance.
    if jax.process_count() > 1 or any(
        task.settings.chat.images.tower is not None for task in tasks
    ):
        return []
    shapes = describe(config, learner, state, policy)
    planned: dict[Any, PlannedProgram] = {}
    lengths: set[int] = set()  # tokens of a padded row
    known, expected_rows = True, []
    for task, c in zip(tasks, per_task_configs(config).values(), strict=True):
        if isinstance(task.settings.environment, HarnessEnvironment):
            known = False  # its programs write the prompts
            continue
        alone, first = turns_per_prompt(c.env) == 1, task.first_prompts
        if task.settings.slots or task.settings.chunk:
            expected = expected_lengths(task.settings.chat, task.first_plays, task.settings.budgets)
            programs = slot_programs(shapes, task, expected)
            longest = max(expected.prompts) + task.settings.budgets.max_new_tokens
            lengths |= {length_bucket(n) for n in range(first[0] + 1, longest + 1)}
        else:
            programs = rollout_starts(shapes, task, first[-1], alone=alone)
            lengths.add(length_bucket(first[-1] + task.settings.budgets.max_new_tokens))
            known &= alone
        for program in programs:
            planned.setdefault(program.name, program)
        expected_rows.append((c, first[-1], task.common_tokens))
    trees = known and expects_trees(shapes, expected_rows)
    for length in sorted(lengths, reverse=True) if known else ():
        update = plain_shapes(shapes, length, minibatch_rows(config))
        step = plain_shapes(shapes, length, step_rows(config))
        for program in training_programs(shapes, update, step):
            if trees and program.name not in APPLY:
                continue
            # The optimizer's step is the same program for all lengths.
            key = program.name, *((x.shape, x.dtype) for x in program.arguments)
            name = f"{program.name} of rows of {length}"
            planned.setdefault(key, PlannedProgram(name, lambda p=program: p.lower().compile()))
    return list(planned.values())


def describe(config: Config, learner: Learner, state: TrainState, policy: Params) -> Shapes:
    """Return the `RunShapes` of a run's actual arrays."""
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
        resident=None,
        images={},
        reference_model=learner.loss.reference_model,
    )


def rollout_starts(
    shapes: Shapes, task: "Task", first: int, *, alone: bool
) -> Iterator[PlannedProgram]:
    """Yield prefill, keys and decode of first turns, for training and evaluation.

    Args:
      first: tokens of a first prompt.
      alone: whether every turn reads a separate prompt; later turns then run the same programs with
        the remaining rows.
    """
    mesh, G, K = shapes.sampling_mesh, task.groups, task.group_size
    shards = data_shards(mesh)
    B = -(-G * K // shards) * shards
    with jax.set_mesh(mesh):
        lanes = lane_count(task.settings.lanes, G, K)
        begun = [(B // lanes, task.settings.sampling)]
        if task.heldout is not None:
            begun.insert(0, (B // lane_count(task.settings.lanes, B, 1), task.eval_sampling))

    def sizes(rows):
        """Return the numbers of rows of a turn of rollouts that begin with `rows`."""
        if not (alone and task.settings.compact):
            return {rows}
        per_shard = rows // shards
        return {shards * row_bucket(n, per_shard) for n in range(1, per_shard + 1)}

    # The temperature is not part of a program.
    wanted = {
        (rows, dataclasses.replace(sampling, temperature=1.0)): sampling
        for first_rows, sampling in begun
        for rows in sizes(first_rows)
    }

    def turn(prompts, rows, sampling):
        compile = functools.partial(_compile_turn, shapes, task, prompts, rows, first, sampling)
        settings = f"top_k {sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}"
        return PlannedProgram(f"{prompts} prompts of {first}, {rows} rows, {settings}", compile)

    for rows in sorted({rows for rows, _ in wanted}, reverse=True):
        yield PlannedProgram(
            f"keys of {rows} rows", functools.partial(_compile_keys, shapes, task, rows)
        )
        yield from (turn(rows, rows, sampling) for (n, _), sampling in wanted.items() if n == rows)
    if B == G * K and G % shards == 0:
        yield turn(G // lanes, B // lanes, task.settings.sampling)


def _samplings(task: "Task") -> tuple[Sampling, ...]:
    """Return the `Sampling` of a task's evaluations, if it has any, and of its training."""
    training = task.settings.sampling
    return (training,) if task.heldout is None else (task.eval_sampling, training)


def slot_programs(
    shapes: Shapes, task: "Task", lengths: ProgramLengths
) -> Iterator[PlannedProgram]:
    """Yield all programs that rollouts in slots can need, for training and evaluation."""
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
                shapes.sampler,
                shapes.policy,
                sizes,
                lengths,
                max_new_tokens=task.settings.budgets.max_new_tokens,
                sampling=sampling,
                stop_ids=task.settings.chat.stop_ids,
                stops=task.settings.chat.stops,
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


def _without_record(segment: Segment) -> Segment:
    return dataclasses.replace(segment, experts_NTX=None)


def _compile_turn(
    shapes: Shapes, task: "Task", prompts: int, rows: int, first: int, sampling: Sampling
) -> None:
    """Compile prefill of `prompts` prompts and decode of `rows` rows that continue them."""
    model, policy, mesh = shapes.sampler, shapes.policy, shapes.sampling_mesh
    prefix_ids = task.settings.chat.prefix_ids

    def rows_of(*shape, dtype=jnp.int32):
        return struct(mesh, shape, dtype, "rows")

    with jax.set_mesh(mesh):
        prefix = None
        if has_prefix(model, task.settings.chat):
            prefix = _without_record(compiled(read_prefix, model, policy, prefix_ids))
            first -= len(prefix_ids)
        tokens = rows_of(prompts, length_bucket(first))
        segment, logits = compiled(prefill, model, policy, tokens, rows_of(prompts), prefix)
        segment = _without_record(segment)
        draws = (
            rows_of(rows, dtype=task.key.dtype),
            rows_of(rows),
            host((), jnp.float32),
        )
        settings = sampling.decode_settings(
            task.settings.chat.stop_ids,
            task.settings.budgets.max_new_tokens,
            task.settings.chat.stops,
        )
        if not task.settings.counted:
            compiled(decode, model, policy, segment, logits, *draws, settings=settings)
            return
        carry = compiled(counted.begin, model, segment, logits, *draws, settings=settings)
        limit = host((), jnp.int32)
        parts = (model, policy, segment, carry, limit, *draws)
        carry, _ = compiled(counted.resume, *parts, settings=settings)
        compiled(counted.finish, carry)
