"""The whole command on the tiny agent: its files, resuming, preemption, error messages."""

import dataclasses
import itertools
import json
import math
import os
import signal

import numpy as np
import pytest
from tensorboard_reader import read_events, scalars

from ragen_jax import train
from ragen_jax.configs import frozen_lake
from ragen_jax.diagnostics import anatomy
from ragen_jax.diagnostics.scopes import SCOPES
from ragen_jax.evaluate import checkpoint_gradients
from ragen_jax.model import hf
from ragen_jax.run import stages
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.load import for_sampling, restore_run
from ragen_jax.run.training import STOPPED
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update import learner

DOCUMENTED = """
rollout/success rollout/return rollout/logp_gap collapse/first_turn/mi collapse/first_turn/h_cond
collapse/first_turn/retrieval_acc filter/kept_ratio update/entropy time/rollout time/diagnose
time/update time/step time/cpu time/compile symptoms/loop_rate symptoms/control_logp
""".split()


@pytest.fixture(autouse=True)
def cache(agent, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))


@pytest.fixture
def config(agent):
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps = 4
    config.env.update(max_turns=3, max_actions=6)
    config.rollout.update(groups=4, group_size=4, save_every=2)
    config.optimizer.update(minibatches=2, micro_batch=8, learning_rate=1e-3, warmup_updates=0)
    config.diagnose.update(first_turn_samples=16, trajectory_samples=8)
    config.eval.update(episodes=24, every=2)
    config.checkpoint.every = 2
    return config


