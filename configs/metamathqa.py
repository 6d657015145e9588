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
    As below, for any Qwen2.5, Qwen3 or Llama-3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
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

from ml_collections import ConfigDict, config_dict

from ragen_jax.configs import base, presets, recipes


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
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
    )  # maximum questions of the file; None: all
    config.env.options.types = ""  # prefix of the question types to draw from
    presets.apply(config, model)
    if model == "tiny":
        config.env.options.largest = 20  # few sums, so that each occurs repeatedly
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
