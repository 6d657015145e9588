"""Cross-scoring and information of models with built-in, known information.

The models have one layer of uniform attention over the prompt, whose values pass through unchanged:
a token's output logit is proportional to its fraction of the prompt's tokens.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals
from ragen_jax.diagnostics.permutation import retrieval_p
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, collapse_metrics
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params, logits
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout.chat import ChatFormat, make_chat

V = 40  # ids 0..31 may name a prompt
FILLER = [39, 38, 37]


def planted(*, attention, certainty, size=V):
    """A policy that repeats ids it read; with `attention` 0 it reads the last token alone."""
    config = ModelConfig(
        vocab_size=size,
        width=size,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=size,
        mlp_width=8,
        tied=False,
    )
    shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    layer, same = params["layers"], np.eye(size, dtype=np.float32)
    for norm in (layer["attention_norm"], layer["mlp_norm"], params["final_norm"]):
        norm["scale"] += 1.0
    params["embed"] = same
    layer["v"]["kernel"] = same.reshape(layer["v"]["kernel"].shape)
    layer["o"]["kernel"] = attention * same.reshape(layer["o"]["kernel"].shape)
    params["head"] = certainty * same * (np.arange(size) < 32)
    return Qwen(config), params


N = 16
PROMPTS = [[*FILLER, n, *FILLER] for n in range(N)]
PROMPT_M = np.arange(64) % N


@functools.partial(jax.jit, static_argnums=0)
def next_token(model, params, tokens_MT, position):
    hidden_MTD, _ = model.apply({"params": params}, tokens_MT)
    return jax.nn.softmax(logits(params, hidden_MTD[:, position]))


def sample(policy, *, tokens, seed):
    """(reasonings sampled from the policy token by token, p_MV of their last token)."""
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
    # 1e-4: the prompt still changes the scores, by little more than float32 rounding.
    policy = planted(attention=attention, certainty=3.0)
    scores = scored(policy, sample(policy, tokens=4, seed=seed)[0])
    figures = information_metrics(*scores, PROMPT_M)
    half = confidence_intervals(*scores, PROMPT_M)
    for name in ("mi", "mi_seq"):
        assert abs(figures[name]) < half[name + "_ci95"] < 0.01
    assert figures["h_marginal"] == pytest.approx(figures["mi"] + figures["h_cond"], rel=1e-6)
    assert retrieval_p(scores[0], PROMPT_M, rng=np.random.default_rng(0)) > 0.01


def test_a_noisy_copy_has_the_information_of_its_channel():
    # p(own id) = a, p(any other token) = b. Over N prompts the marginal of an id is
    # (a + (N - 1) b) / N, and that of a token that names no prompt is b: it carries no information.
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


# ---- several turns, whose prompts show the history ----------------------------------------------

ROOMS, MEMBERS, TURNS, SPOKEN = 8, 4, 3, 3
WORDS = tuple(f"@{i:02d}" for i in range(16))


@pytest.fixture(scope="module")
def words_tokenizer():
    return build_tokenizer(WORDS)


@functools.partial(jax.jit, static_argnums=0)
def next_of_rows(model, params, tokens_BT, position_B):
    hidden_BTD, _ = model.apply({"params": params}, tokens_BT)
    return jax.nn.softmax(logits(params, hidden_BTD[np.arange(len(tokens_BT)), position_B]))


def repeater(tokenizer, words):
    """A policy that says only `words`, each by its fraction of the prompt and the reasoning."""
    size = len(tokenizer) + len(tokenizer) % 2
    ids = tokenizer.convert_tokens_to_ids(words)
    model, params = planted(attention=50.0, certainty=0.0, size=size)
    head = params["head"]
    head[ids, ids] = 30.0
    head[ids, tokenizer.convert_tokens_to_ids("<|im_start|>")] = 100.0  # a token of every prompt
    return model, params


def play(policy, chat, observe, make_turn, make_episode, *, seed=0):
    """Episodes with reasonings sampled from the policy; observe(room, turn) is the observation."""
    rng = np.random.default_rng(seed)
    ending = chat.reply_ids("</think><answer>Up</answer>")
    played = [(room, member, []) for room in range(ROOMS) for member in range(MEMBERS)]
    for t in range(TURNS):
        messages = [observe(room, t) for room, _, _ in played]
        prompts = [
            chat.prompt_ids(turns, message)
            for (_, _, turns), message in zip(played, messages, strict=True)
        ]
        tokens_BT = np.zeros((len(played), 192), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        length_B = np.array([len(prompt) for prompt in prompts])
        for _ in range(SPOKEN):
            p_BV = np.asarray(next_of_rows(*policy, tokens_BT, length_B - 1), np.float64)
            said = [rng.choice(len(p_V), p=p_V) for p_V in p_BV / p_BV.sum(axis=1, keepdims=True)]
            tokens_BT[np.arange(len(played)), length_B] = said
            length_B += 1
        for (_, _, turns), prompt, message, row in zip(
            played, prompts, messages, tokens_BT, strict=True
        ):
            sampled = [*row[len(prompt) : len(prompt) + SPOKEN], *ending]
            reply = chat.read(np.array(sampled))
            assert reply.reasoning == (0, SPOKEN) and reply.valid
            turn = make_turn(prompt, sampled, message=message, reasoning=reply.reasoning)
            turns.append(dataclasses.replace(turn, answer=reply.answer))
    return [make_episode(room, member, turns) for room, member, turns in played]


def forms(policy, tokenizer, observe, make_turn, make_episode, *, context="full", seed=0):
    """{form: {figure: value}} of collapse/*, with the bound from the distinct prompts for each."""
    chat = make_chat(
        tokenizer,
        Sokoban(),
        ChatFormat(context=context, window=2, prompt="terse", actions_per_turn=1, max_actions=9),
    )
    episodes = play(policy, chat, observe, make_turn, make_episode, seed=seed)
    found = collapse_metrics(
        *policy,
        episodes,
        ScopeSizes(first_turn_samples=32, trajectory_samples=32, micro_batch=256),
        ScopeKey(seed=seed, step=1),
        flow=True,
        chat=chat,
    )
    by_form = {}
    for name, value in found.items():
        kind, form, figure = name.split("/")
        if kind == "collapse":
            by_form.setdefault(form, {})[figure] = value
    return by_form


@pytest.mark.parametrize("context", ["full", "window"])
def test_a_policy_that_repeats_its_own_words(words_tokenizer, make_turn, make_episode, context):
    policy = repeater(words_tokenizer, WORDS)

    def observe(room, t):
        return f"room {room}"  # not one of the policy's words

    found = forms(policy, words_tokenizer, observe, make_turn, make_episode, context=context)
    plain, within, stripped = (
        found[form] for form in ("trajectory", "trajectory_within_depth", "trajectory_stripped")
    )
    # It knows its own history by its words, at any depth, and nothing else.
    assert plain["mi_seq"] > 1 and plain["mi_seq"] > plain["mi_seq_ci95"]
    assert within["mi_seq"] > 0.7 and within["retrieval_p"] < 0.01 > plain["retrieval_p"]
    for figures in (stripped, found["trajectory_stripped_within_depth"]):
        assert abs(figures["mi_seq"]) < 1e-3 and figures["retrieval_p"] > 0.01
        assert abs(figures["mi_seq"]) < figures["mi_seq_ci95"] < 0.05
    assert abs(found["first_turn"]["mi_seq"]) < 1e-3


def test_a_policy_that_tells_the_turn_number(words_tokenizer, make_turn, make_episode):
    policy = repeater(words_tokenizer, WORDS)

    def observe(room, t):
        return WORDS[t] * 6**t + f" {room}"  # the newest word outweighs all earlier words

    found = forms(policy, words_tokenizer, observe, make_turn, make_episode)
    plain = found["trajectory"]["mi_seq"]
    assert 0.8 * math.log(TURNS) < plain < math.log(TURNS) + found["trajectory"]["mi_seq_ci95"]
    assert found["trajectory"]["retrieval_p"] < 0.01
    for form in ("trajectory_within_depth", "trajectory_stripped_within_depth"):
        assert abs(found[form]["mi_seq"]) < 0.02 and found[form]["retrieval_p"] > 0.01
    # Its words are also in the observations.
    assert found["trajectory_stripped"]["mi_seq"] > 0.8 * math.log(TURNS)


def test_a_policy_that_reads_the_observation(words_tokenizer, make_turn, make_episode):
    policy = repeater(words_tokenizer, WORDS)

    def observe(room, t):
        return WORDS[room] * 4

    found = forms(policy, words_tokenizer, observe, make_turn, make_episode)
    assert len(found) == 5
    for form, figures in found.items():
        assert figures["mi_seq"] > 0.75 * math.log(ROOMS), form
        assert figures["retrieval_p"] < 0.01, form
        assert figures["mi_seq"] <= figures["mi_upper_bound"]
        assert figures["h_marginal"] == pytest.approx(figures["mi"] + figures["h_cond"], rel=1e-6)


def test_single_turns_have_no_stripped_form(words_tokenizer, make_turn, make_episode):
    policy = repeater(words_tokenizer, WORDS)
    found = forms(
        policy, words_tokenizer, lambda room, t: WORDS[room], make_turn, make_episode,
        context="single_turn",
    )  # fmt: skip
    assert found.keys() == {"first_turn", "trajectory", "trajectory_within_depth"}
