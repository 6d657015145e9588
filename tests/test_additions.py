"""The additions of CONTRIBUTING.md that need only a row in a table."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm import algorithms, filter, objectives
from ragen_jax.algorithm.batch import make_batch, take_rows
from ragen_jax.algorithm.rewards import add_rewards
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.check import check
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.configs import base
from ragen_jax.model import config_json, families, weights
from ragen_jax.model.families import decoder
from ragen_jax.model.families.types import Family
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.run import diagnose
from ragen_jax.run.stages import StepContext
from ragen_jax.run.step import Played
from ragen_jax.update import token_logps
from ragen_jax.update.learner import Outcomes, assign_credit, select, update

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
G, K, V = 3, 4, 20
SHAPE = ModelConfig(vocab_size=V, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24)


@pytest.fixture
def config():
    config = base.get_config()
    config.rollout.update(groups=G, group_size=K)
    config.env.update(context="single_turn", max_turns=1)
    config.optimizer.update(minibatches=1, micro_batch=4)
    config.filter.strategy = "none"
    config.algorithm.name = "grpo"
    return config


@pytest.fixture
def learn(make_turn, make_episode):
    """learn(config) -> selection, credit, batch, params before and after a step, metrics."""
    rng = np.random.default_rng(0)
    episodes = [
        make_episode(g, k, [make_turn([1, 2, 3], rng.integers(0, V, 4), reward=float(g * k))])
        for g in range(G)
        for k in range(K)
    ]

    def step(config):
        check(config)
        mesh, _ = build_meshes(config)
        params = init_params(SHAPE, jax.random.key(0))
        before = jax.device_get(params)
        learner, state = build_learner(load_config(config), Qwen(SHAPE), params, mesh)
        batch, return_GK = add_rewards(make_batch(episodes), episodes, format_penalty=0.0)
        batch = take_rows(batch, np.arange(len(batch.weight_B)), size=step_rows(config))
        outcomes = Outcomes(return_GK, np.full((G, K), 4), np.zeros((G, K), bool))
        with jax.set_mesh(mesh):
            selection, _ = select(learner, state, batch, outcomes)
            credit = assign_credit(learner, state, batch, selection, outcomes)
            state, metrics = update(learner, state, batch, selection, credit)
        return selection, credit, batch, before, jax.device_get(state.params), metrics

    return step


@pytest.mark.medium
def test_a_filter_strategy(config, learn, monkeypatch):
    def above(score_G, candidate_G, *, value, **_):
        return candidate_G & (score_G > value)

    config.filter.update(strategy="above", value=2.0)
    with pytest.raises(ValueError, match="config.filter.strategy is 'above'"):
        check(config)
    row = filter.Strategy(above, lambda value: value >= 1, "a score from 1")
    monkeypatch.setitem(filter.STRATEGIES, "above", row)
    # The groups' variances are 0, 5/3 and 20/3.
    selection, *_ = learn(config)
    assert selection.keep_GK[:, 0].tolist() == [False, False, True]
    config.filter.value = 0.5
    with pytest.raises(ValueError, match="with filter.strategy=above it must be a score from 1"):
        check(config)


@pytest.mark.medium
def test_an_objective(config, learn, monkeypatch):
    def plain(logp_BT, old_logp_BT, advantage_BT, mask_BT, *, clip_low, clip_high, clip_c=None):
        metrics = dict.fromkeys(
            ("ratio_mean", "approx_kl", "clip_fraction", "lower_clip_fraction"),
            jnp.zeros_like(logp_BT),
        )
        return -advantage_BT * logp_BT, metrics

    config.algorithm.update(objective="plain", clip_c=0.0)
    with pytest.raises(ValueError, match="config.algorithm.objective is 'plain'"):
        check(config)
    row = objectives.Objective(plain, second_clip=False)
    monkeypatch.setitem(objectives.OBJECTIVES, "plain", row)
    _, credit, batch, before, after, metrics = learn(config)
    logp_BT = np.asarray(token_logps(Qwen(SHAPE), before, batch.tokens_BT))
    expected = -(credit.advantage_BT * logp_BT)[batch.mask_BT > 0].mean()
    assert metrics["update/policy_loss"] == pytest.approx(expected, rel=1e-4)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    assert any(not np.array_equal(*pair) for pair in pairs)
    config.algorithm.clip_c = 3.0
    with pytest.raises(ValueError, match="objective plain has no dual clip; set 0"):
        check(config)


@pytest.mark.medium
def test_an_algorithm(config, learn, monkeypatch):
    config.algorithm.name = "above_best"
    with pytest.raises(ValueError, match="config.algorithm.name is 'above_best'"):
        check(config)
    row = algorithms.Algorithm(
        algorithms._same_for_all_tokens(
            lambda return_GK: return_GK - return_GK.max(1, keepdims=True)
        )
    )
    monkeypatch.setitem(algorithms.ALGORITHMS, "above_best", row)
    _, credit, batch, *_ = learn(config)
    # The returns of group g are 0, g, 2g, 3g.
    best_B = (batch.group_B * (batch.episode_B % K - (K - 1))).astype(float)
    real = batch.weight_B > 0
    expected_BT = best_B[:, None] * (batch.mask_BT > 0)
    np.testing.assert_array_equal(credit.advantage_BT[real], expected_BT[real])


def test_a_model_family(monkeypatch):
    def read(c, file):
        if c.get("sliding_window"):
            raise ValueError(f"{file}: sliding_window is not supported; accepted: null")
        return decoder.read(c, file, family="mistral")

    def write(config):
        return decoder.write(config) | {"sliding_window": None}

    shape = dataclasses.replace(SHAPE, family="mistral", qkv_bias=False)
    for use in (weights.plan, lambda shape: config_json.from_config(shape, "float32")):
        with pytest.raises(ValueError, match="model family 'mistral'; accepted: qwen2, llama"):
            use(shape)
    row = Family("MistralForCausalLM", read, write, decoder.TENSORS)
    monkeypatch.setitem(families.MODELS, "mistral", row)
    file = config_json.from_config(shape, "float32")
    assert (file["architectures"], file["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config_json.to_config(file, "config.json") == shape
    with pytest.raises(ValueError, match="config.json: sliding_window is not supported"):
        config_json.to_config(file | {"sliding_window": 8}, "config.json")
    biases = [leaf.path for leaf in weights.plan(shape) if "bias" in leaf.path]
    assert not biases and any("bias" in leaf.path for leaf in weights.plan(SHAPE))


def test_a_diagnostic(config, make_turn, make_episode, monkeypatch):
    def longest(step, state, metrics):
        def measure(index, task, episodes, return_GK):
            return {"anatomy/longest": max(len(episode.turns) for episode in episodes)}

        return state, diagnose.measure_each_task(step, measure)

    row = diagnose.Diagnostic(lambda d: d.every, longest)
    monkeypatch.setattr(diagnose, "DIAGNOSTICS", {"longest": row})
    one, two = ([make_episode(0, 0, [make_turn([1], [2])] * turns)] for turns in (1, 3))
    tasks = [SimpleNamespace(label=label) for label in ("first", "second")]
    config.diagnose.every = 2
    run = SimpleNamespace(diagnosis=load_config(config).diagnose, tasks=tasks)
    played = Played(selected=one + two, episodes_E=[one, two], returns_E=[None, None])
    for number, expected in (
        (1, {}),
        (2, {"anatomy/longest": 2, "anatomy/first/longest": 1, "anatomy/second/longest": 3}),
    ):
        seen = StepContext(run, None, None, played, None, None, number)
        assert diagnose.diagnose(seen) == expected


def test_the_page_names_what_there_is():
    """The tables, functions and files that CONTRIBUTING.md names exist."""
    fields = {field.name for field in dataclasses.fields(algorithms.Algorithm)}
    assert {"of_tokens", "critic"} <= fields and "second_clip" in PAGE
    for module, names in (
        (filter, ("STRATEGIES", "Strategy")),
        (objectives, ("OBJECTIVES", "Objective")),
        (families, ("MODELS", "Family")),
        (decoder, ("read", "write", "TENSORS", "in_layers")),
        (diagnose, ("DIAGNOSTICS", "Diagnostic", "measure_each_task")),
        (algorithms, ("ALGORITHMS", "Algorithm", "_same_for_all_tokens")),
    ):
        for name in names:
            assert hasattr(module, name) and re.search(rf"\b{name}\b", PAGE)
    folders = "ragen_jax|envs|configs|tests|benchmarks"
    for path in re.findall(rf"`((?:{folders})/[\w/]+\.(?:py|md))`", PAGE):
        assert "NAME" in path or (ROOT / path).exists()
