"""Does information about the input reach the action through the reasoning, or around it?

These are the measures of two related papers, for comparison with the mutual information and the
flow figures. A reply consists of x (prompt), z (reasoning) and a (the tokens inside <answer>).

arXiv 2605.24286 (definitions as in the code released with it, github.com/safety-research/
faithful-cot at f9e1f29) compares the model with itself when a's tokens, and the tags before them,
attend to only a part of the earlier tokens. Positions stay the same:

    pass            a attends to
    full            x and z
    through z       z, read after x: its keys and values still contain information about x
    without z       x
    z alone         z, read without x

    kl_direct       KL(full || through z)       completeness: 0 if the prompt adds nothing to z
    kl_necessity    KL(full || without z)       necessity: 0 if nothing is lost without z
    kl_leakage      KL(through z || z alone)    information of z's keys and values on x beyond text
    h_through       H(through z) - H(full)      sufficiency: 0 if z alone determines the action
    grad_prompt     sum over x of |dL/de_t| / sum over all tokens, L the mean -log p of a's tokens
    grad_reasoning  the same over z             (e_t: a token's embedding, Euclidean norm)

KL and entropies are of the whole vocabulary, in nats, means over a's tokens.

arXiv 2602.13904 (as in github.com/ManqingLiu/cot-health-metrics) exchanges z, with L the log-
probability of a's tokens after the changed text:

    necessity       (L(a|x,z) - L(a|x)) / -(L(a|x,z) + L(a|x))
    substantivity   the same with |z| full stops instead of z

Both are in [-1, 1]: 1 if z makes a certain, 0 if it changes nothing. The paper's third measure,
paraphrasability, needs a second model that rewrites z, and is left out.

Axes: B replies; X tokens of x, Z of z, E of the text sampled after z.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.padding import length_bucket, pad_rows
from ragen_jax.core.progress import begin_count
from ragen_jax.core.sharding import constrain
from ragen_jax.core.types import Episode, Metrics, Params
from ragen_jax.diagnostics.intervals import mean_with_interval
from ragen_jax.model.likelihood import vocabulary_statistics
from ragen_jax.model.qwen import Qwen, head
from ragen_jax.model.segments import Segment
from ragen_jax.model.vision.positions import next_positions, of_params, splice, token_positions

MEASURES = (
    *("kl_direct", "kl_necessity", "kl_leakage", "h_through", "grad_prompt", "grad_reasoning"),
    *("necessity", "substantivity"),
)


def mediation_metrics(
    model: Qwen,
    params: Params,
    episodes: Sequence[Episode],
    *,
    filler: int,
    micro_batch: int,
) -> Metrics:
    """Return the measures at the top of this file for first turns with a reasoning and an action.

    Args:
      model, params: the policy that sampled the episodes.
      filler: id of the token that replaces each token of the reasoning in substantivity.
      micro_batch: replies per device call.

    Returns:
      For each of MEASURES: mediation/<measure>, the mean over replies, and
      mediation/<measure>_ci95 by groups; {} if no reply has both. Episodes whose environment broke
      are left out.
    """
    sound = [e for e in episodes if not e.error]
    chosen = [e for e in sound if np.diff(e.turns[0].reasoning) and np.diff(e.turns[0].answer)]
    if not chosen:
        return {}
    turns = [episode.turns[0] for episode in chosen]
    parts = [
        [turn.prompt for turn in turns],
        [turn.sampled[slice(*turn.reasoning)] for turn in turns],
        [turn.sampled[turn.reasoning[1] : turn.answer[1]] for turn in turns],
    ]
    action_B = np.array([turn.answer[1] - turn.answer[0] for turn in turns], np.int32)
    widths = [length_bucket(max(map(len, rows)), parts=16) for rows in parts]
    found, count = [], begin_count(-(-len(turns) // micro_batch), "calls of mediation")
    for b in range(0, len(turns), micro_batch):
        batch = slice(b, b + micro_batch)
        padded = [pad_rows(x[batch], n, micro_batch) for x, n in zip(parts, widths, strict=True)]
        action = np.resize(action_B[batch], micro_batch)  # rows after the last are dropped
        measures_MB = measure(model, params, *padded, action, np.int32(filler))
        found.append(np.asarray(measures_MB)[:, : len(turns[batch])])
        count(1)
    value_MB = np.concatenate(found, axis=1).astype(np.float64)
    groups = max(episode.group for episode in episodes) + 1
    group_B = [episode.group for episode in chosen]
    count_G = np.bincount(group_B, minlength=groups)
    metrics: Metrics = {}
    for name, value_B in zip(MEASURES, value_MB, strict=True):
        sum_G = np.bincount(group_B, value_B, minlength=groups)
        metrics |= mean_with_interval(f"mediation/{name}", sum_G, count_G)
    return metrics


Padded = tuple[jax.Array, jax.Array]  # int32 [B, n] right-padded, [B] lengths


@functools.partial(jax.jit, static_argnames="model")
def measure(
    model: Qwen,
    params: Params,
    prompt: Padded,
    reasoning: Padded,
    ending: Padded,
    action_B: jax.Array,
    filler: jax.Array,
) -> jax.Array:
    """Return the measures in the order of MEASURES, float32 [measures, B].

    Args:
      ending: the tokens sampled after the reasoning, up to the action's end; the last `action_B`
        tokens are the action, with at least one token before them.
      filler: a token id.
    """
    (prompt_BX, x_B), (reasoning_BZ, z_B), (ending_BE, e_B) = prompt, reasoning, ending
    X, Z, E = (tokens.shape[1] for tokens, _ in (prompt, reasoning, ending))
    at_E = jnp.arange(E)
    is_action = (at_E >= (e_B - action_B)[:, None]) & (at_E < e_B[:, None])

    def read(tokens, start_B, memory, model=model, params=params, positions=None):
        """Return (hidden states, keys and values) of tokens after a memory, from start_B on."""
        if positions is None:
            positions = token_positions(params, tokens, start_B)
        tokens = constrain(tokens, "rows", None)
        output: Any = model.apply({"params": params}, tokens, positions, memory, keep_kv=True)
        return output

    def segment(kv, length_B):
        return Segment(*kv, length_N=length_B)

    def shift_right(hidden_BED):
        """Return the states that predict the ending's tokens; the first entry is not used."""
        return jnp.roll(hidden_BED, 1, axis=1)

    def mean(value_BE):
        return jnp.where(is_action, value_BE, 0.0).sum(1) / action_B

    zero_B = jnp.zeros_like(x_B)
    reasoning_start_B = next_positions(params, prompt_BX, x_B)  # position after the prompt
    x = segment(read(prompt_BX, zero_B, ())[1], x_B)
    z = segment(read(reasoning_BZ, reasoning_start_B, (x,))[1], z_B)
    alone = segment(read(reasoning_BZ, reasoning_start_B, ())[1], z_B)
    stops = segment(read(jnp.full_like(reasoning_BZ, filler), reasoning_start_B, (x,))[1], z_B)
    states = {
        name: shift_right(read(ending_BE, start_B, memory)[0])
        for name, start_B, memory in (
            ("full", reasoning_start_B + z_B, (x, z)),
            ("through", reasoning_start_B + z_B, (z,)),
            ("without", reasoning_start_B + z_B, (x,)),
            ("alone", reasoning_start_B + z_B, (alone,)),
            ("empty", reasoning_start_B, (x,)),
            ("stops", reasoning_start_B + z_B, (x, stops)),
        )
    }

    def statistics(name, reference=None):
        pair = None if reference is None else (states[reference], head(params))
        return vocabulary_statistics(states[name], head(params), ending_BE, 1.0, pair)

    logp, entropy, direct = statistics("full", "through")
    _, _, kl_without = statistics("full", "without")
    _, entropy_through, kl_alone = statistics("through", "alone")

    def relative_gain(name):
        with_B, without_B = (
            jnp.where(is_action, x, 0.0).sum(1) for x in (logp, statistics(name)[0])
        )
        least = jnp.finfo(jnp.float32).tiny  # both certain: 0
        return (with_B - without_B) / jnp.maximum(-(with_B + without_B), least)

    # Each token gets a separate row of an embedding table; the row's gradient is the token's.
    tokens = jnp.concatenate([prompt_BX, reasoning_BZ, ending_BE], axis=1)
    images, V = of_params(params), model.config.vocab_size
    table = params["embed"][jnp.minimum(tokens, V - 1)]
    if images is not None:
        table = splice(table, tokens, images, V)
    table = table.reshape(tokens.size, -1)
    row_BT = jnp.arange(tokens.size).reshape(tokens.shape)
    plain = {"vision": None, "image_tokens": None}  # its token ids are rows of the table
    table_model = Qwen(
        dataclasses.replace(model.config, vocab_size=tokens.size, tied=True, **plain)
    )

    def loss(table):
        omitted = "head", "images"
        table_params = {name: p for name, p in params.items() if name not in omitted} | {
            "embed": table
        }
        read_from_table = functools.partial(read, model=table_model, params=table_params)
        at_BX = token_positions(params, prompt_BX)
        x = segment(read_from_table(row_BT[:, :X], zero_B, (), positions=at_BX)[1], x_B)
        z = segment(read_from_table(row_BT[:, X : X + Z], reasoning_start_B, (x,))[1], z_B)
        hidden, _ = read_from_table(row_BT[:, X + Z :], reasoning_start_B + z_B, (x, z))
        logp, _ = vocabulary_statistics(shift_right(hidden), head(params), ending_BE, 1.0)
        return -mean(logp).sum()

    norm_BT = jnp.linalg.norm(jax.grad(loss)(table).astype(jnp.float32), axis=-1)
    norm_BT = norm_BT.reshape(tokens.shape)
    parts = jnp.stack([norm_BT[:, :X].sum(1), norm_BT[:, X : X + Z].sum(1)])
    measures_MB = jnp.stack(
        [
            *(mean(kl) for kl in (direct, kl_without, kl_alone)),
            mean(entropy_through) - mean(entropy),
            *parts / norm_BT.sum(1),
            *(relative_gain(name) for name in ("empty", "stops")),
        ]
    )
    return constrain(measures_MB, None, None)  # every process reads all of it
