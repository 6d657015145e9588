"""FrozenLake"""

from configs import base, presets, recipes


def get_config(preset="tiny"):
    """The config of a preset: "tiny" or one of presets.LLMS, then recipes: "tiny+ppo"."""
    model, names = presets.split(preset)
    config = base.get_config()
    config.env.name = "frozen_lake"
    config.env.options.size = (4, 4)
    config.env.options.frozen = 0.8
    config.env.options.slip = 0.02
    config.env.options.observation = "grid"
    config.env.options.min_solution = 1
    config.env.options.max_solution = 10  # the budget of actions
    presets.apply(config, model)
    if model == "tiny":
        config.rollout.max_new_tokens = 32
        config.steps = 120
    recipes.apply(config, names)
    return config
