"""What training changes: TrainState, composed of the states of its parts."""

import dataclasses
from typing import Any

import flax.struct
import jax

from ragen_jax.core.types import Params
from ragen_jax.diagnostics.regimes import RegimeState
from ragen_jax.diagnostics.stopping import StoppingState
from ragen_jax.diagnostics.zscores import ZScoreState


@flax.struct.dataclass
class CriticState:
    """What the critic has learnt: part of `TrainState`."""

    params: Params  # {"backbone": parameters or adapters, "value": float32 [D]}
    opt_state: Any  # of the optimizer


@flax.struct.dataclass
class TrainState:
    """All that a run needs to continue exactly where it was stopped."""

    params: Params
    opt_state: Any  # of the optimizer
    step: jax.Array  # int32, finished iterations
    seed_cursor: dict[str, jax.Array]  # environment -> uint32, seeds used so far
    kl_scale: jax.Array  # float32, multiplies algorithm.kl_coef; moves where a target is set
    stopping: StoppingState | None = None
    regimes: RegimeState | None = None
    # environment -> int32, uninformative visits in a row of each problem of its pool, if it has one
    streak_P: dict[str, jax.Array] | None = None
    zscores: ZScoreState | None = None
    critic: CriticState | None = None  # where the algorithm has one


@flax.struct.dataclass
class Sampler:
    """The policy of a rollout ahead."""

    params: Params  # what is trained, as sampling reads it: LoRA adapters by themselves
    step: jax.Array  # int32, finished iterations behind which it stands


@flax.struct.dataclass
class AheadState(TrainState):
    """The same of a run whose rollouts are ahead of its updates (run/ahead.py)."""

    sampler: Sampler = dataclasses.field(kw_only=True)  # of the next step's episodes
