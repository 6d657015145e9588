"""Presets of all environments: a model and the settings that fit its size."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs import base, recipes
from ragen_jax.core.suggest import did_you_mean

LLMS = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3.5-2b": "Qwen/Qwen3.5-2B",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "gemma3-270m": "google/gemma-3-270m-it",
    "gemma3-1b": "google/gemma-3-1b-it",
    "gemma3-4b": "google/gemma-3-4b-it",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}

MIXTURES = ("qwen3-30b-a3b",)  # those of LLMS that are mixtures of experts

# Small language models, with settings for two CPU cores: brief prompts, and a start that imitates
# the environment's expert.
SMALL_LLMS = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}

# Vision-language models, for environments that render images.
VISION_LLMS = {"qwen2.5-vl-3b": "Qwen/Qwen2.5-VL-3B-Instruct"}
DRAWING_ENVIRONMENTS = ("sokoban", "frozen_lake")
TINY_VL = "tiny-vl"  # the tiny agent with a vision tower

PRESETS = ("tiny", "llm", *SMALL_LLMS, *LLMS)  # presets of every environment
VISION_PRESETS = (TINY_VL, *VISION_LLMS)  # presets of environments that render images

# Placement on devices (docs/preflight.md). REPLICATED: parameters are replicated, rows are split.
# SHARDED: parameters are split over all devices for training and replicated for sampling.
REPLICATED = {
    **{"mesh.data": -1, "mesh.fsdp": 1},
    **{"sampling_mesh.data": 0, "sampling_mesh.fsdp": 0, "sampling_mesh.tensor": 0},
}
SHARDED = {
    **{"mesh.data": 1, "mesh.fsdp": -1},
    **{"sampling_mesh.data": -1, "sampling_mesh.fsdp": 1, "sampling_mesh.tensor": 1},
}

# The same for a mixture of experts: while sampling, each device holds a part of the experts.
SPREAD = {"sampling_mesh.data": 1, "sampling_mesh.expert": -1}

# Preset llm is for any Qwen2.5, Qwen3, Qwen3.5, Llama 3 or Gemma 3 model in model.path. It leaves
# fields open that depend on the model's size and the devices. ragen_jax/config/auto_fields.py fills
# them in unless the command line sets them.
OPEN_FIELDS = {
    "model.path": str,  # no default
    "model.dtype": str,  # float32 on CPU (bfloat16 is slower there), otherwise bfloat16
    "optimizer.micro_batch": int,  # ROWS_PER_DEVICE, at most the rows of a minibatch
    "model.remat": bool,  # this and the following fields: see SIZE_FIELDS
    **dict.fromkeys(REPLICATED, int),
}
SIZE_FIELDS = {  # maximum number of parameters -> fields
    10**8: {"model.remat": False, **REPLICATED},
    5 * 10**8: {"model.remat": True, **REPLICATED},
    math.inf: {"model.remat": True, **SHARDED},
}
# Maximum number of parameters -> rows per device.
ROWS_PER_DEVICE = {10**8: 4, 5 * 10**8: 4, math.inf: 1}

# Diagnosis takes at most 15 % of a step of a language model (programs/roofline.py, replies of full
# length). In environments of one turn, updates are shorter, and both scopes have the same prompts.
DIAGNOSIS = {"diagnose.trajectory_samples": 24}
DIAGNOSIS_OF_ONE_TURN = {"diagnose.every": 3, "diagnose.trajectory_samples": 8}

# Environments whose expert writes sentences, which a language model can imitate (`narrate`).
NARRATING_ENVIRONMENTS = (
    *("sokoban", "frozen_lake", "countdown", "bandit", "metamathqa", "search_qa"),
)
# Settings of SMALL_LLMS that differ from configs/base.py, for two CPU cores.
SMALL = {
    "env.prompt": "brief",
    "rollout.groups": 16,
    "rollout.group_size": 8,
    "algorithm.kl_coef": 0.0,
    "algorithm.entropy_coef": 0.0,
    "optimizer.learning_rate": 2e-5,
    "optimizer.minibatches": 2,
    "diagnose.every": 5,
    "diagnose.flow_every": 10,
    "diagnose.first_turn_samples": 8,
    "diagnose.trajectory_samples": 8,
    "eval.episodes": 192,
    "eval.every": 10,
    "eval.temperature": 1.0,
    "checkpoint.every": 10,
    "checkpoint.keep": 1,
    "steps": 30,
}
# The same for NARRATING_ENVIRONMENTS: imitation comes first, and sentences are short.
IMITATION = {
    "env.context": "single_turn",
    "rollout.max_new_tokens": 96,
    "warmstart.fine_tune": True,
    "warmstart.rooms": 2048,
    "warmstart.batch": 16,
    "warmstart.learning_rate": 2e-4,
    "warmstart.check_every": 25,
    "warmstart.check_episodes": 64,
    "warmstart.success": 0.3,
    "warmstart.max_updates": 120,
}


def split_preset(preset: str) -> tuple[str, list[str]]:
    """Split a preset: "tiny+ppo+no_filter" -> (model "tiny", recipes ["ppo", "no_filter"])."""
    model, *names = preset.split("+")
    return model, names


def list_models(environment: str) -> tuple[str, ...]:
    """Return the models for which an environment's config has a preset."""
    return (*PRESETS, *(VISION_PRESETS if environment in DRAWING_ENVIRONMENTS else ()))


