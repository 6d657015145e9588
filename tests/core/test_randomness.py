"""randomness.py: no two streams are equal, and the effect on the environments of a run."""

import dataclasses
import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy.stats import chi2

import ragen_jax
from ragen_jax.config.build_environment import build_budgets
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.check import check
from ragen_jax.configs import frozen_lake
from ragen_jax.core.randomness import Purpose, generator, key_word, philox, restarts, stream_key
from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs import engines
from ragen_jax.envs.bandit import problems as bandit_problems
from ragen_jax.envs.countdown import problems as countdown_problems
from ragen_jax.envs.dataset import env as dataset_env
from ragen_jax.envs.deepcoder import tasks as deepcoder_tasks
from ragen_jax.envs.frozen_lake import maps as lake_maps
from ragen_jax.envs.game_2048 import boards
from ragen_jax.envs.metamathqa import stories
from ragen_jax.envs.rubik import env as rubik_env
from ragen_jax.envs.search_qa import env as search_qa_env
from ragen_jax.envs.search_qa import world as search_qa_world
from ragen_jax.envs.sokoban import rooms as sokoban_rooms
from ragen_jax.envs.sudoku import problems as sudoku_problems
from ragen_jax.envs.webshop import catalogue as webshop_catalogue
from ragen_jax.model import hf
from ragen_jax.rollout.collect import collect
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.imitate import tiny_model
from ragen_jax.run.tasks import build_tasks

LARGE = (0, 1, 2**31 - 1, 2**31, 2**32 + 1, 2**53, 2**53 + 1, 2**62 + 5, 2**63, 2**64 - 1)
TAGS = (countdown_problems.TAG, lake_maps.TAG, boards.TAG, rubik_env.TAG, sokoban_rooms.TAG)
TAGS += (search_qa_env.TAG, search_qa_world.TAG, webshop_catalogue.TAG)
TAGS += (bandit_problems.TAG, sudoku_problems.TAG, engines.TAG, stories.TAG, deepcoder_tasks.TAG)
TAGS += (dataset_env.TAG,)


def state_of(bit_generator):
    state = bit_generator.state["state"]
    return *state["key"].tolist(), *state["counter"].tolist()


@pytest.mark.slow
def test_no_two_of_100_000_streams_share_a_state():
    seeds = [seed + n for seed in LARGE[:-1] for n in range(12)]
    members = range(120)  # enough even if neighbouring seeds get the same purpose twice
    words = itertools.product(seeds, members, LARGE)
    purposes = itertools.cycle([*Purpose, *TAGS])
    names = [(next(purposes), *word) for word in words]
    names += itertools.product([*Purpose, *TAGS], LARGE, (0, 1, 2**32 - 1), LARGE, LARGE[3:6])
    names = set(names)
    assert len(names) > 100_000
    assert len({state_of(philox(purpose, *word)) for purpose, *word in names}) == len(names)


def test_neighbours_with_all_bits_draw_different_numbers():
    for place in range(5):
        most = [2**64 - 2] * 5
        most[1] = 2**32 - 2
        for words in ([0] * 5, most):
            other = list(words)
            other[place] += 1
            first, second = (generator(Purpose.ENVIRONMENT, *w).random(8) for w in (words, other))
            assert not np.isin(first, second).any()
            np.testing.assert_array_equal(first, generator(Purpose.ENVIRONMENT, *words).random(8))


