"""Sokoban, FrozenLake and Countdown in one run, with one policy and one update per step.

    python -m ragen_jax.train --config=configs/mixture.py[:PRESET]

Each environment has its own groups, budgets and context. The filter ranks the groups of each
environment separately, so that large rewards in one environment do not displace the groups of
another. In metrics.jsonl, names without an environment (eval/success) are means over the
environments; names with an environment (eval/sokoban/success) are for that environment.

tiny (default)
    A 0.2 M parameter agent that first imitates all three solvers.
    Hardware and time: 2 CPU cores; on a busy machine, 7 minutes for the warm start (once) and 14
    for training.
    Expected: mean held-out success of the three environments 0.41 -> 0.52 (+11.5 points, three
    seeds; docs/results/mixture_tiny.md); Sokoban and FrozenLake +10, Countdown +14.
    Differences from the paper: those of the three config files; imitation ends when success is 0.15
    in each environment.
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
llm, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The settings of the three config files, with the algorithm of Sokoban. Not trained here yet.
"""

from ml_collections import ConfigDict

from ragen_jax.configs import countdown, frozen_lake, presets, recipes, sokoban


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    model, names = presets.split_preset(preset)
    config = sokoban.get_config(model)
    for other in (frozen_lake, countdown):
        other_config = other.get_config(model)
        config.also[other_config.env.name] = ConfigDict(
            dict(groups=other_config.rollout.groups, env=other_config.env)
        )
    if model == "tiny":
        config.also.countdown.groups = 8  # a Countdown episode is a single reply
        config.rollout.max_new_tokens = 40  # longest reply of the three environments
        config.warmstart.success = 0.15  # success of each environment
        config.eval.episodes = 512
        config.steps = 150
    recipes.apply(config, names)
    return config
