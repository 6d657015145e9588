"""Small models with each kind of layers: decode and update, against transformers.

The models have four layers of width 128 and random weights: a Gemma 3 with three windowed layers
and a full one, a Qwen3 mixture, and a Qwen3.5 with three linear-attention layers and a full one.
transformers has no other kernels for linear attention on CPUs than plain torch. Of its
implementations of attention and of experts, the fastest is compared.

Times are processor times of all threads. `taskset -c 0` gives both sides one core.
"""

import copy
import os
import time

import jax
import numpy as np

from benchmarks.llm import random_params, torch_updater, updater
from benchmarks.measure import Row, compare, time_once
from benchmarks.peers import PeerMissing, need
from ragen_jax.model import config_json
from ragen_jax.model.families import gemma3, qwen3_5
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.model.shape import DeltaHeads, Experts, Layer
from ragen_jax.rollout.sample import DecodeSettings, decode, episode_keys, prefill

LAYERS, WIDTH = 4, 128
SIZES = dict(
    vocab_size=512, width=WIDTH, layers=LAYERS, heads=4, kv_heads=2, head_dim=32, mlp_width=256
)


def one_full(kind):
    """Return the kinds of three layers of a kind and a full one."""
    return tuple(Layer("full" if i == LAYERS - 1 else kind) for i in range(LAYERS))


KINDS = {
    "windows": dict(
        kinds=one_full("windowed"),
        window=32,
        family="gemma3_text",
        qkv_bias=False,
        qk_norm=True,
        **gemma3.FEATURES,
    ),
    "mixture": dict(
        kinds=(Layer(mlp="experts"),) * LAYERS,
        experts=Experts(count=8, chosen=2, width=64),
        family="qwen3_moe",
        qkv_bias=False,
        qk_norm=True,
    ),
    "hybrid": dict(
        kinds=one_full("linear"),
        delta=DeltaHeads(key_heads=4, value_heads=4, key_dim=32, value_dim=32),
        family="qwen3_5_text",
        **qwen3_5.FEATURES,
    ),
}


def torch_models(config):
    """Return {implementation: model of transformers} of a shape, with the same random weights."""
    torch = need("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config_json.from_config(config, "float32")
    kind = fields.pop("model_type")
    found = {}
    for attention in ("sdpa", "eager"):
        for experts in ("eager", "grouped_mm", "batched_mm") if config.experts else (None,):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **fields),
                attn_implementation=attention,
                **({"experts_implementation": experts} if experts else {}),
            )
            name = f"attention {attention}" + (f", experts {experts}" if experts else "")
            found[name] = model.float()
    return found


def fastest(runs):
    """Return (name, run) of the least processor time, of {name: function without arguments}."""
    seconds = {name: [] for name in runs}
    for _ in range(4):
        for name, run in runs.items():
            seconds[name].append(time_once(run, time.process_time))
    best = min(runs, key=lambda name: min(seconds[name][1:]))
    return best, runs[best]


def decoder(model, params, *, rows, cached, steps):
    """Return a function that samples `steps` tokens after the first, of `rows` read prompts."""
    tokens_BT = np.random.default_rng(0).integers(0, model.config.vocab_size, (rows, cached))
    read = jax.jit(prefill, static_argnums=0)
    segment, logits_BV = read(model, params, tokens_BT, np.full(rows, cached, np.int32))
    keys_B = episode_keys(jax.random.key(0), range(rows), range(rows), 0)
    settings = DecodeSettings(max_tokens=steps + 1, stop_ids=())
    budget_B, one = np.full(rows, steps + 1, np.int32), np.float32(1.0)

    def run():
        found = decode(model, params, segment, logits_BV, keys_B, budget_B, one, settings=settings)
        jax.block_until_ready(found.tokens_BT)

    return run


def torch_decoder(model, *, rows, cached, steps):
    """Return the same as `decoder` in torch: a loop of steps, sampling at temperature 1."""
    torch = need("torch")
    model.eval()
    with torch.inference_mode():
        tokens_BT = torch.randint(0, model.config.vocab_size, (rows, cached))
        found = model(tokens_BT, use_cache=True, logits_to_keep=1)
    # Not every cache can be cut, so each run changes a copy.
    cache, first_BV = found.past_key_values, found.logits[:, -1]

    def draw(logits_BV):
        return torch.multinomial(torch.softmax(logits_BV, -1), 1)

    @torch.inference_mode()
    def run():
        kept = copy.deepcopy(cache)
        token_B1 = draw(first_BV)
        for _ in range(steps):
            found = model(token_B1, past_key_values=kept, use_cache=True)
            token_B1 = draw(found.logits[:, -1])
        token_B1.numpy()

    return run


def layer_kinds(repeats, *, rows=8, length=128, cached=64, steps=32):
    """Windows, experts and linear attention: decode and update of small models, against torch."""
    found = []
    for kind, features in KINDS.items():
        config = ModelConfig(**SIZES, **features)
        model, params = Qwen(config), random_params(config)
        theirs, skipped = {}, ""
        try:
            need("torch").set_num_threads(len(os.sched_getaffinity(0)))
            theirs = torch_models(config)
        except PeerMissing as error:
            skipped = str(error)
        sizes = dict(rows=rows, cached=cached, steps=steps)
        for name, work, ours, peers in (
            (
                f"{kind}, decode: {rows} x {steps} tokens after {cached}",
                rows * steps,
                decoder(model, params, **sizes),
                {name: torch_decoder(x, **sizes) for name, x in theirs.items()},
            ),
            (
                f"{kind}, update: {rows} x {length} tokens",
                rows * length,
                updater(model, params, rows=rows, length=length),
                {name: torch_updater(x, rows=rows, length=length) for name, x in theirs.items()},
            ),
        ):
            label, peer = fastest(peers) if peers else ("", None)
            figures = compare(ours, peer, repeats=repeats, clock=time.process_time)
            found.append(
                Row(
                    name=name,
                    target=1.0,
                    work=work,
                    other_name=f"torch, {label}" if peer else "",
                    skipped=skipped,
                    **figures,
                )
            )
    return found
