"""The programs of a training run: what it compiles, at its largest, and what they cost.

Follows train.py, rollout/, cross_scoring.py and update/: the same jitted functions, with the
shapes of shapes.py in place of arrays.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.stages import Lowered, Wrapped
from ml_collections import ConfigDict

from ragen_jax import sharding
from ragen_jax.diagnostics import cross_scoring, flow
from ragen_jax.preflight.roofline import Cost, Work
from ragen_jax.preflight.shapes import Lengths, Run, Struct, cache_struct, describe, host, struct
from ragen_jax.rollout.sample import decode, extend, prefill
from ragen_jax.run.build import build_loss, build_value_loss, needs_statistics
from ragen_jax.run.sizes import minibatch_rows, of_environments, step_rows
from ragen_jax.types import Params, TrainState
from ragen_jax.update import passes
from ragen_jax.update.critic import CriticState, ValueLoss, critic_step
from ragen_jax.update.policy import Loss, update_step


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run, ready to be compiled."""

    name: str
    lower: Callable[[], Lowered]
    arguments: Any  # tree of `Struct`s
    held: Any  # tree of those in memory that are not its arguments
    cost: Cost  # of a call, on a chip
    calls: float  # of a step, on average
    helps: tuple[str, ...]  # config fields that make it smaller


def programs(
    config: ConfigDict,
    devices: Sequence[jax.Device],
    *,
    prompt_tokens: int,
    observation_tokens: int,
) -> list[Program]:
    """The programs of a run on these devices.

    Raises:
      ValueError: values that the run would refuse, too.
    """
    run = describe(config, devices, prompt_tokens, observation_tokens)
    alone = of_environments(config)
    plan = []
    for name, c in alone.items():
        played = [*rollout_programs(run, c, run.at[name]), *scoring_programs(run, c, run.at[name])]
        suffix = f":{name}" if len(alone) > 1 else ""
        plan += [dataclasses.replace(p, name=p.name + suffix) for p in played]
    return [*plan, *training_programs(run)]


def program(
    name: str,
    mesh: Mesh,
    function: Any,
    *args: Any,
    keywords: dict[str, Any] | None = None,
    **rest: Any,
) -> Program:
    """A `Program` that calls a jitted function (of any declared type) with the mesh in use."""

    def lower():
        with jax.set_mesh(mesh):
            return function.lower(*args, **(keywords or {}))

    arrays = [x for x in jax.tree.leaves(args) if getattr(x, "sharding", None)]
    return Program(name=name, lower=lower, arguments=arrays, **rest)


def on_chip(count: int, mesh: Mesh) -> int:
    """Rows of a chip; rows that do not split evenly are on all of them."""
    shards = sharding.data_shards(mesh)
    return count if count % shards else count // shards


