"""Sudoku (RAGEN): fill in a 4x4 grid, in five replies of two placements.

    python -m ragen_jax.train --config=configs/sudoku.py[:PRESET]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver, in single-turn context. Grids have four to
    six empty cells, and a reply has one placement.
    Hardware and time: 2 CPU cores; 80 s of CPU time for the warm start (once), under 7 minutes for
    training.
    Expected: held-out success 0.56 -> 0.77 (+20.6 points, mean of three seeds;
    docs/results/sudoku_tiny.md).
    Differences from the paper: no KL term; learning rate 1e-4; eight replies, two more than the
    maximum number of empty cells.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    Group-relative advantages, four to eight empty cells, full history, 400 new tokens per reply.
    Not trained here yet.

A reply is a single action with up to `placements` placements, which the environment parses. Grids
of 9x9 need more placements or more turns.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="sudoku", max_turns=5, actions_per_turn=1, max_actions=5),
        dict(size=4, blanks=(4, 8), placements=2),
        tiny={
            "env.max_turns": 8,
            "env.max_actions": 8,
            "env.options.blanks": (4, 6),
            "env.options.placements": 1,
            "rollout.max_new_tokens": 32,
            "warmstart.plan_moves": 1,
            "steps": 120,
        },
    )
