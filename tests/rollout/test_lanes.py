"""lanes.py: parts of a batch that are sampled at the same time."""

import functools
import gc
import threading
import weakref

import jax
import pytest
from episode_equality import assert_same_episode

from ragen_jax.core.sharding import make_mesh
from ragen_jax.rollout import lanes, play, sample
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.rollout.lanes import Job, lane_count, take_turns
from ragen_jax.rollout.play import rollout

KEY = jax.random.key(3)
WAIT = 20.0  # seconds after which a test that waits fails


@pytest.fixture(autouse=True)
def no_job_before(monkeypatch):
    monkeypatch.setattr(lanes, "_run_before", set())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("most", "groups", "group_size", "expected"),
    [
        (1, 8, 16, 1),
        (2, 8, 16, 2),
        (16, 8, 16, 2),  # a lane has at least 64 rows
        (2, 7, 32, 1),  # whole groups, the same number in every lane
        (4, 6, 64, 3),
        (8, 128, 1, 2),
        (2, 1, 128, 1),
        (2, 4, 16, 1),
        (2, 0, 16, 1),
    ],
)
def test_number_of_lanes(most, groups, group_size, expected):
    assert lane_count(most, groups, group_size) == expected


@pytest.mark.fast
@pytest.mark.parametrize(("name", "found"), [("row_shards", (2, [0, 1])), ("process_count", 2)])
def test_rows_on_several_devices_are_one_lane(monkeypatch, name, found):
    monkeypatch.setattr(lanes, name, lambda: found)
    assert lane_count(2, 8, 16) == 1


@pytest.mark.fast
def test_jobs_run_side_by_side_and_all_else_in_turns():
    both, here = threading.Barrier(2), threading.get_ident()
    mesh, seen = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]), []

    def lane(number, turns):
        for turn in range(turns):
            seen.append((number, turn, threading.get_ident() == here))

            def run(turn=turn):
                if turn in (1, 2):
                    both.wait(WAIT)  # passes only if the other lane's job runs as well
                return turn, threading.get_ident(), jax.sharding.get_mesh()

            found, thread, used = yield Job("program", run)
            assert found == turn and used == mesh
            assert (thread == here) == (number == 0 and turn == 0)  # the first runs alone
        return f"lane {number}"

    with jax.set_mesh(mesh):
        assert take_turns([lane(0, 3), lane(1, 5)], 2) == ["lane 0", "lane 1"]
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (1, 3), (1, 4)]
    assert seen == [(*place, True) for place in order]


@pytest.mark.fast
@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_lane_begins_when_another_ends(most):
    turns, active, seen = [2, 0, 4, 1, 3], set(), []

    def lane(number):
        active.add(number)
        for _ in range(turns[number]):
            yield Job("program", lambda: None)
            seen.append((number, len(active)))
        active.remove(number)
        return number

    assert take_turns(map(lane, range(5)), most) == [0, 1, 2, 3, 4]
    assert [number for number, _ in seen].count(2) == 4 and len(seen) == sum(turns)
    assert max(at_a_time for _, at_a_time in seen) == most
    if most == 2:  # lane 1 ends at once; lane 3 begins when lane 0 has ended
        assert [number for number, _ in seen] == [0, 2, 0, 2, 3, 2, 4, 2, 4, 4]


@pytest.mark.fast
@pytest.mark.parametrize("most", [1, 2])
def test_the_caches_of_a_turn_are_freed_before_the_next(most):
    class Cache:
        pass

    alive = weakref.WeakSet()

    def lane(number):
        for turn in range(3):
            cache = yield Job("program", functools.partial(make, number, turn))
            assert cache in alive
            del cache

    def make(number, turn):
        gc.collect()
        assert len(alive) < most  # at most one of each other lane
        alive.add(cache := Cache())
        return cache

    take_turns(map(lane, range(4)), most)


@pytest.mark.fast
@pytest.mark.parametrize("known", [False, True])
def test_an_error_of_a_lane_is_raised(known):
    if known:
        lanes._run_before.add("program")

    def lane(fails):
        def run():
            if fails:
                raise ZeroDivisionError("as XLA does")

        yield Job("program", run)

    with pytest.raises(ZeroDivisionError, match="as XLA does"):
        take_turns([lane(False), lane(True)], 2)


