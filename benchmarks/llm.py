"""Decode and updates of published shapes with random weights, and their bytes and FLOPs."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.measure import Row, compare
from benchmarks.peers import PeerMissing, need
from ragen_jax.algorithm.losses import minibatch_weights
from ragen_jax.core.compilation import compiled
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.families import SHAPES
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.model.segments import Segment
from ragen_jax.programs.roofline import Work
from ragen_jax.rollout.chunks import empty_page
from ragen_jax.rollout.sample import DecodeSettings, decode, episode_keys
from ragen_jax.update.buckets import split_by_length
from ragen_jax.update.optimize import (
    MinibatchLayout,
    apply_gradient,
    micro_batches,
    needs_start,
    no_gradient,
)
from ragen_jax.update.pieces import TokenRows
from ragen_jax.update.policy import ForwardContext, Loss, init_state, policy_gradient
from ragen_jax.update.state import TrainState

TINY = ModelConfig(
    vocab_size=512, width=128, layers=6, heads=4, kv_heads=2, head_dim=32, mlp_width=512
)
LOSS = Loss(
    temperature=1.0,
    objective="ppo",
    clip_low=0.2,
    clip_high=0.28,
    clip_c=3.0,
    aggregation="token-mean",
    norm_length=1,
    kl_kind="k3",
    kl_coef=0.0,
    entropy_coef=0.0,
)
LEARNING_RATE = 1e-6


def shape(name, dtype):
    """Return the `ModelConfig` of a published shape, or of "tiny"."""
    config = TINY if name == "tiny" else SHAPES[name]
    return dataclasses.replace(config, dtype=dtype)


# ------------------------------------------------------------------------------ ours


def default_mesh():
    """Return the default mesh of a run: all devices along the data axis."""
    return make_mesh(data=-1, fsdp=1, tensor=1)


def random_params(config):
    """Return random float32 parameters, made by one program so that there is only one copy."""
    return jax.jit(functools.partial(init_params, config))(jax.random.key(0))


def decoder(model, params, *, rows, cached, steps):
    """Return a function that runs `steps` decode steps of `rows` rows over `cached` positions.

    The cached keys and values are 0: the time of a step does not depend on them.
    """
    k, v = empty_page(model, params, rows=rows, positions=cached)
    segment = Segment(k=k, v=v, length_N=jnp.full(rows, cached, jnp.int32))
    logits_BV = jnp.zeros((rows, model.config.vocab_size), jnp.float32)
    keys_B = episode_keys(jax.random.key(0), range(rows), range(rows), 0)

    def run():
        found = decode(
            model,
            params,
            segment,
            logits_BV,
            keys_B,
            np.full(rows, steps + 1, np.int32),
            np.float32(1.0),
            # the first token is drawn from the given logits
            settings=DecodeSettings(max_tokens=steps + 1, stop_ids=()),
        )
        jax.block_until_ready(found.tokens_BT)

    return run


@dataclasses.dataclass
class Update:
    """One update of a policy on a micro-batch of rows; a call runs it and waits for it."""

    model: Qwen
    optimizer: optax.GradientTransformation
    states: list[TrainState]  # of length 1; several updates may share it
    pieces: dict[str, jax.Array]
    count: jax.Array  # number of micro-batches
    frozen: ForwardContext | None = None  # the base model, if adapters are trained
    rate: float = 1.0  # multiplies the optimizer's step

    def compile(self):
        """Compile the gradient; several threads may compile several updates at a time."""
        compiled(policy_gradient, *self._arguments())

    def __call__(self):
        grads, value, *_ = policy_gradient(*self._arguments())
        state, rate = self.states[0], np.float32(self.rate)
        params, opt_state, metrics = apply_gradient(
            self.optimizer, rate, state.params, state.opt_state, value, grads
        )
        self.states[0] = dataclasses.replace(state, params=params, opt_state=opt_state)
        if float(metrics["skipped"]):
            raise RuntimeError("the update was skipped: not finite")
        jax.block_until_ready(params)

    def _arguments(self):
        params, one = self.states[0].params, np.float32(1.0)
        start = (
            no_gradient(params) if needs_start(len(self.pieces["mask"]), default_mesh()) else None
        )
        scales = one, one
        return (
            *(self.model, LOSS, params, None, start, self.pieces, self.count, scales),
            self.frozen,
        )


def updater(model, params, *, rows, length, micro_batch=None):
    """Return an `Update` of `rows` rows of `length` tokens, by plain SGD."""
    optimizer = optax.sgd(LEARNING_RATE)
    states = [init_state(params, optimizer, default_mesh())]
    pieces, count = make_rows(model, rows=rows, length=length, micro_batch=micro_batch)
    return Update(model, optimizer, states, pieces, count)


def make_rows(model, *, rows, length, micro_batch=None):
    """Return random rows as `policy_gradient` reads them, and the number of micro-batches."""
    shape_BT = rows, length
    mask = np.ones(shape_BT, np.float32)
    mask[..., 0] = 0
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, model.config.vocab_size, shape_BT).astype(np.int32)
    arrays = {
        "logp": np.full(shape_BT, -np.log(model.config.vocab_size), np.float32),
        "advantage": np.ones(shape_BT, np.float32),
        "mask": mask,
    }
    weights = jax.device_get(minibatch_weights(mask, LOSS.aggregation))
    layout = MinibatchLayout(default_mesh(), 1, micro_batch or rows, rows)
    read = TokenRows(tokens_BT, mask > 0)
    ((piece,),) = split_by_length([np.arange(rows)], read, layout.grouping).pieces
    return micro_batches(piece, read, layout, {**arrays, "weights": weights})


def weights(config):
    """Return the number of parameters in a token's matrix products (a tied head counts once)."""
    D, heads = config.width, config.heads + config.kv_heads
    layer = 2 * D * config.head_dim * heads + 3 * D * config.mlp_width
    return config.layers * layer + config.vocab_size * D


