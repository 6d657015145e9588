"""MetaMathQA (RAGEN-2, section 4.1): answer a question; a wrong answer can be corrected.

    python -m ragen_jax.train --config=configs/metamathqa.py[:PRESET]
                              [--config.env.options.path=MetaMathQA-395K.json]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver. Generated questions have two or three
    additions and subtractions of numbers up to 20; there is one attempt.
    Hardware and time: 2 CPU cores; about 110 s of CPU time for the warm start (once), under
    5 minutes for training.
    Expected: held-out success 0.58 -> 0.94 (+35.4 points, mean of three seeds;
    docs/results/metamathqa_tiny.md).
    Differences from the paper: generated questions; no KL term; 32 prompts per step, because an
    episode is one short reply; learning rate 2e-4, decaying to 0; diagnosis every fifth step;
    imitation ends early, so that training starts with an agent that still tries different answers.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts, which first imitate the solver (docs/cli.md).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages, one attempt, 400 new tokens per reply. Time
    and score: not measured yet.

With `path`, questions are drawn from the file of meta-math/MetaMathQA instead of being generated;
`operations`, `largest` and `operators` are then ignored. The file is converted once to a data set
in the user's cache, which is identified by the file's content, not its name. `types=MATH_` selects
the questions that the released code uses.

`compare=math_verify` accepts any answer that is mathematically equal to the correct answer
(pip install 'ragen_jax[math]'); "string", the rule of the released code, accepts only the same
text. For more attempts, raise both `env.max_turns` and `env.max_actions`.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="metamathqa", **ONE_REPLY),
        dict(
            operations=(2, 3),
            largest=99,
            operators="+-*/",
            compare="string",
            path=placeholder(str),  # JSON file to draw from instead
            max_rows=placeholder(int),  # maximum questions of the file; None: all
            types="",  # prefix of the question types to draw from
        ),
        tiny={
            **TINY_REPLIES,
            "env.options.largest": 20,  # few sums, so that each occurs repeatedly
            "env.options.operators": "+-",
            "optimizer.learning_rate": 2e-4,
            "warmstart.success": 0.25,
        },
    )
