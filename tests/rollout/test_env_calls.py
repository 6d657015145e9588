"""env_calls.py: if an environment raises, hangs or returns nonsense, only that episode ends."""

import asyncio
import dataclasses
import json
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_play import BUDGETS, KEY, chat_of

from ragen_jax.algorithm.rewards import broken_episodes, sum_turns
from ragen_jax.envs.types import IMAGE, Observation, Step
from ragen_jax.rollout.env_calls import (
    MAX_IMAGES,
    MAX_PIXELS,
    MAX_REWARD,
    MAX_TEXT,
    Clock,
    EnvFailure,
    Limits,
    StepRequest,
    StepResult,
    act,
    begin,
    identify,
    observe,
)
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.run.preemption import Preemption, Stopped

SERIAL, TIMED = Limits(), Limits(time_limit=0.5, workers=3)


class Evil:
    """An environment that misbehaves in the method `where`, in the states that `is_bad` picks."""

    def __init__(self, environment, where, does, is_bad):
        self._environment, self._where, self._does = environment, where, does
        self._is_bad = is_bad
        self.actions, self.instructions = environment.actions, environment.instructions

    def _do(self, where, bad, otherwise):
        return self._does() if where == self._where and bad else otherwise()

    def reset(self, seed):
        bad = self._is_bad(seed)
        return self._do("reset", bad, lambda: (self._environment.reset(seed), bad))

    def render(self, state):
        return self._do("render", state[1], lambda: self._environment.render(state[0]))

    def identity(self, state):
        return self._environment.identity(state[0])

    def step(self, state, action, rng):
        def step():
            step = self._environment.step(state[0], action, rng)
            return dataclasses.replace(step, state=(step.state, state[1]))

        return self._do("step", state[1], step)


class Count:
    """Adds the numbers of its actions; the episode ends at ten."""

    actions, instructions = (), "Add."

    def reset(self, seed):
        return seed

    def render(self, state):
        return f"now {state}"

    def step(self, state, action, rng):
        state += int(action)
        return Step(state, float(action), state >= 10, {"success": state == 10, "rng": rng})


def raises(error):
    def does():
        raise error

    return does


def steps(**changes):
    return lambda: Step(**({"state": 1, "reward": 0.0, "done": False, "info": {}} | changes))


def hangs():
    time.sleep(60)


