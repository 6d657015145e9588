"""Sokoban (RAGEN-2, section 4.1): push the box onto the target in five replies of two moves.

    python -m ragen_jax.train --config=configs/sokoban.py[:PRESET]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver, in single-turn context.
    Hardware and time: 2 CPU cores; 4 to 8 minutes in all, including the warm start (once;
    benchmarks/NOTES.md, time of the main command).
    Expected: held-out success 0.39 -> 0.56 (+17.2 points, mean of three seeds;
    docs/results/sokoban_tiny.md).
    Differences from the paper: format penalty -1 (with -0.1, an invalid reply costs less than two
    moves); no KL term; learning rate 1e-4, the largest that is stable with the noise of eight
    prompts per step (benchmarks/NOTES.md); all rooms are solvable within the ten moves of an
    episode.
llm
    The paper's setting with group-relative advantages, for any Qwen, Llama 3 or Gemma 3 model
    given by --config.model.path. Its size and the devices determine dtype, micro-batch, mesh and
    rematerialisation (configs/presets.py).
qwen2.5-3b
    The paper's main setting: PPO with a critic, full history, 400 new tokens per reply, the
    absolute tolerance of its filter (filter.eps), bfloat16 with float32 parameters. Its peak
    success in the paper: 12.9 without a filter, 28.9 with the filter (table 4).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts, which first imitate the solver (docs/cli.md).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The same with group-relative advantages; append +ppo for PPO. docs/preflight.md lists the TPUs
    on which they fit. Not trained here yet; expect hours on several accelerators.
tiny-vl
    The tiny agent with a vision tower. Observations are images of 48 x 48 pixels.
    Hardware and time: 2 CPU cores; 3 minutes for the warm start (once), 8 for 100 steps.
    Expected: held-out success 0.47 -> 0.57 in 100 steps (+10.4 points, mean of three seeds;
    docs/results/sokoban_seeing.md).
qwen2.5-vl-3b
    As the Qwen2.5 models, but every observation is an image of the room. Not trained here yet.

--config.env.options.observation=image shows images to models with a vision tower
(docs/environments/pictures.md).
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="sokoban"),
        dict(
            size=(6, 6),
            num_boxes=1,
            observation="grid",
            min_solution=3,
            max_solution=10,  # the action budget of an episode
        ),
        tiny={"env.format_penalty": -1.0, "rollout.max_new_tokens": 22},
        # Split the sampling weights, because the critic needs their memory (docs/preflight.md).
        models={
            "qwen2.5-3b": {
                **{"algorithm.name": "ppo", "sampling_mesh.tensor": 2},
                "filter.eps": 0.01,
            }
        },
    )
