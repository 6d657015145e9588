"""The 2x2x2 Rubik's cube: solve a scramble of one to six turns in five replies of two turns.

    python -m ragen_jax.train --config=configs/rubik.py[:PRESET]

Not an environment of the paper. Each length of the shortest solution is as frequent as the others
in training; the held-out problems, which are all different, are mostly of five and six turns,
because there are few cubes that take less (envs/rubik/env.py counts them).

tiny (default)
    A 0.2 M parameter agent that first imitates a solver, in single-turn context.
    Hardware and time: 2 CPU cores; about 8 minutes of CPU time of warm start (once, 1,850 updates).
    Out of its reach so far: in 75 steps one run gained 0.8 points (95 % +-1.3) of held-out success,
    0.17 -> 0.19.
    Departs from configs/base.py: as presets.py does; imitation ends early, since its check has
    cubes of five and six turns alone (of those that take less none is left that it was not shown).
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    Group-relative advantages, full history, 400 new tokens a reply. Time and score: not measured
    yet.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="rubik"),
        dict(moves=(1, 6)),  # fewest and most scrambling moves; an episode has ten actions
        tiny={"rollout.max_new_tokens": 32, "warmstart.success": 0.1},
    )
