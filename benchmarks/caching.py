"""Time that the cache saves: this program with its cache against the same without."""

import jax
import numpy as np

from benchmarks import llm
from benchmarks.episodes import tiny_setting
from benchmarks.generation import FIVE, ONE
from benchmarks.measure import Row, compare
from ragen_jax.core.padding import length_bucket
from ragen_jax.model.qwen import Qwen, head, with_cache
from ragen_jax.rollout.sample import prefill


def kept_cache(repeats, *, turns=FIVE, members=16):
    """Five turns with full history: a kept cache, against a prefill of every prompt each turn."""
    with tiny_setting(context="full", turns=turns, members=members) as (setting, _):
        episodes = setting.play()
        return [
            Row(
                name=f"{max(turns)} turns of {len(episodes)} episodes",
                other_name="prefill every turn",
                target=2,
                work=sum(len(e.turns) for e in episodes) * setting.budgets.max_new_tokens,
                unit="new tokens",
                **compare(setting.play, lambda: setting.play(read_again=True), repeats=repeats),
            )
        ]


def group_prefill(repeats, *, turns=ONE, members=16):
    """First prompts read once per group, against once per episode."""
    with tiny_setting(context="single_turn", turns=turns, members=members) as (setting, _):
        prompts = [episode.turns[0].prompt for episode in setting.play()]
    tokens_BP = np.zeros((len(prompts), length_bucket(max(map(len, prompts)))), np.int32)
    for tokens_P, prompt in zip(tokens_BP, prompts, strict=True):
        tokens_P[: len(prompt)] = prompt
    length_B = np.array([len(prompt) for prompt in prompts], np.int32)

    def read(rows):
        return lambda: jax.block_until_ready(
            prefill(setting.model, setting.params, tokens_BP[rows], length_B[rows])
        )

    once = slice(None, None, members)
    weights = sum(x.size for x in jax.tree.leaves(setting.params["layers"]))
    tokens = int(length_B[once].sum())
    return [
        Row(
            name=f"prefill of {len(turns)} prompts for {len(prompts)} episodes",
            other_name="one prompt per episode",
            target=3,
            work=len(prompts),
            unit="episodes",
            flops=2 * (weights * tokens + head(setting.params).size * len(turns)),
            **compare(read(once), read(slice(None)), repeats=repeats),
        )
    ]


def int8_cache(repeats, *, name="smollm2-135m", rows=64, cached=512, steps=16):
    """Decode over int8 keys and values, against those of the model's dtype."""
    model = Qwen(llm.shape(name, "float32"))
    params = llm.random_params(model.config)
    int8 = with_cache(model, cache_dtype="int8", cache_kernel="xla", platform="cpu")
    sizes = dict(rows=rows, cached=cached, steps=steps)
    return [
        Row(
            name=f"{name}, batch {rows}, {cached} cached",
            other_name="float32",
            work=rows * steps,
            bytes=llm.decode_bytes(int8.config, **sizes),
            flops=llm.decode_flops(int8.config, **sizes),
            **compare(
                llm.decoder(int8, params, **sizes),
                llm.decoder(model, params, **sizes),
                repeats=repeats,
            ),
        )
    ]
