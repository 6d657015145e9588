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

from ml_collections import ConfigDict, config_dict

from ragen_jax.configs import base, presets, recipes


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    model, names = presets.split(preset)
    config = base.get_config()
    config.env.name = "metamathqa"
    config.env.max_turns = 1
    config.env.actions_per_turn = 1
    config.env.max_actions = 1
    config.env.options.operations = (2, 3)
    config.env.options.largest = 99
    config.env.options.operators = "+-*/"
    config.env.options.compare = "string"
    config.env.options.path = config_dict.placeholder(str)  # JSON file to draw from instead
    config.env.options.max_rows = config_dict.placeholder(
        int
    )  # most questions of the file; None: all
    config.env.options.types = ""  # prefix of the question types to draw from
    presets.apply(config, model)
    if model == "tiny":
        config.env.options.largest = 20  # so few sums that each occurs repeatedly
        config.env.options.operators = "+-"
        config.rollout.groups = 32
        config.rollout.max_new_tokens = 40
        config.optimizer.learning_rate = 2e-4
        config.optimizer.schedule = "linear"
        config.diagnose.every = 5
        config.warmstart.plan_moves = 1
        config.warmstart.check_every = 25
        config.warmstart.success = 0.25
        config.steps = 120
    recipes.apply(config, names)
    return config
