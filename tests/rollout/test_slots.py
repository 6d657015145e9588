"""Episodes in slots: equal to turn-by-turn play, whatever episodes are served together."""

import dataclasses
import functools
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_processes import on_devices
from episode_equality import assert_same_episode
from layer_kinds import hybrid, mixture, windowed

from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.envs import ENVS
from ragen_jax.model import attention
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout import chunks, pages, slots
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.rollout.collect import collect
from ragen_jax.rollout.env_calls import Clock, Limits
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling, start_plays
from ragen_jax.rollout.expected import expected_lengths, expected_programs
from ragen_jax.rollout.play import rollout
from ragen_jax.rollout.sample import DecodeSettings
from ragen_jax.rollout.task import CollectSettings
from ragen_jax.run.stages import episodes_of

SEED = 2**31 - 2  # run seed; its problems' seeds have 63 bits
BUDGETS = Budgets(max_turns=2, max_actions=4, max_new_tokens=12)
# A window shorter than a reply, in a model that runs as a scan.
WINDOWED = (("layers", 5), ("kinds", tuple(windowed(5).items())))
MIXTURE = (("kinds", tuple(mixture(2).items())),)
HYBRID = (("layers", 4), ("kinds", tuple(hybrid(4).items())))


@functools.cache
def played_by(name, context, layers=2, kinds=(), **limits):
    """(model, params, task) of an environment; replies end after any number of tokens from 1 on.

    Args:
      kinds: items of further fields of the model's config.
    """
    environment = ENVS[name]()
    tokenizer = build_tokenizer(environment.words)
    config = ModelConfig(
        vocab_size=len(tokenizer),
        width=16,
        layers=layers,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_width=24,
        **dict(kinds),
    )
    params = jax.tree.map(lambda x: 2.0 * x, init_params(config, jax.random.key(0)))
    chat = make_chat(
        tokenizer,
        environment,
        ChatFormat(
            context=context,
            prompt="terse",
            actions_per_turn=2,
            max_actions=BUDGETS.max_actions,
            **limits,
        ),
    )
    more = tuple(range(10, 20))
    task = types.SimpleNamespace(
        name=name,
        settings=PlaySettings(
            dataclasses.replace(chat, stop_ids=chat.stop_ids + more),
            environment,
            budgets=BUDGETS,
            sampling=Sampling(temperature=1.0),
        ),
        collecting=CollectSettings(
            groups=7,
            max_rounds=1,
            pool=0,
            seed=SEED,
            explore=1.0,
            explore_least=0.01,
            allocate=False,
        ),
        key=stream_key(Purpose.PLAY, SEED, 0),
        group_size=5,
    )
    return Qwen(config), params, task


def collected(model, params, task, clock=None, group_size=None, **changes):
    """The episodes of a step."""
    settings = dataclasses.replace(task.settings, **changes)
    changed = types.SimpleNamespace(**vars(task))
    changed.settings = changed.training_settings = settings
    changed.group_size = group_size or task.group_size
    state = types.SimpleNamespace(seed_cursor={task.name: 3}, streak_P=None)
    play = episodes_of(types.SimpleNamespace(model=model), params, clock)
    return collect(changed, play, state, 1).episodes


def assert_same(model, params, task, ours, theirs):
    assert len(ours) == len(theirs) == 35
    for a, b in zip(ours, theirs, strict=True):
        assert a.group == b.group
        assert_same_episode(model, params, task.key, a, b)


