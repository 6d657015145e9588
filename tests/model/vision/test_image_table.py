"""Images in episodes: their ids and tables, and agreement between sampler, trainer and
diagnostics."""

import dataclasses
import functools
import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from device_processes import on_devices

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.config.build_environment import build_chat, tiny_tokenizer
from ragen_jax.config.build_model import tiny_images, tiny_shape
from ragen_jax.configs import sokoban
from ragen_jax.diagnostics.cross_scoring import cross_score, cross_score_pairs
from ragen_jax.diagnostics.mediation import MEASURES, mediation_metrics
from ragen_jax.envs import make_env
from ragen_jax.envs.types import IMAGE, Observation, Step
from ragen_jax.model import lora
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import Qwen, init_params
from ragen_jax.model.vision import image_table as tables
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.vision.image_table import MIN_CAPACITY, NO_IMAGES, NO_VISION_TOWER, ImageTable
from ragen_jax.model.vision.images import preprocess
from ragen_jax.model.vision.positions import NO_TOKEN, next_positions, table
from ragen_jax.model.vision.tower import Tower, VisionTower
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.update.learner import through_tower
from ragen_jax.update.policy import ForwardContext

SEEDS = [2**62 + 7, 3, 2**63 - 1, 12]
BUDGETS = Budgets(max_turns=3, max_actions=6, max_new_tokens=7)


@functools.cache
def seeing(context="full", observation="image"):
    """Return an agent with random weights that plays Sokoban from pictures; its replies end
    early."""
    config = sokoban.get_config("tiny-vl")
    config.env.context = context
    config.env.options.observation = observation
    config.warmstart.update(width=32, mlp_width=48, tower_width=32)
    config.env.update(max_actions=BUDGETS.max_actions, max_turns=BUDGETS.max_turns)
    if observation != "image":
        del config.env.options.tile
    environment = make_env("sokoban", **config.env.options.to_dict(), split="train")
    tokenizer = tiny_tokenizer(config)
    shape = tiny_shape(config, tokenizer)
    params = init_params(shape, jax.random.key(0))
    params = jax.tree.map(lambda x: 2.0 * x, params)
    tower = vision.init_params(shape.vision, jax.random.key(1))
    images = ImageTable(None, shape.vocab_size, shape.image_tokens.pad)
    chat = build_chat(config, tokenizer, environment, images=images)
    more = tuple(range(10, 40))
    return types.SimpleNamespace(
        model=Qwen(shape),
        params=params,
        tower=Tower(VisionTower(shape.vision), tower, tiny_images()),
        environment=environment,
        chat=dataclasses.replace(chat, stop_ids=chat.stop_ids + more),
    )


class Drawing:
    """Sokoban in which every reply moves: each action is replaced by a random one."""

    def __init__(self, environment):
        self.environment = environment
        self.actions, self.instructions = environment.actions, environment.instructions

    def __getattr__(self, name):
        return getattr(self.environment, name)

    def step(self, state, action, rng):
        return self.environment.step(state, self.actions[int(rng.integers(4))], rng)


def play(s, images, params=None, **settings):
    """Play three members for each of SEEDS; every reply counts as two random moves."""
    environment = Drawing(s.environment)
    # Any text is a valid action: replies are not parsed.
    chat = dataclasses.replace(s.chat, actions=(), images=images)
    chat = _Moving(**{f.name: getattr(chat, f.name) for f in dataclasses.fields(chat)})
    return rollout(
        s.model,
        s.params if params is None else params,
        PlaySettings(
            chat,
            environment,
            budgets=BUDGETS,
            sampling=Sampling(temperature=1.0),
            **settings,
        ),
        SEEDS,
        [environment.reset(seed) for seed in SEEDS],
        group_size=3,
        key=jax.random.key(5),
    )


