"""build_*.py: which config values reach which object, and the messages that refuse a config."""

import dataclasses
import types

import jax
import layer_kinds
import numpy as np
import pytest
from ml_collections import ConfigDict

from ragen_jax.config import build_environment, build_learner, build_model
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs import countdown, mixture, sokoban
from ragen_jax.configs.base import Config
from ragen_jax.core.domains import freeze
from ragen_jax.core.sharding import MESH_AXES, make_mesh
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.shape import DeltaHeads, Experts
from ragen_jax.model.tiny_kinds import KINDS
from ragen_jax.rollout.episode import Budgets, Sampling

pytestmark = pytest.mark.fast


def configured(config=None, **fields):
    """The frozen config of base.py (or another) with fields replaced; write a.b as a__b."""
    if config is None:
        config = Config()
    elif isinstance(config, ConfigDict):
        config = freeze(Config, config)
    for name, value in fields.items():
        config = replaced(config, name.split("__"), value)
    return config


def replaced(section, names, value):
    first, *others = names
    if others:
        value = replaced(getattr(section, first), others, value)
    return dataclasses.replace(section, **{first: value})


def refusal(function, *arguments):
    with pytest.raises(ValueError) as error:
        function(*arguments)
    return str(error.value)


# ------------------------------------------------------------------------------ settings


def test_settings_come_from_the_fields_of_their_names():
    """Every number differs from the default and from the others, so a swap would show."""
    config = configured(
        rollout__temperature=0.7,
        rollout__max_new_tokens=60,
        env__max_turns=4,
        env__max_actions=9,
        env__context="window",
        env__window=3,
        env__format_penalty=-0.3,
        env__time_limit=2.5,
        env__workers=6,
        eval__temperature=0.4,
        eval__top_k=11,
        eval__top_p=0.8,
        eval__min_p=0.05,
        reward__overlong_buffer=13,
        critic__clip=0.6,
        algorithm__aggregation="seq-mean-token-sum",
    )
    assert build_environment.build_budgets(config) == Budgets(4, 9, 60)
    assert build_learner.build_sampling(config.rollout) == Sampling(0.7)
    assert build_learner.build_eval_sampling(config.eval) == Sampling(
        0.4, top_k=11, top_p=0.8, min_p=0.05
    )
    limits = build_environment.build_limits(config.env)
    assert (limits.time_limit, limits.workers) == (2.5, 6)
    penalties = build_learner.build_penalties(config)
    assert (penalties.format_penalty, penalties.max_length) == (-0.3, 60)
    assert penalties.overlong_buffer == 13
    value_loss = build_learner.build_value_loss(config)
    assert (value_loss.clip, value_loss.aggregation) == (0.6, "seq-mean-token-sum")
    assert value_loss.norm_length == 3 * 60  # a row has three turns


def test_the_loss_by_hand():
    config = configured(
        rollout__temperature=0.7,
        rollout__max_new_tokens=50,
        env__max_turns=4,
        env__context="single_turn",
        algorithm__objective="gspo",
        algorithm__clip_low=0.11,
        algorithm__clip_high=0.22,
        algorithm__clip_c=0.0,
        algorithm__kl_coef=0.33,
        algorithm__kl_kind="abs",
        algorithm__entropy_coef=0.44,
        algorithm__aggregation="token-mean",
    )
    loss = build_learner.build_loss(config)
    assert (loss.temperature, loss.objective, loss.clip_c) == (0.7, "gspo", None)
    assert (loss.clip_low, loss.clip_high, loss.norm_length) == (0.11, 0.22, 50)
    assert (loss.kl_coef, loss.kl_kind, loss.entropy_coef) == (0.33, "abs", 0.44)
    in_reward = build_learner.build_loss(configured(config, algorithm__kl_in="reward"))
    assert in_reward.kl_coef == 0.0  # KL is charged only once
    assert build_learner.build_loss(configured(config, algorithm__clip_c=2.0)).clip_c == 2.0


def test_credit_and_collecting_by_hand():
    config = configured(
        algorithm__name="ppo",
        algorithm__gamma=0.9,
        algorithm__lam=0.8,
        algorithm__bi_level=True,
        algorithm__turn_gamma=0.7,
    )
    credit = build_learner.build_credit(config.algorithm, config.reward)
    assert (credit.name, credit.gamma, credit.lam) == ("ppo", 0.9, 0.8)
    assert (credit.bi_level, credit.turn_gamma) == (True, 0.7)
    collecting = build_learner.build_collecting(
        configured(seed=5, rollout__groups=12, env__pool=40, collect__max_rounds=3)
    )
    assert (collecting.groups, collecting.pool, collecting.seed) == (12, 40, 5)
    assert collecting.max_rounds == 3


