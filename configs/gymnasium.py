"""A Gymnasium environment, given by its id, whose observations and actions are text.

    python -m ragen_jax.train --config=configs/gymnasium.py:llm --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.id=mine/Hunt-v0 --config.env.options.module=hunt

llm
    Any supported model given by --config.model.path (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages.

`success` or `is_success` in the environment's info says whether an episode is solved. If the info
has neither, set --config.env.options.success_reward=NUMBER, the minimum sum of rewards of a solved
episode; otherwise there are no success metrics.

Time and score depend on the environment. There is no tiny preset, because there is no solver to
imitate; your own environment may have a solver (docs/environments/engines.md).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset (any of presets.PRESETS but "tiny"), such as "llm+ppo"."""
    return build_config(
        preset,
        dict(name="gymnasium", actions_per_turn=1, max_actions=5),
        dict(
            id="",
            module="",
            maker="gymnasium:make",
            arguments={},
            instructions="",
            split_by="observation",
            replay=True,
            isolated=False,
            success_reward=placeholder(float),  # None: info decides
        ),
    )
