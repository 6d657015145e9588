"""model/qwen.py and model/attention.py: against torch, and every cached form against the full one.

The references come from tests/model/reference/make_qwen2.py, make_llama.py, make_qwen3.py (torch,
float32).

Axes: B rows, N cache rows, T tokens, S cache positions, H heads, K key-value heads, D head width, V
vocabulary, L layers.
"""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.model import families, hf, qwen, rotary
from ragen_jax.model.attention import attend
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.segments import Segment, append
from ragen_jax.rollout import sample

REFERENCE = Path(__file__).parent / "reference"
# Query heads over key heads: 4 over 2; 6 over 1; 3 over 1, with norms and enough layers to run as a
# scan.
NAMES = (
    *("qwen2_tied", "qwen2_untied", "qwen3_deep"),
    *("gemma3_mixed", "gemma3_deep", "qwen3moe_eight"),
)
LLAMAS = ("llama_scaled", "llama_linear")  # 4 over 2; 3 over 1
ALL = (*NAMES, "qwen2_full_heads", "qwen3_tied", "qwen3moe_two", *LLAMAS)  # full heads: 4 over 4
CLOSE = dict(rtol=0, atol=1e-5)  # for log-probs and hidden states of order 1 to 10

grow = jax.jit(append, static_argnames="capacity")


@functools.cache
def load(name):
    return hf.load_weights(REFERENCE / name)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def reference(name):
    """Return the arrays of logps.npz and the mask of their real tokens."""
    arrays = dict(np.load(REFERENCE / name / "logps.npz"))
    T = arrays["tokens_BT"].shape[1]
    return arrays, np.arange(T) < arrays["length_B"][:, None]


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BT, positions_BT=None):
    """(log-probs [B, T, V] of the next token, keys and values) of the uncached model."""
    hidden, kv = model.apply({"params": params}, tokens_BT, positions_BT, keep_kv=True)
    return jax.nn.log_softmax(qwen.logits(params, hidden)), kv


