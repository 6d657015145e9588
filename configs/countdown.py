"""Countdown (RAGEN-2, section 4.1): one reply, an expression of the given numbers for the target.

    python -m ragen_jax.train --config=configs/countdown.py[:PRESET]
                              [--config.env.options.path=FILE.parquet]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver: three numbers up to 30, targets from 10
    to 60, all solvable by + and -.
    Hardware and time: 2 CPU cores; half a minute of warm start (once), under 4 minutes of training
    on a busy machine.
    Expected: held-out success 0.29 -> 0.45 (+16.7 points, mean of three seeds;
    docs/results/countdown_tiny.md).
    Departs from the paper: no KL term; 32 prompts a step, because a reply is one short turn;
    learning rate 4e-4, falling to 0; diagnosis every fifth step; imitation ends early, since
    learning then starts from an agent that still tries different answers.
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The paper's setting with group-relative advantages, three or four numbers up to 99, 400 new
    tokens a reply. Not trained here yet.

`path` draws problems from a parquet file (columns target and nums, as in
Jiayi-Pan/Countdown-Tasks-3to4) instead of generating them; `count`, `largest` and `targets` then
have no part. Problems and agents are kept under the content of the file, not its name. The tiny
agent needs a larger `rollout.max_new_tokens` (about 56) for four numbers.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="countdown", **ONE_REPLY),
        dict(
            count=(3, 4),
            largest=99,
            targets=(10, 100),
            operators="+-",
            allow_subset=False,
            path=placeholder(str),  # parquet file to draw from instead
            max_rows=20_000,
        ),
        tiny={
            **TINY_REPLIES,
            "env.options.count": (3, 3),
            "env.options.largest": 30,
            "env.options.targets": (10, 60),
            "optimizer.learning_rate": 4e-4,
            "warmstart.success": 0.15,
        },
    )
