"""The 2x2x2 Rubik's cube: solve a scramble of one to six turns, in five replies of two turns.

    python -m ragen_jax.train --config=configs/rubik.py[:PRESET]

The paper does not have this environment. In training, all lengths of the shortest solution are
equally frequent. Held-out problems are distinct and mostly need five or six turns, because few
cubes need less (envs/rubik/env.py).

tiny (default)
    A 0.2 M parameter agent that first imitates a solver, in single-turn context.
    Hardware and time: 2 CPU cores; about 8 minutes of CPU time for the warm start (once, 1,850
    updates).
    Not learnt so far: held-out success 0.17 -> 0.19 (+0.8 ± 1.3 points, 95 % CI) in one run of 75
    steps.
    Differences from configs/base.py: those of presets.py; imitation ends early, because it is
    checked only on cubes that need five or six turns (all easier cubes are in the demonstrations).
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
        dict(name="rubik"),
        dict(moves=(1, 6)),  # minimum and maximum scrambling moves; an episode has ten actions
        tiny={"rollout.max_new_tokens": 32, "warmstart.success": 0.1},
    )
