"""The programs that a training run compiles, at their largest sizes, and their costs.

They follow train.py, rollout/ and update/: the same jitted functions, with the shapes of shapes.py
in place of arrays. The programs of diagnostics are in diagnostics.py, those of environments in
residents.py and those of a vision tower in images.py.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ragen_jax.algorithm.bonus import weighs_entropy
from ragen_jax.config.build_learner import build_value_loss, needs_statistics
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config
from ragen_jax.core import sharding
from ragen_jax.core.stored_programs import Jitted
from ragen_jax.core.types import Params
from ragen_jax.model import layout
from ragen_jax.model.qwen import Qwen
from ragen_jax.programs.images import with_tower
from ragen_jax.programs.program import (
    Program,
    on_chip,
    program,
    split,
    training_helps,
    work_on,
)
from ragen_jax.programs.residents import resident_programs, residents, with_residents
from ragen_jax.programs.roofline import Cost
from ragen_jax.programs.rows import MicroBatchShapes, expected_shapes, micro_batch_structs
from ragen_jax.programs.shapes import (
    RowLengths,
    RunShapes,
    cache_struct,
    describe,
    host,
    slot_structs,
    struct,
)
from ragen_jax.rollout.chunks import DecodeBatch, decode_chunk, fold, read
from ragen_jax.rollout.pages import cache_sizes
from ragen_jax.rollout.sample import DecodeSettings, decode, extend, prefill
from ragen_jax.rollout.tails import fold_tail
from ragen_jax.update import passes
from ragen_jax.update.critic import critic_gradient
from ragen_jax.update.optimize import apply_gradient, needs_start
from ragen_jax.update.policy import policy_gradient, rounding_decides
from ragen_jax.update.state import CriticState, TrainState

# (run, config of an environment, its `RowLengths`) -> programs.
Planner = Callable[[RunShapes, Config, RowLengths], Iterator[Program]]


def programs(
    config: Config,
    devices: Sequence[jax.Device],
    diagnostics: Iterable[Planner],
    *,
    prompt_tokens: int,
    observation_tokens: int,
) -> list[Program]:
    """Return the programs of a run on these devices.

    Args:
      diagnostics: planners of the programs of the run's diagnostics.
      prompt_tokens, observation_tokens: as in `shapes.lengths`.

    Raises:
      ValueError: values that the run would refuse.
    """
    run = describe(config, devices, prompt_tokens, observation_tokens)
    alone = per_task_configs(config)
    planners = list(diagnostics)
    plan = []
    for name, c in alone.items():
        measured = [p for planner in planners for p in planner(run, c, run.at[name])]
        played = [
            *rollout_programs(run, c, run.at[name]),
            *(dataclasses.replace(p, diagnosis=True) for p in measured),
        ]
        suffix = f":{name}" if len(alone) > 1 else ""
        plan += [dataclasses.replace(p, name=p.name + suffix) for p in played]
    kept = residents(run)
    plan = with_residents([*plan, *training_programs(run, *expected_shapes(run))], kept)
    return with_tower(run, [*plan, *resident_programs(run, kept)])


def rollout_programs(run: RunShapes, config: Config, at: RowLengths) -> Iterator[Program]:
    """Yield prefill, extend and decode of all rows at the last turn, for one environment's config.

    With slots, yield `slot_programs` instead.
    """
    c, mesh = config, run.sampling_mesh
    work = work_on(run.sampler.config, mesh)
    shards = sharding.data_shards(mesh)
    G, K, T = c.rollout.groups, c.rollout.group_size, c.rollout.max_new_tokens
    B = -(-G * K // shards) * shards
    V = run.sampler.config.vocab_size
    turns, fresh = c.env.max_turns, c.env.max_turns - at.whole
    helps = "rollout.groups", "rollout.max_new_tokens", *cache_helps(run), *run.helps
    shared: dict[str, Any] = {"helps": helps}

    def rows(*shape, dtype=jnp.int32):
        return struct(mesh, shape, dtype, "rows")

    def cache(positions, *, windows=True):
        return cache_struct(run.sampler, run.policy, mesh, B, positions, windows=windows)

    def read_prompts(name, N, length, *, members, calls):
        even = N % shards == 0
        tokens = (rows(N, length), rows(N)) if even else (host((N, length)), host((N,)))
        return program(
            name,
            mesh,
            prefill,
            run.sampler,
            run.with_images,
            *tokens,
            keywords={"members": 1 if even else members},
            resident=run.resident,
            cost=work.prefill(on_chip(N, mesh), length),
            calls=calls,
            **shared,
        )

    by_group = G * K % shards == 0  # as in rollout/play.py
    if c.rollout.slots or c.rollout.chunk:
        yield from slot_programs(run, c, at)
        return
    if by_group:
        yield read_prompts("prefill", G, at.first, members=K, calls=1)
    # Every row reads a separate prompt in evaluations, and in turns that start a new row.
    if fresh or not by_group or c.rollout.compact or c.eval.every:
        length = at.prompt if fresh else at.first
        yield read_prompts("prefill_rows", B, length, members=1, calls=fresh + (not by_group))
    before = reply = None
    if at.shown > 1:
        before, reply = cache(at.before), cache(T, windows=False)
        yield program(
            "extend",
            mesh,
            extend,
            run.sampler,
            run.with_images,
            before,
            reply,
            rows(B),
            rows(B, at.news),
            rows(B),
            keywords={"capacity": at.prompt},
            resident=run.resident,
            cost=work.extend(B // shards, at.prompt, at.news),
            calls=at.whole - 1,
            **shared,
        )
    yield program(
        "decode",
        mesh,
        decode,
        run.sampler,
        run.policy,
        cache(at.prompt),
        struct(mesh, (B, V), jnp.float32, "rows", "vocab"),
        rows(B, dtype=jax.random.key(0).dtype),
        rows(B),
        host((), jnp.float32),
        keywords={"settings": DecodeSettings(max_tokens=T, stop_ids=(0,))},
        resident=(run.resident, before, reply),  # play.py still holds the previous turn
        cost=work.decode(B // shards, at.prompt, T),
        calls=turns,
        tokens=B // shards * (T - 1),
        **shared,
    )


def slot_programs(run: RunShapes, config: Config, at: RowLengths) -> Iterator[Program]:
    """Yield the programs of slots: reading new tokens, decoding a chunk, and folding either into a
    page.

    Their sizes are those of the last turn, with all rows and pages. The numbers of calls assume
    that no row waits for another: every slot plays an equal number of episodes, and every reply has
    the maximum length.
    """
    c, mesh = config, run.sampling_mesh
    work = work_on(run.sampler.config, mesh)
    shards = sharding.data_shards(mesh)
    episodes, longest = c.rollout.groups * c.rollout.group_size, c.rollout.max_new_tokens
    with jax.set_mesh(mesh):
        sizes = cache_sizes(
            slots=c.rollout.slots,
            chunk=c.rollout.chunk,
            episodes=episodes,
            prompt=at.first,
            max_new_tokens=longest,
            compact=False,
        )
    rows, at_a_time, chunk = sizes.rows[-1], sizes.at_a_time, sizes.chunk
    B, R, E = shards * rows, shards * at_a_time, sizes.piece(at.news)
    replies = c.env.max_turns * -(-episodes // B)  # per slot
    lengths, positions = [], 0
    for size in sizes.pages():
        lengths.append(size)
        positions += size
        if positions >= at.last + longest:
            break
    # The kernel reads the positions that a row has, on average over an episode.
    by_kernel = run.sampler.config.cache_kernel == "pages"
    read_positions = (at.first + at.last + longest) // 2 if by_kernel else positions

    def kept(N, positions):
        return slot_structs(run.sampler, run.policy, mesh, N, positions)

    caches = [kept(B, size)[0] for size in lengths]
    _, tail = kept(B, max(run.sampler.config.window, 1))
    tails = {} if tail is None else {"tail": tail}
    largest = lengths.index(max(lengths))
    helps = ("rollout.slots", *cache_helps(run), *run.helps)

    def ints(*shape):
        return struct(mesh, shape, jnp.int32, "rows")

    def fold_of(name, N, length, calls):
        return program(
            name,
            mesh,
            fold,
            caches[largest],
            kept(N, length)[0],
            host((), jnp.int32),
            ints(N),
            ints(N),
            ints(B),
            resident=(run.resident, run.policy, caches[:largest], caches[largest + 1 :], tail),
            cost=Cost(0.0, 2 * work.cache_bytes(N // shards * length)),
            calls=calls,
            helps=helps,
        )

    def fold_tail_of(name, N, length, calls):
        return program(
            name,
            mesh,
            fold_tail,
            run.sampler.config,
            tail,
            kept(N, length)[1],
            ints(N),
            ints(N),
            ints(B),
            resident=(run.resident, run.policy, caches),
            cost=work.fold_tail(N // shards, length),
            calls=calls,
            helps=helps,
        )

    reads, chunks = (
        replies * -(-rows // at_a_time) * -(-at.news // E),
        replies * -(-longest // chunk),
    )
    yield program(
        "read",
        mesh,
        read,
        run.sampler,
        run.with_images,
        caches,
        ints(R),
        ints(R),
        ints(R, E),
        keywords=tails and tails | {"count_R": ints(R)},
        resident=run.resident,
        cost=work.read(at_a_time, positions, E),
        calls=reads,
        helps=helps,
    )
    yield fold_of("fold", R, E, reads)
    if tails:
        yield fold_tail_of("fold_tail", R, E, reads)
    yield program(
        "decode_chunk",
        mesh,
        decode_chunk,
        run.sampler,
        run.policy,
        caches,
        DecodeBatch(*[ints(B)] * 4, keys_B=struct(mesh, (B,), jax.random.key(0).dtype, "rows")),
        host((), jnp.float32),
        keywords={"settings": DecodeSettings(max_tokens=chunk, stop_ids=(0,))} | tails,
        resident=run.resident,
        cost=work.decode(rows, read_positions, chunk + 1),
        calls=chunks,
        tokens=rows * chunk,
        helps=helps,
    )
    yield fold_of("fold_replies", B, chunk, chunks)
    if tails:
        yield fold_tail_of("fold_tail_of_replies", B, chunk, chunks)


def cache_helps(run: RunShapes) -> tuple[str, ...]:
    """Return the config field that reduces the memory of a cached position, if it is not set."""
    return () if run.config.rollout.cache_dtype == "int8" else ("rollout.cache_dtype",)


def training_programs(
    run: RunShapes, update: MicroBatchShapes, step: MicroBatchShapes
) -> Iterator[Program]:
    """Yield the passes before an update, the updates, and the copy of parameters for sampling.

    Args:
      update, step: shapes of the micro-batches of a minibatch, and of a pass over a step's rows.
    """
    c, state = run.config, run.state
    start = needs_start(update.grouping.micro_batches, run.mesh)
    temperature = host((), jnp.float32)
    if needs_statistics(c):
        resident = state.opt_state, state.critic, run.at_rest
        yield _read(
            run,
            step,
            "statistics",
            passes.statistics,
            run.whole,
            temperature,
            resident=resident,
            head=True,
        )
    reference = (
        run.reference
        if run.forward_context is None
        else run.forward_context.reference(run.reference)
    )
    if reference is not None and c.algorithm.kl_coef and c.algorithm.kl_in == "reward":
        yield _read(
            run,
            step,
            "reference",
            passes.statistics,
            reference,
            temperature,
            model=run.reference_model,
            resident=state,
            head=True,
        )
    if state.critic:
        rest = dataclasses.replace(state, critic=None), run.at_rest
        critic = state.critic
        resident = rest, critic.opt_state
        yield _read(
            run,
            step,
            "values",
            passes.values,
            critic.params,
            run.forward_context,
            resident=resident,
            head=False,
        )
        yield _gradient(
            run,
            update,
            "critic",
            critic_gradient,
            *(build_value_loss(c), critic.params, critic.params if start else None),
            micro_batch_structs(run, update, replay=False, mask="f4", value="f4", target="f4"),
            *(host(()), host((), jnp.float32)),
            resident=resident,
            trained=critic,
            reference=False,
            with_head=False,
        )
        yield _apply(run, "critic_apply", critic, resident=rest)
    in_loss = bool(c.algorithm.kl_coef and c.algorithm.kl_in == "loss")
    rest = state.critic, None if in_loss else run.at_rest
    loss = run.loss
    own = rounding_decides(loss, c.model.dtype)
    if own and c.optimizer.minibatches > 1:
        resident = rest, state.opt_state, run.reference if in_loss else None
        yield dataclasses.replace(
            _read(
                run,
                update,
                "old_logps",
                passes.statistics,
                run.whole,
                temperature,
                resident=resident,
                head=True,
            ),
            calls=c.optimizer.minibatches - 1,
        )
    yield _gradient(
        run,
        update,
        "update",
        policy_gradient,
        *(loss, run.learning, run.reference if in_loss else None),
        run.learning if start else None,
        micro_batch_structs(
            run,
            update,
            replay=True,
            **{"mask": "f4", "logp": "f4", "advantage": "f4"},
            **({"bonus": "f4"} if weighs_entropy(c.algorithm) else {}),
        ),
        *(host(()), (host((), jnp.float32), state.kl_scale)),
        resident=(rest, state.opt_state, state.params.get("tower")),
        # Passed even if None: JAX looks programs up by the keywords of a call.
        keywords={"unchanged": host((), jnp.bool_) if own else None},
        trained=state,
        reference=in_loss,
    )
    yield _apply(
        run, "apply", state, resident=(state.critic, run.reference if in_loss else run.at_rest)
    )
    if run.frozen and run.cast:  # at the start, when nothing else is in memory
        yield _resharding(run, run.mesh, resident=None, calls=0)
    elif run.copied:
        resident = state if run.frozen else (dataclasses.replace(state, params=None), run.at_rest)
        # LoRA's base model is copied once per run.
        yield _resharding(run, run.sampling_mesh, resident=resident, calls=0 if run.frozen else 1)


def _resharding(run: RunShapes, mesh: Mesh, *, resident: Any, calls: int) -> Program:
    """Return the `Program` that copies float32 parameters to the model's dtype and a mesh."""
    return program(
        "resharding",
        mesh,
        layout.resharding(run.model, mesh),
        run.base,
        resident=resident,
        cost=work_on(run.model.config, mesh).resharding(shards=split(run)),
        calls=calls,
        helps=run.helps,
    )


