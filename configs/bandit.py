"""Bandit (RAGEN): one reply, which names the arm that pays most on average.

    python -m ragen_jax.train --config=configs/bandit.py[:PRESET]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver: two arms that pay 0.05 to 0.95, the one
    surely and the other on average, so that either can be the better one.
    Hardware and time: 2 CPU cores; some 100 s of CPU time of warm start (once), under 6 minutes of
    training.
    Expected: held-out success 0.59 -> 0.74 (+15.7 points, mean of three seeds;
    docs/results/bandit_tiny.md).
    Departs from the paper: no KL term; 32 prompts a step, because a reply is one short turn; pay
    and chances that differ from problem to problem; learning rate 4e-4, falling to 0, over 250
    steps; diagnosis every fifth step; imitation ends as soon as the agent names arms, though it
    does not choose between them yet.
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    Group-relative advantages, a sure arm of 0.1 and a risky one that pays 1 with a probability of
    0.25, 400 new tokens a reply. Not trained here yet.

`told=False` with `names` "fitting" or "misleading" leaves the names alone to go by. With
`pulls=N`, `env.max_turns` and `env.max_actions` must be N as well.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
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