@pytest.mark.parametrize(
    "name, context, limits",
    [
        ("frozen_lake", "full", ()),
        pytest.param("sokoban", "single_turn", (), marks=pytest.mark.long),
        pytest.param("countdown", "full", (), marks=pytest.mark.slow),
        pytest.param("sokoban", "window", (("window", 2),), marks=pytest.mark.slow),
        pytest.param("frozen_lake", "full", (("max_prompt", 60),), marks=pytest.mark.slow),
        pytest.param("frozen_lake", "full", WINDOWED, marks=pytest.mark.slow),
        pytest.param("frozen_lake", "full", MIXTURE, marks=pytest.mark.long),
        pytest.param("frozen_lake", "full", HYBRID, marks=pytest.mark.long),
        pytest.param("sokoban", "single_turn", HYBRID, marks=pytest.mark.slow),
        pytest.param("sokoban", "window", (*WINDOWED, ("window", 2)), marks=pytest.mark.long),
    ],
)
def test_slots_play_the_episodes_of_the_lock_step(name, context, limits):
    model, params, task = played_by(name, context, **dict(limits))
    theirs = collected(model, params, task)
    lengths = {len(turn.sampled) for episode in theirs for turn in episode.turns}
    assert min(lengths) < 4 and max(lengths) == 12  # some rows wait for others
    assert min(episode.seed for episode in theirs) > 2**62
    # All episodes at once; slots that do not divide the episodes; chunks that do not divide a
    # reply.
    for served in (dict(chunk=5), dict(slots=8, chunk=12)):
        assert_same(model, params, task, collected(model, params, task, **served), theirs)


@pytest.mark.long
@pytest.mark.parametrize(
    "served",
    [pytest.param({}, marks=pytest.mark.slow), {"slots": 20, "chunk": 5}],
    ids=["lock step", "slots"],
)
@pytest.mark.parametrize(
    "kinds",
    [(), WINDOWED, MIXTURE, HYBRID],
    ids=["full attention", "windows", "experts", "hybrid"],
)
def test_sampler_and_trainer_agree_over_five_turns(kinds, served):
    """Log-probs of sampled tokens, by the caches of sampling and by a pass over the whole row."""
    model, params, task = played_by("frozen_lake", "full", **dict(kinds))
    budgets = dataclasses.replace(BUDGETS, max_turns=5, max_actions=20)
    episodes = collected(model, params, task, budgets=budgets, **served)
    last = [one.turns[-1] for one in episodes]
    rows = [np.concatenate([turn.prompt, turn.sampled]) for turn in last]
    tokens_BT = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens_T in zip(rows, tokens_BT, strict=True):
        tokens_T[: len(row)] = row
    logp_BT = np.asarray(token_logps(model, params, tokens_BT))
    compared = 0
    for one, logp_T in zip(episodes, logp_BT, strict=True):
        for turn in one.turns:  # each prompt continues the turn before it
            at = len(turn.prompt) + np.arange(len(turn.sampled))
            np.testing.assert_allclose(turn.logp, logp_T[at], atol=1e-4)
            compared += len(at)
    assert max(len(one.turns) for one in episodes) == 5 and compared > 500


def test_truncated_sampling_is_the_same():
    model, params, task = played_by("frozen_lake", "full")
    cut = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
    theirs = collected(model, params, task, sampling=cut)
    ours = collected(model, params, task, sampling=cut, slots=16)
    for a, b in zip(ours, theirs, strict=True):
        tokens = [[t.sampled.tolist() for t in e.turns] for e in (a, b)]
        assert tokens[0] == tokens[1]


class Waiting:
    """An environment whose steps wait until the device has decoded other rows.

    A step would wait forever if the device never did. The timeout catches code in which the device
    waits for the steps.
    """

    def __init__(self, environment, gone_on):
        self.environment, self.gone_on, self.add_wait, self.late = environment, gone_on, 0, False
        self.actions, self.instructions = environment.actions, environment.instructions
        self.reset, self.render = environment.reset, environment.render

    def step(self, state, action, rng):
        went_on = self.gone_on.wait(timeout=0 if self.late else 300)
        self.add_wait, self.late = self.add_wait + went_on, not went_on
        return self.environment.step(state, action, rng)


