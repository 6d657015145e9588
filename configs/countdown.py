"""Countdown (RAGEN-2, section 4.1): combine given numbers into a target number, in one reply.

    python -m ragen_jax.train --config=configs/countdown.py[:PRESET]
                              [--config.env.options.path=FILE.parquet]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver. Problems have three numbers up to 30 and
    targets from 10 to 60, and all are solvable with + and -.
    Hardware and time: 2 CPU cores; half a minute for the warm start (once), under 4 minutes for
    training on a busy machine.
    Expected: held-out success 0.29 -> 0.45 (+16.7 points, mean of three seeds;
    docs/results/countdown_tiny.md).
    Differences from the paper: no KL term; 32 prompts per step, because an episode is one short
    reply; learning rate 4e-4, decaying to 0; diagnosis every fifth step; imitation ends early, so
    that training starts with an agent that still tries different answers.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts, which first imitate the solver (docs/cli.md).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages, three or four numbers up to 99, 400 new
    tokens per reply. Not trained here yet.

With `path`, problems are drawn from a parquet file (columns target and nums, as in
Jiayi-Pan/Countdown-Tasks-3to4) instead of being generated; `count`, `largest` and `targets` are
then ignored. The cache identifies the file by its content, not its name. For four numbers, the tiny
agent needs a larger `rollout.max_new_tokens` (about 56).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, SMALL_LLMS, TINY_REPLIES, build_config

EASY = {
    "env.options.count": (3, 3),
    "env.options.largest": 30,
    "env.options.targets": (10, 60),
}


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
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
            **EASY,
            "optimizer.learning_rate": 4e-4,
            "warmstart.success": 0.15,
        },
        models=dict.fromkeys(SMALL_LLMS, EASY),
    )
