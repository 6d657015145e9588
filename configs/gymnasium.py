"""A Gymnasium environment, given by its id, whose observations and actions are text.

    python -m ragen_jax.train --config=configs/gymnasium.py:llm --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.id=mine/Hunt-v0 --config.env.options.module=hunt

llm
    Any Qwen2.5, Qwen3 or Llama-3 model given by --config.model.path (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The paper's setting with group-relative advantages.

`success` or `is_success` in the environment's info says whether an episode is solved. If the info
has neither, set --config.env.options.success_reward=NUMBER, the minimum sum of rewards of a solved
episode; otherwise there are no success metrics.

Time and score depend on the environment. There is no tiny preset, because there is no solver to
imitate; your own environment may have a solver (docs/environments/engines.md).
"""

from ml_collections import ConfigDict, config_dict

from ragen_jax.configs import base, presets, recipes


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset (any of presets.PRESETS but "tiny"), such as "llm+ppo"."""
    model, names = presets.split(preset)
    if model == "tiny":
        raise ValueError("configs/gymnasium.py has no preset 'tiny': there is nothing to imitate")
    config = base.get_config()
    config.env.name = "gymnasium"
    config.env.options.id = ""
    config.env.options.module = ""
    config.env.options.maker = "gymnasium:make"
    config.env.options.arguments = {}
    config.env.options.instructions = ""
    config.env.options.split_by = "observation"
    config.env.options.replay = True
    config.env.options.isolated = False
    config.env.options.success_reward = config_dict.placeholder(float)  # None: info decides
    config.env.actions_per_turn = 1
    config.env.max_actions = config.env.max_turns
    presets.apply(config, model)
    recipes.apply(config, names)
    return config
