"""Tasks of the package `verifiers`, played by its own client and harness.

    python -m ragen_jax.train --config=configs/verifiers.py[:PRESET]
                              --config.model.path=DIR_OR_HUB_ID
                              --config.env.options.taskset=gsm8k-v1

llm (default)
    Any supported model given by --config.model.path (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages.

The package needs the extra `verifiers`, or another Python that has it
(--config.env.options.python=/path/to/venv/bin/python). Time and score depend on the taskset. There
is no tiny preset, because there is no solver to imitate. docs/environments/verifiers.md describes
the options.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import HARNESS, build_config


def get_config(preset: str = "llm") -> ConfigDict:
    """Return the config of a preset (any of presets.PRESETS but "tiny"), such as "llm+ppo"."""
    return build_config(
        preset,
        dict(name="verifiers", **HARNESS),
        dict(
            taskset="",  # its id: an installed package, or a module of this folder
            arguments={},  # fields of the taskset's config
            settings={},  # other fields of the environment's config
            python="",  # a Python that has `verifiers`; "": this one
            limit=0,  # number of tasks, the first of the taskset; 0: all
            success=1.0,  # minimum reward of a success
            thinks=False,  # whether every prompt ends with <think>
        ),
    )