def test_equal_configs_share_an_optimizer():
    first, same = configured().optimizer, configured().optimizer
    assert build_learner.build_optimizer(first) == build_learner.build_optimizer(same)
    other = configured(optimizer__max_grad_norm=0.123).optimizer
    assert build_learner.build_optimizer(other) != build_learner.build_optimizer(first)


@pytest.mark.parametrize(
    "fields, needed",
    [
        ({}, False),
        ({"algorithm__kl_coef": 0.1, "algorithm__kl_in": "loss"}, False),
        ({"algorithm__kl_coef": 0.1, "algorithm__kl_in": "reward"}, True),
        ({"algorithm__kl_coef": 0.0, "algorithm__kl_in": "reward"}, False),
        ({"algorithm__mismatch_cap": 2.0}, True),
        ({"algorithm__zvp_coef": 0.1}, True),
        ({"filter__metric": "entropy"}, True),
        ({"filter__metric": "reward_variance"}, False),
    ],
)
def test_a_step_reads_its_rows_again_only_where_something_uses_it(fields, needed):
    off = dict(algorithm__kl_coef=0.0, algorithm__mismatch_cap=0.0, algorithm__zvp_coef=0.0)
    assert build_learner.needs_statistics(configured(**off | fields)) is needed


@pytest.mark.parametrize("kl_coef, rank, held", [(0.1, 0, True), (0.1, 4, False), (0, 0, False)])
def test_the_base_model_of_adapters_is_their_reference(kl_coef, rank, held):
    config = configured(algorithm__kl_coef=kl_coef, model__lora__rank=rank)
    assert build_model.has_reference(config) is held


# ------------------------------------------------------------------------------ environments


def test_names_and_options_that_no_environment_has():
    config = configured(env__name="frozen")
    assert refusal(build_environment.build_environment, config.env, "train").startswith(
        "config.env.name: unknown environment 'frozen'; known: bandit, "
    )
    config = sokoban.get_config()
    with config.unlocked():
        config.env.options.boxes = 3
    config = configured(config)
    assert refusal(build_environment.build_environment, config.env, "train") == (
        "config.env.options of 'sokoban': environment 'sokoban' has no option 'boxes'; accepted: "
        "size, num_boxes, observation, min_solution, max_solution, tile"
    )


def test_a_pool_needs_problems_that_recur(monkeypatch):
    config = configured(sokoban.get_config(), env__pool=8)
    build_environment.build_environment(config.env, "train")
    monkeypatch.setattr(build_environment, "resumable", lambda environment: False)
    assert refusal(build_environment.build_environment, config.env, "train") == (
        "config.env.pool is 8; accepted: 0, because environment 'sokoban' cannot repeat a problem"
    )


def test_text_of_an_answer_is_one_action():
    config = configured(countdown.get_config(), env__actions_per_turn=2)
    assert refusal(build_environment.build_environment, config.env, "train") == (
        "config.env.actions_per_turn is 2; accepted: 1, because in environment 'countdown' the "
        "whole answer is one action"
    )


def test_the_tiny_agent_knows_the_words_of_all_environments():
    config = configured(mixture.get_config("tiny"))
    words = build_environment.tiny_words(config)
    alone = [
        set(build_environment.build_environment(c.env, "train").words)
        for c in per_task_configs(config).values()
    ]
    assert len(alone) > 1 and set(words) == set.union(*alone)
    assert len(words) == len(set(words))


def test_an_environment_without_a_solver_has_no_tiny_agent(monkeypatch):
    config = configured(sokoban.get_config())
    plain = types.SimpleNamespace(words=("a",))
    monkeypatch.setattr(build_environment, "build_environment", lambda config, split: plain)
    assert refusal(build_environment.tiny_words, config) == (
        "config.model.path is 'tiny', an agent that imitates a solver, but environment 'sokoban' "
        "has no solve, explain (envs/types.py, SolvableEnvironment); implement them, or train a "
        "language model: preset llm and --config.model.path=DIR_OR_HUB_ID"
    )


# ------------------------------------------------------------------------------ model


def test_the_shape_of_the_tiny_agent():
    config = configured(
        sokoban.get_config(),
        warmstart__width=48,
        warmstart__layers=3,
        warmstart__heads=4,
        warmstart__kv_heads=2,
        warmstart__mlp_width=80,
    )
    tokenizer = build_environment.tiny_tokenizer(config)
    shape = build_model.tiny_shape(config, tokenizer)
    assert (shape.vocab_size, shape.width, shape.layers) == (len(tokenizer), 48, 3)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.mlp_width) == (4, 2, 12, 80)
    assert shape.vision is None


