"""Train on your own prompts with a reward function, without writing a class.

    python -m ragen_jax.train --config=configs/dataset.py[:PRESET] --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.path=prompts.jsonl
                              --config.env.options.reward=lengths:score

llm (default)
    Any supported model given by --config.model.path (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages, one reply, 400 new tokens.
tiny
    The 0.2 M parameter agent, which first imitates the field named by `solution`. It is limited to
    short prompts and solutions, with about a thousand distinct prompts.

Time and score depend on the data. docs/environments/prompts.md describes the options, and how
several turns are played.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "llm+ppo"."""
    return build_config(
        preset,
        dict(name="dataset", **ONE_REPLY),
        dict(
            path=placeholder(str),  # JSON lines, JSON list or parquet
            hub="",  # a data set of the Hub, instead of `path`
            hub_subset="",  # configuration of the data set
            hub_split="train",
            hub_revision="",  # "": the newest
            prompt="prompt",  # field with a text, or system and user messages
            reward="",  # MODULE:FUNCTION of (prompt, reply, row)
            step="",  # MODULE:FUNCTION of (messages, row), for several turns
            tools="",  # MODULE:LIST of functions that a reply may call
            mcp=(),  # command lines of MCP servers whose tools a reply may call
            success=1.0,  # minimum reward of a successful reply
            solution="",  # field with a correct reply, for the tiny agent
            split_field="",  # field with each row's split; "": by a hash of the prompt
            instructions="",  # start of the system message
            max_rows=placeholder(int),  # maximum rows; None: all
        ),
        tiny={
            **TINY_REPLIES,
            "optimizer.learning_rate": 2e-4,
            "warmstart.rooms": 1024,  # leaves some of the imitation rows for checks
            "warmstart.success": 0.25,
        },
    )
