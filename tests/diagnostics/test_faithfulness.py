"""diagnostics/faithfulness.py: the scorer against whole sequences, the measures by hand."""

import contextlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import hybrid
from test_mediation import CONFIG, MODEL, dense, reply

from ragen_jax.core import progress
from ragen_jax.diagnostics.faithfulness import (
    CASES,
    MEASURES,
    READINGS,
    faithfulness_metrics,
    grounded_by_style,
    measure,
    partners,
    reasoning_of,
    scorer,
)
from ragen_jax.envs.styles import UNGROUNDED, Style
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.run import diagnose

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def params():
    made = init_params(CONFIG, jax.random.key(3))
    return jax.tree.map(lambda x: 4 * x + 0.1, made)  # so that the reasoning matters


@pytest.fixture(scope="module")
def episodes():
    rng = np.random.default_rng(0)
    sizes = [(9, 6, 2, 1), (20, 3, 1, 2)] * 4
    return [reply(rng, i // 2, i % 2, *size) for i, size in enumerate(sizes)]


@pytest.mark.medium
@pytest.mark.parametrize("hidden", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scores_are_those_of_the_whole_text(params, episodes, hidden):
    """Rotations are relative: without the prompt, the text may as well begin at position 0."""
    turns = [e.turns[0] for e in episodes]
    score = scorer(MODEL, params, turns, hidden=hidden, micro_batch=3, count=lambda calls: None)
    for share in (1.0, 0.5, 0.0):
        cut = [z[: int(share * len(z))] for z in map(reasoning_of, turns)]
        found = score(cut)
        for turn, z, value in zip(turns, cut, found, strict=True):
            first, last = turn.answer
            tokens = np.concatenate([turn.prompt[: 0 if hidden else None], z])
            tokens = np.concatenate([tokens, turn.sampled[turn.reasoning[1] : last]])
            mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
            logp = dense(params, params["embed"][tokens], jnp.arange(len(tokens)), mask)
            at = np.arange(len(tokens) - (last - first), len(tokens))
            np.testing.assert_allclose(value, logp[at - 1, tokens[at]].mean(), rtol=2e-4)


@pytest.mark.medium
@pytest.mark.parametrize("hidden", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scores_of_a_hybrid_are_those_of_the_whole_text(episodes, hidden):
    """Its states continue over prompt, reasoning and ending; empty parts leave them as they are."""
    shape = ModelConfig(CONFIG.vocab_size, 24, 2, 4, 2, 8, 20, **hybrid(2, every=2))
    model = Qwen(shape)
    params = jax.tree.map(lambda x: 2 * x, init_params(shape, jax.random.key(3)))
    turns = [e.turns[0] for e in episodes]
    score = scorer(model, params, turns, hidden=hidden, micro_batch=3, count=lambda calls: None)
    found = []
    for share in (1.0, 0.5, 0.0):
        cut = [z[: int(share * len(z))] for z in map(reasoning_of, turns)]
        found.append(score(cut))
        rows = [
            np.concatenate([turn.prompt[: 0 if hidden else None], z, turn.sampled[start:end]])
            for turn, z in zip(turns, cut, strict=True)
            for start, end in [(turn.reasoning[1], turn.answer[1])]
        ]
        tokens_BT = np.stack([np.pad(row, (0, 40 - len(row))) for row in rows])
        logp_BT = np.asarray(token_logps(model, params, tokens_BT))
        for turn, row, logp_T, value in zip(turns, rows, logp_BT, found[-1], strict=True):
            first, last = turn.answer
            want = logp_T[len(row) - (last - first) : len(row)].mean()
            np.testing.assert_allclose(value, want, atol=1e-5)
    assert np.abs(found[0] - found[2]).max() > 1e-3  # the reasoning matters


def test_measures_by_hand():
    """L is -1 for each of the reply's own tokens that is missing at its place."""
    own = [np.arange(3), np.arange(10, 13)]

    def score(reasonings):
        return np.array([np.sum(z[:3] == x[: len(z)]) - 3.0 for x, z in zip(own, reasonings)])  # noqa: B905

    found = measure(score, own, [1, 0])
    # Cuts at 0, 1/4, 1/2 and 3/4 of three tokens keep 0, 0, 1 and 2 of them.
    np.testing.assert_allclose(found["early"], (3 + 3 + 2 + 1) / 4)
    np.testing.assert_allclose(found["swapped"], 3)
    np.testing.assert_allclose(found["perturbed"], 1)
    # After step s: own context, s + 1 or s tokens right; other context, 1 or 0.
    effects = [np.exp(s - 2.0) - np.exp(s - 3.0) for s in range(3)]
    effects += [np.exp(-2.0) - np.exp(-3.0)] * 3
    np.testing.assert_allclose(found["true_thinking"], np.mean(effects))
    assert set(found) == set(MEASURES)


def test_nothing_is_measured_where_the_reasoning_is_ignored():
    found = measure(lambda z: np.full(len(z), -0.5), [np.arange(6), np.arange(4)], [1, 0])
    assert all(not np.any(x) for x in found.values())


def test_partners_are_of_other_groups():
    assert partners([0, 0, 1, 2, 2]) == [2, 2, 3, 0, 0]


def test_the_truth_is_that_of_the_first_style_that_fits():
    styles = {"grounded": Style(re.compile("box at .*"), None, ()), **UNGROUNDED}
    is_grounded = grounded_by_style(styles, lambda tokens: texts[tokens[0]])
    template = UNGROUNDED["template"].write(None, (), np.random.default_rng(0))
    texts = ["box at b2", template, "anything else"]
    assert [is_grounded([i]) for i in range(3)] == [True, False, None]


@pytest.mark.parametrize("asked", [True, False])
def test_a_probe_measures_faithfulness_if_asked(asked, monkeypatch, params, episodes):
    monkeypatch.setattr(diagnose, "play_heldout", lambda *_, **__: episodes)
    monkeypatch.setattr(diagnose, "collapse_metrics", lambda *_, **__: {})
    monkeypatch.setattr(diagnose, "style_metrics", lambda *_, **__: {})
    monkeypatch.setattr(diagnose, "faithfulness_metrics", lambda *_, **__: {"faithfulness/x": 1.0})
    monkeypatch.setattr(diagnose.jax, "set_mesh", lambda mesh: contextlib.nullcontext())
    monkeypatch.setattr(diagnose, "measure_each_task", lambda step, f: f(0, task, [], None))
    monkeypatch.setattr(diagnose.dataclasses, "replace", lambda x, **_: x)
    settings = types.SimpleNamespace(
        **{"probe_problems": 4, "probe_samples": 2, "micro_batch": 4},
        **{"probe_mediation": False, "probe_faithfulness": asked},
    )
    chat = types.SimpleNamespace(text=str)
    task = types.SimpleNamespace(
        settings=types.SimpleNamespace(chat=chat, sampling=None, budgets=None),
        **{"styles": {"grounded": None}, "seen": lambda *_: params, "eval_seed": 0},
    )
    run = types.SimpleNamespace(diagnosis=settings, model=MODEL, sampling_mesh=None)
    step = types.SimpleNamespace(run=run, policy=params)
    _, found = diagnose.probe(step, None, {})
    assert found.get("probe/faithfulness/x") == (1.0 if asked else None)
    assert found["probe/valid_rate"] == 1


@pytest.mark.medium
def test_cases_follow_the_style(params, episodes):
    def grounded(tokens):
        return {6: True, 3: False}[len(tokens)]

    progress.enter_phase("diagnose")
    found = faithfulness_metrics(MODEL, params, episodes, grounded, micro_batch=4)
    # Each case has four replies, which are read in one call.
    assert progress.NOW.done == progress.NOW.total == READINGS * len(CASES)
    assert {name.split("/")[1] for name in found} == set(CASES)
    assert all(found[f"faithfulness/{case}/replies"] == 4 for case in CASES)
    assert found["faithfulness/used/swapped"] != found["faithfulness/necessary/swapped"]
    unknown = faithfulness_metrics(MODEL, params, episodes, lambda z: None, micro_batch=4)
    assert unknown == {}
    one = faithfulness_metrics(MODEL, params, episodes[:2], grounded, micro_batch=4)
    assert one == {}  # no other prompt
