"""What a preset means in every environment: which model, and what fits its size."""

LLMS = {
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
}


def split(preset):
    """("tiny", ["ppo", "no_filter"]) of "tiny+ppo+no_filter": a model and recipes."""
    model, *names = preset.split("+")
    return model, names


def apply(config, model):
    """Sets what `model`, "tiny" or one of LLMS, changes in any environment's config.

    Raises:
      ValueError: any other model.
    """
    if model == "tiny":
        config.env.context = "single_turn"
        config.env.prompt = "terse"
        config.algorithm.kl_coef = 0.0
        config.optimizer.learning_rate = 1e-4
        config.critic.learning_rate = 1e-3
        config.optimizer.warmup_updates = 20
        config.optimizer.b2 = 0.99
        config.optimizer.micro_batch = 16
        config.diagnose.trajectory_samples = 16
        config.diagnose.micro_batch = 128  # the fastest on 2 cores
        config.eval.episodes = 1024
        config.eval.every = 25
        config.checkpoint.every = 25
        config.steps = 250
    elif model in LLMS:
        config.model.path = LLMS[model]
        config.model.dtype = "bfloat16"
        config.model.remat = True
        # Trained on split parameters, sampled with whole ones (docs/preflight.md).
        config.mesh.update(data=1, fsdp=-1)
        config.sampling_mesh.update(data=-1, fsdp=1, tensor=1)
        config.optimizer.micro_batch = 16  # over 16 devices; a multiple of however many there are
    else:
        accepted = ", ".join(["tiny", *LLMS])
        name = config.env.name
        raise ValueError(f"configs/{name}.py has no preset {model!r}; accepted: {accepted}")