def apply(config: ConfigDict, model: str) -> None:
    """Set the fields that a preset's model changes in the config of an environment.

    Raises:
      ValueError: the environment has no preset for the model.
    """
    models = list_models(config.env.name)
    if model not in models:
        name = config.env.name
        # An environment of one's own is MODULE:CLASS, whose config file is not known here.
        of = name if ":" in name else f"configs/{name}.py"
        hint = f"; recipes come after a preset: tiny+{model}" if model in recipes.RECIPES else ""
        raise ValueError(
            f"{of} has no preset {model!r}; accepted: {', '.join(models)}"
            f"{hint or did_you_mean(model, models)}"
        )
    if model in ("tiny", TINY_VL):
        config.env.context = "single_turn"
        config.env.prompt = "terse"
        config.rollout.stop = ()  # it learned to end its replies
        config.algorithm.kl_coef = 0.0
        config.optimizer.learning_rate = 1e-4
        config.critic.learning_rate = 1e-3
        config.optimizer.warmup_updates = 20
        config.optimizer.b2 = 0.99
        config.optimizer.micro_batch = 16
        config.diagnose.trajectory_samples = 16
        config.diagnose.micro_batch = 128  # fastest on 2 cores
        config.eval.episodes = 1024
        config.eval.every = 25
        config.checkpoint.every = 25
        config.steps = 250
    elif model == "llm":
        _leave_open(config, OPEN_FIELDS)
        _limit_diagnosis(config)
    elif model in SMALL_LLMS:
        _leave_open(config, [name for name in OPEN_FIELDS if name != "model.path"])
        config.model.path = SMALL_LLMS[model]
        config.update_from_flattened_dict(SMALL)
        if config.env.name in NARRATING_ENVIRONMENTS:
            config.update_from_flattened_dict(IMITATION)
    else:
        config.model.path = (LLMS | VISION_LLMS)[model]
        config.model.dtype = "bfloat16"
        config.model.remat = True
        config.update_from_flattened_dict(SHARDED)
        if model in MIXTURES:
            config.update_from_flattened_dict(SPREAD)
        _limit_diagnosis(config)
        config.optimizer.micro_batch = (
            16  # for 16 devices; must be a multiple of the number of devices
        )
    if model == TINY_VL:
        config.warmstart.tower_layers = 2
        config.env.options.tile = 8  # pixels; one token of the tower
    if model in VISION_PRESETS:
        config.env.options.observation = "image"


def _limit_diagnosis(config: ConfigDict) -> None:
    """Set the size of the diagnosis for a language model."""
    config.update_from_flattened_dict(DIAGNOSIS)
    if config.env.max_turns == 1:
        config.update_from_flattened_dict(DIAGNOSIS_OF_ONE_TURN)


def _leave_open(config: ConfigDict, names: Iterable[str]) -> None:
    """Leave fields open, for ragen_jax/config/auto_fields.py."""
    for name in names:
        config.update_from_flattened_dict({name: placeholder(OPEN_FIELDS[name])})


# What presets `tiny` of environments with one short reply have in common.
TINY_REPLIES = {
    "rollout.groups": 32,
    "rollout.max_new_tokens": 40,
    "optimizer.schedule": "linear",
    "diagnose.every": 5,
    "warmstart.plan_moves": 1,
    "warmstart.check_every": 25,
    "steps": 120,
}
ONE_REPLY = {"max_turns": 1, "actions_per_turn": 1, "max_actions": 1}  # of env
HARNESS = {  # of env: agents that play by themselves
    "max_turns": 10,  # requests that an episode may send
    "actions_per_turn": 1,
    "max_actions": 10,
    "max_context": 4096,  # tokens of a prompt and its reply
    "format_penalty": 0.0,  # the rewards are the agent's own
    "time_limit": 600.0,  # seconds of an episode
    "workers": 64,  # episodes that are played at a time
}


def build_config(
    preset: str,
    env: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    fields: Mapping[str, Any] | None = None,
    tiny: Mapping[str, Any] | None = None,
    models: Mapping[str, Mapping[str, Any]] | None = None,
) -> ConfigDict:
    """Build an environment's config of a preset: base.py, then what the environment changes.

    Args:
      preset: a model that the environment accepts, then recipes: "tiny+ppo".
      env: fields of config.env, among them the name.
      options: config.env.options.
      fields: {dotted name: value} of further fields, which presets may change.
      tiny: {dotted name: value} with the tiny agent; None: there is nothing that it could imitate.
      models: model -> {dotted name: value} with that model.

    Raises:
      ValueError: an unknown model or recipe.
    """
    model, names = split_preset(preset)
    if model == "tiny" and tiny is None:
        raise ValueError(
            f"configs/{env['name']}.py has no preset 'tiny': there is nothing to imitate"
        )
    config = base.get_config()
    config.env.update(env)
    for name, value in options.items():
        config.env.options[name] = value
    config.update_from_flattened_dict(dict(fields or {}))
    apply(config, model)
    if model in ("tiny", TINY_VL):
        config.update_from_flattened_dict(dict(tiny or {}))
    config.update_from_flattened_dict(dict((models or {}).get(model, {})))
    recipes.apply(config, names)
    return config