def decode_bytes(config, *, rows, cached, steps):
    """Return the bytes of decode steps: weights and cache, each read once per step."""
    itemsize = 4 if config.dtype == "float32" else 2
    cache = Work(config).cache_bytes(1) * rows * (cached + steps / 2)
    return steps * (itemsize * weights(config) + cache)


def decode_flops(config, *, rows, cached, steps):
    """Return the FLOPs of decode steps: products with the weights, and attention to the cache."""
    attention = 2 * config.layers * config.heads * config.head_dim * (cached + steps / 2)
    return 2 * steps * rows * (weights(config) + attention)


def update_flops(config, *, rows, length):
    """Return the FLOPs of an update: three times the forward pass, with half of all attention."""
    attention = 2 * config.layers * config.heads * config.head_dim * length / 2
    return 6 * rows * length * (weights(config) + attention)


# ------------------------------------------------------------------------------ torch


def torch_random(config):
    """Return transformers' Qwen2 of a shape, with random weights."""
    torch = need("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = Qwen2Config(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.mlp_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        tie_word_embeddings=config.tied,
        rope_theta=config.rope_theta,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(fields)
    model = model.to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.03, 0.03)
        rotary = model.model.rotary_emb
        half = torch.arange(config.head_dim // 2) / (config.head_dim // 2)
        rotary.inv_freq.copy_(config.rope_theta**-half)  # to_empty does not set this buffer
    return model


def torch_decoder(model, *, rows, cached, steps):
    """Return the same as `decoder` in torch: a loop of steps, sampling at temperature 1."""
    torch = need("torch")
    with torch.inference_mode():
        found = model(torch.ones(rows, cached, dtype=torch.long), use_cache=True, logits_to_keep=1)
    cache, first_BV = found.past_key_values, found.logits[:, -1]

    def draw(logits_BV):
        return torch.multinomial(torch.softmax(logits_BV, -1), 1)

    @torch.inference_mode()
    def run():
        if cache.get_seq_length() > cached:
            cache.crop(cached - cache.get_seq_length())  # negative: number of positions to remove
        token_B1 = draw(first_BV)
        for _ in range(steps):
            found = model(token_B1, past_key_values=cache, use_cache=True)
            token_B1 = draw(found.logits[:, -1])
        token_B1.numpy()

    return run


def torch_updater(model, *, rows, length):
    """Return the same as `updater` in torch: forward, backward, gradient norm and SGD."""
    torch = need("torch")
    model.train()
    tokens_BT = torch.randint(0, model.config.vocab_size, (rows, length))
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def run():
        optimizer.zero_grad()
        logits_BTV = model(tokens_BT[:, :-1], use_cache=False).logits
        logp_BT = -torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten(), reduction="none"
        )
        ratio = torch.exp(logp_BT - logp_BT.detach())
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.28)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        loss.item()

    return run


# ------------------------------------------------------------------------------ cases


def qwen_05b(repeats, *, name="qwen2.5-0.5b", cached=128, steps=16, rows=2, length=128):
    """Qwen2.5-0.5B in float32: decode at 1 and 8 rows, and an update, against torch."""
    config = shape(name, "float32")
    model, params = Qwen(config), random_params(config)
    fields, peer = {}, None
    try:
        peer = torch_random(config)
        need("torch").set_num_threads(os.cpu_count())
        fields["other_name"] = "torch"
    except PeerMissing as error:
        fields["skipped"] = str(error)
    found = []
    for batch, target in ((1, None), (8, 1.2)):
        sizes = dict(rows=batch, cached=cached, steps=steps)
        found.append(
            Row(
                name=f"decode, batch {batch}: {steps} steps",
                target=target,
                work=batch * steps,
                bytes=decode_bytes(config, **sizes),
                flops=decode_flops(config, **sizes),
                **fields,
                **compare(
                    decoder(model, params, **sizes),
                    peer and torch_decoder(peer, **sizes),
                    repeats=repeats,
                ),
            )
        )
    found.append(
        Row(
            name=f"update: {rows} x {length} tokens",
            target=1.0,
            work=rows * length,
            flops=update_flops(config, rows=rows, length=length),
            **fields,
            **compare(
                updater(model, params, rows=rows, length=length),
                peer and torch_updater(peer, rows=rows, length=length),
                repeats=repeats,
            ),
        )
    )
    return found
