"""Records of experts: what sampling used, in lock step and slots, and its replay in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_kinds import mixture
from test_slots import MIXTURE, collected, played_by

from ragen_jax.algorithm.batch import make_batch, take_rows
from ragen_jax.config.build_model import check_layers
from ragen_jax.config.load import load_config
from ragen_jax.configs import base
from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.types import Turn
from ragen_jax.model.experts import route
from ragen_jax.model.qwen import ModelConfig, Qwen, with_cache
from ragen_jax.model.shape import Experts
from ragen_jax.rollout import play, wire
from ragen_jax.rollout.routes import new_part
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.passes import over_rows, statistics
from ragen_jax.update.pieces import token_rows

SCANNED = (("layers", 5), ("kinds", tuple(mixture(5).items())))


def chosen(model, params, tokens_BT):
    """The experts of each token by a plain forward pass, [B, T, X]."""
    *_, routing = model.apply({"params": params}, tokens_BT, keep_routing=True)
    return np.moveaxis(np.asarray(routing.index), 0, 2).reshape(*tokens_BT.shape, -1)


@pytest.mark.parametrize(
    "name, context, kinds, changes",
    [
        ("frozen_lake", "full", MIXTURE, {}),
        pytest.param("frozen_lake", "full", SCANNED, {}, marks=pytest.mark.slow),
        pytest.param("sokoban", "single_turn", MIXTURE, {}, marks=pytest.mark.slow),
        pytest.param(
            "sokoban", "full", MIXTURE, {"slots": 9, "chunk": 5}, marks=pytest.mark.medium
        ),
        pytest.param("sokoban", "single_turn", MIXTURE, {"slots": 9}, marks=pytest.mark.medium),
        pytest.param("frozen_lake", "full", MIXTURE, {"chunk": 3}, marks=pytest.mark.slow),
    ],
)
def test_every_token_that_is_read_has_its_experts(monkeypatch, name, context, kinds, changes):
    """Over turns, with shared prompts, with a prefix and without."""
    model, params, task = played_by(name, context, **dict(kinds))
    for least in (8, 10**6) if not changes else (10**6,):
        monkeypatch.setattr(play, "LEAST_PREFIX", least)
        episodes = collected(model, params, task, replay_experts=True, **changes)
        batch = make_batch(episodes)
        tokens = batch.tokens_BT.shape[1]
        last_B = tokens - 1 - batch.turn_end_BT[:, ::-1].argmax(1)
        read_BT = np.arange(tokens) < last_B[:, None]
        assert ((batch.experts_BTX >= 0).all(-1) == read_BT).all()
        assert ((batch.experts_BTX >= 0).any(-1) == read_BT).all()
        wanted = chosen(model, params, batch.tokens_BT)
        assert (batch.experts_BTX == wanted)[read_BT].all()
        if context == "full":
            assert max(len(episode.turns) for episode in episodes) > 1
            assert any(len(t.experts) < len(t.prompt) for e in episodes for t in e.turns[1:])
    plain = collected(model, params, task, **changes)
    for a, b in zip(episodes, plain, strict=True):
        for one, other in zip(a.turns, b.turns, strict=True):
            assert one.sampled.tolist() == other.sampled.tolist() and other.experts is None
            np.testing.assert_allclose(one.logp, other.logp, rtol=0, atol=1e-6)


def test_a_record_decides_the_experts_and_the_logits_their_weights():
    logits_NE = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4], [0.6, 0.1, 0.1, 0.2]]))
    replay_Nk = jnp.array([[0, 1], [-1, -1]], jnp.int16)
    index_Nk, weight_Nk, _ = route(logits_NE, Experts(4, 2, 1), replay_Nk)
    assert index_Nk.tolist() == [[0, 1], [0, 3]]
    np.testing.assert_allclose(weight_Nk, [[1 / 3, 2 / 3], [0.75, 0.25]], rtol=1e-6)

    def first(logits_NE):
        return route(logits_NE, Experts(4, 2, 1), replay_Nk)[1][0, 0]

    # d (p0 / (p0 + p1)) / d logits = w0 w1 (1, -1, 0, 0)
    slope_NE = jax.grad(first)(logits_NE)
    np.testing.assert_allclose(slope_NE, [[2 / 9, -2 / 9, 0, 0], [0, 0, 0, 0]], atol=1e-6)


def with_router(params, other):
    """Parameters with the routers of others."""
    return params | {"layers": params["layers"] | {"router": other["layers"]["router"]}}


@functools.cache
def turned():
    """(model, params, the batch of episodes that other routers sampled, these parameters)."""
    model, params, task = played_by("frozen_lake", "full", **dict(MIXTURE))
    noise = jax.random.normal(jax.random.key(7), params["layers"]["router"]["kernel"].shape)
    kernel = params["layers"]["router"]["kernel"] + 0.3 * noise
    other = with_router(params, {"layers": {"router": {"kernel": kernel}}})
    batch = make_batch(collected(model, other, task, replay_experts=True))
    return model, params, batch, other


def logps(model, params, batch, *, replay=True, micro_batch=4):
    layout = MinibatchLayout(
        make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]), 1, micro_batch, 128
    )
    rows, rows_B = token_rows(batch, replay=replay), np.arange(len(batch.weight_B))
    return over_rows(statistics, model, params, rows, rows_B, np.float32(1.0), layout)[0]


def by_hand(model, params, batch):
    """Log-probs with the recorded experts in one plain pass."""
    hidden, _ = model.apply(
        {"params": params}, batch.tokens_BT, replay_BTX=jnp.asarray(batch.experts_BTX)
    )
    found = jax.nn.log_softmax(hidden @ params["head"].T)
    logp_BT = np.take_along_axis(np.asarray(found)[:, :-1], batch.tokens_BT[:, 1:, None], 2)
    return np.pad(logp_BT[..., 0], ((0, 0), (1, 0))) * batch.mask_BT


@pytest.mark.medium
def test_passes_replay_in_trees_and_plain_rows():
    """Whatever the micro-batch; the records are not what this router would choose."""
    model, params, batch, other = turned()
    wanted = by_hand(model, params, batch)
    inside = batch.mask_BT > 0
    own = logps(model, params, batch, replay=False)
    assert np.abs(own - wanted)[inside].max() > 1e-2
    for micro_batch in (1, 4, 16):  # a row alone, and trees
        found = logps(model, params, batch, micro_batch=micro_batch)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    # A record of one's own choice changes nothing.
    np.testing.assert_allclose(
        logps(model, other, batch), logps(model, other, batch, replay=False), rtol=0, atol=1e-6
    )
    assert np.abs(logps(model, other, batch) - batch.logp_BT)[inside].max() < 1e-4


@pytest.mark.medium
def test_a_tree_replays_the_record_of_its_first_row():
    """If rows disagree about a token that they share; a row without a record has no effect."""
    model, params, batch, _ = turned()
    rows = [b for b in range(len(batch.weight_B)) if batch.group_B[b] == batch.group_B[0]]
    batch = take_rows(batch, np.array(rows), size=len(rows))
    wanted = logps(model, params, batch, micro_batch=1)
    changed = batch.experts_BTX.copy()
    changed[:, 2] = np.random.default_rng(0).integers(0, 4, changed[:, 2].shape)
    differ = dataclasses.replace(batch, experts_BTX=changed)
    alone, together = (logps(model, params, differ, micro_batch=n) for n in (1, 16))
    assert np.abs(alone - wanted).max() > 1e-4
    assert np.abs(alone - together).max() > 1e-4
    same = changed.copy()
    order = sorted(range(len(rows)), key=lambda b: batch.tokens_BT[b].tolist())
    same[:, 2] = changed[order[0], 2]
    whole = dataclasses.replace(batch, experts_BTX=same)
    np.testing.assert_allclose(
        together, logps(model, params, whole, micro_batch=1), rtol=0, atol=1e-5
    )


def turn(prompt, sampled, experts=None):
    nothing = dict(message="", reasoning=(0, 0), answer=(0, 0), actions=(), valid=True, info={})
    ids = [np.array(x, np.int32) for x in (prompt, sampled)]
    logp = np.zeros(len(sampled), np.float32)
    return Turn(ids[0], sampled=ids[1], logp=logp, reward=0.0, experts=experts, **nothing)


def test_a_turn_carries_what_the_turn_before_lacks():
    first = turn([1, 2, 3], [4, 5], experts=np.arange(4)[:, None])
    longer, record = np.array([1, 2, 3, 4, 5, 6]), np.arange(10)[:, None]
    assert new_part([first], longer, record)[:, 0].tolist() == [4, 5, 6, 7, 8, 9]
    assert new_part([first], longer[1:], record) is record
    assert new_part([], longer, record) is record
    assert new_part([turn([1, 2, 3], [4, 5])], longer, record) is record
    assert new_part([first], longer, None) is None


def test_records_travel_between_processes():
    model, params, task = played_by("frozen_lake", "full", **dict(MIXTURE))
    episodes = collected(model, params, task, replay_experts=True)
    lacks = dataclasses.replace(episodes[1].turns[0], experts=None)
    episodes[1] = dataclasses.replace(episodes[1], turns=(lacks, *episodes[1].turns[1:]))
    again = wire.from_bytes(wire.to_bytes(episodes))
    for a, b in zip(episodes, again, strict=True):
        for one, other in zip(a.turns, b.turns, strict=True):
            assert (one.experts is None) == (other.experts is None)
            if one.experts is not None:
                assert other.experts.dtype == np.int16
                np.testing.assert_array_equal(one.experts, other.experts)


def test_a_model_without_experts_is_refused():
    config = base.get_config()
    config.rollout.replay_experts = True
    dense = Qwen(ModelConfig(40, 24, 2, 4, 2, 8, 20))
    message = "config.rollout.replay_experts is True, but the model has no experts; set it to False"
    with pytest.raises(ValueError, match=message):
        check_layers(load_config(config), dense.config)
    with pytest.raises(ValueError, match=message):
        on_cpu = dict(cache_dtype="model", cache_kernel="xla", platform="cpu")
        with_cache(dense, **on_cpu, keep_experts=True)
