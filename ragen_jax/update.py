"""The policy update: log-probs of rows, the loss of a micro-batch, one optimizer step.

`token_logps` holds the project's one shift between logits and tokens. The vocabulary is read
in chunks, so that no [B, T, V] array lives however large V is. A minibatch is one program: a
loop over as many micro-batches as its rows need adds up gradients of sum(weight * term), with
token weights fixed on the whole minibatch, so the micro-batch size cannot change the result.

Axes: B rows, T tokens, V vocabulary, A micro-batches.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from ragen_jax import losses
from ragen_jax.batch import take_rows
from ragen_jax.model import lora
from ragen_jax.model.qwen import head
from ragen_jax.sharding import replicate, shard_micro_batches
from ragen_jax.types import TrainState

VOCAB_CHUNK = 8192  # logits of one token held at a time


def _chunks(V):
    """Into how many chunks a vocabulary is cut: evenly where up to twice the least number does, so
    that the head need not be padded (which copies it)."""
    least = -(-V // VOCAB_CHUNK)
    return next((n for n in range(least, 2 * least + 1) if V % n == 0), least)


def vocabulary_statistics(hidden, head_VD, target, temperature):
    """log p(target) and the entropy of softmax(hidden @ head.T / temperature), in nats.

    Runs over the vocabulary in chunks with a running maximum (online log-sum-exp); the backward
    pass recomputes each chunk's logits.

    Args:
      hidden: [..., D]. head_VD: [V, D]. target: int32 [...]. temperature: scalar > 0.

    Returns:
      (logp, entropy), float32 [...].
    """
    V, D = head_VD.shape
    shape = target.shape
    # As matrices: see model/qwen.py, Linear.
    hidden, target = hidden.reshape(-1, D), target.reshape(-1)
    chunks = _chunks(V)
    chunk = -(-V // chunks)
    padded = jnp.pad(head_VD, ((0, chunks * chunk - V), (0, 0))).reshape(chunks, chunk, D)

    @jax.checkpoint
    def body(carry, piece):
        top, total, weighted, picked = carry
        index, weight_CD = piece
        logit = jnp.einsum(
            "nd,vd->nv",
            hidden,
            weight_CD.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        column = index * chunk + jnp.arange(chunk)
        logit = jnp.where(column < V, logit / temperature, -jnp.inf)
        new_top = jax.lax.stop_gradient(jnp.maximum(top, logit.max(-1)))
        e = jnp.exp(logit - new_top[..., None])
        old = jnp.exp(top - new_top)
        # sum of e * (logit - new_top), carried over when the maximum moves by `shift`.
        shift = jnp.where(jnp.isfinite(top), top - new_top, 0.0)
        weighted = old * (weighted + shift * total)
        centred = jnp.where(column < V, logit - new_top[..., None], 0.0)
        weighted = weighted + (e * centred).sum(-1)
        total = old * total + e.sum(-1)
        inside = (target >= index * chunk) & (target < (index + 1) * chunk)
        local = jnp.clip(target - index * chunk, 0, chunk - 1)
        here = jnp.take_along_axis(logit, local[..., None], -1)[..., 0]
        picked = jnp.where(inside, here, picked)
        return (new_top, total, weighted, picked), None

    zero = jnp.zeros(target.shape, jnp.float32)
    start = (jnp.full(target.shape, -jnp.inf, jnp.float32), zero, zero, zero)
    (top, total, weighted, picked), _ = jax.lax.scan(body, start, (jnp.arange(chunks), padded))
    log_total = jnp.log(total)
    logp, entropy = picked - top - log_total, log_total - weighted / total
    return logp.reshape(shape), entropy.reshape(shape)


def token_statistics(model, params, tokens_BT, *, temperature=1.0):
    """(logp_BT, entropy_BT): of each token given those before it; entry 0 is 0."""
    tokens_BT = jnp.asarray(tokens_BT)
    hidden, _ = model.apply({"params": params}, tokens_BT[:, :-1])
    logp, entropy = vocabulary_statistics(hidden, head(params), tokens_BT[:, 1:], temperature)
    first = ((0, 0), (1, 0))
    return jnp.pad(logp, first), jnp.pad(entropy, first)


def token_logps(model, params, tokens_BT, *, temperature=1.0):
    """Log-probabilities of tokens under the model.

    Args:
      model, params: as `model.hf.load` returns them.
      tokens_BT: int32 [B, T], right-padded with any id.
      temperature: logits are divided by it.

    Returns:
      float32 [B, T]: entry t is log p(token t | tokens before t); entry 0 is 0.
    """
    return token_statistics(model, params, tokens_BT, temperature=temperature)[0]


@dataclasses.dataclass(frozen=True)
class Loss:
    """Settings of the loss; see configs/base.py (algorithm)."""

    temperature: float
    clip_low: float
    clip_high: float
    clip_c: float
    aggregation: str
    kl_kind: str
    kl_coef: float
    entropy_coef: float


# Per-token figures that are averaged over a minibatch's sampled tokens.
TOKEN_METRICS = ("ratio_mean", "clip_fraction", "lower_clip_fraction", "approx_kl", "entropy")


@flax.struct.dataclass
class Frozen:
    """The base model of LoRA training: not trained, and the KL reference by itself."""

    params: dict
    scale: float  # of the adapters, alpha / rank

    def attach(self, adapters):
        """What the model runs with."""
        return lora.attach(self.params, adapters, scale=self.scale)


def loss_parts(model, loss, params, ref_params, piece):
    """The loss of one micro-batch and its parts.

    loss = sum(weight * (policy term + kl_coef * KL(policy || reference) - entropy_coef * H))

    Args:
      loss: `Loss`.
      ref_params: parameters of the KL reference; not read when kl_coef is 0.
      piece: dict of [B, T] arrays: tokens, logp (the sampler's), advantage, mask (1 on sampled
        tokens of real rows), weight (`losses.token_weights` of the whole minibatch).

    Returns:
      (loss, dict of sums over sampled tokens, largest |trainer - sampler| log-prob).
    """
    mask_BT, weight_BT = piece["mask"], piece["weight"]
    logp_BT, entropy_BT = token_statistics(
        model, params, piece["tokens"], temperature=loss.temperature
    )
    term_BT, parts = losses.policy_terms(
        logp_BT,
        piece["logp"],
        piece["advantage"],
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        clip_c=loss.clip_c,
    )
    total_BT = term_BT - loss.entropy_coef * entropy_BT
    parts["entropy"] = entropy_BT
    if loss.kl_coef:
        ref_BT = token_logps(model, ref_params, piece["tokens"], temperature=loss.temperature)
        parts["kl"] = losses.kl(logp_BT, jax.lax.stop_gradient(ref_BT), loss.kl_kind)
        total_BT = total_BT + loss.kl_coef * parts["kl"]
    parts = {name: (mask_BT * value_BT).sum() for name, value_BT in parts.items()}
    parts["policy_loss"] = (weight_BT * term_BT).sum()
    gap = jnp.where(mask_BT > 0, jnp.abs(logp_BT - piece["logp"]), 0.0).max()
    return (weight_BT * total_BT).sum(), parts, gap


@functools.partial(jax.jit, static_argnames=("model", "optimizer", "loss"), donate_argnames="state")
def update_step(
    model, optimizer, loss, state, ref_params, minibatch, count, loss_scale, frozen=None
):
    """One optimizer step on one minibatch.

    Args:
      optimizer: optax.GradientTransformation. loss: `Loss`.
      state: `TrainState`, donated.
      minibatch: dict of tokens, logp, advantage and mask, each [A, micro_batch, T].
      count: scalar int32, at least 1: the first `count` micro-batches are run.
      loss_scale: scalar, multiplies the whole loss.
      frozen: `Frozen` where state.params are adapters; then ref_params is not read.

    Returns:
      (TrainState, metrics): a non-finite loss or gradient leaves the state as it was and is
      counted in `skipped`.
    """
    mask = minibatch["mask"]
    weight = losses.token_weights(mask.reshape(-1, mask.shape[-1]), loss.aggregation)
    pieces = {**minibatch, "weight": weight.reshape(mask.shape)}

    def gradient(a):
        piece = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, a, 0, False), pieces)

        def objective(params):
            reference = ref_params
            if frozen is not None:
                params, reference = frozen.attach(params), frozen.params
            total, parts, gap = loss_parts(model, loss, params, reference, piece)
            return loss_scale * total, (parts, gap)

        (value, (parts, gap)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        return (value, grads, parts), gap

    def micro(a, carry):
        sums, gap = carry
        found, new_gap = gradient(a)
        return jax.tree.map(jnp.add, sums, found), jnp.maximum(gap, new_gap)

    if len(mask) == 1:  # no sums of the parameters' size
        (value, grads, parts), gap = gradient(0)
    else:
        names = [*TOKEN_METRICS, "policy_loss"] + (["kl"] if loss.kl_coef else [])
        zero = jnp.float32(0)
        sums = zero, jax.tree.map(jnp.zeros_like, state.params), dict.fromkeys(names, zero)
        (value, grads, parts), gap = jax.lax.fori_loop(0, count, micro, (sums, zero))

    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new, old):
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    tokens = jnp.maximum(minibatch["mask"].sum(), 1.0)
    metrics = {k: v if k == "policy_loss" else v / tokens for k, v in parts.items()}
    metrics |= {
        "loss": value,
        "logp_gap": gap,
        "grad_norm": grad_norm,
        "update_norm": optax.tree.norm(updates),
        "skipped": (~finite).astype(jnp.float32),
    }
    state = state.replace(
        params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state)
    )
    return state, metrics


# What follows the warm-up, of a learning rate over so many updates.
SCHEDULES = {
    "constant": lambda rate, updates: optax.constant_schedule(rate),
    "linear": lambda rate, updates: optax.linear_schedule(rate, 0.0, updates),
    "cosine": lambda rate, updates: optax.cosine_decay_schedule(rate, updates),
}


@functools.cache  # the optimizer is a static argument: equal settings should compile once
def make_optimizer(
    *,
    learning_rate,
    schedule,
    warmup_updates,
    total_updates,
    b1,
    b2,
    eps,
    weight_decay,
    max_grad_norm,
):
    """AdamW behind a global-norm clip.

    Args:
      learning_rate: the largest, reached at the end of the warm-up, which is linear from 0 over
        `warmup_updates`.
      schedule: a key of SCHEDULES; linear and cosine fall to 0 at `total_updates`.
    """
    after = SCHEDULES[schedule](learning_rate, max(total_updates - warmup_updates, 1))
    if warmup_updates:
        start = learning_rate / warmup_updates
        rising = optax.linear_schedule(start, learning_rate, max(warmup_updates - 1, 1))
        after = optax.join_schedules([rising, after], [warmup_updates])
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(after, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
    )


def init_state(params, optimizer, mesh):
    """A `TrainState` at step 0, its optimizer state laid out like the parameters."""
    state = TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        seed_cursor=jnp.uint32(0),
    )
    return jax.tree.map(
        lambda x: x if isinstance(x.sharding, NamedSharding) else replicate(x, mesh), state
    )


def update_policy(
    model,
    optimizer,
    loss,
    state,
    ref_params,
    batch,
    advantage_BT,
    rows_B,
    *,
    mesh,
    rng,
    minibatches,
    micro_batch,
    minibatch_rows,
    loss_scale,
    frozen=None,
):
    """An iteration's updates on the kept rows of a batch.

    The rows are shuffled by `rng` (np.random.Generator) and split as evenly as may be over a
    fixed number of minibatches, so that filtering makes minibatches smaller, not updates fewer
    (RAGEN-2, section 3.3). Each is padded to the same shape; padding costs nothing, since only
    micro-batches with real rows are run.

    Args:
      batch: `Batch` on the host. advantage_BT: float32.
      rows_B: indices of the kept rows; may be empty, then nothing is updated.
      minibatch_rows: the most rows a minibatch can have.
      frozen: `Frozen` where the state's parameters are LoRA adapters.

    Returns:
      (TrainState, update/* metrics: means over the minibatches; update/logp_gap of the first;
      update/skipped and update/count are sums).
    """
    order = rng.permutation(len(rows_B))  # on the host: the number of rows changes every step
    size = -(-minibatch_rows // micro_batch) * micro_batch
    found = []
    for rows in np.array_split(np.asarray(rows_B)[order], minibatches):
        if not len(rows):  # fewer rows than minibatches
            continue
        part = take_rows(batch, rows, size=size)
        advantage = np.zeros(part.tokens_BT.shape, np.float32)
        advantage[: len(rows)] = advantage_BT[rows]
        arrays = {
            "tokens": part.tokens_BT,
            "logp": part.logp_BT,
            "advantage": advantage,
            "mask": part.mask_BT * part.weight_B[:, None],
        }
        arrays = {k: v.reshape(-1, micro_batch, v.shape[1]) for k, v in arrays.items()}
        if found:  # XLA's CPU backend allots a call's temporaries at once, though it must wait
            found[-1] = jax.device_get(found[-1])
        state, metrics = update_step(
            model,
            optimizer,
            loss,
            state,
            ref_params,
            shard_micro_batches(arrays, mesh),
            np.int32(-(-len(rows) // micro_batch)),
            np.float32(loss_scale),
            frozen,
        )
        found.append(metrics)
    found = jax.device_get(found)
    if not found:
        return state, {"update/count": 0}
    metrics = {f"update/{k}": float(np.mean([m[k] for m in found])) for k in found[0]}
    metrics["update/logp_gap"] = float(found[0]["logp_gap"])
    metrics["update/skipped"] = float(sum(m["skipped"] for m in found))
    metrics["update/count"] = len(found)
    return state, metrics