class _Moving(type(seeing().chat)):
    """A chat that parses any reply as a reasoning and one action."""

    def read(self, sampled):
        found = super().read(sampled)
        return dataclasses.replace(
            found,
            reasoning=(0, max(len(sampled) - 2, 0)),
            answer=(max(len(sampled) - 1, 0), len(sampled)),
            actions=("any",),
            valid=True,
        )


@functools.cache
def played(context="full"):
    image_table = ImageTable(seeing().tower, seeing().model.config.vocab_size)
    return image_table, play(seeing(context), image_table)


def picture(seed, height=16, width=24):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def empty_table():
    return ImageTable(seeing().tower, seeing().model.config.vocab_size)


# ------------------------------------------------------------------------------ image ids


def test_numbers_are_past_the_vocabulary_and_never_given_twice():
    image_table = empty_table()
    V = image_table.vocab_size
    image_table.register([picture(0), picture(1), picture(0)])
    assert [image_table.span(picture(i)) for i in (0, 1)] == [(V, 6), (V + 6, 6)]
    image_table.register([picture(2, 8, 8), picture(1)])
    assert image_table.span(picture(2, 8, 8)) == (V + 12, 1)
    # The same pixels in another shape are a different image.
    turned = picture(0).reshape(24, 16, 3)
    image_table.register([turned])
    assert image_table.span(turned) == (V + 13, 6)
    given = {V, V + 6, V + 12, V + 13}
    for _ in range(3):
        image_table.begin_epoch()
        image_table.register([picture(0), picture(2, 8, 8)])
        new = {image_table.span(x)[0] for x in (picture(0), picture(2, 8, 8))}
        assert not new & given
        given |= new


def test_an_image_is_remembered_for_two_pages():
    image_table = empty_table()
    image_table.register([picture(0)])
    old = image_table.span(picture(0))
    row = old[0] + np.arange(6)
    seen = image_table.table(row).embed_ID[:6]
    image_table.begin_epoch()
    image_table.register([picture(0), picture(1)])
    assert image_table.span(picture(0)) != old  # a new id
    np.testing.assert_array_equal(image_table.table(row).embed_ID[:6], seen)
    image_table.begin_epoch()
    with pytest.raises(ValueError, match="6 ids past the vocabulary .* are not registered images"):
        image_table.table(row)
    assert image_table.span(picture(1))
    image_table.begin_epoch()
    with pytest.raises(ValueError, match=r"shape \(16, 24, 3\) is not registered"):
        image_table.span(picture(1))
    assert len(image_table.without.seen) == 0


def test_a_table_has_what_the_rows_show():
    image_table, V = empty_table(), seeing().model.config.vocab_size
    pictures = [picture(0), picture(1, 8, 40), picture(2)]
    image_table.register(pictures)
    spans = [image_table.span(x) for x in pictures]
    rows = [np.array([1, 2, *(spans[2][0] + np.arange(6)), 5]), spans[1][0] + np.arange(5)]
    table = image_table.table(*rows)
    np.testing.assert_array_equal(table.token_I[:11], V + 6 + np.arange(11))
    assert (table.token_I[11:] == NO_TOKEN).all() and len(table.token_I) == MIN_CAPACITY
    np.testing.assert_array_equal(table.step_I[:11], [*[0] * 4, 5, *[0] * 5, 3])
    np.testing.assert_array_equal(table.place_I2[5:11, 0], [0, 0, 0, 1, 1, 1])
    many = [picture(10 + i) for i in range(30)]
    image_table.register(many)
    whole = np.concatenate([image_table.span(x)[0] + np.arange(6) for x in many])
    assert len(image_table.table(whole).token_I) == 256
    assert len(image_table.table(rows[0]).token_I) == 256  # the table never shrinks
    with pytest.raises(ValueError, match=f"1 ids past .*, from {V + 10**6} on"):
        image_table.table(np.array([V, V + 10**6]))