def test_the_shape_of_a_tower():
    config = configured(
        sokoban.get_config(),
        warmstart__width=64,
        warmstart__heads=4,
        warmstart__tower_layers=2,
        warmstart__tower_width=48,
    )
    tokenizer = build_environment.tiny_tokenizer(config)
    shape = build_model.tiny_shape(config, tokenizer)
    assert shape.vision is not None and shape.image_tokens is not None
    assert (shape.vision.depth, shape.vision.hidden_size) == (2, 48)
    assert shape.vision.out_hidden_size == 64 and shape.vision.fullatt_block_indexes == (1,)
    assert sum(shape.mrope_section) == 64 // 4 // 2  # the rotary frequencies of a head
    tokens = shape.image_tokens
    ids = [tokens.start, tokens.pad, tokens.end]
    assert len(set(ids)) == 3 and max(ids) < len(tokenizer)
    narrow = configured(config, warmstart__tower_width=40)
    assert refusal(build_model.tiny_shape, narrow, tokenizer) == (
        "config.warmstart.tower_width is 40; it must be a multiple of 16 (4 heads)"
    )
    mixed = configured(config, warmstart__kind="experts")
    assert refusal(build_model.tiny_shape, mixed, tokenizer) == (
        "config.warmstart.kind is 'experts', but a tiny agent with a vision tower "
        "(warmstart.tower_layers=2) has dense layers; set it to dense"
    )


def test_the_kinds_of_layers_of_the_tiny_agent():
    config = configured(sokoban.get_config(), warmstart__layers=3, warmstart__mlp_width=80)
    tokenizer = build_environment.tiny_tokenizer(config)
    dense, windowed, experts, hybrid = (
        build_model.tiny_shape(configured(config, warmstart__kind=kind), tokenizer)
        for kind in KINDS
    )
    assert dense.kinds == () and dense.family == "qwen2"
    assert [layer.attention for layer in windowed.kinds] == ["windowed", "full", "windowed"]
    assert windowed.window == 32 and windowed.norm_plus_one
    assert {layer.mlp for layer in experts.kinds} == {"experts"}
    assert experts.experts == Experts(count=8, chosen=2, width=40)
    assert [layer.attention for layer in hybrid.kinds] == ["linear", "full", "linear"]
    assert hybrid.delta == DeltaHeads(4, 4, 24, 24) and hybrid.output_gate
    short = configured(config, warmstart__layers=1, warmstart__kind="hybrid")
    assert "config.warmstart.layers is 1" in refusal(build_model.tiny_shape, short, tokenizer)


def test_what_a_model_with_a_state_does_not_support_is_refused():
    shape = ModelConfig(40, 24, 8, 4, 2, 8, 20, **layer_kinds.hybrid(8))
    config = configured(diagnose__probe_mediation=True)
    why = "config.diagnose.probe_mediation is True, but layer 0 of the model is a linear"
    assert refusal(build_model.check_layers, config, shape).startswith(why)
    build_model.check_layers(config, SHAPE)


SHAPE = ModelConfig(vocab_size=8, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, mlp_width=8)


class Device:
    """A device for building a mesh; nothing runs on it."""

    def __init__(self, number, process=0, platform="tpu", memories=("device",)):
        self.id, self.process_index, self.platform = number, process, platform
        self.device_kind = f"fake {platform}"
        self.memories = memories

    def addressable_memories(self):
        return [types.SimpleNamespace(kind=kind) for kind in self.memories]


def test_kernels_are_those_of_the_platform():
    def built(platform, attention, head_dim=8, dtype="float32"):
        mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=[Device(0, platform=platform)])
        config = configured(model__attention=attention, model__dtype=dtype)
        shape = ModelConfig(**vars(SHAPE) | dict(head_dim=head_dim))
        return build_model.build_model(config.model, shape, mesh).config.attention

    assert built("cpu", "auto") == "xla"
    assert built("tpu", "auto", head_dim=64) == "splash" and built("tpu", "auto") == "xla"
    assert built("tpu", "xla", head_dim=64) == "xla"
    assert built("gpu", "cudnn", dtype="bfloat16") == "cudnn"
    assert refusal(built, "cpu", "splash") == (
        "config.model.attention is 'splash', which does not run on cpu with float32 and head size "
        "8; accepted: auto, xla"
    )
    assert refusal(built, "tpu", "cudnn", 64).endswith(" head size 64; accepted: auto, xla, splash")


def test_the_model_keeps_its_shape_and_takes_its_type_from_the_config():
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    config = configured(model__dtype="bfloat16", model__remat=False)
    found = build_model.build_model(config.model, SHAPE, mesh).config
    assert (found.dtype, found.remat, found.width) == ("bfloat16", False, 8)


# ------------------------------------------------------------------------------ meshes


def meshes(fields, devices):
    training, sampling = build_model.build_meshes(configured(**fields), devices)
    ids = [[device.id for device in mesh.devices.flat] for mesh in (training, sampling)]
    return dict(training.shape), dict(sampling.shape), *ids


