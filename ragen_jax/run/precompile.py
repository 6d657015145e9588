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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from tqdm import tqdm

from ragen_jax.compiled import compiled, struct_of
from ragen_jax.padding import length_bucket, row_bucket
from ragen_jax.preflight.programs import training_programs
from ragen_jax.preflight.shapes import Lengths, host, struct
from ragen_jax.preflight.shapes import Run as Shapes
from ragen_jax.rollout.acting import observe
from ragen_jax.rollout.episode import Sampling, next_prompt, start_plays
from ragen_jax.rollout.sample import decode, episode_keys, prefill
from ragen_jax.run.compiling import THREAD, Compiling
from ragen_jax.run.log import console
from ragen_jax.run.sizes import of_environments, turns_shown
from ragen_jax.sharding import data_shards, is_first
from ragen_jax.types import Params, TrainState
from ragen_jax.update.learner import Learner

if TYPE_CHECKING:
    from ragen_jax.run.tasks import Task

MOST = 24  # programs that are compiled at the start
PROMPTS = 16  # held-out problems whose first prompts tell how long these are
THREADS = 8  # at most, and no more than there are cores
WORTH_A_LINE = 1.0  # seconds that compiling them took


@dataclasses.dataclass(frozen=True)
class Planned:
    """A program that is to be compiled."""

    name: str
    compile: Callable[[], Any]


class Precompiler:
    """The threads that compile, and what they are at."""

    def __init__(self, compiling: Compiling) -> None:
        self.compiling = compiling
        self.pool = concurrent.futures.ThreadPoolExecutor(
            min(os.cpu_count() or 1, THREADS), thread_name_prefix=THREAD
        )
        self.beside = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self.under_way: list[concurrent.futures.Future[None]] = []

    def compile_now(self, programs: Sequence[Planned]) -> None:
        """Compiles all of them and waits, with a progress bar on a terminal."""
        start = time.perf_counter()
        futures = [self.pool.submit(_compile, program) for program in programs]
        bar = tqdm(
            concurrent.futures.as_completed(futures),
            total=len(futures),
            desc="compiling",
            leave=False,
            disable=None if is_first() else True,  # None: on a terminal
        )
        for future in bar:
            future.result()
        seconds = time.perf_counter() - start
        self.compiling.waited(seconds)
        if seconds >= WORTH_A_LINE:
            console(f"compiled {len(futures)} programs in {seconds:.1f} s")

    def begin(self, program: Planned) -> None:
        """Has something compiled beside what follows, behind what was begun before."""
        self.under_way.append(self.beside.submit(_compile, program))

    def wait(self) -> None:
        """Returns when all that was begun is there."""
        start = time.perf_counter()
        waiting = [future for future in self.under_way if not future.done()]
        for future in self.under_way:
            future.result()
        self.under_way = []
        if waiting:
            self.compiling.waited(time.perf_counter() - start)

    def close(self) -> None:
        """Begins nothing more; what is under way ends by itself."""
        for pool in (self.pool, self.beside):
            pool.shutdown(wait=False, cancel_futures=True)


def _compile(program: Planned) -> None:
    """Compiles one. Where it cannot be, the run will say so where it calls it."""
    try:
        program.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        console(f"warning: {program.name} was not compiled ahead: {reason}")


# ------------------------------------------------------------------------------ which


def start_programs(
    config: ConfigDict,
    learner: Learner,
    state: TrainState,
    policy: Params,
    tasks: "Sequence[Task]",
) -> list[Planned]:
    """What a run in one process surely needs for its first evaluation and its first update.

    Of rollouts that is every first turn and, where each turn reads a prompt of its own, every
    number of rows that compaction can leave; of updates, where a row is one turn, the length of a
    prompt with the longest reply. At most `MOST`, in the order in which they are needed; none in
    several processes.
    """
    if jax.process_count() > 1:  # which would have to compile in the same order
        return []
    shapes = describe(config, learner, state, policy)
    planned: dict[str, Planned] = {}
    lengths = []
    for task, c in zip(tasks, of_environments(config).values(), strict=True):
        first = length_bucket(longest_prompt(task))
        if not (task.slots or task.chunk):
            for program in rollout_starts(shapes, task, first, alone=turns_shown(c.env) == 1):
                planned.setdefault(program.name, program)
        if turns_shown(c.env) == 1:
            lengths.append(length_bucket(longest_prompt(task) + task.budgets.max_new_tokens))
    jax_config: Any = jax.config  # whose attributes are there when it runs
    kept = jax_config.jax_enable_compilation_cache and jax_config.jax_compilation_cache_dir
    # What takes donated arguments is found again on disk alone.
    if len(lengths) == len(tasks) and kept:
        for program in training_programs(dataclasses.replace(shapes, at=_rows_of(max(lengths)))):
            planned[program.name] = Planned(program.name, lambda p=program: p.lower().compile())
    return list(planned.values())[:MOST]


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
    )


def _rows_of(length: int) -> dict[str, Lengths]:
    """`Lengths` of rows so long, for programs that read no other."""
    return {"": Lengths(*[length] * len(dataclasses.fields(Lengths)))}


def longest_prompt(task: "Task") -> int:
    """Tokens of the longest first prompt among some held-out problems of a task."""
    seeds, states = (listed[:PROMPTS] for listed in task.heldout)
    shown = observe(task.heldout_environment, states, task.limits)
    plays = start_plays(seeds, states, shown, 1, task.key)
    return max(len(next_prompt(play, task.chat)[1]) for play in plays)


def rollout_starts(shapes: Shapes, task: "Task", first: int, *, alone: bool) -> Iterator[Planned]:
    """Prefill, keys and decode of first turns, of training and of evaluation.

    Args:
      first: tokens of a first prompt, padded.
      alone: whether every turn reads a prompt of its own, which the rows that are left do.
    """
    mesh, G = shapes.sampling_mesh, task.groups
    shards = data_shards(mesh)
    B = -(-G * task.group_size // shards) * shards
    sizes = [B]
    if alone and task.compact:
        per_shard = B // shards
        sizes = sorted({shards * row_bucket(n, per_shard) for n in range(1, per_shard + 1)})[::-1]
    # Their temperature is not part of a program.
    samplings = {
        dataclasses.replace(s, temperature=1.0): s for s in (task.eval_sampling, task.sampling)
    }

    def turn(prompts, rows, sampling):
        compile = functools.partial(_compile_turn, shapes, task, prompts, rows, first, sampling)
        settings = f"top_k {sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}"
        return Planned(f"{prompts} prompts of {first}, {rows} rows, {settings}", compile)

    for rows in sizes:
        yield Planned(f"keys of {rows} rows", functools.partial(_compile_keys, shapes, task, rows))
        yield from (turn(rows, rows, sampling) for sampling in samplings.values())
    if B == G * task.group_size and G % shards == 0:
        yield turn(G, B, task.sampling)


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
            max_new_tokens=task.budgets.max_new_tokens,
            stop_ids=task.chat.stop_ids,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