class Own(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise SystemExit(1)

    __repr__ = __str__


def recurse():
    return recurse()


NONSENSE = {
    "raises": (raises(RuntimeError("gone")), "RuntimeError: gone"),
    "exits": (raises(SystemExit(7)), "SystemExit: 7"),
    "cancelled": (raises(asyncio.CancelledError("late")), "CancelledError: late"),
    "generator": (raises(GeneratorExit()), "GeneratorExit:"),
    "own base": (raises(Own("gone")), "Own: gone"),
    "pytest": (pytest.fail, "Failed:"),
    "no words": (raises(Mute()), "Mute: (its message cannot be shown: SystemExit)"),
    "surrogate": (raises(ValueError("\ud800")), "ValueError: \ufffd"),
    "recurses truly": (recurse, "RecursionError: "),
    "recurses": (raises(RecursionError("deep")), "RecursionError: deep"),
    "number": (lambda: 3, "got int"),
    "nothing": (lambda: None, "got NoneType"),
    "bytes": (lambda: b"room", "got bytes"),
}
PICTURE = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
TOO_LARGE = np.broadcast_to(np.uint8(0), (4097, 4096, 3))  # a broadcast view, so it takes no memory
OF_IMAGES = {  # name -> (text, images, error message)
    "number": (3, (), "TypeError: Observation.text must be a str, got int"),
    "much": ("x" * (MAX_TEXT + 1), (), f"at most {MAX_TEXT} characters, got {MAX_TEXT + 1}"),
    "list": (IMAGE, [PICTURE], "TypeError: Observation.images must be a tuple, got list"),
    "array": (IMAGE, PICTURE[None], "Observation.images must be a tuple, got ndarray"),
    "no place": ("", (PICTURE,), "once for each image, got 0 and 1 image(s)"),
    "no image": (
        IMAGE + IMAGE,
        (PICTURE,),
        "('\\ufffc') once for each image, got 2 and 1 im",
    ),
    "none": (IMAGE, (), "got 1 and 0 image(s)"),
    "many": (
        IMAGE * 17,
        (PICTURE,) * 17,
        f"Observation.images must be at most {MAX_IMAGES}, got 17",
    ),
    "bytes": (IMAGE, (b"PNG",), "images[0] must be a uint8 array [height, width, 3], got bytes"),
    "floats": (IMAGE, (PICTURE / 255,), "got float64 [2, 3, 3]"),
    "grey": (IMAGE, (PICTURE[..., 0],), "got uint8 [2, 3]"),
    "alpha": (IMAGE, (np.zeros((2, 3, 4), np.uint8),), "got uint8 [2, 3, 4]"),
    "planes": (IMAGE, (np.zeros((3, 2, 5), np.uint8),), "got uint8 [3, 2, 5]"),
    "low": (IMAGE, (PICTURE[:0],), f"of 1 to {MAX_PIXELS} pixels, got [0, 3, 3]"),
    "thin": (IMAGE, (PICTURE[:, :0],), "got [2, 0, 3]"),
    "huge": (IMAGE, (TOO_LARGE,), "pixels, got [4097, 4096, 3]"),
    "second": (IMAGE * 2, (PICTURE, None), "Observation.images[1] must be a uint8 array"),
}
OF_RENDER = NONSENSE | {
    "much": (lambda: "x" * 10_000_000, f"at most {MAX_TEXT} characters, got 10000000"),
    **{
        f"image: {name}": (lambda shown=shown: Observation(*shown), message)
        for name, (*shown, message) in OF_IMAGES.items()
    },
}
OF_STEP = NONSENSE | {
    "nan": (
        steps(reward=float("nan")),
        "Step.reward must be a number from -1e+06 to 1e+06, got nan",
    ),
    "huge": (steps(reward=1e30), "got 1e+30"),
    "text reward": (steps(reward="1"), "got '1'"),
    "array reward": (steps(reward=np.ones(2)), "must be a number"),
    "text done": (steps(done="no"), "Step.done must be a bool, got 'no'"),
    "info": (steps(info=None), "Step.info must be a dict, got NoneType"),
}


def asked(state, *actions, left=5):
    return StepRequest(state, actions, np.random.default_rng(0), left)


@pytest.mark.fast
@pytest.mark.parametrize("limits", [SERIAL, TIMED])
def test_what_comes_of_a_reply(limits):
    jobs = [asked(3, "4", "2"), asked(3, "4", "3", "1"), asked(0, "1", "1", left=1), asked(5)]
    first, second, third, none = act(Count(), jobs, limits)
    assert first == StepResult(9, ("4", "2"), 6.0, {"success": False}, False, "now 9")
    assert second == StepResult(
        10, ("4", "3"), 7.0, {"success": True}, True, ""
    )  # the episode is over, so there is no observation
    assert third == StepResult(1, ("1",), 1.0, {"success": False}, False, "")  # no action is left
    assert none == StepResult(5, (), 0.0, {}, False, "now 5")
    assert begin(Count(), [4, 2], limits) == [4, 2]
    assert observe(Count(), [4, EnvFailure("e", "t"), 2], limits) == [
        "now 4",
        EnvFailure("e", "t"),
        "now 2",
    ]


@pytest.mark.fast
@pytest.mark.parametrize("limits", [SERIAL, TIMED])
@pytest.mark.parametrize("name", OF_STEP)
def test_nonsense_of_a_step_is_named_and_stays_alone(name, limits):
    does, message = OF_STEP[name]
    environment = Evil(Count(), "step", does, lambda seed: seed == 2)
    states = begin(environment, [1, 2, 3], limits)
    good, bad, last = act(environment, [asked(state, "1") for state in states], limits)
    assert (good.reward, last.reward) == (1.0, 1.0) and isinstance(bad, EnvFailure)
    assert message in bad.error and "\n" not in bad.error and len(bad.error) <= 500
    assert bad.traceback.startswith("Traceback")


@pytest.mark.medium
@pytest.mark.fast
@pytest.mark.parametrize("name", OF_RENDER)
def test_nonsense_of_a_render_is_named_and_stays_alone(name):
    does, message = OF_RENDER[name]
    environment = Evil(Count(), "render", does, lambda seed: seed == 2)
    states = begin(environment, [1, 2], SERIAL)
    good, bad = observe(environment, states, SERIAL)
    assert good == "now 1" and message in bad.error
    good, bad = act(environment, [asked(state, "1") for state in states], SERIAL)
    assert good.observation == "now 2" and message in bad.error


@pytest.mark.fast
def test_an_info_that_is_not_finite_is_left_out_and_is_no_success():
    info = {"success": float("nan"), "far": np.inf, "near": np.float64(0.5), "moves": 3}
    does = lambda: Step((1, True), 0.0, True, info)  # noqa: E731
    environment = Evil(Count(), "step", does, lambda seed: True)
    (done,) = act(environment, [asked((1, True), "1")], SERIAL)
    assert done.info == {"near": 0.5, "moves": 3}


@pytest.mark.fast
def test_texts_are_clean_and_an_info_is_json():
    info = {"why": "\ud800", "\udc00": 1, ("a", 1): 2, 3: 4, b"b": 5, "deep": [[]], "big": 10**400}
    environment = Evil(Count(), "step", steps(state=(1, True), info=info), lambda seed: True)
    (done,) = act(environment, [asked((1, True), "1")], SERIAL)
    assert done.info == {"why": "\ufffd", "\ufffd": 1}
    assert json.loads(json.dumps(done.info)) == done.info
    environment = Evil(Count(), "render", lambda: "a\x00\ud800\n\t", lambda seed: True)
    assert observe(environment, [(0, True)], SERIAL) == ["a\x00\ufffd\n\t"]
    pictured = Observation(f"\udfff{IMAGE}", (PICTURE,))
    environment = Evil(Count(), "render", lambda: pictured, lambda seed: True)
    (shown,) = observe(environment, [(0, True)], SERIAL)
    assert shown.text == f"\ufffd{IMAGE}"


@pytest.mark.fast
@pytest.mark.parametrize("identity", [3, None, ["a"], b"a"])
def test_an_identity_that_is_no_text_is_named(identity):
    environment = SimpleNamespace(identity=lambda state: identity)
    (broken,) = identify(environment, [1], SERIAL)
    assert "identity must return a str, got" in broken.error


@pytest.mark.fast
@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stopped(143)])
def test_a_signal_ends_the_run_and_not_an_episode(error):
    """Signal handlers raise in the main thread; no other thread receives a signal."""
    environment = Evil(Count(), "step", raises(error), lambda seed: True)
    with pytest.raises(type(error)):
        act(environment, [asked((1, True), "1")], SERIAL)
    (broken,) = act(environment, [asked((1, True), "1")], TIMED)
    assert broken.error.startswith(type(error).__name__)


