"""Train on your own prompts with a reward function, without writing a class.

    python -m ragen_jax.train --config=configs/dataset.py[:PRESET] --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.path=prompts.jsonl
                              --config.env.options.reward=lengths:score

llm (default)
    Any Qwen2.5, Qwen3 or Llama-3 model given by --config.model.path (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The paper's setting with group-relative advantages, one reply, 400 new tokens.
tiny
    The 0.2 M parameter agent, which first imitates the field named by `solution`. It is limited to
    short prompts and solutions, with about a thousand distinct prompts.

Time and score depend on the data. docs/environments/prompts.md describes the options, and how
several turns are played.
"""

from ml_collections import ConfigDict, config_dict

from ragen_jax.configs import base, presets, recipes


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "llm+ppo"."""
    model, names = presets.split(preset)
    config = base.get_config()
    config.env.name = "dataset"
    config.env.max_turns = 1
    config.env.actions_per_turn = 1
    config.env.max_actions = 1
    config.env.options.path = config_dict.placeholder(str)  # JSON lines, JSON list or parquet
    config.env.options.hub = ""  # a data set of the Hub, instead of `path`
    config.env.options.hub_subset = ""  # configuration of the data set
    config.env.options.hub_split = "train"
    config.env.options.hub_revision = ""  # "": the newest
    config.env.options.prompt = "prompt"  # field with a text, or system and user messages
    config.env.options.reward = ""  # MODULE:FUNCTION of (prompt, reply, row)
    config.env.options.step = ""  # MODULE:FUNCTION of (messages, row), for several turns
    config.env.options.tools = ""  # MODULE:LIST of functions that a reply may call
    config.env.options.success = 1.0  # minimum reward of a successful reply
    config.env.options.solution = ""  # field with a correct reply, for the tiny agent
    config.env.options.split_field = ""  # field with each row's split; "": by a hash of the prompt
    config.env.options.instructions = ""  # start of the system message
    config.env.options.max_rows = config_dict.placeholder(int)  # maximum rows; None: all
    presets.apply(config, model)
    if model == "tiny":
        config.rollout.groups = 32
        config.rollout.max_new_tokens = 40
        config.optimizer.learning_rate = 2e-4
        config.optimizer.schedule = "linear"
        config.diagnose.every = 5
        config.warmstart.plan_moves = 1
        config.warmstart.rooms = 1024  # leaves some of the imitation rows for checks
        config.warmstart.check_every = 25
        config.warmstart.success = 0.25
        config.steps = 120
    recipes.apply(config, names)
    return config