def test_environments_step_while_the_device_decodes(monkeypatch):
    model, params, task = played_by("frozen_lake", "full")
    task = types.SimpleNamespace(**vars(task))
    chat = task.settings.chat
    # Every reply runs an action, which shows when its step is taken.
    action = task.settings.environment.actions[0]
    read = type(chat).read
    monkeypatch.setattr(
        type(chat),
        "read",
        lambda self, ids: dataclasses.replace(read(self, ids), actions=(action,)),
    )
    theirs = collected(model, params, task)
    gone_on, calls = threading.Event(), []
    decode = pages.decode_chunk

    def seen(*args, **settings):
        calls.append(int((np.asarray(args[3].budget_B) > 0).sum()))
        # the first replies have stopped, and their environment steps are running
        if len(calls) == 2:
            gone_on.set()
        return decode(*args, **settings)

    act_on = slots.act_on

    def act_on_seen(*args):
        here = threading.current_thread() is threading.main_thread()
        assert not here, "the thread that decodes waits for environments"
        act_on(*args)

    monkeypatch.setattr(pages, "decode_chunk", seen)
    monkeypatch.setattr(slots, "act_on", act_on_seen)
    waiting = Waiting(task.settings.environment, gone_on)
    limits = Limits(time_limit=600.0, workers=2)
    ours = collected(
        model, params, task, Clock(), environment=waiting, limits=limits, slots=30, chunk=3
    )
    assert_same(model, params, task, ours, theirs)
    assert calls[0] == 30 and 0 < calls[1] < 30  # without the waiting rows
    assert waiting.add_wait == sum(len(t.actions) for e in ours for t in e.turns) > 0


@pytest.mark.long
def test_a_broken_environment_ends_its_own_episode_alone():
    model, params, task = played_by("frozen_lake", "full")
    broken = min(e.seed for e in collected(model, params, task))

    class Breaks(Waiting):
        def step(self, state, action, rng):
            raise RuntimeError("no such lake")

    def reset(seed):
        if seed == broken:
            raise RuntimeError("no such lake")
        return task.settings.environment.reset(seed)

    environment = Breaks(task.settings.environment, None)
    environment.reset = reset
    theirs = collected(model, params, task, environment=environment)
    ours = collected(model, params, task, environment=environment, slots=8)
    assert_same(model, params, task, ours, theirs)
    assert [bool(e.error) for e in ours] == [bool(e.error) for e in theirs]
    assert sum("no such lake" in e.error for e in ours) >= task.group_size


@pytest.mark.long
def test_held_out_problems_take_slots_in_turn():
    model, params, task = played_by("sokoban", "single_turn")
    seeds = [SEED << 32 | n for n in range(9)]
    states = [task.settings.environment.reset(seed) for seed in seeds]

    def play(**served):
        return rollout(
            model,
            params,
            dataclasses.replace(task.settings, **served),
            seeds,
            states,
            group_size=2,
            rows=6,
            key=task.key,
        )

    theirs = play()
    for served in (dict(chunk=4), dict(slots=5)):
        ours = play(**served)
        assert [(e.group, e.member) for e in ours] == [(g, k) for g in range(9) for k in range(2)]
        for a, b in zip(ours, theirs, strict=True):
            assert_same_episode(model, params, task.key, a, b)


def play_seeds(model, params, task, numbers, *, group_size, **settings):
    """`rollout` of problems with long seeds."""
    seeds = [SEED << 32 | n for n in numbers]
    return rollout(
        model,
        params,
        dataclasses.replace(task.settings, **settings),
        seeds,
        [task.settings.environment.reset(seed) for seed in seeds],
        group_size=group_size,
        key=task.key,
    )


@pytest.mark.long
def test_other_episodes_need_no_other_programs():
    model, params, task = played_by("sokoban", "single_turn")
    programs = chunks.read, chunks.fold, chunks.decode_chunk, chunks.empty_page

    def play(first, count):
        numbers = range(first, first + count)
        play_seeds(model, params, task, numbers, group_size=1, slots=8, chunk=3)

    play(0, 11)
    before = [program._cache_size() for program in programs]
    for first, count in ((20, 24), (50, 9), (60, 17)):
        play(first, count)
    assert [program._cache_size() for program in programs] == before


