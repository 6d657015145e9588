"""Small models with each kind of layers: decode and update, against transformers.

The models have four layers of width 128 and random weights: a Gemma 3 with three windowed layers
and a full one, a Qwen3 mixture, and a Qwen3.5 with three linear-attention layers and a full one.
transformers has no other kernels for linear attention on CPUs than plain torch. Of its
implementations of attention and of experts, the fastest is compared. It runs in its own process,
because what `keep_freed_memory` does for us makes it slower.

Times are processor times of all threads. `taskset -c 0` gives both sides one core.
"""

import concurrent.futures
import copy
import dataclasses
import functools
import multiprocessing
import os
import time

import jax
import numpy as np

from benchmarks.llm import random_params, torch_updater, updater
from benchmarks.measure import Row, summarise, time_once
from benchmarks.peers import PeerMissing, need
from ragen_jax.model import config_json
from ragen_jax.model.experts import best_form
from ragen_jax.model.families import gemma3, qwen3_5
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.model.shape import DeltaHeads, Experts, Layer
from ragen_jax.rollout.sample import DecodeSettings, decode, episode_keys, prefill

LAYERS = 4
SHAPE = dict(
    vocab_size=512, width=128, layers=LAYERS, heads=4, kv_heads=2, head_dim=32, mlp_width=256
)
WARM_UP = 2  # runs of each side before those that count


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Rows of a decode and of an update, and their tokens."""

    rows: int = 8
    length: int = 128  # tokens of a row of an update
    cached: int = 64  # tokens of a prompt
    steps: int = 32  # sampled tokens, after the first


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


def shape_of(kind):
    """Return the `ModelConfig` of a kind of layers."""
    return ModelConfig(**SHAPE, **KINDS[kind], expert_form=best_form(jax.default_backend()))


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


def decoder(model, params, sizes):
    """Return a function that samples tokens after read prompts."""
    rows, cached, steps = sizes.rows, sizes.cached, sizes.steps
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


def torch_decoder(model, sizes):
    """Return the same as `decoder` in torch: a loop of steps, sampling at temperature 1."""
    torch = need("torch")
    model.eval()
    with torch.inference_mode():
        tokens_BT = torch.randint(0, model.config.vocab_size, (sizes.rows, sizes.cached))
        found = model(tokens_BT, use_cache=True, logits_to_keep=1)
    # Not every cache can be cut, so each run changes a copy.
    cache, first_BV = found.past_key_values, found.logits[:, -1]

    def draw(logits_BV):
        return torch.multinomial(torch.softmax(logits_BV, -1), 1)

    @torch.inference_mode()
    def run():
        kept = copy.deepcopy(cache)
        token_B1 = draw(first_BV)
        for _ in range(sizes.steps):
            found = model(token_B1, past_key_values=kept, use_cache=True)
            token_B1 = draw(found.logits[:, -1])
        token_B1.numpy()

    return run


def fastest(runs):
    """Return (name, run) of the least processor time, of {name: function without arguments}."""
    seconds = {name: [] for name in runs}
    for _ in range(4):
        for name, run in runs.items():
            seconds[name].append(time_once(run, time.process_time))
    best = min(runs, key=lambda name: min(seconds[name][1:]))
    return best, runs[best]


@functools.cache
def torch_runs(kind, sizes):
    """Return {part: (implementation, function)} of transformers."""
    need("torch").set_num_threads(len(os.sched_getaffinity(0)))
    models = torch_models(shape_of(kind))
    decoders = {name: torch_decoder(model, sizes) for name, model in models.items()}
    found = {"decode": fastest(decoders)}
    # After decoding, because it sets the models to training.
    rows = dict(rows=sizes.rows, length=sizes.length)
    updates = {name: torch_updater(model, **rows) for name, model in models.items()}
    return found | {"update": fastest(updates)}


def torch_name(kind, sizes, part):
    """Return the implementation that `torch_seconds` times."""
    return torch_runs(kind, sizes)[part][0]


def torch_seconds(kind, sizes, part):
    """Return the processor time of one run of transformers."""
    return time_once(torch_runs(kind, sizes)[part][1], time.process_time)


def layer_kinds(repeats, sizes=Sizes(), kinds=tuple(KINDS)):
    """Windows, experts and linear attention: decode and update of small models, against torch."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
        return [
            row
            for kind in kinds
            for row in _rows(repeats, kind, sizes, lambda *args: process.submit(*args).result())
        ]


def _rows(repeats, kind, sizes, call):
    """Return the rows of a kind; call(function, *args) calls it in transformers' process."""
    model = Qwen(shape_of(kind))
    params = random_params(model.config)
    runs = {
        "decode": decoder(model, params, sizes),
        "update": updater(model, params, rows=sizes.rows, length=sizes.length),
    }
    rows, steps, length = sizes.rows, sizes.steps, sizes.length
    texts = {
        "decode": f"{rows} x {steps} tokens after {sizes.cached}",
        "update": f"{rows} x {length} tokens",
    }
    work = {"decode": rows * steps, "update": rows * length}
    found = []
    for part, run in runs.items():
        fields = {}
        try:
            fields["other_name"] = "torch, " + call(torch_name, kind, sizes, part)
        except PeerMissing as error:
            fields["skipped"] = str(error)
        seconds = []
        for _ in range(WARM_UP + repeats):
            seconds.append([time_once(run, time.process_time)])
            if "skipped" not in fields:
                seconds[-1].append(call(torch_seconds, kind, sizes, part))
        found.append(
            Row(
                name=f"{kind}, {part}: {texts[part]}",
                target=1.0,
                work=work[part],
                **fields,
                **summarise(seconds[WARM_UP:]),
            )
        )
    return found