def test_an_image_looks_the_same_whoever_is_beside_it():
    """Embeddings are bit-identical: slots and lock-step rollouts see the same images."""
    alone, together = empty_table(), empty_table()
    pictures = [picture(i, 48, 48) for i in range(21)]
    together.register(pictures)
    seen = together.table(np.arange(together.vocab_size, together.next))
    for i in (0, 7, 20):
        alone.register([pictures[i]])
        first, count = alone.span(pictures[i])
        got = alone.table(first + np.arange(count)).embed_ID[:count]
        np.testing.assert_array_equal(got, seen.embed_ID[36 * i : 36 * (i + 1)])
        assert np.abs(got).max() > 0.1


def test_shift_is_what_positions_lack():
    image_table = empty_table()
    pictures = [picture(0), picture(1, 8, 40), picture(2, 8, 8)]
    image_table.register(pictures)
    a, b, c = (first + np.arange(count) for first, count in map(image_table.span, pictures))
    row = np.concatenate([[1, 2], a, [3], b, c, [4, 5], a, [6]]).astype(np.int32)
    params = {"images": image_table.table(row)}
    for size in range(len(row) + 1):
        next_values = next_positions(params, row[None], np.array([size]))
        assert size + image_table.shift(row[:size]) == next_values[0]
    assert image_table.shift(row) == (3 - 6) + 0 + 0 + (3 - 6)
    assert image_table.shift(np.zeros(0, np.int32)) == image_table.shift(np.arange(5)) == 0


# ------------------------------------------------------------------------------ episodes


@pytest.mark.parametrize("context", ["full", pytest.param("single_turn", marks=pytest.mark.long)])
def test_sampler_and_trainer_agree(context):
    """Each turn has a new picture, which is read by prefill, by extend and in training."""
    s, (image_table, episodes) = seeing(context), played(context)
    assert len(episodes) == 12 and max(len(e.turns) for e in episodes) == 3
    lengths = {len(turn.sampled) for e in episodes for turn in e.turns}
    assert min(lengths) < 4 and max(lengths) == 7
    for episode in episodes:
        for turn in episode.turns:
            assert turn.message.count(IMAGE) == len(turn.images) == len(turn.spans) == 1
            first, count = turn.spans[0]
            shown = np.flatnonzero(turn.prompt == first)
            assert len(shown) >= 1 and count == 36
            at = shown[-1]
            np.testing.assert_array_equal(turn.prompt[at : at + 36], first + np.arange(36))
    pictures = {x.tobytes() for e in episodes for t in e.turns for x in t.images}
    assert len(pictures) > len(SEEDS)  # moves change the picture
    batch = make_batch(episodes)
    params = image_table.attach(s.params, batch.tokens_BT)
    logp_BT = np.asarray(token_logps(s.model, params, batch.tokens_BT))
    assert np.isfinite(logp_BT).all()
    np.testing.assert_allclose(logp_BT * batch.mask_BT, batch.logp_BT, rtol=0, atol=1e-4)
    # Exchanged pictures would give different log-probs.
    table = params["images"]
    turned = params | {"images": table.replace(embed_ID=np.roll(table.embed_ID, 36, 0))}
    off_BT = np.asarray(token_logps(s.model, turned, batch.tokens_BT)) * batch.mask_BT
    assert np.abs(off_BT - batch.logp_BT).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("context", ["full", pytest.param("single_turn", marks=pytest.mark.long)])
def test_slots_play_the_same_episodes(context):
    s, (_, theirs) = seeing(context), played(context)
    for served in (dict(slots=5, chunk=4), dict(chunk=7)):
        ours = play(s, ImageTable(s.tower, s.model.config.vocab_size), **served)
        for a, b in zip(ours, theirs, strict=True):
            assert len(a.turns) == len(b.turns)
            for x, y in zip(a.turns, b.turns, strict=True):
                np.testing.assert_array_equal(x.sampled, y.sampled)
                np.testing.assert_allclose(x.logp, y.logp, rtol=0, atol=1e-4)
                assert [i.tobytes() for i in x.images] == [i.tobytes() for i in y.images]


