"""Time that filtering saves: a step's updates on half of the groups against all groups."""

import jax
import numpy as np

from benchmarks.episodes import tiny_setting
from benchmarks.generation import FIVE
from benchmarks.measure import Row, compare
from ragen_jax.algorithm.batch import make_batch, take_rows
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.configs import sokoban
from ragen_jax.core.padding import length_bucket
from ragen_jax.update.learner import Outcomes, Selection, assign_credit, update


def filtered_update(repeats, *, turns=FIVE, members=16):
    """The tiny agent's updates of a step, half of the groups kept, against all kept."""
    config = sokoban.get_config()
    config.rollout.update(groups=len(turns), group_size=members)
    config.env.max_turns = max(turns)
    config = load_config(config)
    mesh, _ = build_meshes(config)
    with tiny_setting(context="single_turn", turns=turns, members=members) as (setting, _):
        batch = make_batch(setting.play())
        learner, state = build_learner(config, setting.model, setting.params, mesh)
    size = step_rows(config)
    batch = take_rows(batch, np.arange(len(batch.weight_B)), size=size)
    pad = length_bucket(batch.tokens_BT.shape[1]) - batch.tokens_BT.shape[1]
    batch = batch.replace(
        **{
            name: np.pad(x, ((0, 0), (0, pad)))
            for name, x in batch.arrays.items()
            if name.endswith("_BT")
        }
    )
    return_GK = np.random.default_rng(0).normal(size=(len(turns), members)).astype(np.float32)
    outcomes = Outcomes(
        return_GK, length_GK=np.ones(return_GK.shape, int), success_GK=return_GK > 0
    )
    states = [state]

    def learn(kept_groups):
        keep_GK = np.zeros(return_GK.shape, bool)
        keep_GK[:kept_groups] = True
        selection = Selection(keep_GK, score_G=return_GK.var(1))

        def run():
            with jax.set_mesh(mesh):
                credit = assign_credit(learner, states[0], batch, selection, outcomes)
                states[0], _ = update(learner, states[0], batch, selection, credit)
            jax.block_until_ready(states[0])

        return run

    kept_groups = len(turns) // 2
    rows = int((batch.group_B[batch.weight_B > 0] < kept_groups).sum())
    return [
        Row(
            name=f"updates on {kept_groups} of {len(turns)} groups",
            other_name="all groups",
            target=1 / 0.6,
            work=rows,
            unit="rows",
            **compare(learn(kept_groups), learn(len(turns)), repeats=repeats),
        )
    ]