@functools.partial(jax.jit, static_argnums=0)
def step(model, params, segment, own, token_B):
    """Decode one token per row over a prompt and the turn's earlier tokens, as in
    `sample.decode`."""
    B, index = token_B.shape[0], own.length_N[0]
    start_B = jnp.repeat(segment.length_N, B // segment.length_N.shape[0])
    hidden, (k, v) = model.apply(
        {"params": params},
        token_B[:, None],
        (start_B + index)[:, None],
        (segment, own),
        keep_kv=True,
    )

    def put(cache, new):
        return jax.lax.dynamic_update_slice_in_dim(cache, new, index, axis=cache.ndim - 2)

    own = Segment(
        k=jax.tree.map(put, own.k, k),
        v=jax.tree.map(put, own.v, v),
        length_N=own.length_N + 1,
    )
    return jax.nn.log_softmax(qwen.logits(params, hidden[:, 0])), own


def full(model, params, rows):
    """Run `forward` on a list of ragged rows, always in one shape: all tests share one program."""
    tokens = np.zeros((9, 24), np.int32)
    for row, padded in zip(rows, tokens, strict=False):
        padded[: len(row)] = row
    logp_BTV, (k, v) = forward(model, params, tokens)
    return np.asarray(logp_BTV), np.asarray(k), np.asarray(v)


def log_softmax(x):
    x = np.asarray(x) - np.max(x, -1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def decode_given(model, params, segment, tokens_BT):
    """Feed given tokens one by one; return (log-probs [B, T, V] after each token, their
    `Segment`)."""
    B, T = tokens_BT.shape

    def room(cache):
        *layers, _, K, _, D = cache.shape
        return jnp.zeros((*layers, B, K, T, D))

    whole = jax.eval_shape(
        lambda tokens: model.apply({"params": params}, tokens, keep_kv=True)[1][0], tokens_BT
    )
    empty = jax.tree.map(room, whole)
    own = Segment(k=empty, v=empty, length_N=jnp.zeros(B, jnp.int32))
    logps = []
    for t in range(T):
        logp_BV, own = step(model, params, segment, own, tokens_BT[:, t])
        logps.append(logp_BV)
    return np.stack(logps, 1), own


def ragged(seed, lengths, vocab_size=64):
    """Return right-padded random tokens; the padding is random as well, since it must not
    matter."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (len(lengths), max(lengths)))
    return tokens.astype(np.int32), np.array(lengths, np.int32)


# ---------------------------------------------------------------- against torch


@pytest.mark.parametrize("name", ALL)
def test_log_probs_match_torch(name):
    model, params = load(name)
    arrays, mask_BT = reference(name)
    logp_BT = token_logps(model, params, arrays["tokens_BT"])
    assert logp_BT.dtype == jnp.float32
    np.testing.assert_allclose(logp_BT * mask_BT, arrays["logp_BT"], **CLOSE)


@pytest.mark.parametrize("name", ALL)
def test_decoding_matches_torch(name):
    """Decode five tokens after ragged prompts, in the shapes of the tests below."""
    model, params = load(name)
    arrays, _ = reference(name)
    rows = [b for b, length in enumerate(arrays["length_B"]) if length > 5]
    prompt_B = np.minimum(arrays["length_B"][rows] - 5, 9)
    np.testing.assert_array_equal(prompt_B, [9, 4, 8])
    tokens_BT, logp_BT = arrays["tokens_BT"][rows], arrays["logp_BT"][rows]
    reply_BT = np.stack([row[n : n + 5] for row, n in zip(tokens_BT, prompt_B, strict=True)])
    want_BT = np.stack([row[n : n + 5] for row, n in zip(logp_BT, prompt_B, strict=True)])
    # Tokens after the end of a prompt must not matter.
    segment, logits_BV = sample.prefill(model, params, tokens_BT[:, :9], prompt_B)
    behind_BTV, _ = decode_given(model, params, segment, reply_BT)
    logp_BTV = np.concatenate([log_softmax(logits_BV)[:, None], behind_BTV[:, :-1]], 1)
    got_BT = np.take_along_axis(logp_BTV, reply_BT[..., None], -1)[..., 0]
    np.testing.assert_allclose(got_BT, want_BT, **CLOSE)


@pytest.mark.parametrize("name", ALL)
def test_positions_match_torch(name):
    model, params = load(name)
    arrays, mask_BT = reference(name)
    tokens_BT = arrays["tokens_BT"]
    position_BT = np.broadcast_to(arrays["position_T"], tokens_BT.shape)
    logp_BTV, _ = forward(model, params, tokens_BT, position_BT)
    picked = np.take_along_axis(np.asarray(logp_BTV)[:, :-1], tokens_BT[:, 1:, None], -1)[..., 0]
    want = arrays["jump_logp_BT"]
    assert np.abs(want - arrays["logp_BT"]).max() > 0.1  # the jump has an effect
    # Angles are 22 radians instead of 15: float32 rounds them more coarsely, here and in torch.
    np.testing.assert_allclose(picked * mask_BT[:, 1:], want[:, 1:], rtol=0, atol=3e-5)


# ---------------------------------------------------------------- the full forward


def test_only_relative_positions_matter(name):
    model, params = load(name)
    tokens_BT, _ = ragged(0, (16,) * 4)
    position_BT = np.broadcast_to(np.arange(16), tokens_BT.shape)
    plain, (k, v) = forward(model, params, tokens_BT, position_BT)
    shifted, (k_shifted, v_shifted) = forward(model, params, tokens_BT, position_BT + 40)
    np.testing.assert_allclose(shifted, plain, rtol=0, atol=3e-5)  # float32 angles of 56 radians
    np.testing.assert_allclose(v_shifted, v, rtol=0, atol=3e-5)
    # The cache holds rotated keys.
    assert np.abs(np.asarray(k_shifted) - np.asarray(k)).max() > 0.1


def test_angles_are_not_rounded_again():
    position_BT = jnp.arange(2000)[None]
    found = rotary.rotary_angles(position_BT, 16, 1e4)
    angle = position_BT[..., None, None].astype(jnp.float32) * rotary.rotary_frequencies(
        16, 1e4, None
    )
    np.testing.assert_array_equal(found[0], jnp.cos(angle))
    np.testing.assert_array_equal(found[1], jnp.sin(angle))


def test_rotate_by_hand():
    # D = 4, theta = 100: pairs (0, 2) and (1, 3) are rotated by position * (1, 0.1)
    x = np.array([1.0, 2.0, 3.0, 4.0], np.float32).reshape(1, 1, 1, 4)
    for position in (0, 1, 5):
        a, b = position, position * 0.1
        want = [
            np.cos(a) - 3 * np.sin(a),
            2 * np.cos(b) - 4 * np.sin(b),
            3 * np.cos(a) + np.sin(a),
            4 * np.cos(b) + 2 * np.sin(b),
        ]
        got = rotary.rotate(x, rotary.rotary_angles(jnp.full((1, 1), position), 4, 100.0))
        np.testing.assert_allclose(got[0, 0, 0], want, rtol=1e-5, atol=1e-6)


def test_scaled_angles_by_hand():
    """Wavelengths are 2 pi (1, 10, 100); an original length of 64 has 10, 1 and 0.1 turns."""
    position, theta, head_dim = 10, 1000.0, 6
    wavelengths = [2 * math.pi * 10**i for i in range(3)]
    slow = 64 / wavelengths[1]  # turns, between 1 and 4
    mix = (slow - 1) / (4 - 1)
    want = [1.0, 0.1 * mix + 0.1 / 8 * (1 - mix), 0.01 / 8]
    assert 0 < mix < 0.1 and 64 / wavelengths[0] > 4 and 64 / wavelengths[2] < 1
    for scaling, frequencies in (
        (rotary.RopeScaling("llama3", 8.0, 1.0, 4.0, original_max_positions=64), want),
        (rotary.RopeScaling("linear", 4.0), [0.25, 0.025, 0.0025]),
        (None, [1.0, 0.1, 0.01]),
    ):
        cos, sin = rotary.rotary_angles(jnp.full((1, 1), position), head_dim, theta, scaling)
        angles = position * np.array(frequencies)
        np.testing.assert_allclose(cos[0, 0, 0], np.cos(angles), atol=1e-6)
        np.testing.assert_allclose(sin[0, 0, 0], np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_deep"])
def test_heads_are_normed(name):
    """The root mean square of a head's queries and keys is that of their scales, for any
    weights."""
    model, params = load(name)
    arrays, mask_BT = reference(name)
    scaled, wider = (jax.tree.map(jnp.asarray, params) for _ in range(2))
    for head in ("q", "k"):  # the norm undoes the factor
        scaled["layers"][head]["kernel"] = 3.0 * scaled["layers"][head]["kernel"]
        wider["layers"][f"{head}_norm"]["scale"] = 1.5 * wider["layers"][f"{head}_norm"]["scale"]
    logp_BT = token_logps(model, scaled, arrays["tokens_BT"])
    np.testing.assert_allclose(logp_BT * mask_BT, arrays["logp_BT"], rtol=0, atol=1e-3)  # eps
    logp_BT = token_logps(model, wider, arrays["tokens_BT"])
    assert np.abs(logp_BT * mask_BT - arrays["logp_BT"]).max() > 0.01


@pytest.mark.parametrize("name", LLAMAS)
def test_rope_scaling_is_applied(name):
    model, params = load(name)
    arrays, mask_BT = reference(name)
    plain = qwen.Qwen(dataclasses.replace(model.config, rope_scaling=None))
    logp_BT = token_logps(plain, params, arrays["tokens_BT"])
    assert np.abs(logp_BT * mask_BT - arrays["logp_BT"]).max() > 0.01


def test_bad_rope_scaling():
    with pytest.raises(ValueError, match="'yarn'; accepted: linear, llama3"):
        rotary.RopeScaling("yarn", 4.0)
    for factors in ((0.0, 1.0, 4.0), (8.0, 4.0, 4.0)):
        with pytest.raises(ValueError, match="low_freq_factor < high_freq_factor"):
            rotary.RopeScaling("llama3", *factors)


# From the model cards and the safetensors indices of the published models.
@pytest.mark.parametrize(
    "name, count",
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen2.5-vl-3b", 3_085_938_688),  # the language models only, which are those of Qwen2.5
        ("qwen2.5-vl-7b", 7_615_616_512),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 3_880_263_168),  # the language model only
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3.5-0.8b", 752_393_024),  # computed from the shapes; the published counts are rounded
        ("qwen3.5-2b", 1_881_825_088),
        ("qwen3.5-4b", 4_205_751_296),
        ("qwen3.5-9b", 8_953_803_264),
        ("qwen3.5-27b", 26_895_998_464),
    ],
)
def test_published_sizes(name, count):
    init = functools.partial(qwen.init_params, families.SHAPES[name])
    shapes = jax.tree.leaves(jax.eval_shape(init, jax.random.key(0)))
    assert sum(math.prod(x.shape) for x in shapes) == count


def test_every_shape_has_a_published_size():
    (marker,) = (m for m in test_published_sizes.pytestmark if m.name == "parametrize")
    assert [name for name, _ in marker.args[1]] == list(families.SHAPES)


def test_right_padding_does_not_matter(name):
    model, params = load(name)
    tokens_BT, length_B = ragged(1, (16, 4, 1, 7))
    mask_BT = np.arange(16) < length_B[:, None]
    other_BT, _ = ragged(2, (16,) * 4)
    got = token_logps(model, params, np.where(mask_BT, tokens_BT, other_BT))
    want = token_logps(model, params, tokens_BT)
    assert np.abs(got - want).max() > 0.1  # the padding differs
    np.testing.assert_array_equal(got * mask_BT, want * mask_BT)


def test_remat_changes_nothing():
    model, params = load("qwen2_tied")
    remat = qwen.Qwen(dataclasses.replace(model.config, remat=True))
    tokens_BT, _ = ragged(3, (8, 8, 8))

    def objective(model, params):
        hidden_BTD, _ = model.apply({"params": params}, tokens_BT)
        return jnp.sin(qwen.logits(params, hidden_BTD)).sum()

    grad = jax.jit(
        jax.value_and_grad(objective, argnums=1),
        static_argnums=0,
        compiler_options={"xla_backend_optimization_level": 0},  # compiles twice as fast
    )
    got, want = grad(remat, params), grad(model, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(want[1]["layers"]["q"]))
    text = str(jax.make_jaxpr(objective, static_argnums=0)(remat, params))
    assert "remat" in text or "checkpoint" in text  # otherwise both would be the same program


# ---------------------------------------------------------------- attention


def plain_attention(q_BTHD, k_BTKD, v_BTKD, segments):
    """Compute attention query by query, over the list of visible keys."""
    B, T, H, D = q_BTHD.shape
    share = H // k_BTKD.shape[2]
    out = np.zeros(q_BTHD.shape)
    for b, t, h in np.ndindex(B, T, H):
        keys, values = [k_BTKD[b, : t + 1, h // share]], [v_BTKD[b, : t + 1, h // share]]
        for k_NKSD, v_NKSD, length_N in segments:
            n = b // (B // len(length_N))
            keys.append(k_NKSD[n, h // share, : length_N[n]])
            values.append(v_NKSD[n, h // share, : length_N[n]])
        score = np.concatenate(keys).astype(np.float64) @ q_BTHD[b, t, h] / D**0.5
        weight = np.exp(score - score.max())
        out[b, t, h] = weight / weight.sum() @ np.concatenate(values)
    return out


@pytest.mark.parametrize("T", [1, 5])  # few queries use a different code path
@pytest.mark.parametrize("H, K", [(4, 4), (4, 2), (6, 1)])
def test_attend(T, H, K):
    rng = np.random.default_rng(T + H)
    B, D = 4, 8
    draw = functools.partial(rng.normal, size=None)
    q, k, v = (draw(size=(B, T, n, D)).astype(np.float32) for n in (H, K, K))
    segments = []
    for lengths, S in (([3, 7], 7), ([0, 4, 1, 5], 6), ([2], 2)):
        N = len(lengths)
        sk, sv = (1.5 * draw(size=(N, K, S, D)).astype(np.float32) for _ in "kv")
        for n, length in enumerate(lengths):  # positions after the end must not be seen
            sk[n, :, length:] = sv[n, :, length:] = 1e3
        segments.append((sk, sv, np.array(lengths, np.int32)))
    for count in (0, 3):
        got = jax.jit(attend)(q, k, v, segments[:count])
        assert got.shape == (B, T, H, D)
        np.testing.assert_allclose(got, plain_attention(q, k, v, segments[:count]), atol=2e-5)


def plain_append(old, length_N, new, count_B, capacity):
    """Implement `append` for keys or values token by token: [L, B, K, capacity, D]."""
    L, B, K, T, D = new.shape
    out = np.zeros((L, B, K, capacity, D), np.float32)
    for b in range(B):
        n = b // (B // len(length_N))
        history = [old[:, n, :, s] for s in range(length_N[n])]
        row = history + [new[:, b, :, t] for t in range(count_B[b])]
        assert len(row) <= capacity
        for s, x in enumerate(row):
            out[:, b, :, s] = x
    return out


@pytest.mark.parametrize(
    "length_N, count_B, capacity",
    [
        ([3, 5], [4, 2], 7),  # both rows end full
        ([3, 5, 0, 1], [4, 0, 1, 4], 9),  # rows that append nothing, and rows that start empty
        ([5, 2], [2, 1, 4, 0], 7),  # cache rows shared by two rows each; the first ends full
        ([5], [0, 0, 0], 5),  # full before; only padding to append
    ],
)
def test_append(length_N, count_B, capacity):
    rng = np.random.default_rng(0)
    L, K, T, D = 2, 2, 4, 3
    length_N, count_B = np.array(length_N, np.int32), np.array(count_B, np.int32)
    N, B = len(length_N), len(count_B)
    old = rng.normal(size=(2, L, N, K, 5, D)).astype(np.float32)
    new = rng.normal(size=(2, L, B, K, T, D)).astype(np.float32)
    segment = Segment(k=old[0], v=old[1], length_N=length_N)
    got = grow(segment, new[0], new[1], count_B, capacity=capacity)
    want_B = np.repeat(length_N, B // N) + count_B
    np.testing.assert_array_equal(got.length_N, want_B)
    real = (np.arange(capacity) < want_B[:, None])[None, :, None, :, None]
    for one, o, x in ((got.k, old[0], new[0]), (got.v, old[1], new[1])):
        want = plain_append(o, length_N, x, count_B, capacity)
        np.testing.assert_array_equal(np.where(real, one, 0), want)
    by_layer = grow(
        Segment(k=tuple(old[0]), v=tuple(old[1]), length_N=length_N),
        tuple(new[0]),
        tuple(new[1]),
        count_B,
        capacity=capacity,
    )
    np.testing.assert_array_equal(np.asarray(by_layer.k), got.k)
    np.testing.assert_array_equal(np.asarray(by_layer.v), got.v)


# ---------------------------------------------------------------- cached forms

PROMPT_NP, LENGTH_N = ragged(4, (6, 2, 9))


@pytest.mark.parametrize("share", [1, 3])
def test_decoding_equals_full_forward(name, share):
    """Ragged prompts of N rows; each is continued by `share` rows, one token at a time."""
    model, params = load(name)
    reply_BT, _ = ragged(5, (5,) * (3 * share))
    segment, logits_NV = sample.prefill(model, params, PROMPT_NP, LENGTH_N)
    got, own = jax.device_get(decode_given(model, params, segment, reply_BT))
    np.testing.assert_array_equal(own.length_N, 5)
    prompts = [PROMPT_NP[b // share, : LENGTH_N[b // share]] for b in range(3 * share)]
    rows = [np.concatenate(pair) for pair in zip(prompts, reply_BT, strict=True)]
    want, k, v = full(model, params, rows)
    for b, row in enumerate(rows):
        n, end = len(row) - 5, len(row)
        np.testing.assert_allclose(log_softmax(logits_NV[b // share]), want[b, n - 1], **CLOSE)
        np.testing.assert_allclose(got[b], want[b, n:end], **CLOSE)
        np.testing.assert_allclose(np.asarray(own.k)[:, b], k[:, b, :, n:end], **CLOSE)
        np.testing.assert_allclose(np.asarray(own.v)[:, b], v[:, b, :, n:end], **CLOSE)


def test_shared_rows_equal_repeated_rows(name):
    model, params = load(name)
    reply_BT, _ = ragged(6, (5,) * 9)
    segment, _ = sample.prefill(model, params, PROMPT_NP, LENGTH_N)
    repeated = Segment(
        k=jax.tree.map(lambda x: np.repeat(x, 3, axis=-4), segment.k),
        v=jax.tree.map(lambda x: np.repeat(x, 3, axis=-4), segment.v),
        length_N=np.repeat(LENGTH_N, 3),
        window_N=None if segment.window_N is None else np.repeat(segment.window_N, 3),
    )
    shared, own = decode_given(model, params, segment, reply_BT)
    apart, own_apart = decode_given(model, params, repeated, reply_BT)
    np.testing.assert_allclose(shared, apart, **CLOSE)
    np.testing.assert_allclose(own.k, own_apart.k, **CLOSE)
    assert np.abs(apart[0] - apart[1]).max() > 0.1  # the rows differ


def test_extend_equals_full_forward(name):
    """Two turns: shared ragged prompts, ragged replies; some rows continue with ragged new text."""
    model, params = load(name)
    reply_BT, count_B = ragged(7, (3, 5, 1, 4, 2, 5, 1, 3, 5))
    rows_A = np.array([0, 1, 8, 6], np.int32)  # rows that continue; three per prompt
    new_AE, new_A = ragged(8, (6, 2, 4, 1))
    segment, _ = sample.prefill(model, params, PROMPT_NP, LENGTH_N)
    _, own = decode_given(model, params, segment, reply_BT)
    # The state after `decode`: the last token of each reply is not in the cache and starts the next
    # call.
    own = own.replace(length_N=count_B - 1)
    tokens_AE = np.concatenate([reply_BT[rows_A, count_B[rows_A] - 1][:, None], new_AE], 1)
    rows = [
        np.concatenate([PROMPT_NP[b // 3, : LENGTH_N[b // 3]], reply_BT[b, : count_B[b]], new[:n]])
        for b, new, n in zip(rows_A, new_AE, new_A, strict=True)
    ]
    capacity = max(map(len, rows))  # the longest row fills its cache
    cache, logits_AV = jax.device_get(
        sample.extend(model, params, segment, own, rows_A, tokens_AE, new_A + 1, capacity=capacity)
    )
    np.testing.assert_array_equal(cache.length_N, [len(row) for row in rows])
    after_AT, _ = ragged(9, (3,) * 4)
    after, _ = decode_given(model, params, cache, after_AT)
    longer = [np.concatenate(pair) for pair in zip(rows, after_AT, strict=True)]
    want, k, v = full(model, params, longer)
    for a, row in enumerate(rows):
        n, end = len(row), len(row) + 3
        np.testing.assert_allclose(log_softmax(logits_AV[a]), want[a, n - 1], **CLOSE)
        if cache.window_N is None:  # windowed layers hold other positions (test_window_cache.py)
            np.testing.assert_allclose(np.asarray(cache.k)[:, a, :, :n], k[:, a, :, :n], **CLOSE)
            np.testing.assert_allclose(np.asarray(cache.v)[:, a, :, :n], v[:, a, :, :n], **CLOSE)
        np.testing.assert_allclose(after[a], want[a, n:end], **CLOSE)