@pytest.mark.fast
def test_a_signal_before_the_first_step_is_no_systemexit(tmp_path, capsys):
    preemption = Preemption(tmp_path)
    environment = Evil(
        Count(), "step", lambda: signal.raise_signal(signal.SIGTERM), lambda seed: True
    )
    with pytest.raises(Stopped) as stopped:
        act(environment, [asked((1, True), "1")], SERIAL)
    assert stopped.value.exit_code == 143 and not preemption.signal
    assert "nothing to save" in capsys.readouterr().out


def test_the_largest_reward_and_text_are_accepted():
    environment = Evil(Count(), "step", steps(reward=np.float32(-MAX_REWARD)), lambda seed: True)
    (acted,) = act(
        environment, [StepRequest((0, True), ("1",), np.random.default_rng(0), 1)], SERIAL
    )
    assert acted.reward == -MAX_REWARD and type(acted.reward) is float
    environment = Evil(Count(), "render", lambda: "x" * MAX_TEXT, lambda seed: True)
    assert observe(environment, [(0, True)], SERIAL) == ["x" * MAX_TEXT]


@pytest.mark.fast
def test_images_are_shown_and_stay_what_they_were():
    """An environment may draw into one array, of any layout, again and again."""
    canvas = np.zeros((3, 2, 3), np.uint8).transpose(1, 0, 2)
    mine = []

    def render():
        canvas[:] = len(mine)
        mine.append(canvas)
        return Observation(f"now {IMAGE}, {IMAGE}", (canvas, PICTURE))

    environment = Evil(Count(), "render", render, lambda seed: True)
    first, second = observe(environment, [(0, True), (1, True)], SERIAL)
    (acted,) = act(environment, [asked((0, True), "1")], SERIAL)
    for number, shown in enumerate((first, second, acted.observation)):
        assert isinstance(shown, Observation) and shown.text == f"now {IMAGE}, {IMAGE}"
        assert [type(image) for image in shown.images] == [np.ndarray] * 2
        np.testing.assert_array_equal(shown.images[0], np.full((2, 3, 3), number))
        np.testing.assert_array_equal(shown.images[1], PICTURE)
    (over,) = act(environment, [asked((0, True), "1", left=1)], SERIAL)
    assert over.observation == "" and len(mine) == 3
    most = Evil(
        Count(),
        "render",
        lambda: Observation(IMAGE * MAX_IMAGES, (PICTURE[:1, :1],) * MAX_IMAGES),
        lambda seed: True,
    )
    (shown,) = observe(most, [(0, True)], SERIAL)
    assert len(shown.images) == MAX_IMAGES
    # In a plain text the image mark is an ordinary character.
    text = Evil(Count(), "render", lambda: f"{IMAGE} is U+FFFC", lambda seed: True)
    assert observe(text, [(0, True)], SERIAL) == [f"{IMAGE} is U+FFFC"]


