"""An environment on a server of OpenEnv, given by its address.

    python -m ragen_jax.train --config=configs/openenv.py:llm --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.url=http://127.0.0.1:8000

llm
    Any supported model given by --config.model.path (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages.

The server must play as many episodes at once as the run does: rollout.groups x rollout.group_size,
or rollout.slots. Time and score depend on it. There is no tiny preset, because there is no solver
to imitate. docs/environments/engines.md describes it.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset (any of presets.PRESETS but "tiny"), such as "llm+ppo"."""
    return build_config(
        preset,
        dict(name="openenv", max_turns=10, actions_per_turn=1, max_actions=10, time_limit=120.0),
        dict(url="", arguments={}, instructions="", success_reward=1.0, timeout=60.0),
    )
