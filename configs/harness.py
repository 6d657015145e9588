"""Train the agent you have: a program that asks for replies over the OpenAI API plays the episodes.

    python -m ragen_jax.train --config=configs/harness.py[:PRESET] --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.problems=problems.jsonl
                              --config.env.options.function=my_agent:play

llm (default)
    Any supported model given by --config.model.path (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages.

A command takes the function's place with --config.env.options.command="python my_agent.py". The
package needs the extra `serve`. Time and score depend on the agent. There is no tiny preset,
because there is no solver to imitate. docs/environments/harness.md describes the options and what a
program gets.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import HARNESS, build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset (any of presets.PRESETS but "tiny"), such as "llm+ppo"."""
    return build_config(
        preset,
        dict(name="harness", **HARNESS),
        dict(
            problems=placeholder(str),  # JSON lines, JSON list, Parquet or OWNER/NAME of the Hub
            function="",  # MODULE:FUNCTION of (problem, base_url, api_key)
            command="",  # a command line instead
            variables=("PATH", "HOME", "LANG"),  # environment variables that the command gets
            success=1.0,  # minimum reward of a success
            thinks=False,  # whether every prompt ends with <think>
            split_field="",  # field with each row's split; "": by a hash of the row
        ),
    )
