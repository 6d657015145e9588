"""The programs of a training run as shapes: what it compiles, at its largest, and what they cost.

Follows train.py, rollout.py, cross_scoring.py and update.py: the same jitted functions, with
`jax.ShapeDtypeStruct`s in place of arrays, laid out over a mesh as the run would lay them out.
Reads no weights, no tokenizer and no network.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from ragen_jax import config as cfg
from ragen_jax import passes, sharding
from ragen_jax.chat import CONTEXTS
from ragen_jax.credit import WITH_CRITIC
from ragen_jax.critic import CriticState, critic_step
from ragen_jax.diagnostics import cross_scoring
from ragen_jax.learn import needs_statistics
from ragen_jax.model import hf, lora, qwen
from ragen_jax.model.attention import Segment
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout import length_bucket
from ragen_jax.roofline import Cost, Work
from ragen_jax.sample import decode, extend, prefill
from ragen_jax.types import TrainState
from ragen_jax.update import Frozen, update_step


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a run, ready to be compiled."""

    name: str
    lower: Callable  # () -> jax.stages.Lowered
    arguments: object  # tree of arrays
    held: object  # tree of arrays in memory that are not its arguments
    cost: Cost  # of a call, on a chip
    calls: int  # of a step
    helps: tuple[str, ...]  # config fields that make it smaller


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens, padded as the run would pad them, but for `last`."""

    shown: int  # turns of a prompt, at most
    whole: int  # turns of an episode until one is dropped, every reply being as long as it may
    last: int  # the last turn's prompt, not padded
    first: int  # the first turn's prompt
    before: int  # the cache of the turn before
    prompt: int  # the last turn's prompt
    news: int  # what the last turn appends
    row: int  # a whole row
    reasoning: int


def lengths(config, prompt_tokens, observation_tokens):
    """`Lengths` of a config, every reply being as long as it may.

    Raises:
      ValueError: a length below 1, or a first prompt that env.max_context does not hold.
    """
    for name, value in (
        ("prompt_tokens", prompt_tokens),
        ("observation_tokens", observation_tokens),
    ):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    env, reply = config.env, config.rollout.max_new_tokens
    shown = CONTEXTS[env.context](env.max_turns, env.window)
    last = prompt_tokens + (shown - 1) * (reply + observation_tokens)
    if env.max_context:
        last = min(last, env.max_context - reply)
        if last < prompt_tokens:
            raise ValueError(
                f"--prompt_tokens is {prompt_tokens}, but config.env.max_context = "
                f"{env.max_context} leaves {last} beside a reply"
            )
    before = max(last - reply - observation_tokens, prompt_tokens)
    return Lengths(
        shown=shown,
        whole=1 + (last - prompt_tokens) // (reply + observation_tokens),
        last=last,
        first=length_bucket(prompt_tokens),
        before=length_bucket(before),
        prompt=length_bucket(last),
        news=length_bucket(observation_tokens + 1),  # and the last sampled token
        row=length_bucket(last + reply),
        reasoning=-(-reply // 16) * 16,
    )


def model_shape(config):
    """`qwen.ModelConfig` of config.model.path, without weights, tokenizer files or network.

    Raises:
      ValueError: neither a directory nor a model whose shape is known.
    """
    path = config.model.path
    if path == "tiny":
        words = cfg.build_environment(config, "train").words
        return cfg.tiny_shape(config, len(build_tokenizer(words)))
    if Path(path).expanduser().is_dir():
        return hf.model_config(path)
    name = path.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if name not in qwen.SHAPES:
        raise ValueError(
            f"config.model.path is {path!r}: neither a model directory nor a model whose shape is "
            f"known; known, with or without -Instruct: tiny, {', '.join(qwen.SHAPES)}"
        )
    return qwen.SHAPES[name]


def meshes(config, devices):
    """config.build_meshes over the given devices."""
    mesh = sampling = sharding.make_mesh(**config.mesh, devices=devices)
    if any(config.sampling_mesh.values()):
        try:
            sampling = sharding.make_mesh(**config.sampling_mesh, devices=devices)
        except ValueError as error:
            raise ValueError(f"config.sampling_{error}") from error
    if config.optimizer.micro_batch % sharding.data_shards(mesh):
        raise ValueError(
            f"config.optimizer.micro_batch is {config.optimizer.micro_batch}; its rows must split "
            f"evenly over mesh.data x mesh.fsdp = {sharding.data_shards(mesh)}"
        )
    return mesh, sampling


# ------------------------------------------------------------------------------ arrays


def struct(mesh, shape, dtype, *axes):
    """A ShapeDtypeStruct laid out by the logical names of its axes (None, or none given: whole)."""
    axes = axes + (None,) * (len(shape) - len(axes))
    placed = NamedSharding(mesh, sharding.spec(axes, shape, mesh))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)


def host(shape, dtype=jnp.int32):
    """A ShapeDtypeStruct of a NumPy argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_per_chip(tree):
    """What the arrays of a tree take on one chip, without padding."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def place(shapes, shardings):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def cache_struct(model, params, mesh, rows, positions):
    """The `Segment` of a cache on a mesh."""
    tokens = jax.ShapeDtypeStruct((rows, positions), jnp.int32)
    plain = qwen.Qwen(dataclasses.replace(model.config, attention="xla"))
    shapes = jax.eval_shape(
        lambda params, tokens: plain.apply({"params": params}, tokens, keep_kv=True)[1],
        params,
        tokens,
    )

    def one(x):
        axes = (None,) * (len(x.shape) - 4) + ("rows", "kv_heads")
        return struct(mesh, x.shape, x.dtype, *axes)

    k, v = jax.tree.map(one, shapes)
    return Segment(k=k, v=v, length_N=struct(mesh, (rows,), jnp.int32, "rows"))


# ------------------------------------------------------------------------------ programs


@dataclasses.dataclass(frozen=True)
class Run:
    """What all programs of a run share."""

    config: object  # ConfigDict
    model: qwen.Qwen
    at: Lengths
    mesh: jax.sharding.Mesh
    sampling_mesh: jax.sharding.Mesh
    optimizer: object
    state: TrainState
    reference: object  # parameters of the KL term, or None
    frozen: object  # update.Frozen of LoRA, or None
    policy: object  # parameters that sampling and scoring read
    base: object  # what sharding.sampling_params copies
    copied: bool  # whether it copies, or hands on what it is given
    held: object  # tree of what training keeps while sampling and scoring

    @property
    def helps(self):
        """Config fields that make what every program holds smaller."""
        helps = ["mesh.fsdp", "sampling_mesh"]
        helps += ["model.dtype"] if self.config.model.dtype == "float32" else []
        helps += [] if self.frozen else ["model.lora.rank"]
        return (*helps, "a larger --topology")


def programs(config, devices, *, prompt_tokens, observation_tokens):
    """The `Program`s of a run on these devices.

    Raises:
      ValueError: values that the run would refuse, too.
    """
    run = describe(config, devices, prompt_tokens, observation_tokens)
    return [*rollout_programs(run), *scoring_programs(run), *training_programs(run)]


def describe(config, devices, prompt_tokens, observation_tokens):
    """The `Run` of a config, as train.py sets it up."""
    c = config
    shape = model_shape(c)
    mesh, sampling_mesh = meshes(c, devices)
    model = cfg.build_model(c, shape, mesh)
    at = lengths(c, prompt_tokens, observation_tokens)
    if at.last + c.rollout.max_new_tokens > shape.max_positions:  # as rollout.py
        raise ValueError(
            f"the last prompt with its reply needs {at.last + c.rollout.max_new_tokens} "
            f"positions, but {c.model.path} has {shape.max_positions}"
        )
    shapes = jax.eval_shape(model.init, jax.random.key(0), host((1, 1), jnp.int32))
    shapes = nn.unbox(shapes)["params"]
    params = policy = place(shapes, sharding.param_shardings(model, mesh))
    copied = c.model.dtype != "float32" or mesh != sampling_mesh
    if copied:
        copy = jax.eval_shape(sharding._resharding(model, sampling_mesh), shapes)
        policy = place(copy, sharding.param_shardings(model, sampling_mesh))

    trained, frozen, reference = params, None, params if c.algorithm.kl_coef else None
    if c.model.lora.rank:
        frozen, reference = Frozen(params, host((), jnp.float32)), None
        trained = adapters(c, model, mesh)
        beside = adapters(c, model, sampling_mesh)["layers"]
        layers = {name: leaf | beside.get(name, {}) for name, leaf in policy["layers"].items()}
        policy = policy | {"layers": layers}

    optimizer = cfg.build_optimizer(c)
    critic = None
    if c.algorithm.name in WITH_CRITIC:
        backbone = trained if frozen else {k: x for k, x in trained.items() if k != "head"}
        values = struct(mesh, (shape.width,), jnp.float32)
        critic = {"backbone": backbone, "value": values}
        critic = CriticState(critic, moments(optimizer, critic, mesh))
    state = TrainState(
        params=trained,
        opt_state=moments(optimizer, trained, mesh),
        step=struct(mesh, (), jnp.int32),
        seed_cursor=struct(mesh, (), jnp.uint32),
        kl_scale=struct(mesh, (), jnp.float32),
        critic=critic,
    )
    if copied:
        held = state, reference, frozen and frozen.params
    else:  # the sampler reads the training's own parameters
        held = state if frozen else state.replace(params=None), reference
    return Run(
        config=c,
        model=model,
        at=at,
        mesh=mesh,
        sampling_mesh=sampling_mesh,
        optimizer=optimizer,
        state=state,
        reference=reference,
        frozen=frozen,
        policy=policy,
        base=params,
        copied=copied,
        held=held,
    )


def moments(optimizer, params, mesh):
    """An optimizer's state as update.init_state lays it out: moments like the parameters, all else
    on every device."""
    return optax.tree.map_params(
        optimizer,
        lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: struct(mesh, x.shape, x.dtype),
    )


def adapters(config, model, mesh):
    """LoRA's adapters as config.build_adapters makes them."""
    settings = config.model.lora
    shapes = jax.eval_shape(
        lambda key: lora.init_adapters(
            model.config, key, rank=settings.rank, targets=settings.targets
        ),
        jax.random.key(0),
    )
    return place(shapes, lora.adapter_shardings(model.config, shapes, mesh))