@pytest.mark.parametrize("used", [0, 1, 7])
def test_a_restarted_stream_is_a_new_one(used):
    words = (2**64 - 1, 2**32 - 1)
    bits = philox(Purpose.THOUGHTS, 1, 2, 3, 4, 5)
    bits.random_raw(used)
    np.random.Generator(bits).integers(10, dtype=np.uint32)  # keeps the other half of a word
    restart = restarts(bits, Purpose.ENVIRONMENT, words[0])
    restart(7)
    bits.random_raw(used)
    restart(words[1])
    new = philox(Purpose.ENVIRONMENT, *words)
    first, second = (
        np.random.Generator(x).integers(10, size=9, dtype=np.uint32) for x in (bits, new)
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(bits.random_raw(20), new.random_raw(20))
    with pytest.raises(ValueError, match="the second word of a stream must be below"):
        restart(2**32)


def test_purposes_are_distinct():
    numbers = [*Purpose, *TAGS]
    assert len(set(numbers)) == len(numbers) and max(numbers) < 2**32


@pytest.mark.parametrize(
    "words, error",
    [
        ((1.0,), TypeError),
        ((-1,), ValueError),
        ((2**64,), ValueError),
        ((0, 2**32), ValueError),
        ((0,) * 6, ValueError),
    ],
)
def test_words_that_do_not_fit_are_refused(words, error):
    with pytest.raises(error):
        philox(Purpose.POOL, *words)


def test_keys_hold_all_bits_of_a_seed():
    keys = [
        key_word(stream_key(purpose, seed, *words))
        for purpose in (Purpose.PLAY, Purpose.EVALUATE)
        for seed in LARGE
        for words in ((), (0,), (1,), (1, 0), (2**32 - 1,))
    ]
    assert len(set(keys)) == len(keys)
    assert {key >> 63 for key in keys} == {0, 1}  # the upper half of the range is used
    for seed, word in ((2**64, 0), (-1, 0), (0, 2**32)):
        with pytest.raises(ValueError):
            stream_key(Purpose.PLAY, seed, word)


def test_no_other_file_makes_a_generator_or_a_key_from_a_seed():
    root = Path(ragen_jax.__file__).parent
    made = ("np.random.Philox", "default_rng", "SeedSequence", "jax.random.key(", "PRNGKey")
    for path in (*root.rglob("*.py"), *(root.parent / "envs").rglob("*.py")):
        # jax.random.key(0) serves only to trace shapes; no number is drawn from it.
        lines = [line for line in path.read_text().splitlines() if "jax.random.key(0)" not in line]
        if path.name != "randomness.py":
            assert not [line for line in lines if any(word in line for word in made)], path


# ---- through the parts of a run -----------------------------------------------------------------


class Watched:
    """An environment that counts slips and records the streams."""

    def __init__(self, environment):
        self._environment = environment
        self.slips = self.moves = 0
        self.streams = {}  # id of a generator -> (generator, state before its first move)

    def __getattr__(self, name):
        return getattr(self._environment, name)

    def step(self, state, action, rng):
        # Keep the generators alive, so that no two have the same id.
        self.streams.setdefault(id(rng), (rng, state_of(rng.bit_generator)))
        step = self._environment.step(state, action, rng)
        self.moves += 1
        self.slips += step.info["slipped"]
        return step


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """(config, model, params, tokenizer) of an agent that has learnt to walk on FrozenLake."""
    config = frozen_lake.get_config()
    config.warmstart.update(rooms=512, success=0.0, check_every=150, check_episodes=16)
    config.warmstart.update(width=48, mlp_width=96, batch=32)
    config.rollout.update(groups=8, group_size=8)
    config.optimizer.minibatches = 1
    directory = tiny_model(config, tmp_path_factory.mktemp("cache"))
    config.model.path = str(directory)
    return config, *hf.load(directory)


@pytest.fixture
def changed(lake, tmp_path, monkeypatch):
    """changed(field=value, ...) -> `lake` with another config."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, *policy = lake

    def change(**fields):
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
        return other, *policy

    return change


def play_training(lake, steps):
    """(`Watched` environment, keys of the rollouts) of a run's steps, played as in train.py."""
    config, model, params, tokenizer = lake
    (task,) = build_tasks(config, tokenizer, hf.stop_ids(config.model.path))
    watched, keys = Watched(task.settings.environment), []
    copy = jax.tree.map(lambda x: x + 0, params)
    _, state = build_learner(config, model, copy, make_mesh(data=1, fsdp=1, tensor=1))

    def play(task, seeds_G, key):
        keys.append(np.asarray(jax.random.key_data(key)).tolist())
        return rollout(
            model,
            params,
            PlaySettings(
                task.settings.chat,
                watched,
                budgets=build_budgets(config),
                sampling=Sampling(temperature=1.0),
            ),
            seeds_G,
            [task.settings.environment.reset(seed) for seed in seeds_G],
            group_size=config.rollout.group_size,
            key=key,
        )

    for step in range(1, steps + 1):
        collected = collect(task, play, state, step)
        state = state.replace(seed_cursor={task.name: np.uint32(collected.cursor)})
    return watched, keys


def play_evaluation(lake):
    """`Watched` environment of a run's held-out problems, played twice each as in evaluate.py."""
    config, model, params, tokenizer = lake
    (task,) = build_tasks(config, tokenizer, hf.stop_ids(config.model.path))
    watched = Watched(task.heldout_environment)
    evaluate(model, params, [dataclasses.replace(task, heldout_environment=watched)], samples=2)
    return watched


def slip_p(watched, slip):
    """p-values of chi-square tests of the slip rate: for each run, and for all runs together."""
    due = np.array([one.moves for one in watched]) * slip
    found = np.array([one.slips for one in watched])
    apart = ((found - due) ** 2 / (due * (1 - slip))).sum()
    together = (found.sum() - due.sum()) ** 2 / (due.sum() * (1 - slip))
    return chi2.sf(apart, len(watched)), chi2.sf(together, 1)


def assert_slips(watched, slip):
    assert min(slip_p(watched, slip)) > 0.001
    states = [state for one in watched for _, state in one.streams.values()]
    assert len(set(states)) == len(states)


@pytest.mark.slow
def test_every_episode_slips_by_itself_at_the_rate_asked_for(changed):
    slip = dict(env__options__slip=0.1, eval__episodes=32)
    seeds = (0, 1, 2**29 - 1)
    assert_slips([play_training(changed(seed=seed, **slip), steps=2)[0] for seed in seeds], 0.1)
    seeds = (0, 2)
    assert_slips([play_evaluation(changed(eval__seed=seed, **slip)) for seed in seeds], 0.1)


@pytest.mark.slow
def test_a_pool_draws_other_noise_at_every_visit_and_none_of_a_second_environments(changed):
    small = dict(rollout__groups=4, rollout__group_size=2, eval__episodes=8)
    _, keys = play_training(changed(**small, env__pool=4), steps=3)
    both = changed(**small)
    both[0].also.second = ConfigDict(dict(groups=4, env=both[0].env))
    tasks = build_tasks(check(both[0]), both[-1], ())
    keys += [np.asarray(jax.random.key_data(task.key)).tolist() for task in tasks]
    assert len(keys) == 5 == len({tuple(key) for key in keys})


@pytest.mark.slow
def test_100_000_moves_slip_as_often_as_they_should(changed):
    played = [play_training(changed(seed=seed), steps=6)[0] for seed in range(30)]
    held_out = [play_evaluation(changed(eval__seed=s, eval__episodes=1024)) for s in range(7)]
    for watched in (played, held_out):
        moves, slips = (sum(getattr(one, name) for one in watched) for name in ("moves", "slips"))
        print(f"{moves} moves, {slips} slips, p {slip_p(watched, 0.02)}")
        assert_slips(watched, 0.02)
    assert sum(one.moves for one in played + held_out) >= 100_000