class OneThread:
    """An environment that refuses other threads, and whose step breaks for one seed."""

    def __init__(self, environment, thread, broken):
        self.environment, self.thread, self.broken = environment, thread, broken

    def __getattr__(self, name):
        return getattr(self.environment, name)

    def render(self, state):
        assert threading.get_ident() == self.thread
        return self.environment.render(state)

    def step(self, state, action, rng):
        assert threading.get_ident() == self.thread
        if self.broken is not None and state.room == self.broken.room:
            raise RuntimeError("out of order")
        return self.environment.step(state, action, rng)


@pytest.mark.medium
def test_batches_are_numbered_through_and_limit_the_rows(agent, monkeypatch):
    seeds = list(range(100, 105))
    states = [agent.environment.reset(seed) for seed in seeds]
    format = ChatFormat(context="single_turn", prompt="terse", actions_per_turn=2, max_actions=10)
    chat = make_chat(agent.tokenizer, agent.environment, format)
    settings = PlaySettings(
        chat,
        agent.environment,
        budgets=Budgets(max_turns=2, max_actions=10, max_new_tokens=24),
        sampling=Sampling(temperature=1.0),
        lanes=2,
    )
    asked, at_a_time = [], []

    def decode(model, params, segment, logits, keys_B, *others, **settings):
        asked.append(len(keys_B))
        return sample.decode(model, params, segment, logits, keys_B, *others, **settings)

    def take_turns_seen(parts, most):
        at_a_time.append(most)
        return take_turns(parts, most)

    monkeypatch.setattr(play, "decode", decode)
    monkeypatch.setattr(play, "take_turns", take_turns_seen)

    def played(rows):
        asked.clear()
        options = dict(group_size=32, rows=rows, key=KEY)
        return rollout(agent.model, agent.params, settings, seeds, states, **options)

    whole = played(None)
    assert max(asked) == 160  # five groups cannot be divided into two equal lanes
    for rows, largest in ((128, 64), (70, 64), (1, 32)):
        found = played(rows)
        assert [(e.group, e.member) for e in found] == [(g, k) for g in range(5) for k in range(32)]
        assert max(asked) == largest and at_a_time[-1] * largest <= max(rows, 32)
        for a, b in zip(whole, found, strict=True):
            assert_same_episode(agent.model, agent.params, KEY, a, b)
    assert rollout(agent.model, agent.params, settings, [], [], group_size=2, rows=4, key=KEY) == []


@pytest.mark.medium
@pytest.mark.parametrize(
    ("context", "turns"), [("single_turn", 4), pytest.param("full", 3, marks=pytest.mark.long)]
)
def test_lanes_do_not_change_episodes(agent, context, turns):
    seeds = list(range(100, 108))
    states = [agent.environment.reset(seed) for seed in seeds]
    format = ChatFormat(context=context, prompt="terse", actions_per_turn=2, max_actions=10)
    chat = make_chat(agent.tokenizer, agent.environment, format)

    def play(most, broken=None):
        settings = PlaySettings(
            chat,
            OneThread(agent.environment, threading.get_ident(), broken),
            budgets=Budgets(max_turns=turns, max_actions=10, max_new_tokens=24),
            sampling=Sampling(temperature=1.0),
            lanes=most,
        )
        return rollout(agent.model, agent.params, settings, seeds, states, group_size=32, key=KEY)

    one = play(1)
    names = len(lanes._run_before)
    assert names == 0  # a single lane needs no names
    for most in (2, 4):
        found = play(most)
        assert len(lanes._run_before) > names
        names = len(lanes._run_before)
        assert [(e.seed, e.group, e.member) for e in found] == [
            (e.seed, e.group, e.member) for e in one
        ]
        for a, b in zip(one, found, strict=True):
            assert_same_episode(agent.model, agent.params, KEY, a, b)
    again = play(4)  # now with every lane in a thread
    assert len(lanes._run_before) == names
    for a, b in zip(found, again, strict=True):
        assert_same_episode(agent.model, agent.params, KEY, a, b)
    assert len({e.turns[0].sampled.tobytes() for e in one}) > 16  # they differ from each other

    broken = play(4, broken=states[5])
    assert {e.seed for e in broken if e.error} == {seeds[5]}
    for a, b in zip(found, broken, strict=True):
        if not b.error:
            assert_same_episode(agent.model, agent.params, KEY, a, b)