def program(name, mesh, function, *args, keywords=None, **rest):
    """A `Program` that calls a jitted function with the mesh in use."""

    def lower():
        with jax.set_mesh(mesh):
            return function.lower(*args, **(keywords or {}))

    arrays = [x for x in jax.tree.leaves(args) if getattr(x, "sharding", None)]
    return Program(name=name, lower=lower, arguments=arrays, **rest)


def on_chip(count, mesh):
    """Rows of a chip; rows that do not split evenly are on all of them."""
    shards = sharding.data_shards(mesh)
    return count if count % shards else count // shards


def rollout_programs(run):
    """Prefill, extend and decode with all rows, at the last turn."""
    c, at, mesh = run.config, run.at, run.sampling_mesh
    work = Work(run.model.config, mesh.shape["tensor"])
    shards = sharding.data_shards(mesh)
    G, K, T = c.rollout.groups, c.rollout.group_size, c.rollout.max_new_tokens
    B = -(-G * K // shards) * shards
    V = run.model.config.vocab_size
    turns, fresh = c.env.max_turns, c.env.max_turns - at.whole
    shared = {"helps": ("rollout.groups", "rollout.max_new_tokens", *run.helps)}

    def rows(*shape, dtype=jnp.int32):
        return struct(mesh, shape, dtype, "rows")

    def cache(positions):
        return cache_struct(run.model, run.policy, mesh, B, positions)

    def read(name, N, length, *, members, calls):
        even = N % shards == 0
        tokens = (rows(N, length), rows(N)) if even else (host((N, length)), host((N,)))
        return program(
            name,
            mesh,
            prefill,
            run.model,
            run.policy,
            *tokens,
            keywords={"members": 1 if even else members},
            held=run.held,
            cost=work.prefill(on_chip(N, mesh), length),
            calls=calls,
            **shared,
        )

    by_group = G * K % shards == 0  # as rollout.py
    if by_group:
        yield read("prefill", G, at.first, members=K, calls=1)
    # Every row reads a prompt of its own: in evaluations, and where a turn starts afresh.
    if fresh or not by_group or c.rollout.compact or c.eval.every:
        length = at.prompt if fresh else at.first
        yield read("prefill_rows", B, length, members=1, calls=fresh + (not by_group))
    before = own = None
    if at.shown > 1:
        before, own = cache(at.before), cache(T)
        yield program(
            "extend",
            mesh,
            extend,
            run.model,
            run.policy,
            before,
            own,
            rows(B),
            rows(B, at.news),
            rows(B),
            keywords={"capacity": at.prompt},
            held=run.held,
            cost=work.extend(B // shards, at.prompt, at.news),
            calls=at.whole - 1,
            **shared,
        )
    yield program(
        "decode",
        mesh,
        decode,
        run.model,
        run.policy,
        cache(at.prompt),
        struct(mesh, (B, V), jnp.float32, "rows", "vocab"),
        rows(B, dtype=jax.random.key(0).dtype),
        rows(B),
        host((), jnp.float32),
        keywords={"max_new_tokens": T, "stop_ids": (0,)},
        held=(run.held, before, own),  # rollout.py still has the turn before
        cost=work.decode(B // shards, at.prompt, T),
        calls=turns,
        **shared,
    )


def scoring_programs(run):
    """Cross-scoring of the trajectory scope, whose prompts are the longest."""
    c, at, mesh = run.config, run.at, run.sampling_mesh
    if not c.diagnose.every:
        return
    work = Work(run.model.config, mesh.shape["tensor"])
    episodes = c.rollout.groups * c.rollout.group_size
    N = min(c.diagnose.trajectory_samples, episodes)
    n, m, calls = blocks(N, N, c.diagnose.micro_batch)
    # The first turn's scope has as many rows a call and shorter prompts.
    first = min(c.diagnose.first_turn_samples, episodes)
    first_calls = blocks(c.rollout.groups, first, c.diagnose.micro_batch)[2]
    P = -(-at.last // 32) * 32
    shared = {
        "held": run.held,
        "helps": ("diagnose.micro_batch", "diagnose.trajectory_samples", *run.helps),
    }
    yield program(
        "score_prompts",
        mesh,
        cross_scoring._read_prompts,
        run.model,
        run.policy,
        host((n, P)),
        host((n,)),
        cost=work.score_prompts(on_chip(n, mesh), P),
        calls=-(-N // n),
        **shared,
    )
    yield program(
        "score",
        mesh,
        cross_scoring._score,
        run.model,
        run.policy,
        cache_struct(run.model, run.policy, mesh, n, P),
        struct(mesh, (n, run.model.config.width), jnp.dtype(c.model.dtype), "rows"),
        host((m, at.reasoning)),
        host((m,)),
        cost=work.score(on_chip(n * m, mesh), on_chip(n, mesh), P, at.reasoning),
        calls=calls + first_calls,
        **shared,
    )


def training_programs(run):
    """The passes before an update, the updates, and the copy of parameters that sampling reads."""
    c, mesh, state = run.config, run.mesh, run.state
    micro = c.optimizer.micro_batch
    A = -(-cfg.minibatch_rows(c) // micro)
    split = mesh.shape["fsdp"] * mesh.shape["tensor"]
    work = Work(run.model.config, mesh.shape["tensor"])
    helps = ["optimizer.micro_batch"]
    helps += [] if c.model.remat else ["model.remat"]
    helps += ["algorithm.kl_coef"] if run.reference else []
    helps += ["algorithm.name"] if state.critic else []
    helps = (*helps, *run.helps)
    # train.py drops the sampler's copy while it learns, unless its base is LoRA's.
    copy = run.policy if run.frozen and run.copied else None

    def rows(A, **types):
        return {
            name: struct(mesh, (A, micro, run.at.row), jnp.dtype(dtype), None, "rows")
            for name, dtype in types.items()
        }

    def step(name, function, optimizer, loss, trained, minibatch, *rest, held, **cost):
        return program(
            name,
            mesh,
            function,
            run.model,
            optimizer,
            loss,
            trained,
            *rest,
            minibatch,
            host(()),
            host((), jnp.float32),
            run.frozen,
            held=(held, copy),
            cost=work.update(
                on_chip(micro, mesh),
                run.at.row,
                micro_batches=A,
                trained=sum(x.size for x in jax.tree.leaves(trained.params)) // split,
                frozen=bool(run.frozen),
                **cost,
            ),
            calls=c.optimizer.minibatches,
            helps=helps,
        )

    def read(name, function, params, extra, *, held, head):
        count = -(-cfg.step_rows(c) // micro)
        return program(
            name,
            mesh,
            passes.read_micro_batches,
            function,
            run.model,
            params,
            rows(count, tokens="int32")["tokens"],
            host(()),
            extra,
            held=(held, copy),
            cost=work.read_rows(on_chip(micro, mesh), run.at.row, micro_batches=count, head=head),
            calls=1,
            helps=helps,
        )

    temperature = host((), jnp.float32)
    if needs_statistics(c):
        whole = run.frozen.attach(state.params) if run.frozen else state.params
        held = state.opt_state, state.critic, run.reference
        yield read("statistics", passes.statistics, whole, temperature, held=held, head=True)
    if c.algorithm.kl_coef and c.algorithm.kl_in == "reward":
        reference = run.frozen.params if run.frozen else run.reference
        yield read("reference", passes.statistics, reference, temperature, held=state, head=True)
    if state.critic:
        rest = state.replace(critic=None), run.reference
        critic, optimizer = state.critic, run.optimizer
        yield read(
            "values",
            passes.values,
            critic.params,
            run.frozen,
            held=(rest, critic.opt_state),
            head=False,
        )
        yield step(
            "critic",
            critic_step,
            optimizer,
            cfg.build_value_loss(c),
            critic,
            rows(A, tokens="int32", value="f4", target="f4", mask="f4"),
            held=rest,
            reference=False,
            with_head=False,
        )
    in_loss = bool(c.algorithm.kl_coef and c.algorithm.kl_in == "loss")
    yield step(
        "update",
        update_step,
        run.optimizer,
        cfg.build_loss(c),
        state,
        rows(A, tokens="int32", logp="f4", advantage="f4", mask="f4"),
        run.reference if in_loss else None,
        held=None if in_loss else run.reference,
        reference=in_loss,
    )
    if run.copied:
        work = Work(run.model.config, run.sampling_mesh.shape["tensor"])
        yield program(
            "resharding",
            run.sampling_mesh,
            sharding._resharding(run.model, run.sampling_mesh),
            run.base,
            held=run.state if run.frozen else (run.state.replace(params=None), run.reference),
            cost=work.resharding(shards=split),
            calls=0 if run.frozen else 1,  # LoRA's base model is copied once a run
            helps=run.helps,
        )


def blocks(N, M, micro_batch):
    """(prompts of a call, reasonings of a call, calls) of cross_scoring.cross_score."""
    n = min(-(-N // 8) * 8, micro_batch)
    m = min(-(-M // 16) * 16, max(1, micro_batch // n))
    return n, m, -(-N // n) * -(-M // m)
