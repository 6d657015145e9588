"""DeepCoder (RAGEN-2, section 4.1): write a program in one reply, which is scored by tests.

    python -m ragen_jax.train --config=configs/deepcoder.py[:PRESET]
                              [--config.env.options.path=FILE_OR_FOLDER]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver. It cannot write programs, so
    `language=expression` asks for a single expression with two or three steps of arithmetic on a, b
    and c. Expressions are parsed, not executed, so no sandbox is used.
    Hardware and time: 2 CPU cores; 6 minutes of CPU time, including 1.5 for the imitation (once).
    Expected: held-out success 0.73 -> 0.96 (one seed, mean of the last three evaluations).
    Differences from the paper: expressions instead of programs; no KL term; 32 prompts per step,
    because an episode is one short reply; learning rate 4e-4, decaying to 0; diagnosis every fifth
    step; imitation ends early, so that training starts with an agent that still tries different
    answers.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The settings of the released runs (RAGEN docs/experiment_deepcoder.md) with group-relative
    advantages: 16 prompts with 8 replies each of up to 4,000 tokens, 10,000 tokens of prompt and
    reply, no KL term, 200 steps, 256 held-out problems, evaluation every 10 steps. The released
    runs train Qwen2.5-Coder-7B: set --config.model.path. Time and score: not measured yet.

Without `path`, problems are generated: `steps` steps of arithmetic, or three operations on numbers
or words. A language model soon solves all of them. `path` is a parquet file of
agentica-org/DeepCoder-Preview-Dataset or the folder of the data set; files test* are used for
evaluation and all others for training.

Programs run on this machine, `env.workers` at a time, in the best available sandbox; `sandbox`
requires a certain sandbox (docs/environments/deepcoder.md). `env.time_limit` applies to all tests
of a program, including the wait for a core; an episode that exceeds it is left out. `max_tests`
limits the number of tests per program.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="deepcoder", **ONE_REPLY, time_limit=600.0, max_context=10_000),
        dict(
            language="python",  # or "expression"
            steps=(2, 4),  # minimum and maximum steps of a generated problem
            tests=8,  # tests of a generated problem
            time_limit_s=3.0,  # seconds per test
            memory_mb=512,  # MiB of address space per test
            sandbox=placeholder(str),  # required sandbox; None: the best available
            path=placeholder(str),  # parquet file, or a folder of them
            max_tests=placeholder(int),  # maximum tests of a problem from a file; None: all
        ),
        fields={
            "rollout.groups": 16,
            "rollout.group_size": 8,
            "rollout.max_new_tokens": 4000,
            "algorithm.kl_coef": 0.0,
            "eval.episodes": 256,
            "eval.every": 10,
        },
        tiny={
            **TINY_REPLIES,
            "env.time_limit": 0.0,
            "env.max_context": 0,
            "env.options.language": "expression",
            "env.options.steps": (2, 3),
            "rollout.group_size": 16,
            "rollout.max_new_tokens": 48,
            "optimizer.learning_rate": 4e-4,
            "warmstart.success": 0.25,
        },
    )
