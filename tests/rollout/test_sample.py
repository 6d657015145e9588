"""Sampling against a loop that recomputes everything, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import hybrid, windowed

from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits
from ragen_jax.rollout import drawing, sample

V, STOP = 40, 7


@pytest.fixture(
    scope="module",
    params=[
        (2, {}, 0),
        pytest.param((5, windowed(5), 1), marks=pytest.mark.medium),
        pytest.param((3, windowed(3), 2), marks=pytest.mark.medium),
        pytest.param((4, hybrid(4), 2), marks=pytest.mark.medium),
        pytest.param((8, hybrid(8), 2), marks=pytest.mark.medium),
    ],
    ids=["full", "windowed-scanned", "windowed", "hybrid", "hybrid-scanned"],
)
def policy(request):
    layers, kinds, seed = request.param
    config = ModelConfig(
        vocab_size=V,
        width=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=48,
        **kinds,
    )
    # Larger than usual, so that tokens differ in probability.
    params = jax.tree.map(lambda x: 2.0 * x, init_params(config, jax.random.key(seed)))
    return Qwen(config), params


def prompts(rows, seed=0):
    rng = np.random.default_rng(seed)
    length = rng.integers(3, 9, rows).astype(np.int32)
    tokens = np.zeros((rows, 8), np.int32)
    for row, n in enumerate(length):
        tokens[row, :n] = rng.integers(0, V, n)
    return tokens, length


def sample_replies(policy, tokens, length, *, members=1, budget=6, temperature=1.0, **options):
    model, params = policy
    segment, logits_NV = sample.prefill(model, params, tokens, length)
    rows = len(tokens) * members
    keys = sample.episode_keys(
        jax.random.key(5),
        [row // members for row in range(rows)],
        [row % members for row in range(rows)],
        0,
    )
    return keys, sample.decode(
        model,
        params,
        segment,
        logits_NV,
        keys,
        np.full(rows, budget, np.int32),
        np.float32(temperature),
        settings=sample.DecodeSettings(max_tokens=6, stop_ids=(STOP,), **options),
    )


@functools.partial(jax.jit, static_argnames="model")
def forward(model, params, ids_T):
    return logits(params, model.apply({"params": params}, ids_T[None])[0][0])


def next_logits(policy, ids):
    """[V] after `ids`, by a full forward pass; all lengths share one program."""
    padded_T = np.zeros(48, np.int32)
    padded_T[: len(ids)] = ids
    return forward(*policy, padded_T)[len(ids) - 1]


def naive_reply(policy, prompt, key, *, budget, temperature):
    """The same reply by full forward passes and Gumbel-max sampling."""
    ids, logps = list(prompt), []
    for index in range(budget):
        scaled = np.asarray(next_logits(policy, ids)) / temperature
        draw = jax.random.fold_in(key, index)
        gumbel = np.asarray(jax.random.gumbel(draw, (V,), mode="high"))
        token = int(np.argmax(scaled + gumbel))
        logps.append(scaled[token] - np.log(np.exp(scaled).sum()))
        ids.append(token)
        if token == STOP:
            break
    return ids[len(prompt) :], logps


@pytest.mark.parametrize("members, temperature", [(1, 1.0), (4, 0.7)])
def test_decode_equals_sampling_by_full_forward_passes(policy, members, temperature):
    tokens, length = prompts(3)
    keys, found = sample_replies(policy, tokens, length, members=members, temperature=temperature)
    stops = 0
    for row in range(3 * members):
        prompt = tokens[row // members, : length[row // members]]
        ids, logps = naive_reply(policy, prompt, keys[row], budget=6, temperature=temperature)
        count = int(found.count_B[row])
        assert found.tokens_BT[row, :count].tolist() == ids
        np.testing.assert_allclose(found.logp_BT[row, :count], logps, atol=2e-5)
        assert not np.any(found.tokens_BT[row, count:])
        assert not np.any(found.logp_BT[row, count:])
        stops += ids[-1] == STOP
    assert 0 < stops or members == 1  # both ways to end occur


def test_rows_have_their_own_budgets_and_padding_rows_sample_nothing(policy):
    model, params = policy
    tokens, length = prompts(4)
    segment, logits_NV = sample.prefill(model, params, tokens, length)
    keys = sample.episode_keys(jax.random.key(5), [0, 1, 2, 3], [0] * 4, 0)
    found = sample.decode(
        model,
        params,
        segment,
        logits_NV,
        keys,
        np.array([0, 1, 3, 6], np.int32),
        np.float32(1.0),
        # this token is never sampled
        settings=sample.DecodeSettings(max_tokens=6, stop_ids=(V + 1,)),
    )
    assert found.count_B.tolist() == [0, 1, 3, 6]
    assert found.reply.length_N.tolist() == [0, 0, 2, 5]  # the last token is not in the cache


def test_a_row_samples_the_same_whatever_its_place_and_company(policy):
    tokens, length = prompts(4)
    model, params = policy
    keys = sample.episode_keys(jax.random.key(5), [0, 1, 2, 3], [0] * 4, 0)

    def replies(order):
        segment, logits_NV = sample.prefill(model, params, tokens[order], length[order])
        found = sample.decode(
            model,
            params,
            segment,
            logits_NV,
            keys[np.array(order)],
            np.full(len(order), 6, np.int32),
            np.float32(1.0),
            settings=sample.DecodeSettings(max_tokens=6, stop_ids=(STOP,)),
        )
        return {row: found.tokens_BT[i].tolist() for i, row in enumerate(order)}

    assert replies([0, 1, 2, 3]) == replies([3, 1, 0, 2])


def test_keys_differ_by_seed_member_turn_and_run_but_not_by_place():
    run = jax.random.key(1)

    def data(*args):
        return [tuple(row) for row in jax.random.key_data(sample.episode_keys(*args)).tolist()]

    seeds, members = [3, 3, 4, 3 + (1 << 32)], [0, 1, 0, 0]
    keys = data(run, seeds, members, 0)
    assert len(set(keys)) == 4  # the high half of a seed matters
    assert data(run, seeds[::-1], members[::-1], 0) == keys[::-1]
    assert not set(keys) & set(data(run, seeds, members, 1))
    assert not set(keys) & set(data(jax.random.key(2), seeds, members, 0))


def test_sampled_frequencies_follow_the_softmax(policy):
    """20,000 draws of one token; each frequency within 5 standard errors."""
    scaled = jnp.asarray([1.0, 0.0, -1.0, 2.0, -3.0])
    keys = sample.episode_keys(jax.random.key(0), [1] * 20_000, list(range(20_000)), 0)
    draws = np.asarray(jnp.argmax(scaled + drawing.noise(keys, 0, 5), -1))
    p = np.asarray(jax.nn.softmax(scaled))
    frequency = np.bincount(draws, minlength=5) / 20_000
    assert np.all(np.abs(frequency - p) < 5 * np.sqrt(p * (1 - p) / 20_000))


@pytest.mark.parametrize("V", [drawing.LARGE + 100, 281, drawing.SMALL, drawing.SMALL - 1])
def test_drawn_tokens_follow_the_softmax(V):
    """Draws in two steps and, in the smallest vocabulary, in one: some blocks are filtered out, the
    last is not full, some tokens are rare.

    20,000 draws; sums over tokens of like probability are within 5 standard errors.
    """
    draws, block = 20_000, drawing.BLOCK if V < drawing.LARGE else drawing.LARGE_BLOCK
    rng = np.random.default_rng(0)
    scaled = rng.normal(size=V).astype(np.float32)
    if V > 4 * block:
        scaled[block : 4 * block] = -np.inf  # three whole blocks
    scaled[4 * block + 6 : 4 * block + 76] = -np.inf
    scaled[[3, V // 2, V - 1]] = 3.0, 4.0, 3.5
    if V > drawing.LARGE:
        scaled[[3, V // 2, V - 1]] += 5
    p = np.exp(scaled.astype(np.float64))
    p /= p.sum()

    @jax.jit
    def draw(members):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), members)
        rows = jnp.broadcast_to(scaled, (len(members), V))
        return drawing.draw_tokens(rows, keys, 2)

    found = [draw(part) for part in jnp.arange(draws).reshape(40, -1)]
    tokens, logp = (np.concatenate(x) for x in zip(*found, strict=True))
    np.testing.assert_allclose(logp, np.log(p[tokens]), atol=2e-5)
    frequency = np.bincount(tokens, minlength=V) / draws
    kinds = (
        np.digitize(scaled, [-2.0, -1.0, 0.0, 1.0, 2.0, 2.9, 3.4, 3.9, 7.9, 8.4, 8.9]) * 4
        + np.arange(V) % 4
    )
    for kind in np.unique(kinds):
        expected, seen = p[kinds == kind].sum(), frequency[kinds == kind].sum()
        assert abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws), kind
    assert frequency[np.isneginf(scaled)].sum() == 0


@pytest.mark.slow
def test_rare_tokens_are_drawn_as_often_as_they_are_likely(policy):
    """2.8e8 draws of a token of probability 5e-8: 14 are expected."""
    likely = float(np.log1p(-5e-8) - np.log(5e-8))
    keys = jax.random.split(jax.random.key(0), 2800)

    @jax.jit
    def count(total, key):
        noise_BV = drawing.noise(key[None], 0, 2 * 100_000).reshape(-1, 2)
        return total + (noise_BV[:, 0] > noise_BV[:, 1] + likely).sum(), None

    found = int(jax.jit(lambda: jax.lax.scan(count, 0, keys))()[0])
    assert 4 <= found <= 26


@pytest.mark.parametrize(
    "options, kept",
    [
        # probabilities 0.5, 0.25, 0.15, 0.1
        (dict(top_k=2, top_p=1.0, min_p=0.0), [0, 1]),
        (dict(top_k=0, top_p=0.5, min_p=0.0), [0]),
        (dict(top_k=0, top_p=0.51, min_p=0.0), [0, 1]),
        (dict(top_k=0, top_p=0.75, min_p=0.0), [0, 1]),
        (dict(top_k=0, top_p=1.0, min_p=0.28), [0, 1, 2]),
        (dict(top_k=3, top_p=0.8, min_p=0.0), [0, 1]),  # of the 3 kept tokens: 0.56, 0.28, 0.17
        (dict(top_k=99, top_p=1.0, min_p=0.0), [0, 1, 2, 3]),
    ],
)
def test_truncation_keeps_what_it_says(options, kept):
    order = np.array([2, 0, 3, 1])  # the tokens are not sorted by probability
    p = np.array([0.5, 0.25, 0.15, 0.1])
    row = np.zeros(4)
    row[order] = np.log(p)
    found = drawing.truncate(jnp.asarray(row[None], jnp.float32), **options)[0]
    assert sorted(np.flatnonzero(np.isfinite(found))) == sorted(order[kept])


def test_logp_is_of_the_truncated_distribution(policy):
    tokens, length = prompts(3)
    _, found = sample_replies(policy, tokens, length, top_k=1)
    inside = np.arange(6) < np.asarray(found.count_B)[:, None]
    np.testing.assert_allclose(np.where(inside, found.logp_BT, 0.0), 0.0, atol=1e-6)


def test_extend_continues_exactly_where_a_reply_ended(policy):
    """prefill + decode + extend gives the logits of a full forward pass, rows reordered."""
    model, params = policy
    tokens, length = prompts(2)
    _, found = sample_replies(policy, tokens, length, members=2)
    segment, _ = sample.prefill(model, params, tokens, length)
    rows = np.array([3, 0, 0], np.int32)
    observation = np.array([5, 6, 9], np.int32)
    new = np.zeros((3, 4), np.int32)
    for i, row in enumerate(rows):
        new[i] = [found.tokens_BT[row, found.count_B[row] - 1], *observation]
    longer, last = sample.extend(
        model, params, segment, found.reply, rows, new, np.array([4, 4, 2], np.int32), capacity=20
    )
    for i, (row, count) in enumerate(zip(rows, [4, 4, 2], strict=True)):
        reply = found.tokens_BT[row, : found.count_B[row]].tolist()
        ids = [*tokens[row // 2, : length[row // 2]], *reply, *observation[: count - 1]]
        np.testing.assert_allclose(last[i], next_logits(policy, ids), atol=2e-5)
        assert longer.length_N[i] == len(ids)


def test_the_cache_shrinks_when_its_longest_row_has_finished(policy):
    """The episode with a long prompt ends; the shorter one continues in a smaller cache."""
    model, params = policy
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, V, (2, 24)).astype(np.int32), np.array([24, 4], np.int32)
    _, found = sample_replies(policy, tokens, length)
    segment, _ = sample.prefill(model, params, tokens, length)
    reply = found.tokens_BT[1, : found.count_B[1]].tolist()
    new = np.array([[reply[-1], 5, 6]], np.int32)
    shorter, last = sample.extend(
        model, params, segment, found.reply, np.array([1]), new, np.array([3]), capacity=16
    )
    ids = [*tokens[1, :4], *reply, 5, 6]
    np.testing.assert_allclose(last[0], next_logits(policy, ids), atol=2e-5)
    assert shorter.length_N.tolist() == [len(ids)]
    held = {16, model.config.window} - {0}  # a windowed layer holds its window
    assert {x.shape[-2] for x in jax.tree.leaves((shorter.k, shorter.v))} == held
