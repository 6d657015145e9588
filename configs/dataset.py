"""Prompts of your own and a function that says what a reply earns: no class to write.

    python -m ragen_jax.train --config=configs/dataset.py[:PRESET] --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.path=prompts.jsonl
                              --config.env.options.reward=lengths:score

llm (default)
    Any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The paper's setting with group-relative advantages, one reply, 400 new tokens.
tiny
    The 0.2 M parameter agent that first imitates the field named by `solution`: short prompts and
    solutions alone are within its reach, and some thousand different ones.

Time and score are the data's. The options, and how several turns are played, are in
docs/environments/prompts.md.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "llm+ppo"."""
    return build_config(
        preset,
        dict(name="dataset", **ONE_REPLY),
        dict(
            path=placeholder(str),  # JSON lines, JSON list or parquet
            hub="",  # instead of it, a data set of the Hub
            hub_subset="",  # its configuration
            hub_split="train",
            hub_revision="",  # "": the newest
            prompt="prompt",  # field: a text, or messages of the system and the user
            reward="",  # MODULE:FUNCTION of (prompt, reply, row)
            step="",  # MODULE:FUNCTION of (messages, row), for several turns
            tools="",  # MODULE:LIST of functions that a reply may call
            success=1.0,  # reward from which on a reply is a success
            solution="",  # field with a right reply, for the tiny agent
            split_field="",  # field with each row's split; "": by a hash of the prompt
            instructions="",  # what the system message begins with
            max_rows=placeholder(int),  # None: all
        ),
        tiny={
            **TINY_REPLIES,
            "optimizer.learning_rate": 2e-4,
            "warmstart.rooms": 1024,  # of the rows to be imitated some are left to be checked on
            "warmstart.success": 0.25,
        },
    )
