"""DeepCoder (RAGEN-2, section 4.1): one reply, a program, paid by the tests that it passes.

    python -m ragen_jax.train --config=configs/deepcoder.py[:PRESET]
                              [--config.env.options.path=FILE_OR_FOLDER]

tiny (default)
    A 0.2 M parameter agent writes no programs: `language=expression` asks for one expression that
    carries out two or three steps of arithmetic on a, b and c. It is read, not executed: nothing of
    the sandbox has a part. The agent first imitates a solver.
    Hardware and time: 2 CPU cores; 6 minutes of CPU time, of them 1.5 for the imitation (once). One
    seed: held-out success 0.73 -> 0.96 (mean of the last three evaluations).
    Departs from the paper: expressions for programs; no KL term; 32 prompts a step, because a reply
    is one short turn; learning rate 4e-4, falling to 0; diagnosis every fifth step; imitation ends
    early, since learning then starts from an agent that still tries different answers.
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    What the released runs set (RAGEN docs/experiment_deepcoder.md): 16 prompts of 8 replies of
    4,000 tokens, 10,000 tokens in all, no KL term, 200 steps, 256 problems held out, evaluated
    every 10 steps; group-relative advantages. They train Qwen2.5-Coder-7B: --config.model.path.
    Time and score: not measured yet.

Without `path` problems are generated, `steps` of arithmetic or three over numbers or words, which a
language model soon solves. `path` is a parquet file of agentica-org/DeepCoder-Preview-Dataset, or
the folder of the data set, of which test* evaluates and all else trains. Programs run on this
machine, `env.workers` at a time, in the best sandbox that it offers; `sandbox` demands one
(docs/environments/deepcoder.md). `env.time_limit` is of all tests of a program, waiting for a
core included: an episode that is late is left out. `max_tests` bounds what a program with many
tests may take.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="deepcoder", **ONE_REPLY, time_limit=600.0, max_context=10_000),
        dict(
            language="python",  # or "expression"
            steps=(2, 4),  # fewest and most steps of a generated problem
            tests=8,  # tests of a generated problem
            time_limit_s=3.0,  # seconds per test
            memory_mb=512,  # MiB of address space per test
            sandbox=placeholder(str),  # required sandbox; None: the best available
            path=placeholder(str),  # parquet file, or a folder of them
            max_tests=placeholder(int),  # most tests of a problem from a file; None: all
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