@pytest.mark.medium
@pytest.mark.fast
def test_what_hangs_is_given_up_and_the_others_go_on():
    """Four of ten hang, which is more than there are workers: each hanging worker is replaced."""
    environment = Evil(Count(), "step", hangs, lambda seed: seed % 3 == 0)
    states = begin(environment, range(10), TIMED)
    before = threading.active_count()
    clock, start = Clock(), time.perf_counter()
    acted = act(environment, [asked(state, "1") for state in states], TIMED, clock)
    seconds = time.perf_counter() - start
    assert [isinstance(x, EnvFailure) for x in acted] == [seed % 3 == 0 for seed in range(10)]
    assert all(x.error == "TimeoutError: a step took longer than 0.5 s" for x in acted[::3])
    assert 0.5 <= seconds < 3 and clock.seconds == pytest.approx(seconds, abs=0.1)
    # the hanging threads, which are no longer waited for
    assert threading.active_count() - before == 4


@pytest.mark.medium
@pytest.mark.fast
def test_a_limit_is_of_a_step_not_of_a_reply():
    def slow():
        time.sleep(0.3)
        return Step((0, True), 1.0, False, {})

    environment = Evil(Count(), "step", slow, lambda seed: True)
    (acted,) = act(environment, [asked((0, True), "1", "1", "1")], TIMED)
    assert acted.reward == 3.0


@pytest.mark.medium
@pytest.mark.fast
def test_environments_that_wait_do_so_together():
    def slow():
        time.sleep(0.2)
        return Step((0, True), 1.0, False, {})

    environment = Evil(Count(), "step", slow, lambda seed: True)
    start = time.perf_counter()
    jobs = [asked((0, True), "1") for _ in range(20)]
    act(environment, jobs, Limits(time_limit=5.0, workers=10))
    assert time.perf_counter() - start < 1.5  # one after the other they would take 4 s


def play(agent, environment, limits=SERIAL):
    """Episodes of four problems, played four times each."""
    seeds = [5, 6, 7, 8]
    return rollout(
        agent.model,
        agent.params,
        PlaySettings(
            chat_of(agent, "single_turn"),
            environment,
            budgets=BUDGETS,
            sampling=Sampling(temperature=1.0),
            limits=limits,
        ),
        seeds,
        begin(environment, seeds, limits),
        group_size=4,
        key=KEY,
    )


def tokens(episode):
    return [(turn.sampled.tolist(), turn.logp.tolist(), turn.reward) for turn in episode.turns]


@pytest.mark.parametrize(
    ("where", "does"),
    [
        ("reset", raises(OSError("no server"))),
        ("render", lambda: None),
        ("step", steps(reward=float("nan"))),
    ],
)
def test_the_other_groups_are_played_as_if_nothing_had_happened(agent, where, does):
    def good(seed):
        return False

    sound = play(agent, Evil(agent.environment, where, does, good))
    evil = play(agent, Evil(agent.environment, where, does, lambda seed: seed == 7))
    assert [(e.group, e.member) for e in evil] == [(e.group, e.member) for e in sound]
    for mine, theirs in zip(evil, sound, strict=True):
        if mine.group != 2:
            assert tokens(mine) == tokens(theirs) and not mine.error
            continue
        # If `step` fails, a reply without a readable action does not call it.
        *before, last = mine.turns
        assert all(where == "step" and not turn.valid for turn in before)
        assert last.reward == 0.0 and not mine.success
        if where != "step":
            assert mine.error and mine.turns[0].info["error"] == mine.error.splitlines()[-1]
    broken_GK = broken_episodes(evil)
    assert broken_GK[2].any() and not broken_GK[[0, 1, 3]].any()


def test_what_broke_counts_as_the_mean_of_its_group(make_turn, make_episode):
    episodes = [make_episode(g, k, [make_turn([1], [2])]) for g in range(2) for k in range(4)]
    for index in (1, 4, 5, 6, 7):
        episodes[index] = dataclasses.replace(episodes[index], error="Traceback")
    rewards = [[1.0], [0.0], [3.0], [5.0], [1.0], [2.0], [3.0], [4.0]]
    return_GK = sum_turns(rewards, episodes)
    assert return_GK.dtype == np.float32
    np.testing.assert_array_equal(return_GK, [[1, 3, 3, 5], [0, 0, 0, 0]])
