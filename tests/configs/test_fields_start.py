"""Fields that a run reads before its first step: the model, the warm start, the meshes."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from device_processes import on_devices
from field_entries import Entry, check_entry, configured, once
from ml_collections import ConfigDict

from ragen_jax.config.build_environment import build_chat, build_environment, tiny_words
from ragen_jax.config.build_model import build_model
from ragen_jax.configs import sokoban
from ragen_jax.model import hf
from ragen_jax.model.families import SHAPES
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.run import imitate
from ragen_jax.run.load import load_policy

pytestmark = pytest.mark.long

# ---- meshes -------------------------------------------------------------------------------------


def on_mesh(**shares):
    """Claim that each of eight devices holds these fractions of the rows and parameters."""
    return lambda _, o: {name: o[name.replace("_", " ")] for name in shares} == shares


ROWS = {"optimizer.micro_batch": 8}
REST = ROWS | {"mesh.data": 2, "mesh.tensor": -1}
APART = ROWS | {"sampling_mesh.fsdp": 1, "sampling_mesh.tensor": 1, "sampling_mesh.data": -1}

MESHES = {
    "mesh.data": Entry(4, on_mesh(rows=1 / 4, heads=1 / 2, played_rows=1 / 4), REST),
    "mesh.fsdp": Entry(4, on_mesh(rows=1 / 8, heads=1 / 4, played_heads=1 / 4), ROWS),
    "mesh.tensor": Entry(2, on_mesh(rows=1 / 4, heads=1 / 2, played_heads=1 / 2), ROWS),
    "mesh.expert": Entry(
        4, on_mesh(rows=1 / 8, heads=1, experts=1 / 4, played_experts=1 / 4), ROWS
    ),
    "sampling_mesh.data": Entry(
        4,
        on_mesh(rows=1 / 8, heads=1, played_rows=1 / 4, played_heads=1 / 2),
        APART | {"sampling_mesh.data": 2, "sampling_mesh.tensor": -1},
    ),
    "sampling_mesh.fsdp": Entry(4, on_mesh(heads=1, played_rows=1 / 8, played_heads=1 / 4), APART),
    "sampling_mesh.expert": Entry(
        4, on_mesh(experts=1, played_rows=1 / 8, played_experts=1 / 4), APART
    ),
    "sampling_mesh.devices": Entry(
        4, on_mesh(rows=1 / 4, heads=1, played_rows=1 / 4, played_heads=1), ROWS
    ),
    "sampling_mesh.tensor": Entry(
        2, on_mesh(heads=1, played_rows=1 / 4, played_heads=1 / 2), APART
    ),
}


@pytest.fixture(scope="module")
def laid_out():
    """config -> fractions, for all configs of MESHES; a single process computes them."""
    asked = {}
    for name, entry in MESHES.items():
        for fields in (entry.settings, entry.settings | {name: entry.changed}):
            asked[configured(fields).to_json()] = fields
    process = on_devices(
        8, ["tests/configs/fields_on_mesh_script.py", json.dumps([*asked.values()])]
    )
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    shares = dict(zip(asked, json.loads(out.splitlines()[-1]), strict=True))
    return lambda config, given: shares[config.to_json()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_mesh(name, laid_out):
    check_entry(name, MESHES[name], laid_out)


# ---- model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(agent, tmp_path_factory):
    """The model that a run loads, and its output for a row of tokens."""

    @once
    def stage(config, given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
            model, params, _, tasks = load_policy(config, None)
        tokens_BT = np.arange(16, dtype=np.int32)[None]
        hidden, _ = model.apply({"params": params}, tokens_BT)

        def loss(params):
            return token_logps(model, params, tokens_BT).sum()

        return types.SimpleNamespace(
            shape=model.config,
            dtype=hidden.dtype,
            held={x.dtype.name for x in jax.tree.leaves(params)},
            gradient=str(jax.make_jaxpr(jax.grad(loss))(params)),
            logp=float(loss(params)),
        )

    return stage


MODEL = {
    "model.dtype": Entry(
        "bfloat16",
        lambda a, b: (
            b.dtype == jnp.bfloat16
            and b.held == {"float32"}
            and 1e-6 < abs(a.logp - b.logp) < 0.05 * abs(a.logp)
        ),
    ),
    "model.remat": Entry(
        True,
        lambda a, b: (
            b.gradient.count("remat") > a.gradient.count("remat") and abs(a.logp - b.logp) < 1e-4
        ),
    ),
}


@pytest.fixture(scope="module")
def start(agent):
    return lambda: configured(
        {"model.path": str(agent.directory), "eval.episodes": 4},
        agent.config.copy_and_resolve_references,
    )


@pytest.mark.parametrize("name", MODEL)
def test_model(name, loaded, start):
    check_entry(name, MODEL[name], loaded, start)


def kernel_on_a_gpu(config, given):
    """The attention kernel of a model on a mesh of GPUs, of which shape and platform are read."""
    mesh = types.SimpleNamespace(
        devices=np.array([types.SimpleNamespace(platform="gpu")]), shape={}
    )
    return build_model(config.model, SHAPES["qwen2.5-0.5b"], mesh).config.attention


def opening_of_a_prompt(config, directory):
    """The text that a directory's chat template writes before a message."""
    environment = build_environment(config.env, "train")
    chat = build_chat(config, hf.load_tokenizer(directory), environment)
    return chat.text(chat.template.begin("x"))


