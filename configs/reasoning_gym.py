"""Tasks of reasoning-gym: answer a question in one reply, which the task's own rule scores.

    pip install 'ragen_jax[gym]'
    python -m ragen_jax.train --config=configs/reasoning_gym.py[:PRESET]
                              [--config.env.options.task=NAME] [--config.env.options.level=1]
                              [--config.env.options.settings='{"max_terms": 3}']

tiny (default)
    A 0.2 M parameter agent that first imitates the task's answers. The default task is leg_counting
    with two kinds of animals and at most three of each. Tasks do not explain their answers, so the
    agent's reasoning repeats the end of the question and the answer.
    Another task: --config.env.options.task=spell_backward
    --config.env.options.settings='{"min_word_len": 3, "max_word_len": 6}'.
    Hardware and time: 2 CPU cores; about 2 minutes for the warm start (once), under 5 for training.
    Expected: held-out success 0.51 -> 0.62 (+11.3 points, mean of three seeds); spell_backward
    0.69 -> 0.86 (+16.9); docs/results/reasoning_gym_tiny.md.
    Not learnt so far: tasks whose questions the agent learns to copy, but not to answer, in five
    minutes of CPU time (chain_sum with two digits per term, number_filtering). rotate_matrix is
    learnt by imitation alone: success was below 0.3 at one check and 0.66 at the next.
    Differences from the paper: those of configs/metamathqa.py, but learning rate 4e-4; 512 held-out
    problems, because a task may have few distinct problems.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The task's defaults, group-relative advantages, 400 new tokens per reply.
    Time and score: not measured yet.

docs/reasoning_gym.md lists the tasks. If `attempts` is above 1, set env.max_turns and
env.max_actions to the same number. `settings` on the command line replace those of the preset.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import ONE_REPLY, TINY_REPLIES, build_config

# Settings that make a task short and simple enough for the tiny agent.
SHORT = {
    "leg_counting": dict(min_animals=2, max_animals=2, min_instances=1, max_instances=3),
    "spell_backward": dict(min_word_len=3, max_word_len=6),
}


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
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
