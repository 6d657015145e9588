"""Bandit (RAGEN): name the arm that pays most on average, in one reply.

    python -m ragen_jax.train --config=configs/bandit.py[:PRESET]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver. There are a sure arm and a risky arm; both
    pay 0.05 to 0.95 on average, so either can be the better arm.
    Hardware and time: 2 CPU cores; about 100 s of CPU time for the warm start (once), under
    6 minutes for training.
    Expected: held-out success 0.59 -> 0.74 (+15.7 points, mean of three seeds;
    docs/results/bandit_tiny.md).
    Differences from the paper: no KL term; 32 prompts per step, because an episode is one short
    reply; pay and chances differ between problems; learning rate 4e-4, decaying to 0 over 250
    steps; diagnosis every fifth step; imitation ends as soon as the agent names arms, before it
    chooses between them.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts, which first imitate the solver (docs/cli.md).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    Group-relative advantages, a sure arm that pays 0.1 and a risky arm that pays 1 with probability
    0.25, 400 new tokens per reply. Not trained here yet.

With `told=False` and `names` "fitting" or "misleading", the names are the only information about
the arms. With `pulls=N`, set `env.max_turns` and `env.max_actions` to N.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="bandit", **ONE_REPLY),
        dict(arms=2, pulls=1, told=True, names="neutral", sure=(10, 10), chance=(25, 25)),
        tiny={
            **TINY_REPLIES,
            "env.options.sure": (5, 95),
            "env.options.chance": (5, 95),
            "rollout.max_new_tokens": 32,
            "optimizer.learning_rate": 4e-4,
            "warmstart.success": 0.5,  # success of an agent that picks arms at random
            "steps": 250,
        },
    )
