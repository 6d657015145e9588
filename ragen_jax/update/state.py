"""The state that training changes: `TrainState`, composed of the states of its parts."""

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
    """The trained state of the critic: part of `TrainState`."""

    params: Params  # {"backbone": parameters or adapters, "value": float32 [D]}
    opt_state: Any  # optimizer state


@flax.struct.dataclass
class TrainState:
    """All the state that a run needs to resume exactly where it stopped."""

    params: Params
    opt_state: Any  # optimizer state
    step: jax.Array  # int32, finished iterations
    seed_cursor: dict[str, jax.Array]  # environment -> uint32, seeds used so far
    kl_scale: jax.Array  # float32, multiplies algorithm.kl_coef; adapted if a KL target is set
    stopping: StoppingState | None = None
    regimes: RegimeState | None = None
    # environment with a pool -> int32 per problem: consecutive uninformative visits
    streak_P: dict[str, jax.Array] | None = None
    # with collect.allocate: environment -> float32 [P, 2]: solved and played episodes per problem
    tally_P: dict[str, jax.Array] | None = None
    zscores: ZScoreState | None = None
    critic: CriticState | None = None  # None: the algorithm has no critic


@flax.struct.dataclass
class Sampler:
    """The policy of a rollout that runs ahead of the updates (run/ahead.py)."""

    params: Params  # the trained parameters as sampling reads them; with LoRA only the adapters
    step: jax.Array  # int32, finished iterations when this policy was copied


@flax.struct.dataclass
class AheadState(TrainState):
    """`TrainState` of a run whose rollouts run ahead of its updates (run/ahead.py)."""

    # Policies that sample the next steps, the next step first; as many as rollout.ahead.
    samplers: tuple[Sampler, ...] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class PlayedProblems:
    """The fields of a `TrainState` that a rollout reads and changes."""

    seed_cursor: dict[str, jax.Array]
    streak_P: dict[str, jax.Array] | None
    tally_P: dict[str, jax.Array] | None = None
