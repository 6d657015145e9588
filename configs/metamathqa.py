"""MetaMathQA (RAGEN-2, section 4.1): a question with a final answer; a wrong one can be mended.

    python -m ragen_jax.train --config=configs/metamathqa.py[:PRESET]
                              [--config.env.options.path=MetaMathQA-395K.json]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver: generated questions of two or three
    additions and subtractions with numbers up to 20, one attempt.
    Hardware and time: 2 CPU cores; some 110 s of CPU time of warm start (once), under 5 minutes of
    training.
    Expected: held-out success 0.58 -> 0.94 (+35.4 points, mean of three seeds;
    docs/results/metamathqa_tiny.md).
    Departs from the paper: generated questions; no KL term; 32 prompts a step, because a reply is
    one short turn; learning rate 2e-4, falling to 0; diagnosis every fifth step; imitation ends
    early, since learning then starts from an agent that still tries different answers.
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The paper's setting with group-relative advantages, one attempt, 400 new tokens a reply. Time
    and score: not measured yet.

`path` draws questions from the file of meta-math/MetaMathQA instead of generating them;
`operations`, `largest` and `operators` then have no part. It is converted once, to a data set in
the user's cache, and counts by its content, not its name. `types=MATH_` draws from those that the
released code keeps. `compare=math_verify` takes an answer that means the same as the right one
(pip install 'ragen_jax[math]'); "string", the released rule, one that is written the same. More
attempts: `env.max_turns` and `env.max_actions`, both.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="metamathqa", **ONE_REPLY),
        dict(
            operations=(2, 3),
            largest=99,
            operators="+-*/",
            compare="string",
            path=placeholder(str),  # JSON file to draw from instead
            max_rows=placeholder(int),  # most questions of the file; None: all
            types="",  # prefix of the question types to draw from
        ),
        tiny={
            **TINY_REPLIES,
            "env.options.largest": 20,  # so few sums that each occurs repeatedly
            "env.options.operators": "+-",
            "optimizer.learning_rate": 2e-4,
            "warmstart.success": 0.25,
        },
    )