@pytest.mark.long
@pytest.mark.parametrize(
    "kinds, most",
    [((), 32), pytest.param(WINDOWED, 46, marks=pytest.mark.slow), (HYBRID, 46)],
    ids=["full", "windows", "hybrid"],
)
def test_programs_are_known_before(monkeypatch, kinds, most):
    model, params, task = played_by("frozen_lake", "full", **dict(kinds))
    met = set()

    def called(name, args, settings):
        arrays = {key: settings[key] for key in ("tail", "count_R") if key in settings}
        shapes = [np.shape(x) for x in jax.tree.leaves((args, arrays))]
        static = {key: x for key, x in settings.items() if key not in arrays}
        return name, tuple(shapes), tuple(sorted(static.items()))

    def seen(name):
        function = getattr(pages, name)

        def call(*args, **settings):
            met.add(called(name, args, settings))
            return function(*args, **settings)

        return call

    served = dict(slots=96, chunk=4)
    seeds = [SEED << 32 | n for n in range(4)]
    shown = [
        task.settings.environment.render(task.settings.environment.reset(seed)) for seed in seeds
    ]
    plays = start_plays(seeds, seeds, shown, 1, task.key)
    lengths = expected_lengths(task.settings.chat, plays, BUDGETS)
    cache = dict(max_new_tokens=BUDGETS.max_new_tokens, compact=True, prompt=lengths.prompts[0])
    listed = expected_programs(
        *(model, params, pages.cache_sizes(episodes=140, **served, **cache), lengths),
        max_new_tokens=BUDGETS.max_new_tokens,
        sampling=task.settings.sampling,
        stop_ids=task.settings.chat.stop_ids,
    )
    found = {called(x.function.__name__, x.args, x.keywords) for x in listed}
    assert len(found) == len({x.name for x in listed}) == len(listed) <= most
    names = ["read", "fold", "decode_chunk", "keep_rows", "empty_page"]
    if kinds:
        names += ["empty_tail", "fold_tail"]
    for name in names:
        monkeypatch.setattr(pages, name, seen(name))
    collected(model, params, task, group_size=20, **served)
    assert {name for name, *_ in met} == set(names) and met <= found


@pytest.mark.long
def test_a_first_prompt_as_expected_sizes_the_cache_and_changes_no_episode(monkeypatch):
    model, params, task = played_by("sokoban", "single_turn")
    expected = []
    sizes = pages.cache_sizes
    monkeypatch.setattr(slots, "cache_sizes", lambda **x: expected.append(x) or sizes(**x))
    theirs = collected(model, params, task, slots=8)
    for tokens in (9, 200):  # shorter and longer than the actual news
        ours = collected(model, params, task, slots=8, first_prompt=tokens)
        assert_same(model, params, task, ours, theirs)
    assert [x["prompt"] for x in expected[1:]] == [9, 200] and 9 < expected[0]["prompt"] < 200


def sizes(slots=0, episodes=128, **changed):
    given = dict(prompt=50, chunk=0, max_new_tokens=22, compact=True)
    return pages.cache_sizes(slots=slots, episodes=episodes, **given | changed)


def test_sizes():
    chunks = ((0, 400), (0, 22), (7, 22), (99, 22))
    found = [sizes(chunk=chunk, max_new_tokens=n).chunk for chunk, n in chunks]
    assert found == [50, 22, 7, 22]
    # The first page holds the prompt, in eighths of a power of two; later pages grow by half of
    # the total.
    for prompt, lengths in {
        50: [56, 56, 56, 56, 112, 168, 224, 336, 504, 784],
        830: [896, 896, 896, 896, 1024, 1024],
        2000: [2048, 1024, 1024],
    }.items():
        assert [n for n, _ in zip(sizes(prompt=prompt).pages(), lengths, strict=False)] == lengths
    assert sizes(prompt=50, max_new_tokens=4096).first == 512
    assert [sizes(prompt=n).pieces for n in (5, 50, 830)] == [*((8,), (16, 32, 56), (56, 112, 224))]
    one = sizes(prompt=830)
    assert [one.piece(n) for n in (1, 56, 57, 224, 999)] == [56, 56, 112, 224, 224]
    # (slots, episodes) -> rows of a cache, including the smaller counts for the last episodes.
    assert [sizes(*numbers).rows for numbers in ((0, 128), (100, 300), (128, 60), (1024, 400))] == [
        (64, 128),
        (64, 100),
        (64,),
        (256, 512),
    ]
    assert sizes(128, 3, compact=False).rows == (128,)
    assert [sizes(count).at_a_time for count in (128, 40, 5)] == [16, 8, 5]


