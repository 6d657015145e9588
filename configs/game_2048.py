"""2048: make a tile of 128, starting in the middle of a game, in ten replies of two moves.

    python -m ragen_jax.train --config=configs/game_2048.py[:PRESET]

The paper does not have this environment. New tiles appear at random, so the expert is a scripted
player, whose moves are good but not optimal. In 20 moves it makes the tile on 86 of 100 boards;
random moves make it on 17.

tiny (default)
    A 0.2 M parameter agent that first imitates that player, in single-turn context.
    Hardware and time: 2 CPU cores; about 9 minutes in one run, including 1 minute for the warm
    start (once).
    Expected: held-out success 0.20 -> 0.26 (+5.6 ± 2.4 points, 95 % CI, in that run). The task is
    hard for this agent: the scripted player succeeds on 0.86 of the boards, and imitation did not
    reach 0.35 in ten minutes of CPU time.
    Differences from configs/base.py: those of presets.py; learning rate 4e-4, decaying to 0;
    diagnosis every fifth step; imitation ends early, because it does not get further, and has half
    the boards, because a board takes up to ten replies instead of five; the reasoning lists only
    the moves of the reply.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    Group-relative advantages, full history, 400 new tokens per reply. Time and score: not measured
    yet.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="game_2048", max_turns=10, max_actions=20),
        dict(
            size=4,
            goal=128,
            start_tiles=8,
            min_sum=112,  # so that the goal can be reached in 20 actions
        ),
        tiny={
            "rollout.max_new_tokens": 40,
            "optimizer.learning_rate": 4e-4,
            "optimizer.schedule": "linear",
            "diagnose.every": 5,
            "warmstart.rooms": 4096,
            "warmstart.success": 0.2,  # random moves reach 0.17
            "warmstart.plan_moves": 2,  # the moves of a reply; later moves depend on the new tiles
            "steps": 120,
        },
    )
