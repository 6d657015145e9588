"""Countdown"""

from ml_collections import config_dict

from configs import base, presets, recipes


def get_config(preset="tiny"):
    """The config of a preset: "tiny" or one of presets.LLMS, then recipes: "tiny+ppo"."""
    model, names = presets.split(preset)
    config = base.get_config()
    config.env.name = "countdown"
    config.env.max_turns = 1
    config.env.actions_per_turn = 1
    config.env.max_actions = 1
    config.env.options.count = (3, 4)
    config.env.options.largest = 99
    config.env.options.targets = (10, 100)
    config.env.options.operators = "+-"
    config.env.options.allow_subset = False
    config.env.options.path = config_dict.placeholder(str)  # parquet file to draw from instead
    config.env.options.max_rows = 20_000
    presets.apply(config, model)
    if model == "tiny":
        config.env.options.count = (3, 3)
        config.env.options.largest = 30
        config.env.options.targets = (10, 60)
        config.rollout.groups = 32
        config.rollout.max_new_tokens = 40
        config.optimizer.learning_rate = 4e-4
        config.optimizer.schedule = "linear"
        config.diagnose.every = 5
        config.warmstart.plan_moves = 1
        config.warmstart.check_every = 25
        config.warmstart.success = 0.15
        config.steps = 120
    recipes.apply(config, names)
    return config