ROWS = dict(mesh__data=2, mesh__fsdp=2, mesh__tensor=1, optimizer__micro_batch=8)
FOUR, EIGHT = [Device(i) for i in range(4)], [Device(i) for i in range(8)]


def sizes(*values):
    return dict(zip(MESH_AXES, values, strict=True))


def test_training_and_sampling_share_devices_or_split_them():
    shared = meshes(ROWS, FOUR)
    assert shared == (sizes(2, 2, 1), sizes(2, 2, 1), [0, 1, 2, 3], [0, 1, 2, 3])
    apart = meshes(ROWS | {"sampling_mesh__devices": 4}, EIGHT)
    assert apart == (sizes(2, 2, 1), sizes(2, 2, 1), [0, 1, 2, 3], [4, 5, 6, 7])
    own = dict(sampling_mesh__data=1, sampling_mesh__fsdp=1, sampling_mesh__tensor=-1)
    assert meshes(ROWS | own, FOUR)[1] == sizes(1, 1, 4)
    found = meshes(ROWS | own | {"sampling_mesh__devices": 4}, EIGHT)
    assert found[1] == sizes(1, 1, 4) and found[3] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "fields, devices, line",
    [
        (
            {"optimizer__micro_batch": 6},
            FOUR,
            "config.optimizer.micro_batch is 6; it must be a multiple of mesh.data x mesh.fsdp = 4",
        ),
        (
            {"sampling_mesh__devices": 4},
            FOUR,
            "config.sampling_mesh.devices is 4, but at least one of 4 device(s) must train; use at "
            "most 3",
        ),
        (
            dict(sampling_mesh__data=3, sampling_mesh__fsdp=1, sampling_mesh__tensor=1),
            FOUR,
            "config.sampling_mesh.data=3, mesh.fsdp=1, mesh.tensor=1 does not fit 4 device(s)",
        ),
        (
            {"rollout__ahead": 1},
            FOUR,
            "config.rollout.ahead is 1, but training and sampling share 4 devices, where two "
            "concurrent programs can deadlock; set sampling_mesh.devices, for example to 2, or "
            "rollout.ahead=0",
        ),
        (
            {"rollout__ahead": 1},
            [Device(i, process=i // 2) for i in range(4)],
            "config.rollout.ahead is 1, but training and sampling share 4 devices, where two "
            "concurrent programs can deadlock; set sampling_mesh.devices, for example to 2, or "
            "rollout.ahead=0",
        ),
        (
            {"sampling_mesh__devices": 3},
            [Device(i, process=i // 4) for i in range(8)],
            "config.sampling_mesh.devices is 3, but each of 2 processes gives the same number of "
            "devices; use a multiple of 2",
        ),
        (
            {"algorithm__kl_coef": 0.1, "algorithm__kl_memory": "host"},
            FOUR,
            "config.algorithm.kl_memory is 'host', but fake tpu has no pinned host memory, only "
            "device; set algorithm.kl_memory=device",
        ),
    ],
    ids=["rows", "none left", "sampling", "ahead", "ahead of two", "apart of two", "host"],
)
def test_meshes_that_no_run_can_use(fields, devices, line):
    assert refusal(meshes, ROWS | fields, devices) == line


def test_a_reference_in_host_memory_where_there_is_one():
    fields = {"algorithm__kl_coef": 0.1, "algorithm__kl_memory": "host"}
    devices = [Device(i, memories=("device", "pinned_host")) for i in range(4)]
    meshes(ROWS | fields, devices)
    meshes(ROWS | fields | {"model__lora__rank": 4}, FOUR)  # the base model is the KL reference
    meshes(ROWS | fields | {"algorithm__kl_coef": 0.0}, FOUR)


# ------------------------------------------------------------------------------ schedules


def test_rates_depend_on_the_number_of_the_step_alone():
    config = configured(
        steps=4,
        algorithm__name="grpo",
        optimizer__learning_rate=0.8,
        optimizer__schedule="linear",
        optimizer__warmup_updates=2,
        optimizer__minibatches=2,
        critic__warmup_steps=3,  # GRPO has no critic
    )
    found = [build_learner.step_rates(config, step)[0] for step in (1, 2, 3, 4)]
    falling = 0.8 * np.arange(6, 0, -1) / 6
    np.testing.assert_allclose(np.concatenate(found), [0.4, 0.8, *falling], rtol=1e-6)
    assert found[0].dtype == np.float32
    np.testing.assert_array_equal(build_learner.step_rates(config, 3)[0], found[2])
    constant = configured(config, optimizer__schedule="constant", optimizer__warmup_updates=0)
    assert build_learner.step_rates(constant, 1)[0].shape == (2,)  # one rate per minibatch
