"""Rollouts that run ahead: each step's episodes, weights, resuming, errors, devices."""

import dataclasses
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_processes import on_devices

from ragen_jax import train
from ragen_jax.config.auto_fields import fill_auto_fields
from ragen_jax.config.build import build_learner, build_meshes, build_penalties
from ragen_jax.config.check import check
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.config.stored import read_run_config
from ragen_jax.configs import base, sokoban
from ragen_jax.model.layout import shard_params
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.run import ahead
from ragen_jax.run.stages import StepContext, inform, rewarded_batch
from ragen_jax.run.step import Played
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update.learner import (
    Outcomes,
    Selection,
    assign_credit,
    sampled_next,
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


def make_config(agent):
    """A run of four steps."""
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps = 4
    config.env.update(max_turns=2, max_actions=4)
    config.rollout.update(groups=4, group_size=4, save_every=0, ahead=1)
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


@pytest.fixture
def config(agent):
    return make_config(agent)


@dataclasses.dataclass(frozen=True)
class Whole:
    """An uninterrupted run: its folder, the policy that played each step, the policy after each."""

    workdir: object
    played: dict
    behind: dict


@pytest.fixture(scope="module")
def whole(agent, tmp_path_factory):
    """A `Whole`, made once; do not change it."""
    config, played, behind = make_config(agent), {}, {}
    play, get_rollout = ahead.play, ahead.RolloutQueue.get_rollout

    def noted(run, policy, state, step):
        played[step] = jax.device_get(policy)
        return play(run, policy, state, step)

    def seen(rollouts, stage, policy, state, step):
        behind[step - 1] = jax.device_get(policy)
        return get_rollout(rollouts, stage, policy, state, step)

    workdir = tmp_path_factory.mktemp("ahead") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(agent.home))
        patch.setattr(ahead, "play", noted)
        patch.setattr(ahead.RolloutQueue, "get_rollout", seen)
        assert train.train(config, workdir) == 0
    return Whole(workdir, played, behind)


def same_bits(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_a_step_learns_from_what_the_policy_before_the_last_updates_sampled(whole):
    assert sorted(whole.played) == [1, 2, 3, 4]
    assert same_bits(whole.played[1], whole.behind[0])
    for step in (2, 3, 4):
        assert same_bits(whole.played[step], whole.behind[step - 2])
        assert not same_bits(whole.played[step], whole.behind[step - 1])
    rows = read_metrics(whole.workdir / "metrics.jsonl")[1:]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    # The figures show what the update changed; in the first step they show only rounding.
    assert rows[0]["update/mismatch_kl"] < 1e-8 and rows[0]["rollout/logp_gap"] < 1e-4
    for row in rows[1:]:
        assert 1e-6 < row["update/mismatch_kl"] < 1 and row["rollout/logp_gap"] > 1e-3
    # Nothing is played ahead during the last step; its episodes were played during the step before.
    shares = [row["time/idle_share"] for row in rows]
    assert all(0 <= share < 1 for share in shares[:3]) and shares[3] == 1
    assert ["time/wait" in row for row in rows] == [True, True, True, False]
    for row in rows:
        assert row["time/rollout"] > 0
        spent = (row[f"time/{name}"] for name in ("batch", "diagnose", "inform", "update"))
        spent = sum(spent) + row.get("time/wait", 0) + row["time/rollout"] * (row["step"] == 1)
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
    config.steps = 4
    assert train.train(config, tmp_path) == 0
    expected, found = (read_metrics(path / "metrics.jsonl") for path in (whole.workdir, tmp_path))
    evaluated = {k for k in expected[2] if k.startswith("eval/")}
    assert evaluated and timeless(found) == timeless(expected)


class RolloutFailed(Exception):
    pass


def test_what_a_rollout_ahead_raises_is_raised(config, whole, tmp_path, monkeypatch):
    """The error is raised in the step that runs in parallel; that step is not saved, and the run
    can be resumed."""
    play, threads = ahead.play, {}

    def broken(run, policy, state, step):
        threads[step] = threading.current_thread()
        if step == 3:
            raise RolloutFailed(f"in step {step}")
        return play(run, policy, state, step)

    monkeypatch.setattr(ahead, "play", broken)
    with pytest.raises(RolloutFailed, match="in step 3"):
        train.train(config, tmp_path)
    assert threads[1] is threading.main_thread() is not threads[2]
    assert not any(thread.is_alive() for step, thread in threads.items() if step > 1)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(whole.workdir.parent))
    assert train.train(config, tmp_path) == 0
    expected, found = (read_metrics(path / "metrics.jsonl") for path in (whole.workdir, tmp_path))
    assert timeless(found) == timeless(expected)


