"""Tasks of reasoning-gym: one reply, the answer to a question in words, and the task's own score.

    pip install 'ragen_jax[gym]'
    python -m ragen_jax.train --config=configs/reasoning_gym.py[:PRESET]
                              [--config.env.options.task=NAME] [--config.env.options.level=1]
                              [--config.env.options.settings='{"max_terms": 3}']

tiny (default)
    A 0.2 M parameter agent that first imitates the task's answers: leg_counting with two kinds of
    animals, at most three of each. A task does not say how its answers are found, so the agent's
    thought repeats the end of the question, and the answer.
    Another: --config.env.options.task=spell_backward
    --config.env.options.settings='{"min_word_len": 3, "max_word_len": 6}'.
    Hardware and time: 2 CPU cores; about 2 minutes of warm start (once), under 5 of training.
    Expected: held-out success 0.51 -> 0.62 (+11.3 points, mean of three seeds), of the other
    0.69 -> 0.86 (+16.9); docs/results/reasoning_gym_tiny.md.
    Out of its reach so far: tasks whose questions imitation learns to copy, but not to answer, in
    five minutes of CPU time (chain_sum with two digits a term, number_filtering). rotate_matrix
    is learnt by imitation alone: one check of success found 0.66, the one before less than 0.3.
    Departs from the paper: as configs/metamathqa.py, but learning rate 4e-4 and 512 held-out
    problems, since a task may have few different ones.
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The task with its own defaults, group-relative advantages, 400 new tokens a reply.
    Time and score: not measured yet.

docs/reasoning_gym.md lists the tasks. With `attempts` above 1, env.max_turns and env.max_actions
must be as many. `settings` given on the command line replace those of the preset.
"""

from ml_collections import ConfigDict

from ragen_jax.configs import base, presets, recipes

# Settings with which a task is short enough for the tiny agent, and few enough facts decide it.
SHORT = {
    "leg_counting": dict(min_animals=2, max_animals=2, min_instances=1, max_instances=3),
    "spell_backward": dict(min_word_len=3, max_word_len=6),
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
        config.env.options.task = "leg_counting"
        config.env.options.settings = ConfigDict(SHORT["leg_counting"])
        config.rollout.groups = 32
        config.rollout.max_new_tokens = 40
        config.optimizer.learning_rate = 4e-4
        config.optimizer.schedule = "linear"
        config.diagnose.every = 5
        config.eval.episodes = 512
        config.warmstart.plan_moves = 1
        config.warmstart.check_every = 25
        config.warmstart.success = 0.25
        config.steps = 120
    recipes.apply(config, names)
    return config