@pytest.mark.slow
def test_eight_devices_play_the_same_episodes(tmp_path):
    found = []
    for count in (1, 8):
        command = [Path(__file__).with_name("image_table_script.py"), count]
        process = on_devices(count, command)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    one, eight = found
    assert one["sampled"] == eight["sampled"] and one["devices"] + 7 == eight["devices"]
    np.testing.assert_allclose(one["logp"], eight["logp"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(one["trained"], eight["trained"], rtol=0, atol=1e-4)


def test_images_need_a_model_that_sees():
    s = seeing()
    episodes = play(s, NO_IMAGES)
    assert episodes and all(episode.error.endswith(f": {NO_VISION_TOWER}") for episode in episodes)


@pytest.mark.slow
def test_an_environment_of_text_needs_no_image():
    """The same model with text observations: no table row is used, and positions are plain."""
    s = seeing("full", "grid")
    image_table = empty_table()
    with_table = play(s, image_table)
    assert image_table.next == image_table.vocab_size
    for a, b in zip(with_table, play(s, NO_IMAGES), strict=True):
        for x, y in zip(a.turns, b.turns, strict=True):
            np.testing.assert_array_equal(x.sampled, y.sampled)


class Mixed:
    """An observation of texts and two pictures of two sizes; the second picture changes every
    turn."""

    actions, instructions = (), "Look."

    def reset(self, seed):
        return seed % 1000, 0

    def render(self, state):
        seed, turn = state
        a, b = picture(seed, 16, 24), picture(seed + turn, 24, 8)
        return Observation(f"first {IMAGE} then {IMAGE}, turn {turn}", (a, b))

    def step(self, state, action, rng):
        return Step((state[0], state[1] + 1), float(state[1]), False, {"success": False})

    def identity(self, state):
        return str(state)


def test_several_pictures_of_several_sizes():
    s, image_table = seeing(), empty_table()
    own = types.SimpleNamespace(**(vars(s) | {"environment": Mixed()}))
    episodes = play(own, image_table)
    turns = [t for e in episodes for t in e.turns]
    assert {tuple(count for _, count in t.spans) for t in turns} == {(6, 3)}
    batch = make_batch(episodes)
    params = image_table.attach(s.params, batch.tokens_BT)
    logp_BT = np.asarray(token_logps(s.model, params, batch.tokens_BT))
    np.testing.assert_allclose(logp_BT * batch.mask_BT, batch.logp_BT, rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------ adapters


def random_adapters(s, seed):
    """Return adapters of language model and tower without zeros."""
    targets = ("q", "v", "o", "up", "down")
    adapters = lora.init_adapters(
        s.model.config, jax.random.key(0), rank=2, targets=targets, tower=True
    )
    leaves, tree = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        0.3 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)
    )


@pytest.mark.parametrize("slots", [0, 5])
def test_sampler_and_trainer_see_with_the_adapters_of_the_tower(slots):
    s, image_table = seeing(), empty_table()
    first, other = (lora.attach(s.params, random_adapters(s, n), scale=1.5) for n in (1, 2))
    episodes = play(s, image_table, first, slots=slots, chunk=4)
    batch = make_batch(episodes)

    def logps(params):
        seen = image_table.attach(params, batch.tokens_BT)
        assert "tower" not in seen
        return batch.mask_BT * np.asarray(token_logps(s.model, seen, batch.tokens_BT))

    np.testing.assert_allclose(logps(first), batch.logp_BT, rtol=0, atol=1e-4)
    # Embeddings are not shared with other adapters or without adapters, in any order of calls.
    blind = {name: x for name, x in first.items() if name != "tower"}
    for params in (other, blind, blind | {"tower": other["tower"]}):
        assert abs(logps(params) - batch.logp_BT).max() > 1e-2
    np.testing.assert_allclose(logps(first), batch.logp_BT, rtol=0, atol=1e-4)


def test_the_tower_s_adapters_get_the_gradient_of_the_whole(monkeypatch):
    """The gradient through embeddings, a few images at a time, equals that of one joint
    function."""
    monkeypatch.setattr(tables, "AT_A_TIME", 5)
    s, image_table = seeing(), empty_table()
    adapters, scale = random_adapters(s, 3), np.float32(1.5)
    batch = make_batch(play(s, image_table))
    tokens_BT = batch.tokens_BT
    weight_BT = np.random.default_rng(0).normal(size=tokens_BT.shape) * batch.mask_BT
    shown = image_table.images_of(tokens_BT)
    assert len(shown) > 10 and len(shown) % 5  # several batches, the last one padded
    patches = np.stack([preprocess(image.pixels, s.tower.images)[0] for image in shown])
    room = len(image_table.table(tokens_BT).token_I)

    @jax.jit
    def whole(adapters):
        tower = lora.attach(s.tower.params, adapters["tower"], scale=scale)
        embed = s.tower.model.apply({"params": tower}, patches, shown[0].grid)
        sides = [(image.first, *image_table.grid_size(image)) for image in shown]
        images = table(sides, embed.reshape(-1, embed.shape[-1]), room)
        language = lora.attach(s.params, {"layers": adapters["layers"]}, scale=scale)
        logp_BT = token_logps(s.model, language | {"images": images}, tokens_BT)
        return (weight_BT * logp_BT).sum()

    want = jax.grad(whole)(adapters)
    frozen = ForwardContext(s.params, scale)
    through = through_tower(image_table, frozen, tokens_BT)
    with_images = dataclasses.replace(frozen, images=image_table.table(tokens_BT))

    @jax.jit
    def through_embeds(read):
        params = with_images.attach(read)
        return (weight_BT * token_logps(s.model, params, tokens_BT)).sum()

    read = through.forward(adapters)
    np.testing.assert_allclose(through_embeds(read), whole(adapters), rtol=1e-5)
    got = through.backward(adapters, jax.grad(through_embeds)(read))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * abs(b).max())


