"""Tasks of reasoning-gym: one reply, the answer to a question in words, and the task's own score.

    pip install 'ragen_jax[gym]'
    python -m ragen_jax.train --config=configs/reasoning_gym.py[:PRESET]
                              [--config.env.options.task=NAME] [--config.env.options.level=1]
                              [--config.env.options.settings='{"max_terms": 3}']

tiny (default)
    A 0.2 M parameter agent that first imitates the task's answers: chain_sum with two or three
    terms of two digits each. A task does not say how its answers are found, so the agent's thought
    repeats the sum, and the answer. Two others with questions as short and few answers:
    count_bits, and simple_equations (settings as in SHORT; a thought needs about 40 tokens).
    Out of its reach so far: in five minutes of CPU time imitation of chain_sum did not get to
    warmstart.success. Of spell_backward with words of three to six letters (max_new_tokens=40,
    success=0.3, learning rate 2e-4) one run rose from 0.69 to 0.78 in 40 steps.
    Departs from the paper: as configs/countdown.py.
llm
    The same as below for any Qwen2.5 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b
    The task with its own defaults, group-relative advantages, 400 new tokens a reply.
    Time and score: not measured yet.

docs/reasoning_gym.md lists the tasks. With `attempts` above 1, env.max_turns and env.max_actions
must be as many. `settings` given on the command line replace those of the preset.
"""

from ml_collections import ConfigDict

from ragen_jax.configs import base, presets, recipes

# Settings with which a task is short enough for the tiny agent.
SHORT = {
    "chain_sum": dict(min_terms=2, max_terms=3, min_digits=2, max_digits=2),
    "count_bits": dict(min_n=1, max_n=9999),
    "simple_equations": dict(max_terms=2, max_value=20, operators_weights=(0.5, 0.5, 0.0)),
}


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    model, names = presets.split(preset)
    config = base.get_config()
    config.env.name = "reasoning_gym"
    config.env.max_turns = 1
    config.env.actions_per_turn = 1
    config.env.max_actions = 1
    config.env.options.task = "chain_sum"
    config.env.options.level = 0
    config.env.options.settings = ConfigDict()
    config.env.options.attempts = 1
    presets.apply(config, model)
    if model == "tiny":
        config.env.options.settings = ConfigDict(SHORT["chain_sum"])
        config.rollout.groups = 32
        config.rollout.max_new_tokens = 24
        config.optimizer.learning_rate = 4e-4
        config.optimizer.schedule = "linear"
        config.diagnose.every = 5
        config.warmstart.plan_moves = 1
        config.warmstart.check_every = 25
        config.warmstart.success = 0.15
        config.steps = 120
    recipes.apply(config, names)
    return config
