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

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config

# Settings with which a task is short enough for the tiny agent, and few enough facts decide it.
SHORT = {
    "leg_counting": dict(min_animals=2, max_animals=2, min_instances=1, max_instances=3),
    "spell_backward": dict(min_word_len=3, max_word_len=6),
}


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="reasoning_gym", **ONE_REPLY),
        dict(task="chain_sum", level=0, settings={}, attempts=1),
        tiny={
            **TINY_REPLIES,
            "env.options.task": "leg_counting",
            "env.options.settings": SHORT["leg_counting"],
            "optimizer.learning_rate": 4e-4,
            "eval.episodes": 512,
            "warmstart.success": 0.25,
        },
    )