@pytest.mark.parametrize("window", [None, 4, 300])
@pytest.mark.parametrize("rows", [False, True])
def test_attention_in_blocks_is_attention(monkeypatch, rows, window):
    rng, attend = np.random.default_rng(0), functools.partial(attention.attend, window=window)
    B, T, H, K, D = 4, 5, 4, 2, 8

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    q, k, v = draw(B, T, H, D), draw(B, T, K, D), draw(B, T, K, D)
    lengths = [np.array([700, 3, 256, 0]), np.array([600, 0, 0, 0])]
    memory = [
        (draw(B, K, S, D), draw(B, K, S, D), n) for S, n in zip((700, 613), lengths, strict=True)
    ]
    order = np.array([2, 0, 3, 1]) if rows else np.arange(B)
    plain = [(sk[order], sv[order], n) for sk, sv, n in memory]
    monkeypatch.setattr(attention, "WHOLE", 10**6)
    whole = attend(q, k, v, plain)
    monkeypatch.undo()
    looked_up = [(sk, sv, n, order) for sk, sv, n in memory] if rows else memory
    found = attend(q, k, v, looked_up)
    np.testing.assert_allclose(found, whole, atol=2e-6)
    # each cached row is read by two rows
    shared = [(sk[:2], sv[:2], n[:2]) for sk, sv, n in memory]
    monkeypatch.setattr(attention, "WHOLE", 10**6)
    whole = attend(q, k, v, shared)
    monkeypatch.undo()
    np.testing.assert_allclose(attend(q, k, v, shared), whole, atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 5])  # unrolled, and as a scan
def test_no_second_cache_and_no_scores_of_all_positions(optimised, layers):
    config = ModelConfig(
        vocab_size=40,
        width=64,
        layers=layers,
        heads=8,
        kv_heads=2,
        head_dim=16,
        mlp_width=96,
    )
    model, B, R, E, positions = Qwen(config), 64, 16, 128, (512, 512, 1024)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def page(rows, size):
        make = functools.partial(chunks.empty_page, model, rows=rows, positions=size)
        return jax.eval_shape(make, params)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    held = [page(B, size) for size in positions]
    largest = sum(x.size * 4 for x in jax.tree.leaves(held[-1]))
    size = sum(x.size * 4 for x in jax.tree.leaves(held))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    heat, first = (jax.ShapeDtypeStruct((), kind) for kind in (jnp.float32, jnp.int32))
    with optimised():
        decode = chunks.decode_chunk.lower(
            *(model, params, held, chunks.DecodeBatch(*[ints(B)] * 4, keys_B=keys), heat),
            settings=DecodeSettings(max_tokens=16, stop_ids=(1,)),
        )
        fold = chunks.fold.lower(held[-1], page(R, E), first, ints(R), ints(R), ints(B))
        read = chunks.read.lower(model, params, held, ints(R), ints(R), ints(R, E))
        decode, fold, read = (x.compile().memory_analysis() for x in (decode, fold, read))
    assert fold.alias_size_in_bytes == largest
    # A scan copies a layer out of its stack.
    for found, whole in ((decode, size), (fold, largest)):
        assert found.temp_size_in_bytes < whole * (0.4 if layers > 4 else 0.2)
    assert read.temp_size_in_bytes - size / layers * (layers > 4) < (
        0.6 * 4 * R * config.heads * E * sum(positions)
    )


@pytest.mark.slow
def test_on_1_2_4_and_8_devices():
    process = on_devices(8, ["tests/rollout/slots_on_mesh_script.py"])
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-3000:]
    meshes = ["1,1,1", "2,1,1", "2,2,1", "4,2,1", "2,1,2"]
    others = ["windowed:2,1,2", "hybrid:2,1,2", "experts:2,1,2", "experts:2,1,2,2"]
    assert out.split() == [*(f"full:{mesh}" for mesh in meshes), *others]