def timeless(rows):
    """Return rows without the values that may differ between identical runs."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows
    ]


@pytest.fixture
def finished(config, agent):
    """Return the folder of an uninterrupted run of four steps; made once, not to be changed."""
    workdir = agent.directory.parent / "whole"
    if not workdir.exists():
        assert train.train(config, workdir) == 0
    return workdir


def test_a_run_writes_what_is_documented(finished):
    rows = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/success" in row] == [0, 2, 4]
    assert not any(name.startswith("rollout/") for name in rows[0])
    for row in rows[1:]:
        assert not [name for name in DOCUMENTED if name not in row]
        assert row["rollout/logp_gap"] <= 1e-4
        assert all(math.isfinite(value) for value in row.values())
    assert json.loads((finished / "config.json").read_text())["rollout"]["groups"] == 4
    assert sorted(p.name for p in (finished / "rollouts").iterdir()) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
        "step_000004.jsonl",
    ]
    # The messages of rollouts contain the training text, in the usual chat format.
    tokenizer, turns = hf.load_tokenizer(finished / "policy"), 0
    for line in (finished / "rollouts" / "step_000004.jsonl").read_text().splitlines():
        for turn in json.loads(line)["turns"]:
            *shown, reply = turn["messages"]
            text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
            assert tokenizer.encode(text + turn["added"]) == turn["prompt_ids"]
            encoded = tokenizer.encode(reply["content"].removeprefix(turn["added"]))
            ids = turn["sampled_ids"][: -1 if turn["end"] == "closed" else None]
            assert turn["prompt_exact"] and turn["reply_exact"] == (encoded == ids)
            turns += turn["reply_exact"]
    assert turns >= 4 * 4
    # The exported config names a single stop token: the one that ends a reply in the template.
    tokenizer = hf.load_tokenizer(finished / "policy")
    assert hf.stop_ids(finished / "policy") == (tokenizer.eos_token_id,)
    # The filter masks whole groups, and the policy moves.
    assert {row["filter/kept_ratio"] * 4 for row in rows[1:]} <= {0, 1, 2, 3, 4}
    assert any(row.get("update/update_norm", 0) > 0 for row in rows[1:])


def test_resuming_gives_the_numbers_of_an_uninterrupted_run(config, finished, tmp_path):
    workdir = tmp_path / "resumed"
    config.steps = 2
    config.log.trackers = ()
    assert train.train(config, workdir) == 0
    # A killed process may leave rows after the checkpoint, and an incomplete line.
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rollout/success": 9.0}\n{"step": 4, "roll')
    assert not (workdir / "tensorboard").exists()
    config.steps = 4
    config.log.trackers = ("tensorboard",)  # may change on resuming, as may the steps
    assert train.train(config, workdir) == 0
    whole, resumed = (read_metrics(d / "metrics.jsonl") for d in (finished, workdir))
    assert timeless(resumed) == timeless(whole)
    for folder, rows in ((finished, whole), (workdir, resumed)):
        seen = [{"step": s} | values for s, values in scalars(read_events(folder / "tensorboard"))]
        assert seen == [pytest.approx(row) for row in rows]
    clock = [row["time/total"] for row in resumed]
    assert clock == sorted(clock) and clock[-1] > 0
    steps = sum(row.get("time/step", 0) + row.get("time/eval", 0) for row in resumed)
    assert clock[-1] >= steps
    for earlier, row in itertools.pairwise(resumed):
        episodes = row["rollout/episodes_total"] - earlier.get("rollout/episodes_total", 0)
        assert episodes == 4 * 4
        sampled = row["throughput/tokens_total"] - earlier.get("throughput/tokens_total", 0)
        assert sampled == pytest.approx(row["rollout/replies"] * row["rollout/response_length"])
    assert all(0.1 < row["throughput/host_memory_gib"] < 64 for row in resumed)
    assert {row["update/learning_rate"] for row in resumed[1:]} == {np.float32(1e-3)}


@pytest.mark.slow
def test_resuming_over_slots_gives_the_numbers_of_an_uninterrupted_run(config, tmp_path):
    config.rollout.update(slots=6, chunk=9)
    config.eval.update(episodes=10, every=2)
    config.checkpoint.every = 1
    for name, ends in {"whole": [3], "resumed": [2, 3]}.items():
        for config.steps in ends:
            assert train.train(config, tmp_path / name) == 0
    whole, resumed = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "resumed")
    )
    assert [row["step"] for row in whole] == [0, 1, 2, 3]
    assert [row["step"] for row in whole if "eval/success" in row] == [0, 2, 3]
    assert timeless(resumed) == timeless(whole)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_and_resuming_goes_on(
    number, code, config, finished, tmp_path, monkeypatch
):
    workdir = tmp_path / "preempted"
    plain = stages.rollout_metrics

    def preempt_in_step_3(episodes, return_GK):
        if len(read_metrics(workdir / "metrics.jsonl")) == 3:
            os.kill(os.getpid(), number)
        return plain(episodes, return_GK)

    monkeypatch.setattr(stages, "rollout_metrics", preempt_in_step_3)
    assert train.train(config, workdir) == code
    ends = signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # a second Ctrl-C quits immediately
    assert ends == (number == signal.SIGINT)
    assert [row["step"] for row in read_metrics(workdir / "metrics.jsonl")] == [0, 1, 2, 3]
    assert "step 3 of 4" in (workdir / "report.html").read_text()
    monkeypatch.setattr(stages, "rollout_metrics", plain)
    assert train.train(config, workdir) == 0
    whole, resumed = (read_metrics(d / "metrics.jsonl") for d in (finished, workdir))
    assert timeless(resumed) == timeless(whole)


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_good(config, finished, tmp_path, capsys):
    workdir = tmp_path / "damaged"
    assert train.train(config, workdir) == 0
    files = [path for path in (workdir / "checkpoints" / "4").rglob("*") if path.is_file()]
    arrays = max(files, key=lambda path: path.stat().st_size)
    content = arrays.read_bytes()
    arrays.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert train.train(config, workdir) == 0
    output = capsys.readouterr().out
    assert (
        f"warning: the checkpoint of step 4 is damaged ({arrays} has changed since it was written)"
        in output
    )
    assert f"resuming {workdir} after step 2" in output
    whole, resumed = (read_metrics(d / "metrics.jsonl") for d in (finished, workdir))
    assert timeless(resumed) == timeless(whole)
    assert (workdir / "damaged" / "4-1").is_dir()
    weights = workdir / "checkpoints" / "2"
    for folder in (weights, workdir / "checkpoints" / "4"):
        (folder / "default" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(SystemExit, match="2"):
        train.train(config, workdir)
    assert "every checkpoint in" in capsys.readouterr().err
    assert read_metrics(workdir / "metrics.jsonl") == resumed


def test_evaluation_of_a_run_repeats_its_last_row(finished):
    last = read_metrics(finished / "metrics.jsonl")[-1]
    policy = for_sampling(restore_run(finished))
    metrics, _ = evaluate(policy.model, policy.params, policy.tasks)
    assert metrics["eval/success"] == last["eval/success"]
    assert metrics["eval/return"] == pytest.approx(last["eval/return"])


@pytest.mark.long
def test_gradients_of_a_checkpoint(finished):
    trained = restore_run(finished)
    policy = for_sampling(trained)
    run_config = dataclasses.replace(
        trained.config,
        diagnose=dataclasses.replace(trained.config.diagnose, gradients_groups=6),
        # the run had no KL term
        algorithm=dataclasses.replace(trained.config.algorithm, kl_coef=0.1),
    )
    assert trained.step == 4
    found = checkpoint_gradients(run_config, finished, policy, 4)
    rows = {}
    for name, value in found.items():
        _, bucket, figure = name.split("/")
        rows.setdefault(bucket, {})[figure] = value
    assert sum(row["groups"] for row in rows.values()) == 6
    assert sum(row["episodes"] for row in rows.values()) == 6 * 4
    varied = [row for bucket, row in rows.items() if bucket != "zero"]
    variances = [row["reward_variance"] for row in varied]
    assert np.all(np.diff(variances) > -1e-6) and variances[0] > 0  # equal but for rounding
    for row in varied:
        assert row["task_norm"] > 0 and row["kl_norm"] > 0 and row["entropy_norm"] > 0
        assert 0 < row["dominance"] < 1
    if "zero" in rows:
        assert rows["zero"]["task_norm"] == 0


def test_a_batch_without_variance_updates_nothing(config, tmp_path):
    config.filter.eps = 1e6  # larger than any batch's variance
    config.steps = 1
    config.eval.every = 0
    assert train.train(config, tmp_path / "run") == 0
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["filter/empty"] == 1 and row["update/count"] == 0
    assert "rollout/logp_gap" not in row  # undefined, so left out


def test_non_finite_updates_stop_the_run_and_dump_the_batch(config, tmp_path, monkeypatch, capsys):
    broken = lambda *args, **settings: (np.full_like(args[1].mask_BT, np.nan), None)  # noqa: E731
    monkeypatch.setattr(learner, "token_advantages", broken)
    config.stopping.nonfinite.patience = 2
    config.eval.every = 0
    assert train.train(config, tmp_path / "run") == STOPPED
    assert "updates were not finite in 2 iterations in a row" in capsys.readouterr().out
    dump = np.load(tmp_path / "run" / "nonfinite_step_2.npz")
    assert np.isnan(dump["advantage_BT"]).any() and dump["tokens_BT"].ndim == 2


def test_another_config_does_not_continue_a_run(config, finished, capsys):
    before = (finished / "metrics.jsonl").read_text()
    config.optimizer.learning_rate = 5e-4
    with pytest.raises(SystemExit, match="2"):
        train.train(config, finished)
    assert "config.optimizer.learning_rate=0.001" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


def test_rows_that_do_not_split_over_devices_are_refused(config, tmp_path, capsys):
    config.mesh.update(data=3)
    with pytest.raises(SystemExit, match="2"):
        train.train(config, tmp_path / "run")
    assert "does not fit 1 device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.long
def test_ppo_with_every_control_runs_and_resumes(config, tmp_path):
    config.steps, config.eval.every, config.checkpoint.every = 3, 0, 1
    config.algorithm.update(
        name="ppo",
        bi_level=True,
        kl_in="reward",
        kl_kind="k1",
        kl_coef=0.05,
        kl_target=0.01,
        mismatch_cap=2.0,
    )
    config.filter.update(metric="entropy", top_members=1, bottom_members=1)
    config.reward.overlong_buffer = 5
    config.critic.update(learning_rate=1e-2, warmup_steps=1)
    assert train.train(config, tmp_path / "whole") == 0
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [row["update/count"] for row in rows] == [0, 2, 2]  # at first, only the critic learns
    assert [row["critic/count"] for row in rows] == [2, 2, 2]
    # The policy equals its reference until its first update.
    assert abs(rows[0]["update/kl"]) < 1e-5 < abs(rows[2]["update/kl"])
    assert rows[0]["update/kl_coef"] != 0.05
    # The gap is measured against the sampler's log-probs, not the update's.
    assert all(1e-8 < row["rollout/logp_gap"] < 1e-4 for row in rows)
    assert all(row["filter/kept_ratio"] <= 0.5 for row in rows)
    assert rows[2]["critic/loss"] != rows[0]["critic/loss"]

    config.steps = 2
    assert train.train(config, tmp_path / "resumed") == 0
    config.steps = 3
    assert train.train(config, tmp_path / "resumed") == 0
    again = read_metrics(tmp_path / "resumed" / "metrics.jsonl")
    assert timeless(again) == timeless(rows)


@pytest.mark.slow
@pytest.mark.long
def test_a_pool_collected_in_rounds_until_a_rule_stops_it(config, tmp_path, capsys):
    config.steps = 3
    config.env.pool = 6
    config.collect.update(max_rounds=2, explore=0.5)
    config.filter.strategy = "none"
    config.algorithm.zvp_coef = 0.1
    config.reward.update(normalize="mean_std", grouping="environment")
    config.stopping.success.update(least=1.0, patience=1)
    assert train.train(config, tmp_path / "run") == STOPPED
    assert "stopped: held-out success" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]  # stops at the first evaluation that counts
    for row in rows[1:]:
        assert 1 <= row["collect/rounds"] <= 2 and row["collect/groups"] in (4, 8)
        assert row["filter/kept_ratio"] == 1

    # The run was saved when it stopped. It resumes under a milder rule and warns once.
    config.stopping.success.action = "warn"
    assert train.train(config, tmp_path / "run") == 0
    assert "warning" not in capsys.readouterr().out  # the warning was printed earlier in the streak
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.long
def test_figures_are_of_all_that_dynamic_sampling_played(config, tmp_path):
    """The environment is FrozenLake, which this agent hardly ever solves: most groups earn no
    reward."""
    config.env = frozen_lake.get_config().env
    config.env.prompt = "full"  # the agent's vocabulary lacks the words of the terse prompt
    config.env.max_turns = 2
    config.steps = 2
    config.eval.every = 0
    config.collect.max_rounds = 2
    assert train.train(config, tmp_path / "run") == 0
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["collect/groups"] == 8
    path = tmp_path / "run" / "rollouts" / "step_000002.jsonl"
    played = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(played) == 8 * 4
    rewards = [[turn["reward"] for turn in episode["turns"]] for episode in played]
    returns = np.array([sum(turns) for turns in rewards])
    assert row["rollout/return"] == pytest.approx(returns.mean(), rel=1e-5)
    assert row["rollout/success"] == np.mean([episode["success"] for episode in played])
    assert row["rollout/replies"] == sum(map(len, rewards))
    assert sum(row[f"anatomy/{name}_count"] for name in anatomy.CLASSES) == 8
    # Selected are the first four informative groups, else the earliest groups; a lake rewards
    # success.
    solved = np.reshape([episode["success"] for episode in played], (8, 4)).sum(1)
    informative = (solved > 0) & (solved < 4)
    chosen = sorted(sorted(range(8), key=lambda g: not informative[g])[:4])
    selected = returns.reshape(8, 4)[chosen]
    assert row["collect/return"] == pytest.approx(selected.mean(), rel=1e-5)


@pytest.mark.slow
def test_the_stripped_form_is_scored_where_flow_is_and_the_history_is_shown(config, tmp_path):
    config.steps = 2
    config.eval.every = 0
    config.env.context = "full"
    config.diagnose.flow_every = 2
    assert train.train(config, tmp_path / "run") == 0
    first, second = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for row, due in ((first, False), (second, True)):
        for name in ("flow/trajectory/za_swap", "collapse/trajectory_stripped/mi"):
            assert (name in row) == due
        assert "collapse/trajectory_within_depth/mi" in row
        # Only the two plain scopes have moving averages.
        averaged = {name for name in row if name.endswith("mi_zscore_ema")}
        assert averaged == {f"collapse/{scope}/mi_zscore_ema" for scope in SCOPES}
