"""The programs of a step's diagnostics; rows of `run.diagnose.DIAGNOSTICS` name these functions."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.configs.base import Config
from ragen_jax.core import sharding
from ragen_jax.diagnostics import cross_scoring, flow, gradients, mediation
from ragen_jax.programs.program import (
    Program,
    on_chip,
    program,
    split,
    training_helps,
    work_on,
)
from ragen_jax.programs.rows import group_shapes, micro_batch_structs
from ragen_jax.programs.shapes import RowLengths, RunShapes, cache_struct, host, struct
from ragen_jax.update.policy import PolicyLoss


def scoring_programs(run: RunShapes, config: Config, at: RowLengths) -> Iterator[Program]:
    """Yield the programs of cross-scoring and of the flow figures.

    Their sizes are those of the trajectory scope, which has the longest prompts. Its prompts are
    different ones, except in single turns: these are the first prompts of the groups. If prompts
    show earlier replies, steps with flow figures score the trajectory scope again, without the
    reasonings in these replies; the prompts are then no longer than before. If mutual information
    is rewarded (algorithm.mi_coef), every step scores its replies under the first prompts; these
    are shorter, but are counted as if they had the same length.
    """
    c, mesh = config, run.sampling_mesh
    if not (c.diagnose.every or c.algorithm.mi_coef):
        return
    share = 1 / c.diagnose.every if c.diagnose.every else 0
    work = work_on(run.model.config, mesh)
    episodes = c.rollout.groups * c.rollout.group_size
    M = min(c.diagnose.trajectory_samples, episodes)
    N = M if c.env.max_turns > 1 else min(M, c.rollout.groups)
    shards = sharding.data_shards(mesh)

    def blocks(prompts, reasonings):
        """Return (prompts per call, reasonings per call, calls) of cross_scoring.cross_score."""
        n, m = cross_scoring.blocks(prompts, reasonings, c.diagnose.micro_batch, shards)
        return n, m, -(-prompts // n) * -(-reasonings // m)

    n, m, calls = blocks(N, M)
    # The first turn's scope has the same number of rows per call, and shorter prompts.
    first = min(c.diagnose.first_turn_samples, episodes)
    first_calls = blocks(c.rollout.groups, first)[2]
    P = cross_scoring.padded_length(at.last, 32)
    paid = blocks(c.rollout.groups, episodes * c.env.max_turns) if c.algorithm.mi_coef else None
    flow_every = math.lcm(c.diagnose.every, c.diagnose.flow_every)  # 0: never
    stripped = 1 / flow_every if flow_every and at.shown > 1 else 0
    shared: dict[str, Any] = {
        "resident": run.resident,
        "helps": ("diagnose.micro_batch", "diagnose.trajectory_samples", *run.helps),
    }
    yield program(
        "score_prompts",
        mesh,
        cross_scoring.read_prompts,
        run.model,
        run.with_images,
        host((n, P)),
        host((n,)),
        cost=work.score_prompts(on_chip(n, mesh), P),
        calls=-(-N // n) * (share + stripped) + (paid is not None),
        **shared,
    )

    def score(name, shape, *further, calls):
        return program(
            name,
            mesh,
            cross_scoring.score_block,
            run.model,
            run.with_images,
            cache_struct(run.model, run.policy, mesh, n, P),
            struct(mesh, (n, run.model.config.width), jnp.dtype(c.model.dtype), "rows"),
            host((*shape, at.reasoning)),
            host(shape),
            *further,
            cost=work.score(on_chip(n * m, mesh), on_chip(n, mesh), P, at.reasoning),
            calls=calls,
            **shared,
        )

    of_scopes = (calls + first_calls) * share + calls * stripped
    yield score("score", (m,), calls=of_scopes + (paid[2] if paid else 0))
    if flow_every:
        # Actions are scored after the other reasonings of their panels, which differ between
        # prompts. There is one panel per turn, and two per first turn.
        most = -(-2 * (flow.PANEL - 1) * first // c.rollout.groups)
        swapped = blocks(N, flow.PANEL - 1)[2] + blocks(c.rollout.groups, most)[2]
        yield score("score_flow", (n, m), host((n, m, 2)), calls=swapped / flow_every)


def mediation_programs(run: RunShapes, config: Config, at: RowLengths) -> Iterator[Program]:
    """Yield the program that measures what a probe's actions depend on (mediation.py).

    A probe's other programs are no larger than the programs of a step.
    """
    d, mesh = config.diagnose, run.sampling_mesh
    if not (d.probe_every and d.probe_mediation):
        return
    P, B = cross_scoring.padded_length(at.first, 32), d.micro_batch
    padded = [(host((B, n)), host((B,))) for n in (P, at.reasoning, at.reasoning)]
    yield program(
        "mediation",
        mesh,
        mediation.measure,
        run.model,
        run.with_images,
        *padded,
        host((B,)),
        host(()),
        cost=work_on(run.model.config, mesh).mediation(
            on_chip(B, mesh), P, at.reasoning, at.reasoning
        ),
        calls=-(-d.probe_problems * d.probe_samples // B) / d.probe_every,
        resident=run.resident,
        helps=("diagnose.micro_batch", *run.helps),
    )


def gradient_programs(run: RunShapes, config: Config, at: RowLengths) -> Iterator[Program]:
    """Yield the program that computes the inner products of a bucket's gradients, part by part."""
    d = config.diagnose
    if not d.gradients_every:
        return
    loss, groups = run.loss, d.gradients_groups or config.rollout.groups
    shapes = group_shapes(run, config, at)
    of_group = shapes.grouping.micro_batches
    types = {"logp": "f4", "advantage": "f4", "mask": "f4"}
    pieces = micro_batch_structs(run, shapes, groups, of_group, replay=True, **types)
    buckets = len(d.gradients_edges) + 1 if d.gradients_edges else d.gradients_buckets
    size = sum(x.size for x in jax.tree.leaves(run.state.params))
    yield program(
        "gradients",
        run.mesh,
        gradients.bucket_products,
        PolicyLoss(
            run.model,
            loss,
            run.reference if loss.kl_coef else None,
            run.state.kl_scale,
            run.forward_context,
        ),
        run.state.params,
        pieces,
        host((groups,)),
        host(()),
        resident=(
            (run.state.opt_state, run.state.critic),
            None if loss.kl_coef else run.at_rest,
            run.policy if run.copied else None,
        ),
        cost=work_on(run.model.config, run.mesh).gradients(
            *(shapes.positions, shapes.keys, shapes.sizes.reads),
            micro_batches=groups * shapes.count / buckets,
            parts=len(gradients.part_names(loss)),
            reference=bool(loss.kl_coef),
            trained=size // split(run),
            frozen=bool(run.frozen),
        ),
        calls=buckets / d.gradients_every,
        helps=("diagnose.gradients_groups", *training_helps(run)),
    )
