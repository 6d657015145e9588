"""Cross-scoring and information of models whose information is known, because it was built in.

One layer of even attention over the prompt, whose values pass straight through: an output logit
is in proportion to the share of the prompt's tokens that are that token.
"""

import functools
import math

import jax
import numpy as np
import pytest

from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals, retrieval_p
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits

V = 40  # ids 0..31 may name a prompt
FILLER = [39, 38, 37]


def planted(*, attention, certainty):
    """A policy that repeats ids it read: `attention` 0 = it reads nothing behind the last token."""
    config = ModelConfig(
        vocab_size=V, width=V, layers=1, heads=1, kv_heads=1, head_dim=V, mlp_width=8, tied=False
    )
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    layer, same = params["layers"], np.eye(V, dtype=np.float32)
    for norm in (layer["attention_norm"], layer["mlp_norm"], params["final_norm"]):
        norm["scale"] += 1.0
    params["embed"] = same
    layer["v"]["kernel"] = same.reshape(layer["v"]["kernel"].shape)
    layer["o"]["kernel"] = attention * same.reshape(layer["o"]["kernel"].shape)
    params["head"] = certainty * same * (np.arange(V) < 32)
    return Qwen(config), params


N = 16
PROMPTS = [[*FILLER, n, *FILLER] for n in range(N)]
PROMPT_M = np.arange(64) % N


@functools.partial(jax.jit, static_argnums=0)
def next_token(model, params, tokens_MT, position):
    hidden_MTD, _ = model.apply({"params": params}, tokens_MT)
    return jax.nn.softmax(logits(params, hidden_MTD[:, position]))


def sample(policy, *, tokens, seed):
    """(reasonings drawn from the policy itself token by token, p_MV of their last token)."""
    rng = np.random.default_rng(seed)
    start = len(PROMPTS[0])
    tokens_MT = np.zeros((len(PROMPT_M), start + 4), int)  # padded on the right
    tokens_MT[:, :start] = np.array(PROMPTS)[PROMPT_M]
    for t in range(start, start + tokens):
        p_MV = np.asarray(next_token(*policy, tokens_MT, t - 1), np.float64)
        p_MV /= p_MV.sum(axis=1, keepdims=True)
        tokens_MT[:, t] = [rng.choice(V, p=p_V) for p_V in p_MV]
    return tokens_MT[:, start : start + tokens].tolist(), p_MV


def scored(policy, reasonings):
    return cross_score(*policy, PROMPTS, reasonings, micro_batch=1024)


def test_copying_the_prompts_id_is_log_n():
    policy = planted(attention=50.0, certainty=30.0)
    reasonings, _ = sample(policy, tokens=3, seed=0)
    assert reasonings[N - 1] == [N - 1] * 3
    scores = scored(policy, reasonings)
    figures = information_metrics(*scores, PROMPT_M)
    assert figures["mi_seq"] == pytest.approx(math.log(N), rel=0.02)
    assert figures["h_marginal"] == pytest.approx(figures["mi"] + figures["h_cond"], rel=1e-6)
    assert figures["retrieval_acc"] == 1.0
    half = confidence_intervals(*scores, PROMPT_M)
    assert abs(figures["mi_seq"] - math.log(N)) < half["mi_seq_ci95"]
    assert retrieval_p(scores[0], PROMPT_M, rng=np.random.default_rng(0)) == 1 / 1000


@pytest.mark.parametrize("attention", [0.0, 1e-4])
@pytest.mark.parametrize("seed", range(3))
def test_ignoring_the_prompt_is_within_its_interval_of_zero(attention, seed):
    # 1e-4: the prompt still moves the scores, hardly more than a float32 is rounded.
    policy = planted(attention=attention, certainty=3.0)
    scores = scored(policy, sample(policy, tokens=4, seed=seed)[0])
    figures = information_metrics(*scores, PROMPT_M)
    half = confidence_intervals(*scores, PROMPT_M)
    for name in ("mi", "mi_seq"):
        assert abs(figures[name]) < half[name + "_ci95"] < 0.01
    assert figures["h_marginal"] == pytest.approx(figures["mi"] + figures["h_cond"], rel=1e-6)
    assert retrieval_p(scores[0], PROMPT_M, rng=np.random.default_rng(0)) > 0.01


def test_a_noisy_copy_has_the_information_of_its_channel():
    # p(own id) = a, p(any other token) = b. Over N prompts an id's marginal is
    # (a + (N - 1) b) / N, that of another token b, which says nothing.
    policy = planted(attention=50.0, certainty=2.3)
    drawn = [sample(policy, tokens=1, seed=seed) for seed in range(4)]
    reasonings, p_MV = [z for found, _ in drawn for z in found], drawn[0][1]
    a = p_MV[0, 0]
    b = (1 - a) / (V - 1)
    np.testing.assert_allclose(p_MV[0, 1:], b, rtol=1e-4)
    assert 0.4 < a < 0.8
    marginal = (a + (N - 1) * b) / N
    want = a * math.log(a / marginal) + (N - 1) * b * math.log(b / marginal)
    scores, prompt_M = scored(policy, reasonings), np.tile(PROMPT_M, 4)
    found = information_metrics(*scores, prompt_M)["mi_seq"]
    assert abs(found - want) < confidence_intervals(*scores, prompt_M)["mi_seq_ci95"] < want / 4
