"""A single-player game of TextArena, given by its id.

    python -m ragen_jax.train --config=configs/textarena.py:llm --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.id=GuessTheNumber-v0-raw

llm
    Any supported model given by --config.model.path (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages.

Time and score depend on the game. There is no tiny preset, because there is no solver to imitate.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset (any of presets.PRESETS but "tiny"), such as "llm+ppo"."""
    return build_config(
        preset,
        dict(name="textarena", max_turns=10, actions_per_turn=1, max_actions=10),
        dict(id="", arguments={}, success_reward=1.0),
    )
