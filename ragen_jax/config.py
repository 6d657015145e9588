"""What a config describes: the numbers that follow from it and the objects it stands for."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict, config_dict

from envs import make_env
from ragen_jax import chat, credit, critic
from ragen_jax.model import lora
from ragen_jax.model.kernels import best_kernel
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.optimize import learning_rates, make_optimizer
from ragen_jax.randomness import Purpose, stream_key
from ragen_jax.rollout import Budgets, Sampling
from ragen_jax.sharding import data_shards, make_mesh
from ragen_jax.update import Loss


def of_environments(config):
    """{name: the run's config with that environment as its only one}, config.env first.

    A config of one environment is its own only entry.
    """
    alone = {config.env.name: config}
    if config.also:
        parts = {config.env.name: ConfigDict(dict(groups=config.rollout.groups, env=config.env))}
        for name, part in (parts | dict(config.also)).items():
            alone[name] = config.copy_and_resolve_references()
            with alone[name].unlocked():
                alone[name].env = part.env
                alone[name].also = ConfigDict()
            alone[name].rollout.groups = part.groups
    return alone


def groups_of_environments(config):
    """The groups of a step, environment by environment, as ints."""
    return tuple(c.rollout.groups for c in of_environments(config).values())


def step_groups(config):
    """The groups of a step, of all environments."""
    return sum(groups_of_environments(config))


def turns_shown(env):
    """The most turns that a prompt of an environment's section can show."""
    return chat.CONTEXTS[env.context](env.max_turns, env.window)


def row_tokens(config):
    """The most tokens that the policy can sample in a row: Dr.GRPO's constant length."""
    shown = max(turns_shown(c.env) for c in of_environments(config).values())
    return shown * config.rollout.max_new_tokens


def step_rows(config):
    """The most rows of a step: what does not lie in an episode's first row has rows of its own."""

    def rows(c):
        # At the limit of the context any turn may have to start another row.
        together = 1 if c.env.max_context else turns_shown(c.env)
        return c.rollout.groups * c.rollout.group_size * (c.env.max_turns - together + 1)

    return sum(map(rows, of_environments(config).values()))


def minibatch_rows(config):
    """The most rows that a minibatch can hold."""
    return -(-step_rows(config) // config.optimizer.minibatches)


def environment_settings(config):
    """What decides the problems of config.env, JSON-like: for cache names.

    A file of problems (the option `path`) counts by its content, wherever it lies.

    Raises:
      ValueError: the file cannot be read.
    """
    options = config.env.options.to_dict()
    if options.get("path") is not None:
        try:
            content = Path(options["path"]).read_bytes()
        except OSError as error:
            raise ValueError(f"config.env.options.path cannot be read: {error}") from error
        options["path"] = hashlib.sha256(content).hexdigest()
    return {"env": config.env.name, **options}


TINY_NEEDS = ("words", "solve", "explain")  # of envs.types.SolvableEnvironment


def words(config):
    """What the tiny agent's tokenizer keeps whole, each word once.

    Raises:
      ValueError: unusable environments, or one that lacks what the tiny agent needs.
    """
    found = {}
    for name, c in of_environments(config).items():
        environment = build_environment(c, "train")
        missing = [member for member in TINY_NEEDS if not hasattr(environment, member)]
        if missing:
            raise ValueError(
                f"config.model.path is {config.model.path!r}, an agent that imitates a solver, but "
                f"environment {name!r} has no {', '.join(missing)} (envs/types.py, "
                "SolvableEnvironment); write them, or train a language model: preset llm and "
                "--config.model.path=DIR_OR_HUB_ID"
            )
        found |= dict.fromkeys(environment.words)
    return tuple(found)


def build_environment(config, split):
    """The environment of config.env, its problems drawn from `split`.

    Raises:
      ValueError: unknown options or values, or several actions a turn where an action is a text.
    """
    try:
        environment = make_env(config.env.name, **config.env.options.to_dict(), split=split)
    except ValueError as error:
        raise ValueError(f"config.env.options of {config.env.name!r}: {error}") from error
    if not environment.actions and config.env.actions_per_turn != 1:
        raise ValueError(
            f"config.env.actions_per_turn is {config.env.actions_per_turn}; accepted: 1, because "
            f"the whole answer is one action in environment {config.env.name!r}"
        )
    return environment


def build_chat(config, tokenizer, environment, extra_stop_ids=()):
    """The config's `Chat`."""
    limit = config.env.max_context
    return chat.make_chat(
        tokenizer,
        environment,
        context=config.env.context,
        window=config.env.window,
        max_prompt=limit - config.rollout.max_new_tokens if limit else 0,
        prompt=config.env.prompt,
        actions_per_turn=config.env.actions_per_turn,
        max_actions=config.env.max_actions,
        extra_stop_ids=extra_stop_ids,
    )


def build_meshes(config):
    """(mesh of training, mesh of sampling and scoring).

    Raises:
      ValueError: sizes that do not fit the devices, or rows that do not split over them.
    """
    mesh = sampling = make_mesh(**config.mesh)
    if any(config.sampling_mesh.values()):
        try:
            sampling = make_mesh(**config.sampling_mesh)
        except ValueError as error:
            raise ValueError(f"config.sampling_{error}") from error
    if config.optimizer.micro_batch % data_shards(mesh):
        raise ValueError(
            f"config.optimizer.micro_batch is {config.optimizer.micro_batch}; its rows must split "
            f"evenly over mesh.data x mesh.fsdp = {data_shards(mesh)}"
        )
    return mesh, sampling


def tiny_shape(config, vocab_size):
    """`ModelConfig` of the agent that warmstart.py trains."""
    w = config.warmstart
    return ModelConfig(
        vocab_size=vocab_size,
        width=w.width,
        layers=w.layers,
        heads=w.heads,
        kv_heads=w.kv_heads,
        head_dim=w.width // w.heads,
        mlp_width=w.mlp_width,
    )


def build_model(config, shape, mesh):
    """The config's `Qwen` of a `ModelConfig`: with the dtype, kernel and remat of the run.

    Raises:
      ValueError: the kernel does not run on the mesh's devices.
    """
    m, platform = config.model, mesh.devices.flat[0].platform
    kernel = best_kernel(platform, m.dtype, shape.head_dim)
    if m.attention not in ("auto", "xla", kernel):
        raise ValueError(
            f"config.model.attention is {m.attention!r}, which does not run on {platform} with "
            f"{m.dtype} and heads of {shape.head_dim}; accepted: auto, xla"
            + (f", {kernel}" if kernel != "xla" else "")
        )
    kernel = kernel if m.attention == "auto" else m.attention
    return Qwen(dataclasses.replace(shape, dtype=m.dtype, attention=kernel, remat=m.remat))


def build_optimizer(config):
    """The config's optimizer, of policy and critic; its steps are those of learning rate 1."""
    o = config.optimizer
    return make_optimizer(
        b1=o.b1,
        b2=o.b2,
        eps=o.eps,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
    )


def step_rates(config, step):
    """(policy's, critic's) learning rates of a step's minibatches, float32.

    They follow the number of the step, whatever a filter dropped or was skipped before; the
    policy's from its first step on, behind those in which the critic alone learns.
    """
    o, first = config.optimizer, config.critic.warmup_steps if has_critic(config) else 0

    def rates(largest, start):
        schedule = learning_rates(
            learning_rate=largest,
            schedule=o.schedule,
            warmup_updates=o.warmup_updates,
            total_updates=(config.steps - start) * o.minibatches,
        )
        updates = (step - 1 - start) * o.minibatches + np.arange(o.minibatches)
        found = np.asarray(schedule(np.maximum(updates, 0)), np.float32)
        return np.broadcast_to(found, updates.shape)

    return rates(o.learning_rate, first), rates(config.critic.learning_rate, 0)


def has_critic(config):
    """Whether the config's algorithm learns with a critic."""
    return config.algorithm.name in credit.WITH_CRITIC


def build_loss(config):
    """The config's `update.Loss`."""
    a = config.algorithm
    return Loss(
        temperature=config.rollout.temperature,
        objective=a.objective,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        clip_c=a.clip_c or None,
        aggregation=a.aggregation,
        norm_length=row_tokens(config),
        kl_kind=a.kl_kind,
        kl_coef=a.kl_coef if a.kl_in == "loss" else 0.0,
        entropy_coef=a.entropy_coef,
    )


def build_credit(config):
    """The config's `credit.Credit`."""
    a, r = config.algorithm, config.reward
    return credit.Credit(
        name=a.name,
        gamma=a.gamma,
        lam=a.lam,
        bi_level=a.bi_level,
        turn_gamma=a.turn_gamma,
        soft_weights=a.soft_weights,
        level=r.level,
        normalize=r.normalize,
        grouping=r.grouping,
    )


def build_value_loss(config):
    """The config's `critic.ValueLoss`."""
    return critic.ValueLoss(
        clip=config.critic.clip,
        aggregation=config.algorithm.aggregation,
        norm_length=row_tokens(config),
    )


def build_adapters(config, model, mesh):
    """The config's fresh LoRA adapters on the mesh."""
    settings = config.model.lora
    key = stream_key(Purpose.ADAPTERS, config.seed)
    adapters = lora.init_adapters(model.config, key, rank=settings.rank, targets=settings.targets)
    return lora.place_adapters(adapters, model, mesh)


def build_budgets(config):
    """The config's `Budgets`."""
    return Budgets(
        max_turns=config.env.max_turns,
        max_actions=config.env.max_actions,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def build_eval_sampling(config):
    """How evaluation draws tokens."""
    return Sampling(
        temperature=config.eval.temperature,
        top_k=config.eval.top_k,
        top_p=config.eval.top_p,
        min_p=config.eval.min_p,
    )


def cache_directory():
    """Where generated models and datasets are kept: $XDG_CACHE_HOME (or ~/.cache)/ragen_jax."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ragen_jax"


def read_run_config(workdir):
    """The config that a run wrote to its folder.

    Raises:
      ValueError: there is none.
    """
    path = Path(workdir) / "config.json"
    if not path.exists():
        raise ValueError(f"{workdir} is not the folder of a run: it has no config.json")

    def typed(value):
        """Of types that an override knows: tuples for lists, for null what takes any."""
        if isinstance(value, dict):
            return {name: typed(inner) for name, inner in value.items()}
        if value is None:
            return config_dict.placeholder(object)
        return tuple(value) if isinstance(value, list) else value

    return ConfigDict(typed(json.loads(path.read_text())))


def same_run(config, workdir):
    """Refuses to continue a run under a config that would make it another run.

    Raises:
      ValueError: names the first field that differs; steps (where the learning rate is
        constant), eval.every, checkpoint.every and .keep, rollout.save_every and stopping.* may
        change.
    """
    if not (workdir / "config.json").exists():
        return
    free = ["eval.every", "checkpoint.every", "checkpoint.keep", "rollout.save_every"]
    if config.optimizer.schedule == "constant":  # any other is stretched over all steps
        free.append("steps")
    before, now = _flat(read_run_config(workdir)), _flat(config)
    for name in sorted(set(before) | set(now)):
        free_to_change = name in free or name.startswith("stopping.")
        if not free_to_change and before.get(name) != now.get(name):
            raise ValueError(
                f"{workdir} holds a run with config.{name}={before.get(name)!r}, but this command "
                f"has {now.get(name)!r}; give the same value, or another --workdir"
            )


def _flat(config):
    """{"a.b": value} of a nested config, sequences as lists."""

    def leaves(node, prefix):
        for name, value in node.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name, value

    return dict(leaves(json.loads(json.dumps(config.to_dict())), ""))
