"""FrozenLake (RAGEN-2, section 4.1): cross slippery ice to the goal in five replies of two moves.

    python -m ragen_jax.train --config=configs/frozen_lake.py[:PRESET]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver, in single-turn context.
    Hardware and time: 2 CPU cores; 40 s for the warm start (once), under 6 minutes for training on
    a busy machine.
    Expected: held-out success 0.47 -> 0.56 (+8.8 points, mean of three seeds;
    docs/results/frozen_lake_tiny.md).
    Differences from the paper: no KL term; learning rate 1e-4 (benchmarks/NOTES.md); all lakes can
    be crossed within the ten moves of an episode.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts, which first imitate the solver (docs/cli.md). The lake
    is shown by positions; episodes have three replies of four moves.
    Expected (135m): held-out success 0.49 -> 0.66 (three seeds; docs/results/language_model.md).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The paper's setting with group-relative advantages, full history, 400 new tokens per reply. Not
    trained here yet.
tiny-vl
    The tiny agent with a vision tower. Observations are images of 32 x 32 pixels. Imitation ends
    when the agent reads them (0.98 of its statements are true), after 145 s on two cores.
    Expected: held-out success 0.71 -> 0.73 (three seeds; no gain that can be distinguished from
    noise; docs/results/sokoban_seeing.md).
qwen2.5-vl-3b
    As the other models, but every observation is an image of the lake. Not trained here yet.

--config.env.options.observation=image shows images to models with a vision tower
(docs/environments/pictures.md).
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import SMALL_LLMS, TINY_VL, build_config

# A small language model reads positions more easily than symbols, which share tokens. Replies of
# four moves need fewer prompts.
SMALL = {
    "env.options.observation": "coordinate",
    "env.max_turns": 3,
    "env.actions_per_turn": 4,
    "rollout.groups": 8,
    "rollout.max_new_tokens": 128,  # the expert's replies have up to 106
    "warmstart.check_every": 20,
    "rollout.slots": 32,  # few episodes have a third reply
    "steps": 20,
}


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="frozen_lake"),
        dict(
            size=(4, 4),
            frozen=0.8,
            slip=0.02,
            observation="grid",
            min_solution=1,
            max_solution=10,  # the action budget of an episode
        ),
        tiny={"rollout.max_new_tokens": 32, "steps": 120},
        # Below this success, the agent misreads half of its images.
        models={TINY_VL: {"warmstart.success": 0.65}, **dict.fromkeys(SMALL_LLMS, SMALL)},
    )
