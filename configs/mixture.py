"""Sokoban, FrozenLake and Countdown in one run: one policy, one update, figures for each.

    python -m ragen_jax.train --config=configs/mixture.py[:PRESET]

Each environment has its own groups, budgets and context; the filter ranks its groups by
themselves, so that none is starved by another's larger rewards. The plain names in metrics.jsonl
(eval/success) are means over the environments, those with a name in them (eval/sokoban/success)
are its own.

tiny (default)
    A 0.2 M parameter agent that first imitates all three solvers.
    Hardware and time: 2 CPU cores; on a busy machine, 7 minutes of warm start (once) and 14 of
    training.
    Expected: held-out success, mean of the three, 0.41 -> 0.52 (+11.5 points, three seeds:
    docs/results/mixture_tiny.md): Sokoban and FrozenLake +10, Countdown +14.
    Departs from the paper: as the three config files do; imitation ends when each environment's
    success is 0.15.
llm, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The settings of the three config files, with Sokoban's algorithm. Not trained here yet.
"""

from ml_collections import ConfigDict

from ragen_jax.configs import countdown, frozen_lake, presets, recipes, sokoban


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    model, names = presets.split(preset)
    config = sokoban.get_config(model)
    for other in (frozen_lake, countdown):
        its = other.get_config(model)
        config.also[its.env.name] = ConfigDict(dict(groups=its.rollout.groups, env=its.env))
    if model == "tiny":
        config.also.countdown.groups = 8  # a Countdown episode is a single reply
        config.rollout.max_new_tokens = 40  # longest reply of the three environments
        config.warmstart.success = 0.15  # success of each environment
        config.eval.episodes = 512
        config.steps = 150
    recipes.apply(config, names)
    return config