def test_what_an_update_raises_comes_before_what_its_rollout_does(config, tmp_path, monkeypatch):
    ended = []

    def late(run, policy, state, step):
        if step == 1:
            return play(run, policy, state, step)
        started.set()
        go_on.wait(60)
        ended.append(step)
        raise RolloutFailed

    def broken(*_):
        assert started.wait(60)  # the rollout has started
        go_on.set()
        raise FloatingPointError("of the update")

    started, go_on, play = threading.Event(), threading.Event(), ahead.play
    config.eval.every = 0
    monkeypatch.setattr(ahead, "play", late)
    monkeypatch.setattr(train, "select", broken)
    with pytest.raises(FloatingPointError, match="of the update"):
        train.train(config, tmp_path)
    assert ended == [2]  # no thread outlives the run


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
    uniform = jax.tree.map(lambda x: 0 * x, sampler_policy(learner, state.sampler))
    with jax.set_mesh(learner.sampling_mesh):
        played = Played(episodes, [episodes], [return_GK])
        seen = StepContext(None, learner, uniform, played, batch, outcomes, 1)
        outcomes, metrics = inform(seen, state)
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
    before = jax.device_get(sampler_policy(learner, moved.sampler))
    after = jax.device_get(sampling_policy(learner, moved))
    assert not same_bits(before, after)
    following = sampled_next(learner, sampling_policy(learner, moved), moved)
    with jax.set_mesh(learner.mesh):
        moved = dataclasses.replace(following, params=step(following.params))
    assert same_bits(sampler_policy(learner, moved.sampler), after)
    assert not same_bits(sampling_policy(learner, moved), after)


def test_a_state_is_as_ever_without():
    _, _, state = built(**{"rollout.ahead": 0})
    assert type(state) is TrainState
    _, _, state = built()
    assert type(state) is AheadState and int(state.sampler.step) == 0
    assert jnp.asarray(state.step) == 0


# ---- refusals and devices -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a given process."""

    process_index: int = 0
    number: int = 0


def test_what_cannot_run_is_refused_in_one_line():
    def refused(fields, devices):
        config = base.get_config()
        config.optimizer.micro_batch = 8
        config.update_from_flattened_dict(fields)
        check(config)
        with pytest.raises(ValueError) as error:
            build_meshes(config, devices)
        assert "\n" not in str(error.value)
        return str(error.value)

    ahead_, apart = {"rollout.ahead": 1}, {"sampling_mesh.devices": 2}
    four = [Device(0, n) for n in range(4)]
    two_hosts = [Device(n // 2, n) for n in range(4)]
    assert "rollout.ahead is 1, but training and sampling share 4 devices" in refused(ahead_, four)
    assert "sampling_mesh.devices, for example to 2" in refused(ahead_, four)
    assert "rollout.ahead is 1, but with 2 processes" in refused(ahead_, two_hosts)
    assert "sampling_mesh.devices is 2, but with 2 processes" in refused(apart, two_hosts)
    assert "sampling_mesh.devices is 2, but at least one of 2" in refused(apart, four[:2])
    uneven = apart | {"mesh.data": 4}
    assert "mesh.data=4, mesh.fsdp=1, mesh.tensor=1 does not fit 2" in refused(uneven, four)
    config = base.get_config()
    config.rollout.ahead, config.diagnose.gradients_every = 1, 5
    config.diagnose.gradients_groups = 0
    with pytest.raises(ValueError, match="config.diagnose.gradients_groups is 0, but with rollout"):
        check(config)


def test_the_last_devices_sample():
    config = base.get_config()
    config.update_from_flattened_dict({"rollout.ahead": 1, "sampling_mesh.devices": 3})
    devices = [Device(0, n) for n in range(5)]
    mesh, sampling = build_meshes(config, devices)
    assert list(mesh.devices.flat) == devices[:2] and list(sampling.devices.flat) == devices[2:]
    assert sampling.shape["data"] == 3
    config.sampling_mesh.tensor = config.sampling_mesh.data = 1
    config.sampling_mesh.fsdp = -1
    assert build_meshes(config, devices)[1].shape["fsdp"] == 3


HALF = {"model.lora.rank": 4, "model.dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, HALF], ids=str)
def test_two_devices_train_and_two_sample(fields, agent, tmp_path):
    """Up to rounding, the figures equal those of one device that does both."""
    settings = {
        **{"model.path": agent.directory, "steps": 3, "env.max_turns": 2, "env.max_actions": 4},
        **{"rollout.groups": 4, "rollout.group_size": 4, "rollout.ahead": 1},
        **{"optimizer.minibatches": 2, "optimizer.micro_batch": 8, "filter.strategy": "none"},
        **{"optimizer.learning_rate": 1e-3, "diagnose.every": 3, "diagnose.micro_batch": 16},
        **{"diagnose.first_turn_samples": 8, "diagnose.trajectory_samples": 4},
        **{"eval.episodes": 8, "eval.every": 3, "checkpoint.export": False, "report.every": 0},
        **fields,
    }
    words = ["-m", "ragen_jax.train", "--config=configs/sokoban.py"]
    words += [f"--config.{name}={value}" for name, value in settings.items()]
    rows = {}
    for name, count, further in (("one", 1, []), ("four", 4, ["--config.sampling_mesh.devices=2"])):
        command = [*words, *further, f"--workdir={tmp_path / name}"]
        process = on_devices(count, command, XDG_CACHE_HOME=str(agent.home))
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        rows[name] = timeless(read_metrics(tmp_path / name / "metrics.jsonl"))
    half = "model.dtype" in fields
    for one, four in zip(rows["one"], rows["four"], strict=True):
        assert one.keys() == four.keys()
        assert one.get("rollout/staleness") == four.get("rollout/staleness")
        if half:  # rounding decides between two tokens
            continue
        for name in one.keys() - {"rollout/logp_gap"}:
            assert four[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name