def _resident_copy(run: RunShapes) -> Params | None:
    """Return the sampler's copy of the parameters if it stays in memory during updates.

    train.py drops the copy before updates, except for a copy of LoRA's base model.
    """
    return run.policy if run.frozen and run.copied else None


def _gradient(
    run: RunShapes,
    shapes: MicroBatchShapes,
    name: str,
    function: Jitted,
    *args: Any,
    resident: Any,
    trained: TrainState | CriticState,
    keywords: dict[str, Any] | None = None,
    **cost: bool,
) -> Program:
    """Return the `Program` of a minibatch's gradient; other sizes compile it again."""
    return program(
        name,
        run.mesh,
        function,
        run.model,
        *args,
        run.forward_context,
        keywords=keywords,
        resident=(resident, _resident_copy(run)),
        cost=work_on(run.model.config, run.mesh).update(
            *(shapes.positions, shapes.keys, shapes.sizes.reads),
            micro_batches=shapes.count,
            trained=_on_chip(run, trained),
            frozen=bool(run.frozen),
            **cost,
        ),
        calls=run.config.optimizer.minibatches,
        helps=training_helps(run),
    )


def _apply(
    run: RunShapes, name: str, trained: TrainState | CriticState, *, resident: Any
) -> Program:
    """Return the `Program` of an optimizer step, given the gradient."""
    number = host((), jnp.float32)
    return program(
        name,
        run.mesh,
        apply_gradient,
        *(run.optimizer, number, trained.params, trained.opt_state, number, trained.params),
        resident=(resident, run.frozen and run.frozen.params, _resident_copy(run)),
        cost=work_on(run.model.config, run.mesh).apply(_on_chip(run, trained)),
        calls=run.config.optimizer.minibatches,
        helps=training_helps(run),
    )


def _on_chip(run: RunShapes, trained: TrainState | CriticState) -> int:
    """Return the number of trained parameters on one chip."""
    return sum(x.size for x in jax.tree.leaves(trained.params)) // split(run)


def _read(
    run: RunShapes,
    shapes: MicroBatchShapes,
    name: str,
    function: Callable[..., tuple[jax.Array, ...]],
    params: Params,
    extra: Any,
    *,
    resident: Any,
    head: bool,
    model: Qwen | None = None,
) -> Program:
    """Return the `Program` of a pass over micro-batches; model: None for the policy's."""
    replay = function is passes.statistics and model is None
    return program(
        name,
        run.mesh,
        passes.read_micro_batches,
        function,
        model or run.model,
        params,
        micro_batch_structs(run, shapes, replay=replay)["packed"],
        host(()),
        extra,
        resident=(resident, _resident_copy(run)),
        cost=work_on(run.model.config, run.mesh).read_rows(
            *(shapes.positions, shapes.keys, shapes.sizes.reads),
            micro_batches=shapes.count,
            head=head,
        ),
        calls=1,
        helps=training_helps(run),
    )