def rollout_programs(run: Run, config: ConfigDict, at: Lengths) -> Iterator[Program]:
    """Prefill, extend and decode with all rows, at the last turn, of one environment's config."""
    c, mesh = config, run.sampling_mesh
    work = Work(run.model.config, mesh.shape["tensor"])
    shards = sharding.data_shards(mesh)
    G, K, T = c.rollout.groups, c.rollout.group_size, c.rollout.max_new_tokens
    B = -(-G * K // shards) * shards
    V = run.model.config.vocab_size
    turns, fresh = c.env.max_turns, c.env.max_turns - at.whole
    shared: dict[str, Any] = {"helps": ("rollout.groups", "rollout.max_new_tokens", *run.helps)}

    def rows(*shape, dtype=jnp.int32):
        return struct(mesh, shape, dtype, "rows")

    def cache(positions):
        return cache_struct(run.model, run.policy, mesh, B, positions)

    def read(name, N, length, *, members, calls):
        even = N % shards == 0
        tokens = (rows(N, length), rows(N)) if even else (host((N, length)), host((N,)))
        return program(
            name,
            mesh,
            prefill,
            run.model,
            run.policy,
            *tokens,
            keywords={"members": 1 if even else members},
            held=run.held,
            cost=work.prefill(on_chip(N, mesh), length),
            calls=calls,
            **shared,
        )

    by_group = G * K % shards == 0  # as rollout/play.py
    if by_group:
        yield read("prefill", G, at.first, members=K, calls=1)
    # Every row reads a prompt of its own: in evaluations, and where a turn starts afresh.
    if fresh or not by_group or c.rollout.compact or c.eval.every:
        length = at.prompt if fresh else at.first
        yield read("prefill_rows", B, length, members=1, calls=fresh + (not by_group))
    before = reply = None
    if at.shown > 1:
        before, reply = cache(at.before), cache(T)
        yield program(
            "extend",
            mesh,
            extend,
            run.model,
            run.policy,
            before,
            reply,
            rows(B),
            rows(B, at.news),
            rows(B),
            keywords={"capacity": at.prompt},
            held=run.held,
            cost=work.extend(B // shards, at.prompt, at.news),
            calls=at.whole - 1,
            **shared,
        )
    yield program(
        "decode",
        mesh,
        decode,
        run.model,
        run.policy,
        cache(at.prompt),
        struct(mesh, (B, V), jnp.float32, "rows", "vocab"),
        rows(B, dtype=jax.random.key(0).dtype),
        rows(B),
        host((), jnp.float32),
        keywords={"max_new_tokens": T, "stop_ids": (0,)},
        held=(run.held, before, reply),  # play.py still has the turn before
        cost=work.decode(B // shards, at.prompt, T),
        calls=turns,
        **shared,
    )


def scoring_programs(run: Run, config: ConfigDict, at: Lengths) -> Iterator[Program]:
    """Cross-scoring of the trajectory scope, whose prompts are the longest, and flow's rows.

    Where prompts show earlier replies, the steps with flow figures score the trajectory scope
    again: under prompts without these replies' reasonings, which are at most as long.
    """
    c, mesh = config, run.sampling_mesh
    if not c.diagnose.every:
        return
    work = Work(run.model.config, mesh.shape["tensor"])
    episodes = c.rollout.groups * c.rollout.group_size
    N = min(c.diagnose.trajectory_samples, episodes)
    shards = sharding.data_shards(mesh)

    def blocks(prompts, reasonings):
        """(prompts of a call, reasonings of a call, calls) of cross_scoring.cross_score."""
        n, m = cross_scoring.blocks(prompts, reasonings, c.diagnose.micro_batch, shards)
        return n, m, -(-prompts // n) * -(-reasonings // m)

    n, m, calls = blocks(N, N)
    # The first turn's scope has as many rows a call and shorter prompts.
    first = min(c.diagnose.first_turn_samples, episodes)
    first_calls = blocks(c.rollout.groups, first)[2]
    P = cross_scoring.padded_length(at.last, 32)
    flow_every = math.lcm(c.diagnose.every, c.diagnose.flow_every)  # 0: never
    stripped = 1 / flow_every if flow_every and at.shown > 1 else 0
    shared: dict[str, Any] = {
        "held": run.held,
        "helps": ("diagnose.micro_batch", "diagnose.trajectory_samples", *run.helps),
    }
    yield program(
        "score_prompts",
        mesh,
        cross_scoring.read_prompts,
        run.model,
        run.policy,
        host((n, P)),
        host((n,)),
        cost=work.score_prompts(on_chip(n, mesh), P),
        calls=-(-N // n) * (1 / c.diagnose.every + stripped),
        **shared,
    )

    def score(name, shape, *further, calls):
        return program(
            name,
            mesh,
            cross_scoring.score_block,
            run.model,
            run.policy,
            cache_struct(run.model, run.policy, mesh, n, P),
            struct(mesh, (n, run.model.config.width), jnp.dtype(c.model.dtype), "rows"),
            host((*shape, at.reasoning)),
            host(shape),
            *further,
            cost=work.score(on_chip(n * m, mesh), on_chip(n, mesh), P, at.reasoning),
            calls=calls,
            **shared,
        )

    yield score("score", (m,), calls=(calls + first_calls) / c.diagnose.every + calls * stripped)
    if flow_every:
        # Actions behind the other reasonings of their panels, which differ from prompt to prompt:
        # one panel a turn, and two a first turn.
        most = -(-2 * (flow.PANEL - 1) * first // c.rollout.groups)
        swapped = blocks(N, flow.PANEL - 1)[2] + blocks(c.rollout.groups, most)[2]
        yield score("score_flow", (n, m), host((n, m, 2)), calls=swapped / flow_every)


def training_programs(run: Run) -> Iterator[Program]:
    """The passes before an update, the updates, and the copy of parameters that sampling reads."""
    c, state = run.config, run.state
    A = -(-minibatch_rows(c) // c.optimizer.micro_batch)
    temperature = host((), jnp.float32)
    if needs_statistics(c):
        held = state.opt_state, state.critic, run.reference
        yield _read(
            run, "statistics", passes.statistics, run.whole, temperature, held=held, head=True
        )
    reference = run.frozen.params if run.frozen else run.reference
    if reference is not None and c.algorithm.kl_coef and c.algorithm.kl_in == "reward":
        yield _read(
            run, "reference", passes.statistics, reference, temperature, held=state, head=True
        )
    if state.critic:
        rest = dataclasses.replace(state, critic=None), run.reference
        critic, optimizer = state.critic, run.optimizer
        held = rest, critic.opt_state
        yield _read(run, "values", passes.values, critic.params, run.frozen, held=held, head=False)
        yield _step(
            run,
            "critic",
            critic_step,
            optimizer,
            build_value_loss(c),
            critic,
            _rows(run, A, tokens="int32", value="f4", target="f4", mask="f4"),
            held=rest,
            reference=False,
            with_head=False,
        )
    in_loss = bool(c.algorithm.kl_coef and c.algorithm.kl_in == "loss")
    yield _step(
        run,
        "update",
        update_step,
        run.optimizer,
        build_loss(c),
        state,
        _rows(run, A, tokens="int32", logp="f4", advantage="f4", mask="f4"),
        run.reference if in_loss else None,
        held=None if in_loss else run.reference,
        reference=in_loss,
    )
    if run.copied:
        held = state if run.frozen else (dataclasses.replace(state, params=None), run.reference)
        work = Work(run.model.config, run.sampling_mesh.shape["tensor"])
        yield program(
            "resharding",
            run.sampling_mesh,
            sharding.resharding(run.model, run.sampling_mesh),
            run.base,
            held=held,
            cost=work.resharding(shards=_split(run)),
            calls=0 if run.frozen else 1,  # LoRA's base model is copied once a run
            helps=run.helps,
        )


def _split(run: Run) -> int:
    """Chips that a parameter is split over."""
    return run.mesh.shape["fsdp"] * run.mesh.shape["tensor"]


def _beside(run: Run) -> Params | None:
    """The sampler's copy, which train.py drops while it learns unless its base is LoRA's."""
    return run.policy if run.frozen and run.copied else None


def _helps(run: Run) -> tuple[str, ...]:
    """Config fields that make what training holds smaller."""
    helps = ["optimizer.micro_batch"]
    helps += [] if run.config.model.remat else ["model.remat"]
    helps += ["algorithm.kl_coef"] if run.reference else []
    helps += ["algorithm.name"] if run.state.critic else []
    return (*helps, *run.helps)


def _rows(run: Run, A: int, **types: str) -> dict[str, Struct]:
    """{name: [A, micro_batch, T] of a dtype}."""
    shape = (A, run.config.optimizer.micro_batch, run.row)
    return {
        name: struct(run.mesh, shape, jnp.dtype(dtype), None, "rows")
        for name, dtype in types.items()
    }


def _step(
    run: Run,
    name: str,
    function: Wrapped,
    optimizer: optax.GradientTransformation,
    loss: Loss | ValueLoss,
    trained: TrainState | CriticState,
    minibatch: dict[str, Struct],
    *rest: Any,
    held: Any,
    **cost: bool,
) -> Program:
    """The `Program` of an optimizer step."""
    o = run.config.optimizer
    size = sum(x.size for x in jax.tree.leaves(trained.params))
    return program(
        name,
        run.mesh,
        function,
        run.model,
        optimizer,
        loss,
        trained,
        *rest,
        minibatch,
        host(()),
        host((), jnp.float32),
        host((), jnp.float32),
        run.frozen,
        held=(held, _beside(run)),
        cost=Work(run.model.config, run.mesh.shape["tensor"]).update(
            on_chip(o.micro_batch, run.mesh),
            run.row,
            micro_batches=-(-minibatch_rows(run.config) // o.micro_batch),
            trained=size // _split(run),
            frozen=bool(run.frozen),
            **cost,
        ),
        calls=o.minibatches,
        helps=_helps(run),
    )


def _read(
    run: Run,
    name: str,
    function: Callable[..., tuple[jax.Array, ...]],
    params: Params,
    extra: Any,
    *,
    held: Any,
    head: bool,
) -> Program:
    """The `Program` of a pass over all rows of a step."""
    micro = run.config.optimizer.micro_batch
    count = -(-step_rows(run.config) // micro)
    return program(
        name,
        run.mesh,
        passes.read_micro_batches,
        function,
        run.model,
        params,
        _rows(run, count, tokens="int32")["tokens"],
        host(()),
        extra,
        held=(held, _beside(run)),
        cost=Work(run.model.config, run.mesh.shape["tensor"]).read_rows(
            on_chip(micro, run.mesh), run.row, micro_batches=count, head=head
        ),
        calls=1,
        helps=_helps(run),
    )
