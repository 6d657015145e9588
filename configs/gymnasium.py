"""A Gymnasium environment whose observations and actions are text, by its id.

    python -m ragen_jax.train --config=configs/gymnasium.py:llm --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.id=mine/Hunt-v0 --config.env.options.module=hunt

llm
    Any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The paper's setting with group-relative advantages.

    Where its info has no `success` or `is_success`, --config.env.options.success_reward=NUMBER says
    from which sum of rewards on an episode is solved; without it there are no figures of success.

Time and score are the environment's. The tiny agent has no solver to imitate here; an environment
of your own may have one (docs/environments/engines.md).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS but tiny, then recipes: "llm+ppo"."""
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
