"""Closed formulas, the shapes of a run's programs, and the command's output and exit code."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from device_processes import ROOT

from ragen_jax.config.load import load_config
from ragen_jax.configs import countdown, mixture, search_qa, sokoban
from ragen_jax.configs.base import Config
from ragen_jax.core.domains import freeze
from ragen_jax.envs import ENVS
from ragen_jax.envs.search_qa import dense
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model import config_json
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.model.vision import images
from ragen_jax.model.vision.config import ImageTokens, VisionConfig
from ragen_jax.preflight import compile as compiling
from ragen_jax.preflight.report import complaints, report, table
from ragen_jax.programs import images as seeing_programs
from ragen_jax.programs import residents as residing
from ragen_jax.programs import shapes
from ragen_jax.programs import training as programs
from ragen_jax.programs.roofline import CHIPS, Chip, Cost, TowerWork, Work
from ragen_jax.run.diagnose import DIAGNOSTICS

SMALL = ModelConfig(
    vocab_size=10, width=4, layers=2, heads=2, kv_heads=1, head_dim=3, mlp_width=5, tied=False
)
# Wide enough for the matrix products to dominate.
WIDE = ModelConfig(
    vocab_size=512, width=256, layers=1, heads=4, kv_heads=2, head_dim=64, mlp_width=1024
)
# As in Qwen3: the heads together are twice as wide as the model.
NORMED = dataclasses.replace(WIDE, head_dim=128, qkv_bias=False, qk_norm=True)
CHIP = Chip(peak_flops=100.0, bandwidth=10.0, hbm_gib=16.0, topologies=("1x1",))


# ------------------------------------------------------------------------------ formulas


def test_weights_by_hand():
    # A layer: q 4x6, k and v 4x3 each, o 6x4, gate, up and down 4x5 each.
    work = Work(SMALL)
    assert work.layer_weights == 24 + 12 + 12 + 24 + 3 * 20 == 132
    assert work.parameters == 2 * 132 + 2 * 40  # untied: embedding and head
    assert work.weight_bytes() == 4 * (2 * 132 + 40)
    assert Work(dataclasses.replace(SMALL, dtype="bfloat16")).weight_bytes() == 2 * 304
    # Keys and values: 2 layers x 2 x 1 head x 3 wide x 4 bytes per position.
    assert work.cache_bytes(7) == 48 * 7


def test_decode_by_hand():
    # 3 rows, 5 earlier positions, 4 tokens: 3 passes. A token costs 2 layers x (2 x 132 + attention
    # 4 x 6 for each of 5 + 4 + 1 positions) and a head of 2 x 40.
    cost = Work(SMALL).decode(3, 5, 4)
    assert cost.flops == 3 * 3 * (2 * (264 + 24 * 10) + 80)
    assert cost.bytes == 3 * (4 * 304 + 48 * 3 * (5 + 4))


def test_update_by_hand():
    # 6 positions that attend to 18, and 5 predictions.
    forward = 2 * (264 * 6 + 24 * 18)
    head = 80 * 5
    work = Work(SMALL)
    plain = work.update(6, 18, 5, micro_batches=3, reference=False, trained=344)
    assert plain.flops == 3 * (3 * forward + 4 * head)
    assert work.update(6, 18, 5, micro_batches=3, reference=True, trained=344).flops == 3 * (
        4 * forward + 5 * head
    )
    remat = Work(dataclasses.replace(SMALL, remat=True))
    assert remat.update(6, 18, 5, micro_batches=3, reference=False, trained=344).flops == 3 * (
        4 * forward + 4 * head
    )
    own, saved = 4 * 344, 2 * 2 * 6 * 4 * 4
    weights = 4 * (2 * 264 + 3 * 40)
    assert plain.bytes == 3 * (weights + saved + 2 * own)
    assert work.apply(344) == Cost(0, (1 + 4 + 4 + 3) * own)


def test_critic_and_passes_by_hand():
    forward, head = 2 * (264 * 6 + 24 * 18), 80 * 5  # as above
    work = Work(SMALL)
    critic = work.update(6, 18, 5, micro_batches=3, reference=False, trained=300, with_head=False)
    assert critic.flops == 3 * 3 * forward
    own, saved = 4 * 300, 2 * 2 * 6 * 4 * 4
    assert critic.bytes == 3 * (4 * 2 * 264 + saved + 2 * own)
    whole, values = (work.read_rows(6, 18, 5, micro_batches=5, head=h) for h in (True, False))
    assert (whole.flops, values.flops) == (5 * (forward + head), 5 * forward)
    assert (whole.bytes, values.bytes) == (5 * 4 * 304, 5 * 4 * 264)


def test_kernels_skip_the_masked_half():
    assert Work(SMALL).causal_keys(2, 4) == 2 * 16
    assert Work(dataclasses.replace(SMALL, attention="splash")).causal_keys(2, 4) == 2 * 10


def test_tensor_axis_splits_heads_that_divide():
    work = Work(dataclasses.replace(SMALL, kv_heads=2), tensor=2)
    assert work.cache_bytes(1) * 2 == Work(work.config).cache_bytes(1)
    assert Work(SMALL, tensor=2).cache_bytes(1) == Work(SMALL).cache_bytes(1)  # one head: not split
    assert work.layers(3, 9) * 2 == Work(work.config).layers(3, 9)


def test_a_tower_by_hand():
    """An image of 8 x 12 patches: all windows of 4 x 4 are full, and one of three layers attends to
    the whole image."""
    c = VisionConfig(3, 8, 5, 2, 6, (1,), window_size=16, patch_size=4)
    cost = TowerWork(c).see(2, (1, 8, 12))
    layer = 4 * 8 * 8 + 3 * 8 * 5
    merger = 32 * 32 + 32 * 6
    products = 96 * (96 * 8 + 3 * layer) + 24 * merger  # a patch has 3 * 2 * 4 * 4 numbers
    keys = 96 * 96 + 2 * 96 * 16
    assert cost.flops == 2 * (2 * products + 4 * 8 * keys)
    assert cost.bytes == 4 * (96 * 8 + 3 * layer + merger)
    # Two forward passes, and a backward pass with as many matrix products and twice the attention.
    back = TowerWork(c).back(2, (1, 8, 12))
    assert back.flops == 2 * (3 * 2 * products + 4 * 4 * 8 * keys) and back.bytes == 3 * cost.bytes
    # An image of 2 x 10 patches: half of the last of three windows is padding.
    assert TowerWork(c).see(1, (1, 2, 10)).flops - 4 * 8 * (20 * 20 + 2 * 24 * 8) == 2 * (
        20 * (96 * 8 + 3 * layer) + 5 * merger
    )


def test_a_program_takes_the_longer_of_the_two():
    assert Cost(flops=500.0, bytes=10.0).seconds(CHIP) == 5.0
    assert Cost(flops=500.0, bytes=100.0).seconds(CHIP) == 10.0


def flops_of(function, *args):
    return jax.jit(function).lower(*args).cost_analysis()["flops"]


@pytest.mark.parametrize("config", [WIDE, NORMED], ids=["plain", "normed"])
def test_one_layer_against_xla(config):
    params = jax.eval_shape(Qwen(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    params = nn.unbox(params)["params"]
    tokens = jax.ShapeDtypeStruct((2, 129), jnp.int32)
    model, work = Qwen(config), Work(config)

    def forward(params, tokens):
        return model.apply({"params": params}, tokens[:, :-1])[0]

    keys = work.causal_keys(2, 128)
    assert work.layers(256, keys) == pytest.approx(flops_of(forward, params, tokens), rel=0.05)

    def loss(params, tokens):
        return token_logps(model, params, tokens).sum()

    ours = work.update(256, keys, 256, micro_batches=1, reference=False, trained=1).flops
    assert ours == pytest.approx(flops_of(jax.grad(loss), params, tokens), rel=0.05)


# ------------------------------------------------------------------------------ programs


def test_lengths_of_the_papers_setting():
    found = shapes.lengths(sokoban.get_config("qwen2.5-3b"), 800, 200)
    assert found.last + 400 == 3600
    # Padded as by padding.length_bucket; the previous turn ended at 2,600.
    assert (found.before, found.prompt, found.news, found.row) == (3072, 3584, 224, 4096)
    one = shapes.lengths(sokoban.get_config(), 50, 10)  # single turn: all prompts are first prompts
    assert one.first == one.prompt == 56
    with pytest.raises(ValueError, match="--observation_tokens is 0"):
        shapes.lengths(sokoban.get_config(), 50, 0)


def test_lengths_of_windows_and_limits():
    def found(**env):
        config = sokoban.get_config("qwen2.5-3b")
        config.env.update(env)
        return shapes.lengths(config, 800, 200)

    full = found()
    assert (full.shown, full.whole) == (5, 5)
    assert found(context="window", window=9) == full
    assert found(context="window", window=1) == found(context="single_turn")
    two = found(context="window", window=2)
    # One earlier turn of 600 after the first prompt; the second turn continues from 800.
    assert (two.shown, two.whole, two.last, two.before, two.row) == (2, 2, 1400, 896, 2048)
    # 2,500 tokens leave 2,100 for a prompt: two whole earlier turns, or more with shorter replies.
    limited = found(max_context=2500)
    assert (limited.shown, limited.whole, limited.last) == (5, 3, 2100)
    assert found(max_context=9999) == full
    with pytest.raises(ValueError, match="--prompt_tokens is 800, but .* 1199 leaves 799"):
        found(max_context=1199)


def test_shapes_of_models(tmp_path):
    config = sokoban.get_config("qwen2.5-3b")
    assert shapes.model_shape(config).layers == 36
    config.model.path = "meta-llama/Llama-3.2-1B-Instruct"
    assert shapes.model_shape(config).width == 2048
    config.model.path = "Qwen/Qwen3-0.6B"
    assert shapes.model_shape(config).head_dim == 128 and shapes.model_shape(config).qk_norm
    config.model.path = "Qwen/Qwen2.5-VL-3B-Instruct"
    assert shapes.model_shape(config).vision.out_hidden_size == 2048
    config.model.path = "tiny"
    assert shapes.model_shape(config).width == config.warmstart.width
    config.model.path = "Qwen/Qwen9-1B"
    with pytest.raises(ValueError, match="Qwen/Qwen9-1B.*qwen2.5-0.5b.*llama-3.1-8b"):
        shapes.model_shape(config)


def plan(config=None, **overrides):
    config = config or sokoban.get_config()
    config.update_from_flattened_dict(overrides)
    found = programs.programs(
        freeze(Config, config),
        jax.devices()[:1],
        [d.programs for d in DIAGNOSTICS.values() if d.programs],
        prompt_tokens=40,
        observation_tokens=8,
    )
    return {program.name: program for program in found}


def test_two_programs_at_a_time_are_not_planned():
    for name, value in (("rollout.ahead", 1), ("sampling_mesh.devices", 2)):
        with pytest.raises(ValueError, match=f"config.{name} is {value}, which preflight does not"):
            plan(**{name: value})


def test_programs_lower():
    # The run's own functions accept these shapes; checking this needs no compiler.
    found = plan(**{"env.context": "full", "algorithm.kl_coef": 0.1, "model.dtype": "bfloat16"})
    assert list(found) == [
        "prefill", "prefill_rows", "extend", "decode", "score_prompts", "score", "score_flow",
        "old_logps", "update", "apply", "resharding",
    ]  # fmt: skip
    for program in found.values():
        assert program.lower().out_info is not None
    assert {name: program.calls for name, program in found.items()} == {
        "prefill": 1,
        "prefill_rows": 0,
        "extend": 4,
        "decode": 5,
        # Blocks of 8 prompts by 16 reasonings: 16 by 16 turns of trajectories, 8 by 64 first turns.
        # Every fifth step, the trajectory turns again, without the reasonings of earlier replies.
        "score_prompts": 2 + 2 / 5,
        "score": 2 + 4 + 2 / 5,
        # Every fifth step, for each prompt: 3 other reasonings for its trajectory turn, in two
        # blocks, and 48 for its 8 first turns, in three.
        "score_flow": (2 + 3) / 5,
        "old_logps": 3,
        "update": 4,
        "apply": 4,
        "resharding": 1,
    }


def sokoban_with(overrides):
    config = sokoban.get_config()
    config.update_from_flattened_dict(overrides)
    return config


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_reference_on_the_host_is_held_by_no_program_that_does_not_read_it(kl_in):
    overrides = {"algorithm.kl_coef": 0.1, "algorithm.kl_in": kl_in, "model.dtype": "bfloat16"}
    here, away = (
        plan(**overrides, **{"algorithm.kl_memory": memory}) for memory in ("device", "host")
    )
    # The pass of the old log-probs runs while the updates' copy is in memory.
    reads = {"loss": {"update", "apply", "old_logps"}, "reward": {"reference"}}[kl_in]
    run = shapes.describe(sokoban_with(overrides), jax.devices()[:1], 40, 8)
    size = shapes.bytes_per_chip(run.reference)
    assert size > 10**5
    resident = shapes.bytes_per_chip
    saved = {name: resident(here[name].resident) - resident(away[name].resident) for name in here}
    assert saved == {name: 0 if name in reads else size for name in here}


def test_programs_of_slots():
    slots = {"rollout.slots": 64, "rollout.chunk": 5, "model.dtype": "bfloat16"}
    found = plan(**{"env.context": "full", **slots})
    names = ["read", "fold", "decode_chunk", "fold_replies"]
    assert list(found)[:5] == [*names, "score_prompts"]
    for name in names:
        assert found[name].lower().out_info is not None
    # 128 episodes of 5 turns in 64 slots: each slot has 10 replies of 22 tokens, in chunks of 5; 8
    # calls of 8 rows read the new tokens.
    assert [found[name].calls for name in names] == [80, 80, 50, 50]
    # Besides the parameters, a chunk holds the slots' cache, whatever the number of episodes.
    more = plan(**{"env.context": "full", "rollout.groups": 64, **slots})
    for a, b in zip(found["decode_chunk"].arguments, more["decode_chunk"].arguments, strict=True):
        assert a.shape == b.shape


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["windowed", "hybrid"])
def test_programs_of_slots_with_tails(kind):
    slots = {"rollout.slots": 64, "rollout.chunk": 5, "warmstart.kind": kind}
    found = plan(**{"env.context": "full", **slots})
    names = ["read", "fold", "fold_tail", "decode_chunk", "fold_replies", "fold_tail_of_replies"]
    assert list(found)[: len(names)] == names
    for name in names:
        assert found[name].lower().out_info is not None
    assert found["fold_tail"].calls == found["fold"].calls


def test_an_int8_cache_takes_half_the_memory_of_bfloat16():
    slots = {"rollout.slots": 64, "model.dtype": "bfloat16"}
    plain, int8 = (plan(**slots, **{"rollout.cache_dtype": x}) for x in ("model", "int8"))
    saved = {
        name: shapes.bytes_per_chip(plain[name].arguments)
        - shapes.bytes_per_chip(int8[name].arguments)
        for name in plain
    }
    assert saved["decode_chunk"] > 0 and saved["update"] == saved["score"] == 0
    assert plain["decode_chunk"].cost.bytes > int8["decode_chunk"].cost.bytes
    for name in ("read", "decode_chunk"):
        assert "int8" in {x.dtype.name for x in jax.tree.leaves(int8[name].lower().out_info)}
    assert "rollout.cache_dtype" in plain["decode_chunk"].helps
    assert "rollout.cache_dtype" not in int8["decode_chunk"].helps


def test_the_bytes_of_a_sampled_token_are_printed():
    found = plan(**{"rollout.slots": 64, "rollout.chunk": 5})["decode_chunk"]
    result = compiling.CompileResult(found, 1.0, 2.0, 0.5, 0.1, True)
    summary = report([result], CHIP, 1)
    expected = found.cost.bytes / (64 * 5)  # a chunk of 5 tokens in 64 slots
    assert summary["programs"][0]["bytes_per_token"] == expected
    printed = table([result], CHIP, summary)
    assert f"decode_chunk moves at least {expected / 1e6:.1f} MB a token and chip." in printed


def test_programs_of_gradients():
    overrides = {
        "algorithm.kl_coef": 0.1,
        "algorithm.entropy_coef": 0.01,
        "diagnose.gradients_every": 10,
        "diagnose.gradients_groups": 12,
    }
    found = plan(**overrides)
    others = plan(**{"algorithm.kl_coef": 0.1})
    assert [name for name in found if name not in others] == ["gradients"]
    program = found["gradients"]
    assert program.lower().out_info[0].shape == (3, 3)  # task, KL, entropy
    assert program.calls == 6 / 10
    # 12 groups of 16 episodes of five turns, one row each, in micro-batches of 16 rows: tokens,
    # their predictions, log-probs, advantages, masks and two kinds of weights.
    rows = [x.shape[:3] for x in program.arguments if len(x.shape) == 4 and x.shape[2] == 16]
    assert rows == [(12, 5, 16)] * 7
    # A sixth of 60 micro-batches with three backward passes, against an update's quarter of 40.
    assert 2 < program.cost.flops / found["update"].cost.flops < 3
    by_edges = plan(**overrides | {"diagnose.gradients_edges": (1.0, 2.0)})["gradients"]
    assert by_edges.calls == 3 / 10
    adapted = plan(**overrides | {"model.lora.rank": 2})["gradients"]
    assert adapted.lower().out_info[0].shape == (3, 3)


@pytest.mark.slow
@pytest.mark.long
def test_programs_of_a_probe_and_of_the_bonuses():
    probe = {"diagnose.probe_every": 4, "diagnose.probe_mediation": True}
    found, others = plan(**probe), plan()
    assert [name for name in found if name not in others] == ["mediation"]
    program = found["mediation"]
    assert program.lower().out_info.shape == (8, 128)  # measures, rows per call
    assert program.calls == 1 / 4  # 32 x 4 replies
    assert "mediation" not in plan(**{"diagnose.probe_every": 4})
    # With the backward pass, prompts are read three times, reasonings five times and the endings
    # eight times: 128 rows cost about twice as much as an update's 160, which are read three times.
    assert 1.5 < program.cost.flops / found["update"].cost.flops < 2.5
    # 128 episodes of five turns under 8 first prompts, 16 per call; nothing else is scored.
    paid = plan(**{"algorithm.mi_coef": 0.1, "diagnose.every": 0, "diagnose.flow_every": 0})
    assert paid["score"].calls == 128 * 5 / 16 and paid["score_prompts"].calls == 1
    assert plan(**{"algorithm.mi_coef": 0.1})["score"].calls == others["score"].calls + 40
    shapes_of = {
        on: [x.shape for x in plan(**{"algorithm.entropy_on": on})["update"].arguments]
        for on in ("all", "actions")
    }
    assert len(shapes_of["actions"]) == len(shapes_of["all"]) + 1
    gated = plan(**{"algorithm.entropy_gate": 0.5})["update"].arguments
    assert [x.shape for x in gated] == shapes_of["actions"]


def test_gradients_of_one_part_cost_what_an_update_costs():
    work = Work(shapes.model_shape(sokoban.get_config("qwen2.5-3b")), 1)
    for frozen in (False, True):
        sizes = dict(micro_batches=3, reference=False, trained=1000, frozen=frozen)
        one, three = (
            work.gradients(512, 9999, 300, parts=parts, **sizes).flops for parts in (1, 3)
        )
        assert one == work.update(512, 9999, 300, **sizes).flops
        assert 2 * one < three < 3 * one


@pytest.mark.slow
@pytest.mark.long
def test_programs_of_ppo():
    overrides = {
        "algorithm.name": "ppo",
        "algorithm.kl_coef": 0.01,
        "algorithm.kl_in": "reward",
        "algorithm.mismatch_cap": 2.0,
    }
    found = plan(**overrides)
    new = ["statistics", "reference", "values", "critic", "critic_apply"]
    assert [name for name in found if name not in plan()] == new
    for name in (*new, "update"):
        assert found[name].lower().out_info is not None
    # The arrays that a program does not read are resident: seven copies of the model (parameters
    # and critic with two moments each, and the reference) and some rows of tokens. Updates also
    # hold a gradient.
    shape = shapes.model_shape(sokoban.get_config())
    params = jax.eval_shape(Qwen(shape).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    for name in (*new, "update"):
        program = found[name]
        whole = sum(shapes.bytes_per_chip(x) for x in (program.resident, program.arguments))
        copies = 8 if name in ("critic", "critic_apply", "update") else 7
        assert copies * size <= whole < (copies + 0.5) * size, name


def test_old_log_probs_are_read_where_rounding_could_clip():
    before = plan()
    assert "old_logps" not in before and "old_logps" not in plan(**{"optimizer.minibatches": 1})
    narrow = {"algorithm.objective": "gspo", "algorithm.clip_low": 3e-4, "algorithm.clip_c": 0.0}
    for fields in (narrow, {"model.dtype": "bfloat16"}):
        config = sokoban.get_config()
        found = plan(config, **fields)
        assert found["old_logps"].calls == config.optimizer.minibatches - 1
        for name in ("old_logps", "update"):
            assert found[name].lower().out_info is not None
        assert "old_logps" not in plan(**fields, **{"optimizer.minibatches": 1})


def test_programs_of_windows_and_limits():
    found = plan(**{"env.context": "window", "env.window": 2})
    calls = {name: program.calls for name, program in found.items()}
    assert (calls["prefill"], calls["extend"], calls["prefill_rows"], calls["decode"]) == (
        *(1, 1, 3, 5),
    )
    assert calls["score_prompts"] == 2 + 2 / 5
    # Single turns show no earlier reply, and without flow figures no reasoning is stripped.
    single = {"env.context": "single_turn", "env.window": 1}
    for changes in (single, {"env.context": "full", "diagnose.flow_every": 0}):
        calls = {name: program.calls for name, program in plan(**changes).items()}
        assert (calls["score_prompts"], calls["score"]) == (2, 2 + 4)
    # A prompt of 40, a reply of 22 and an observation of 8, padded.
    assert [x.shape for x in found["prefill_rows"].arguments[-2:]] == [(128, 80), (128,)]
    assert [x.shape for x in found["prefill"].arguments[-2:]] == [(8, 40), (8,)]
    assert found["extend"].lower().out_info is not None
    # With a limit, a prompt may hold no earlier turn, or all turns if replies are short.
    found = plan(**{"env.context": "full", "env.max_context": 64})
    assert (found["extend"].calls, found["prefill_rows"].calls) == (0, 4)


def test_each_environment_of_several_has_programs_of_its_own():
    found = plan(mixture.get_config())
    for name in ("sokoban", "countdown", "frozen_lake"):
        assert found[f"decode:{name}"].lower().out_info is not None
    # Countdown has one turn.
    assert (found["decode:sokoban"].calls, found["decode:countdown"].calls) == (5, 1)
    assert found["score:sokoban"].calls >= 1
    # One update for all: 128 rows of Countdown and twice 640 rows, over four minibatches, in
    # micro-batches of 16.
    rows = {x.shape[:2] for x in found["update"].arguments if len(x.shape) == 3 and x.shape[0] > 2}
    assert rows == {(22, 16), (22, 1)}  # of the rows' arrays, and of the predictions of a device


def test_what_is_held_beside_a_program():
    shape = shapes.model_shape(sokoban.get_config())
    params = jax.eval_shape(Qwen(shape).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    size = 4 * sum(x.size for x in jax.tree.leaves(params))
    # float32 on one mesh: the sampler reads the state's own parameters, next to Adam's moments.
    plain = plan()
    assert "resharding" not in plain and "extend" not in plain
    resident = shapes.bytes_per_chip(plain["decode"].resident)
    assert resident == pytest.approx(2 * size, abs=100)
    copied = plan(**{"model.dtype": "bfloat16", "algorithm.kl_coef": 0.1})
    resident = shapes.bytes_per_chip(copied["decode"].resident)
    # Parameters, moments, and the reference in bfloat16, except for its norms.
    assert 3.5 * size <= resident < 3.52 * size
    adapted = plan(**{"model.dtype": "bfloat16", "model.lora.rank": 2})
    assert adapted["update"].lower().out_info is not None
    # The sampler reads the frozen model itself, in bfloat16; adapters and moments are small.
    assert shapes.bytes_per_chip(adapted["decode"].resident) < 0.5 * size
    base = [x for x in adapted["update"].arguments if len(x.shape) > 1 and x.dtype == "bfloat16"]
    assert 0.48 * size < shapes.bytes_per_chip(base) <= 0.5 * size
    assert adapted["resharding"].calls == 0 and not shapes.bytes_per_chip(
        adapted["resharding"].resident
    )
    assert adapted["update"].cost.flops < copied["update"].cost.flops


class Shelf(Sokoban):
    """Sokoban with a corpus of 10,000 vectors of 64 numbers."""

    @staticmethod
    def resident(mesh, **options):
        assert options["num_boxes"] == 1
        return dense.resident(10_000, 64, "bfloat16", mesh, k=5)


def test_what_an_environment_keeps_is_beside_every_program(monkeypatch):
    plain = plan()
    monkeypatch.setitem(ENVS, "sokoban", Shelf)
    found = plan()
    assert set(found) == {*plain, "retrieve"}
    size = 2 * 10_000 * 64
    for name, one in plain.items():
        more = shapes.bytes_per_chip(found[name].resident) - shapes.bytes_per_chip(one.resident)
        assert more == size
    one = found["retrieve"]
    assert one.lower().out_info[0].shape == (dense.QUERIES, 5)
    assert one.cost == Cost(flops=2 * dense.QUERIES * 10_000 * 64, bytes=size)
    assert one.calls == 5 * 128 / dense.QUERIES  # five turns of 128 episodes
    resident = shapes.bytes_per_chip(one.resident)
    assert resident > shapes.bytes_per_chip(
        plain["decode"].resident
    )  # the parameters and a turn's cache
    monkeypatch.setattr(Shelf, "resident", lambda mesh, **options: None)
    assert set(plan()) == set(plain)


@pytest.fixture
def seeing(tmp_path):
    """A directory with the configuration of a small vision-language model, without weights."""
    config = dataclasses.replace(
        SMALL,
        head_dim=2,
        vision=VisionConfig(2, 8, 5, 2, 4, (1,)),
        image_tokens=ImageTokens(start=6, pad=7, end=8, video=9),
        mrope_section=(1, 0, 0),
        max_positions=4096,
        family="qwen2_5_vl",
    )
    (tmp_path / "config.json").write_text(json.dumps(config_json.from_config(config, "bfloat16")))
    (tmp_path / images.FILE).write_text(json.dumps(images.to_fields(images.ImageConfig())))
    return tmp_path


def sokoban_seeing(path):
    config = sokoban.get_config("qwen2.5-vl-3b")
    config.model.path = str(path)
    return config


@pytest.mark.slow
def test_what_sees_is_beside_every_program(seeing):
    sees = plan(sokoban_seeing(seeing))
    blind = plan(sokoban_seeing(seeing), **{"env.options.observation": "grid"})
    assert set(sees) == {*blind, "tower"}
    # A room of 6 x 6 cells is an image of 168 x 168 pixels: 12 x 12 patches, 36 tokens.
    one = sees["tower"]
    assert one.lower().out_info.shape == (16, 36, 4) and one.calls == 8 * 5
    assert one.cost == TowerWork(VisionConfig(2, 8, 5, 2, 4, (1,), dtype="bfloat16")).see(
        16, (1, 12, 12)
    )
    bytes_of = shapes.bytes_per_chip
    # 128 * 5 * 36 tokens: 23,040. Embeddings in bfloat16, plus four 32-bit numbers.
    table, empty = (room * (4 * 2 + 4 * 4) for room in (32768, 64))
    for name, blind_one in blind.items():
        read = name not in ("decode", "apply", "resharding")
        resident, arguments = (
            bytes_of(getattr(sees[name], which)) - bytes_of(getattr(blind_one, which))
            for which in ("resident", "arguments")
        )
        assert (resident, arguments) == ((0, table - empty) if read else (table - empty, 0)), name
        assert sees[name].lower().out_info is not None
    run = shapes.describe(freeze(Config, sokoban_seeing(seeing)), jax.devices()[:1], 40, 8)
    # Matrices and biases in bfloat16: the patches', two layers', the merger's. Scales in float32.
    layer = 4 * (64 + 8) + 2 * (40 + 5) + 40 + 8
    params = 1176 * 8 + 2 * layer + 32 * 32 + 32 + 32 * 4 + 4
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        model = dataclasses.replace(run.config.model, dtype=dtype)
        typed = dataclasses.replace(run, config=dataclasses.replace(run.config, model=model))
        resident = seeing_programs.tower_struct(typed, typed.sampling_mesh)
        assert bytes_of(resident) == item * params + 4 * 5 * 8


@pytest.mark.slow
def test_adapters_of_the_tower_are_planned(seeing):
    lora = {"model.lora.rank": 2, "algorithm.kl_coef": 0.1}
    language, both = (
        plan(sokoban_seeing(seeing), **lora, **{"model.lora.tower": tower})
        for tower in (False, True)
    )
    assert set(both) == {*language, "tower_update", "tower_gradient"}
    # 128 episodes of 5 turns, 16 at a time; each of 4 minibatches sees all, differentiates its own.
    assert {name: one.calls for name, one in both.items() if "tower" in name} == {
        "tower": 40, "tower_update": 160, "tower_gradient": 40,
    }  # fmt: skip
    bytes_of = shapes.bytes_per_chip
    pairs = 2 * (4 * (8 + 8) + 3 * (8 + 5)) * 2  # of two layers: four of 8 x 8, three of 8 x 5
    assert bytes_of(both["tower_gradient"].arguments) - bytes_of(language["tower"].arguments) == (
        4 * pairs
    )
    table, embeds = 32768 * (4 * 2 + 4 * 4), 32768 * 4 * 4
    # Resident: three more tables, the adapters and their two moments.
    more = bytes_of(both["update"].resident) - bytes_of(language["update"].resident)
    assert more == 3 * table + 3 * 4 * pairs
    more = bytes_of(both["update"].arguments) - bytes_of(language["update"].arguments)
    # The base model's table as well, and the trained embeddings with their gradient.
    assert more == table + 2 * embeds
    for one in both.values():
        assert one.lower().out_info is not None


def test_an_adapted_run_holds_its_base_model_throughout():
    config = sokoban_with({"model.lora.rank": 2, "model.dtype": "bfloat16"})
    base = 2 * Work(shapes.model_shape(config)).parameters
    for name, one in plan(config).items():
        # The cast at the start creates the base model, so it comes earlier.
        both = shapes.bytes_per_chip(one.resident) + shapes.bytes_per_chip(one.arguments)
        assert both > base or name == "resharding", name


def test_only_a_dense_index_is_kept_on_the_devices():
    config = search_qa.get_config("llm")
    run = SimpleNamespace(config=config, sampling_mesh=None)
    assert residing.residents(run) == {}
    config.env.options.update(retriever="dense", index="nowhere")
    with pytest.raises(ValueError, match="config.env.options of 'search_qa': nowhere holds no den"):
        residing.residents(run)


@pytest.mark.slow
def test_wiki_18_compiles_for_a_pod():
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "preflight" / "wiki_search_script.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] and 1.85 < found["matrix_gib"] < found["peak_gib"] < 1.95


def test_statistics_of_a_policy_with_adapters():
    plain, adapted = (
        plan(**{"model.lora.rank": rank, "filter.metric": "entropy"})["statistics"]
        for rank in (0, 2)
    )
    bytes_of = shapes.bytes_per_chip
    assert 1 < bytes_of(adapted.arguments) / bytes_of(plain.arguments) < 1.1
    assert adapted.lower().out_info is not None


@pytest.mark.parametrize("environment", [sokoban, countdown])
@pytest.mark.parametrize("size", ["0.5B", "1.5B", "3B"])
def test_the_diagnosis_takes_a_small_part_of_a_language_models_step(environment, size):
    """On one chip: sampling, whose weights are read once for all rows, is then shortest."""
    config, devices = environment.get_config("llm"), jax.devices()[:1]
    config.model.path, config.model.dtype = f"Qwen/Qwen2.5-{size}", "bfloat16"
    found = programs.programs(
        load_config(config, devices=devices),
        devices,
        [d.programs for d in DIAGNOSTICS.values() if d.programs],
        prompt_tokens=800,
        observation_tokens=200,
    )
    seconds = [p.calls * p.cost.seconds(CHIPS["v5e"]) for p in found]
    diagnosis = [s for s, p in zip(seconds, found, strict=True) if p.diagnosis]
    assert 0.02 < sum(diagnosis) / sum(seconds) < 0.15


# ------------------------------------------------------------------------------ command


def result(name="update", peak=10.0, fits=True, calls=2):
    program = programs.Program(
        name=name,
        lower=None,
        arguments=(),
        resident=None,
        cost=Cost(flops=500.0, bytes=10.0),
        calls=calls,
        helps=("optimizer.micro_batch",),
    )
    return compiling.CompileResult(program, 1.0, peak, 2.0, 5.0, fits)


def test_report():
    found = report([result(), result("decode", 20.0, False, calls=3)], CHIP, devices=4)
    assert json.loads(json.dumps(found)) == {
        "programs": [
            {
                "name": name,
                "compile_s": 1.0,
                "peak_hbm_gib": peak,
                "hbm_gib": 16.0,
                "fits": fits,
                "flops": 2000.0,
                "bytes": 10.0,
                "roofline_s": 5.0,
            }
            for name, peak, fits in (("update", 10.0, True), ("decode", 20.0, False))
        ],
        "step_s": 25.0,
        "diagnosis_share": 0.0,
        "fits": False,
    }
    assert "25.0 s, 0% of it" in table([result()] * 2, CHIP, found)
    score = result("score", calls=3)
    score = dataclasses.replace(score, program=dataclasses.replace(score.program, diagnosis=True))
    assert report([result(), score], CHIP, devices=4)["diagnosis_share"] == 0.6


def test_complaints_name_the_excess_and_what_helps():
    lines = list(complaints([result(), result("score", 20.5, False)], CHIP))
    assert len(lines) == 1
    assert "score does not fit: 20.50 GiB, 4.50 GiB more than" in lines[0]
    assert "optimizer.micro_batch" in lines[0]


def test_out_of_memory_is_a_result(monkeypatch):
    text = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (16.74G) exceeds available HBM (15.75G). HLO module: jit_f."
    )

    def lower():
        raise jax.errors.JaxRuntimeError(text)

    program = dataclasses.replace(result().program, lower=lower)
    found = compiling.compile_program(program, CHIPS["v5e"])
    assert found.peak_gib == pytest.approx(16.74) and not found.fits
    text = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compiling.compile_program(program, CHIPS["v5e"])


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_what_the_compiler_refuses_is_as_large_as_it_is():
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "preflight" / "refused_program_script.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["19.0", "2.0", "False"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_the_kernel_for_pages_compiles_without_copies_of_them():
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "preflight" / "page_kernel_script.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for plain, kernel in (rows[:2], rows[2:]):
        assert plain["calls"] == 0 < kernel["calls"]
        assert kernel["peak_hbm_gib"] < plain["peak_hbm_gib"] + 0.1
        assert kernel["bytes_per_token"] < 0.8 * plain["bytes_per_token"]


def test_topologies(monkeypatch):
    for name in ("v5litepod-16", "v9:2x2", "v5e:big", "v5e"):
        with pytest.raises(ValueError, match="v5e:.1x1,2x2.*tpu7x"):
            compiling.find_topology(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install ragen_jax\[tpu\]"):
        compiling.find_topology("v5e:2x2")


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "ragen_jax.preflight", *args], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "argument, named",
    [
        ("--topology=v9:2x2", "tpu7x"),
        ("--config.model.path=Qwen/Qwen9-1B", "llama-3.1-8b"),
    ],
)
def test_bad_input_is_one_line(argument, named):
    found = command(argument)
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1
    assert named in found.stderr


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_command():
    args = ("--topology=v5e:2x2", "--config.mesh.fsdp=-1", "--config.mesh.data=1")
    args += ("--config.model.dtype=bfloat16", "--prompt_tokens=48")
    found = command("--json", *args)
    assert found.returncode == 0, found.stderr
    shown = json.loads(found.stdout)  # one object and nothing else
    assert set(shown) == {"programs", "step_s", "fits"} and shown["fits"]
    names = [program["name"] for program in shown["programs"]]
    assert names == [
        "prefill",
        "prefill_rows",
        "decode",
        "score_prompts",
        "score",
        "score_flow",
        "update",
        "apply",
        "resharding",
    ]
    for program in shown["programs"]:
        assert 0 < program["peak_hbm_gib"] < program["hbm_gib"] == 15.75
        assert program["compile_s"] > 0 and program["roofline_s"] > 0
    assert found.stderr == ""

    # 1,024 rows of the whole context at once do not fit; the message suggests a setting.
    args += ("--config.optimizer.micro_batch=512", "--config.rollout.groups=64")
    args += ("--config.rollout.max_new_tokens=4000", "--config.diagnose.every=0")
    found = command(*args)
    assert found.returncode == 1
    assert "does not fit" in found.stderr and "optimizer.micro_batch" in found.stderr
