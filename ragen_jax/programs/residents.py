"""Arrays that environments keep on the devices next to the model, and programs that read them."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config
from ragen_jax.core.domains import plain
from ragen_jax.envs import find_env
from ragen_jax.envs.types import Resident
from ragen_jax.programs.program import Program, program
from ragen_jax.programs.roofline import Cost
from ragen_jax.programs.shapes import RunShapes, cache_struct


def residents(run: RunShapes) -> dict[str, Resident]:
    """Return {environment: its `Resident`} of the environments that keep an array on the devices.

    Raises:
      ValueError: options that the environment cannot use.
    """
    found = {}
    for name, config in per_task_configs(run.config).items():
        resident = getattr(find_env(config.env.name), "resident", None)
        if resident is not None:
            try:
                found[name] = resident(run.sampling_mesh, **plain(config.env.options))
            except ValueError as error:
                raise ValueError(f"config.env.options of {config.env.name!r}: {error}") from error
    return {name: resident for name, resident in found.items() if resident is not None}


def with_residents(plan: Sequence[Program], found: dict[str, Resident]) -> list[Program]:
    """Return the programs with the resident arrays added to their `resident` memory."""
    kept = [resident.arguments[0] for resident in found.values()]
    if not kept:
        return [*plan]
    return [dataclasses.replace(one, resident=(one.resident, kept)) for one in plan]


def resident_programs(run: RunShapes, found: dict[str, Resident]) -> Iterator[Program]:
    """Yield the programs that read resident arrays: in a turn, while the previous turn's cache is
    in memory."""
    several = len(per_task_configs(run.config)) > 1
    for name, resident in found.items():
        config: Config = per_task_configs(run.config)[name]
        kept, *rest = resident.arguments
        others = [other.arguments[0] for key, other in found.items() if key != name]
        rows = config.rollout.groups * config.rollout.group_size
        cache = cache_struct(run.sampler, run.policy, run.sampling_mesh, rows, run.at[name].prompt)
        yield program(
            f"{resident.name}:{name}" if several else resident.name,
            run.sampling_mesh,
            resident.function,
            kept,
            *rest,
            keywords=dict(resident.keywords),
            resident=(run.resident, run.policy, cache, others),
            cost=Cost(
                flops=resident.flops,
                bytes=math.prod(kept.sharding.shard_shape(kept.shape)) * kept.dtype.itemsize,
            ),
            calls=config.env.max_turns * -(-rows // resident.rows),
            helps=(*resident.helps, *run.helps),
        )