def test_model_date(dated_model):
    """When the field is open, this test uses a fixed day; the commands fill in today's."""
    entry = Entry(
        "2026-11-25",
        lambda a, b: a.startswith("Today Date: 26 Jul") and b == a.replace("26 Jul 2024", DAY),
        {"model.path": str(dated_model), "env.prompt": "full"},
        given=dated_model,
    )
    check_entry("model.date", entry, opening_of_a_prompt)


DAY = "25 Nov 2026"
ATTENTION = {
    "model.attention": Entry(
        "xla", lambda a, b: (a, b) == ("cudnn", "xla"), {"model.dtype": "bfloat16"}
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    check_entry(name, ATTENTION[name], kernel_on_a_gpu)


def test_model_path(loaded, start, language_model):
    entry = Entry(
        str(language_model),
        lambda a, b: (a.shape.width, b.shape.width) == (96, 16),
        {"env.prompt": "full"},
    )
    check_entry("model.path", entry, loaded, start)


# ---- warm start ---------------------------------------------------------------------------------


def tiny():
    """An agent that barely starts to learn."""
    return configured(
        {
            **{"warmstart.width": 16, "warmstart.layers": 1, "warmstart.heads": 2},
            **{"warmstart.mlp_width": 24, "warmstart.rooms": 12, "warmstart.batch": 4},
            **{"warmstart.success": 0.0, "warmstart.check_every": 2, "warmstart.max_updates": 4},
            **{"warmstart.check_episodes": 3, "env.max_turns": 2},
        },
        sokoban.get_config,
    )


@pytest.fixture(scope="module")
def imitated(tmp_path_factory):
    """A warm start: its demonstrations, the distance moved, and the episodes that check it."""

    @once
    def stage(config, given):
        shapes, held, batches, checked, episodes, refused = [], [], [], [], [], ""
        make_batch, play = imitate.make_batch, imitate.rollout
        step = imitate._imitation_step

        def make_batch_seen(found):
            episodes.extend(found)
            return make_batch(episodes)

        def step_seen(model, vision_tower, optimizer, trained, opt_state, tokens_BT, *others):
            shapes.append(model.config)
            held.append(jax.device_get(trained["model"]))
            batches.append(tokens_BT)
            return step(model, vision_tower, optimizer, trained, opt_state, tokens_BT, *others)

        def play_seen(model, params, settings, seeds, states, **others):
            checked.append(len(seeds))
            held.append(jax.device_get(params))
            return play(model, params, settings, seeds, states, **others)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(imitate, "make_batch", make_batch_seen)
            patch.setattr(imitate, "_imitation_step", step_seen)
            patch.setattr(imitate, "rollout", play_seen)
            try:
                imitate.imitate(config, tmp_path_factory.getbasetemp() / "imitated")
            except ValueError as error:
                refused = str(error)
        tokenizer = build_tokenizer(tiny_words(config))
        replies = [tokenizer.decode(turn.sampled) for e in episodes for turn in e.turns]
        return types.SimpleNamespace(
            shape=shapes[0],
            first=held[0]["embed"],
            moved=float(optax.tree.norm(jax.tree.map(np.subtract, held[-1], held[0]))),
            batches=batches,
            checked=checked,  # problems of each check
            problems=len(episodes),
            plans=[
                len(reply.split("</think>")[0].split("plan")[1].split())
                for reply in replies
                if reply.startswith("player")
            ],
            replies=replies,
            refused=refused,
        )

    return stage


SHAPE = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 40}
SHAPE |= {"rooms": 24, "plan_moves": 1, "batch": 6, "check_every": 1, "check_episodes": 5}
OTHER = {f"warmstart.{name}": value for name, value in SHAPE.items()}
LONGER = {"warmstart.success": 0.9, "warmstart.seed": 5}


def of_shape(name):
    return lambda _, o: getattr(o.shape, name) == SHAPE[name]


CLAIMS = {name: of_shape(name) for name in ("width", "layers", "heads", "kv_heads", "mlp_width")}
CLAIMS |= {
    "rooms": lambda _, o: o.problems == 24,
    "plan_moves": lambda _, o: max(o.plans) == 1,
    "batch": lambda _, o: {len(rows) for rows in o.batches} == {6},
    "check_every": lambda _, o: (len(o.batches), len(o.checked)) == (1, 1),
    "check_episodes": lambda _, o: o.checked == [5],
}

EYES = {"warmstart.tower_layers": 1, "warmstart.tower_width": 16}
EYES |= {"env.options.observation": "image", "env.options.tile": 8}

WARMSTART = {
    f"warmstart.{name}": Entry(SHAPE[name], claim, along=OTHER) for name, claim in CLAIMS.items()
}
WARMSTART |= {
    "warmstart.seed": Entry(
        5,
        lambda a, b: (
            not np.array_equal(a.first, b.first) and not np.array_equal(a.batches[0], b.batches[0])
        ),
        along=LONGER,
    ),
    "warmstart.kind": Entry("experts", lambda _, o: o.shape.experts is not None),
    "warmstart.tower_layers": Entry(
        2, lambda _, o: o.shape.vision is not None and o.shape.vision.depth == 2, along=EYES
    ),
    "warmstart.tower_width": Entry(
        32, lambda _, o: o.shape.vision is not None and o.shape.vision.hidden_size == 32, along=EYES
    ),
    "warmstart.learning_rate": Entry(
        9e-3, lambda a, b: abs(b.moved / a.moved - 3) < 1e-3 and np.array_equal(a.first, b.first)
    ),
    "warmstart.styles": Entry(
        ConfigDict(dict(grounded=0.5, silent=0.5)),
        lambda _, o: sum(r.startswith("</think>") for r in o.replies) == len(o.replies) / 2,
    ),
    # An agent trained for two updates is never right.
    "warmstart.success": Entry(
        0.9,
        lambda a, b: len(a.checked) == 1 and "not warmstart.success=0.9" in b.refused,
        along=LONGER,
    ),
    "warmstart.max_updates": Entry(
        6, lambda _, o: len(o.batches) == 6 and "in 6 updates" in o.refused, LONGER
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WARMSTART)
def test_warmstart(name, imitated):
    check_entry(name, WARMSTART[name], imitated, tiny)