# ------------------------------------------------------------------------------ diagnostics


def test_cross_scoring_sees_pictures():
    """The kernel with shared prompts agrees with the naive version; other pictures change the
    scores."""
    s, (image_table, episodes) = seeing(), played()
    turns = [e.turns[-1] for e in episodes if e.turns[-1].reasoning[1]][:6]
    prompts = [turn.prompt for turn in turns]
    said = [turn.sampled[slice(*turn.reasoning)] for turn in turns]
    params = image_table.attach(s.params, *prompts)
    want_MN, _ = cross_score_pairs(s.model, params, prompts, said, micro_batch=8)
    got_MN, _ = cross_score(s.model, params, prompts, said, micro_batch=64)
    np.testing.assert_allclose(got_MN, want_MN, rtol=0, atol=1e-4)
    assert np.ptp(got_MN, axis=1).max() > 0.01
    # A common prefix of prompts is read once; it may end within a picture.
    shared = [np.concatenate([prompts[0], np.array([i], np.int32)]) for i in (3, 4, 5)]
    want_MN, _ = cross_score_pairs(s.model, params, shared, said, micro_batch=8)
    got_MN, _ = cross_score(s.model, params, shared, said, micro_batch=64)
    np.testing.assert_allclose(got_MN, want_MN, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_mediation_sees_pictures():
    s, (image_table, episodes) = seeing(), played()
    firsts = [t.prompt for e in episodes for t in e.turns[:1]]
    params = image_table.attach(s.params, *firsts)
    found = mediation_metrics(s.model, params, episodes, filler=7, micro_batch=4)
    assert set(MEASURES) <= {name.removeprefix("mediation/") for name in found}
    assert all(np.isfinite(found[f"mediation/{name}"]) for name in MEASURES)
    table = params["images"]
    blind = params | {"images": table.replace(embed_ID=0 * table.embed_ID)}
    other = mediation_metrics(s.model, blind, episodes, filler=7, micro_batch=4)
    name = "mediation/kl_direct"
    assert abs(found[name] - other[name]) > 1e-4
