"""Rollouts that run ahead: each step's episodes, weights, resuming, errors."""

import dataclasses
import functools
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.config.auto_fields import fill_auto_fields
from ragen_jax.config.build_learner import build_learner, build_penalties
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.check import check
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.config.stored import read_run_config
from ragen_jax.configs import base, sokoban
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.run import ahead, training
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.stages import StepContext, inform, rewarded_batch
from ragen_jax.run.step import Played
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update.learner import (
    Outcomes,
    Selection,
    assign_credit,
    copy_sampler,
    sampler_policy,
    sampling_policy,
    select,
)
from ragen_jax.update.state import AheadState, TrainState


def timeless(rows):
    """Rows without the fields that may differ between identical runs."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows
    ]


def make_config(agent, steps_ahead):
    """A run of five steps."""
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps = 5
    config.env.update(max_turns=2, max_actions=4)
    config.rollout.update(groups=4, group_size=4, save_every=0, ahead=steps_ahead)
    config.optimizer.update(minibatches=2, micro_batch=8, learning_rate=1e-3, warmup_updates=0)
    config.filter.strategy = "none"
    config.diagnose.update(first_turn_samples=16, trajectory_samples=8, flow_every=0)
    config.eval.update(episodes=8, every=2)
    config.checkpoint.update(every=1, keep=4, export=False)
    config.report.every = 0
    config.log.trackers = ()
    return config


@pytest.fixture(autouse=True)
def cache(agent, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))


@dataclasses.dataclass(frozen=True)
class Whole:
    """An uninterrupted run: its folder, the policy that played each step, the policy after each."""

    ahead: int
    workdir: object
    played: dict
    behind: dict


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.medium)])
def whole(request, agent, tmp_path_factory):
    """A `Whole`, made once; do not change it."""
    config, played, behind = make_config(agent, request.param), {}, {}
    play, get = train.play, ahead.RolloutQueue.get

    def noted(run, policy, problems, step):
        played[step] = jax.device_get(policy)
        return play(run, policy, problems, step)

    def seen(rollouts, stage, policy, state, step):
        behind[step - 1] = jax.device_get(policy)
        return get(rollouts, stage, policy, state, step)

    workdir = tmp_path_factory.mktemp("ahead") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(agent.home))
        patch.setattr(train, "play", noted)
        patch.setattr(ahead.RolloutQueue, "get", seen)
        assert train.train(config, workdir) == 0
    return Whole(request.param, workdir, played, behind)


@pytest.fixture
def config(agent, whole):
    return make_config(agent, whole.ahead)


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_a_step_learns_from_the_policy_some_steps_earlier(whole):
    lag = whole.ahead
    assert sorted(whole.played) == [1, 2, 3, 4, 5]
    for step in whole.played:
        assert same_bits(whole.played[step], whole.behind[max(0, step - 1 - lag)])
        if step > 1:
            assert not same_bits(whole.played[step], whole.behind[step - 1])
    rows = read_metrics(whole.workdir / "metrics.jsonl")[1:]
    assert [row["rollout/staleness"] for row in rows] == [min(step, lag) for step in range(5)]
    # The figures show what the updates changed; in the first step they show only rounding.
    assert rows[0]["update/mismatch_kl"] < 1e-8 and rows[0]["rollout/logp_gap"] < 1e-4
    for row in rows[1:]:
        assert 1e-6 < row["update/mismatch_kl"] < 1 and row["rollout/logp_gap"] > 1e-3
    # Nothing is played during the last steps, whose episodes were played during earlier steps.
    shares = [row["time/idle_share"] for row in rows]
    assert all(0 <= share <= 1 for share in shares) and shares[0] < 1 and shares[4] == 1
    for row in rows:
        assert row["time/rollout"] > 0 and row["time/diagnose"] > 0 and row["time/wait"] >= 0
        spent = row["time/wait"] + row["time/update"]
        assert spent <= row["time/step"] * (1 + 1e-9)


def test_weights_are_on_and_what_was_settled_is_written_down(whole):
    assert read_run_config(whole.workdir).algorithm.mismatch_cap == 2.0
    config = base.get_config()
    fill_auto_fields(config, jax.devices())
    assert config.algorithm.mismatch_cap == 0
    config.rollout.ahead, config.algorithm.mismatch_cap = 1, 5.0
    fill_auto_fields(config, jax.devices())
    assert config.algorithm.mismatch_cap == 5  # the user's value stays


@pytest.mark.long
def test_resuming_gives_the_numbers_of_an_undisturbed_run(config, whole, tmp_path):
    """Stopped between steps, or killed during a rollout, it gets the same remaining numbers."""
    config.steps = 2
    assert train.train(config, tmp_path) == 0
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rollout/success": 9.0}\n{"step": 4, "roll')
    config.steps = 3  # before the rollouts of the first part are used up
    assert train.train(config, tmp_path) == 0
    config.steps = 5
    assert train.train(config, tmp_path) == 0
    expected, found = (read_metrics(path / "metrics.jsonl") for path in (whole.workdir, tmp_path))
    evaluated = {k for k in expected[2] if k.startswith("eval/")}
    assert evaluated
    found[3] = {k: v for k, v in found[3].items() if not k.startswith("eval/")}  # its last step
    assert timeless(found) == timeless(expected)


class RolloutFailed(Exception):
    pass


def test_what_a_rollout_ahead_raises_is_raised(config, whole, tmp_path, monkeypatch):
    """The error is raised in the step whose episodes are missing; the steps before are saved, and
    the run can be resumed."""
    play, threads = train.play, {}

    def broken(run, policy, problems, step):
        threads[step] = threading.current_thread()
        if step == 3:
            raise RolloutFailed(f"in step {step}")
        return play(run, policy, problems, step)

    monkeypatch.setattr(train, "play", broken)
    with pytest.raises(RolloutFailed, match="in step 3"):
        train.train(config, tmp_path)
    assert sorted(threads) == [1, 2, 3]
    assert not {threading.main_thread()} & set(threads.values())
    assert not any(thread.is_alive() for thread in threads.values())
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(whole.workdir.parent))
    assert train.train(config, tmp_path) == 0
    expected, found = (read_metrics(path / "metrics.jsonl") for path in (whole.workdir, tmp_path))
    assert timeless(found) == timeless(expected)


def test_what_an_update_raises_comes_before_what_its_rollout_does(config, tmp_path, monkeypatch):
    ended = []

    def late(run, policy, problems, step):
        if step == 1:
            return play(run, policy, problems, step)
        started.set()
        go_on.wait(60)
        ended.append(step)
        raise RolloutFailed

    def broken(*_):
        assert started.wait(60)  # the rollout has started
        go_on.set()
        raise FloatingPointError("of the update")

    started, go_on, play = threading.Event(), threading.Event(), train.play
    config.eval.every = 0
    monkeypatch.setattr(train, "play", late)
    monkeypatch.setattr(train, "select", broken)
    with pytest.raises(FloatingPointError, match="of the update"):
        train.train(config, tmp_path)
    assert ended == [2]  # no thread outlives the run


def test_the_sampler_does_not_wait_for_a_save_or_an_evaluation(config, tmp_path, monkeypatch):
    """While step 1 is evaluated and saved, the rollout that needs its policy is waiting only for
    the evaluation, and runs during the save."""
    play, evaluate, save = train.play, training.Run.evaluate, Checkpoints.save
    first = 2 + config.rollout.ahead  # the first step that the policy after step 1 samples
    begun, events = threading.Event(), []

    def noted(run, policy, problems, step):
        events.append(f"play {step}")
        if step == first:
            begun.set()
        return play(run, policy, problems, step)

    def evaluated(run, policy, step):
        events.append(f"evaluate {step}")
        return evaluate(run, policy, step)

    def saved(checkpoints, step, state, *, wait=False):
        if step == 1:
            assert begun.wait(60)
        save(checkpoints, step, state, wait=wait)

    config.eval.every = 1
    config.stopping.success.action = "off"
    monkeypatch.setattr(train, "play", noted)
    monkeypatch.setattr(training.Run, "evaluate", evaluated)
    monkeypatch.setattr(Checkpoints, "save", saved)
    assert train.train(config, tmp_path) == 0
    assert events.index("evaluate 1") < events.index(f"play {first}")
    assert events.index(f"play {first - 1}") < events.index("evaluate 1")
    assert [f"play {step}" for step in range(1, 6)] == [e for e in events if e.startswith("play")]


# ---- the thread ---------------------------------------------------------------------------------


def test_a_player_runs_what_the_others_have_begun_and_no_more():
    """One process has begun two of three jobs when the run ends; another has begun only one."""
    done, go_on, begun = [], threading.Event(), threading.Event()

    def job(number):
        begun.set()
        go_on.wait(60)
        done.append(number)
        return number

    player = ahead.Player()
    futures = [player.submit(functools.partial(job, number)) for number in range(3)]
    assert begun.wait(60)

    def agree(count):
        assert count == 1
        go_on.set()
        return 2

    player.close(agree)
    assert done == [0, 1] and [future.done() for future in futures] == [True, True, False]
    assert futures[1].result() == 1


def test_a_player_measures_the_time_of_its_jobs():
    player = ahead.Player()
    before = time.perf_counter()
    player.submit(lambda: time.sleep(0.05)).result()
    player.close(lambda count: count)
    after = time.perf_counter()
    assert 0.05 <= player.busy_seconds(before, after) <= after - before
    assert player.busy_seconds(after, after + 1) == 0


# ---- weights and parameters ---------------------------------------------------------------------


SHAPE = ModelConfig(
    vocab_size=24, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=24
)


def built(**fields):
    """(learner, state) of a small model and a config with some fields changed."""
    config = sokoban.get_config()
    config.rollout.update(groups=2, group_size=2, ahead=1, max_new_tokens=4)
    config.env.update(max_turns=1)
    config.optimizer.update(minibatches=1, micro_batch=2)
    config.algorithm.update(kl_coef=0.0, gamma=1.0)
    config.filter.update(strategy="none")
    config.update_from_flattened_dict(fields)
    fill_auto_fields(config, jax.devices())
    check(config)
    mesh, sampling_mesh = build_meshes(config)
    model = Qwen(dataclasses.replace(SHAPE, dtype=config.model.dtype))
    params = shard_params(jax.device_get(init_params(SHAPE, jax.random.key(0))), model, mesh)
    return config, *build_learner(load_config(config), model, params, mesh, sampling_mesh)


def test_the_ratio_is_to_the_policy_before_the_updates_and_weights_to_the_sampler(
    make_turn, make_episode
):
    """By hand: weights min(p_policy / p_sampler, cap) on the advantages, ratios of 1 before any
    update, and the KL of the sampled tokens."""
    config, learner, state = built()
    sampler_logp, logp = [-1.0, -2.0], [-0.5, -3.5]  # log-probs of the two tokens of every reply
    episodes = [
        make_episode(g, k, [make_turn([1, 2], [5, 6], reward=float(k), logp=sampler_logp)])
        for g in range(2)
        for k in range(2)
    ]
    batch, return_GK = rewarded_batch(episodes, build_penalties(config))
    logp_BT = np.where(batch.mask_BT > 0, 7.0, 3.0).astype(np.float32)
    for row in range(4):
        logp_BT[row, batch.mask_BT[row] > 0] = logp
    keep_GK = np.ones((2, 2), bool)
    outcomes = Outcomes(return_GK, length_GK=np.full((2, 2), 2), success_GK=return_GK > 0)
    selection = Selection(keep_GK, np.ones(2, np.float32), logp_BT, 0 * logp_BT)
    with jax.set_mesh(learner.mesh):
        credit = assign_credit(learner, state, batch, selection, outcomes)
        plain = dataclasses.replace(learner, mismatch=None)
        unweighted = assign_credit(plain, state, batch, selection, outcomes)
    weights = [min(math.exp(0.5), 2.0), math.exp(-1.5)]
    assert weights == pytest.approx([1.6487, 0.2231], abs=1e-4)
    for row in range(4):
        inside = batch.mask_BT[row] > 0
        assert credit.old_logp_BT[row, inside] == pytest.approx(logp)
        assert unweighted.old_logp_BT[row, inside] == pytest.approx(sampler_logp)
        assert np.abs(unweighted.advantage_BT[row, inside]).min() > 0.1
        assert credit.advantage_BT[row, inside] == pytest.approx(
            weights * unweighted.advantage_BT[row, inside], rel=1e-6
        )
    by_hand = ((math.exp(0.5) - 1 - 0.5) + (math.exp(-1.5) - 1 + 1.5)) / 2
    assert credit.metrics["update/mismatch_kl"] == pytest.approx(by_hand, rel=1e-6)
    assert "update/mismatch_kl" not in unweighted.metrics
    assert len(batch.weight_B) <= step_rows(config)


@pytest.mark.slow
def test_rl_zvp_reads_the_entropy_of_the_policy_that_sampled(make_turn, make_episode):
    """When rollouts run ahead, the sampling policy is not the policy that is updated. Here it is
    uniform over the tokens, and the updated policy has other entropies. Group 0 has no variance;
    the members of group 1 earn different rewards."""
    config, learner, state = built(**{"algorithm.zvp_coef": 0.5})
    episodes = [
        make_episode(g, k, [make_turn([1, 2], [5, 6 + k], reward=float(g * k))], success=True)
        for g in range(2)
        for k in range(2)
    ]
    batch, return_GK = rewarded_batch(episodes, build_penalties(config))
    outcomes = Outcomes(return_GK, length_GK=np.full((2, 2), 2), success_GK=np.ones((2, 2), bool))
    uniform = jax.tree.map(lambda x: 0 * x, sampler_policy(learner, state.samplers[0]))
    with jax.set_mesh(learner.sampling_mesh):
        played = Played(episodes, [episodes], [return_GK])
        seen = StepContext(None, learner, uniform, played, batch, outcomes, 1)
        outcomes, metrics = inform(seen)
    assert not metrics
    with jax.set_mesh(learner.mesh):
        learner = dataclasses.replace(learner, mismatch=None)
        selection, _ = select(learner, state, batch, outcomes)
        credit = assign_credit(learner, state, batch, selection, outcomes)
    inside = batch.mask_BT[:2] > 0
    assert credit.advantage_BT[:2][inside] == pytest.approx(0.5 * math.log(24), rel=1e-4)
    assert selection.entropy_BT[:2][inside].max() < math.log(24) - 1e-3
    assert not outcomes.sampled_entropy_BT[2:].any()  # no code reads those rows


@pytest.mark.parametrize(
    "fields", [{}, {"model.dtype": "bfloat16"}, {"model.lora.rank": 2}], ids=str
)
def test_a_sampler_outlives_the_parameters_that_updates_donate(fields):
    _, learner, state = built(**fields)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with jax.set_mesh(learner.mesh):
        moved = dataclasses.replace(state, params=step(state.params))
    (sampler,) = moved.samplers
    before = jax.device_get(sampler_policy(learner, sampler))
    after = jax.device_get(sampling_policy(learner, moved))
    assert not same_bits(before, after)
    following = copy_sampler(learner, sampling_policy(learner, moved), moved)
    with jax.set_mesh(learner.mesh):
        moved = dataclasses.replace(moved, params=step(moved.params))
    assert same_bits(sampler_policy(learner, following), after)
    assert not same_bits(sampling_policy(learner, moved), after)


def test_a_state_has_the_policies_of_the_next_steps():
    _, _, state = built(**{"rollout.ahead": 0})
    assert type(state) is TrainState
    for number in (1, 3):
        _, _, state = built(**{"rollout.ahead": number})
        assert type(state) is AheadState
        assert [int(sampler.step) for sampler in state.samplers] == [0] * number
        assert jnp.asarray(state.step) == 0
