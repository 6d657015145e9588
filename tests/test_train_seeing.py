"""The whole command on an agent with vision: pictures of boards, from warm start to export."""

import json
import shutil

import jax
import numpy as np
import pytest
from device_processes import in_two_processes, on_devices
from PIL import Image

from ragen_jax import train
from ragen_jax.configs import sokoban
from ragen_jax.envs.sokoban import sprites
from ragen_jax.model import hf
from ragen_jax.model.vision import images
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.imitate import tiny_model
from ragen_jax.run.load import for_sampling, load_policy, restore_run
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = [pytest.mark.long, pytest.mark.slow]  # they share an agent that is trained for them


@pytest.fixture(scope="module")
def directory(tmp_path_factory, optimised):
    """Return a tiny agent trained on some boards: its replies are well-formed and mostly wrong."""
    config = sokoban.get_config("tiny-vl")
    config.warmstart.update(rooms=512, success=0.0, check_every=100, check_episodes=16)
    with optimised():
        return tiny_model(config, tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def config(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = sokoban.get_config("tiny-vl")
    config.model.path = str(directory)
    config.steps = 3
    config.env.update(max_turns=2, max_actions=4, context="full")
    config.rollout.update(groups=4, group_size=4, save_every=1)
    config.optimizer.update(minibatches=2, micro_batch=8, learning_rate=1e-3, warmup_updates=0)
    config.reward.update(overlong_buffer=8)  # so that rewards differ
    config.filter.strategy = "none"
    config.diagnose.update(first_turn_samples=16, trajectory_samples=8, flow_every=2)
    config.diagnose.update(probe_every=3, probe_problems=4, probe_samples=2, probe_mediation=True)
    config.eval.update(episodes=12, every=3)
    config.checkpoint.every = 1
    config.report.every = 0
    return config


def timeless(workdir):
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/"))}
        for row in read_metrics(workdir / "metrics.jsonl")
    ]


def test_a_run_learns_resumes_and_is_exported(config, directory, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.train(config, whole) == 0
    for steps in (1, 3):
        config.steps = steps
        assert train.train(config, parts) == 0
    rows = timeless(whole)
    assert [row for row in timeless(parts) if row["step"] not in (0, 1)] == rows[2:]
    assert timeless(parts)[1]["rollout/return"] == rows[1]["rollout/return"]
    for row in rows[1:]:
        assert row["rollout/logp_gap"] < 1e-4 and row["update/update_norm"] > 0
        assert np.isfinite(row["collapse/first_turn/mi"])
        # Its statements about a picture are checked against the board in the picture.
        assert row["reasoning/stated"] > 0 and 0 < row["reasoning/grounded_rate"] < 1
    assert any(name.startswith("flow/first_turn/") for name in rows[2])
    assert any(name.startswith("probe/mediation/") for name in rows[3])

    # The pictures are next to the rollouts, one file each, and show the room.
    folder = whole / "rollouts"
    lines = (folder / "step_000001.jsonl").read_text().splitlines()
    episodes = [json.loads(line)["turns"] for line in lines]
    assert all(first["prompt_exact"] for first, *_ in episodes)  # later prompts show replies
    turns = [turn for episode in episodes for turn in episode]
    named = {name for turn in turns for name in turn["images"]}
    assert len(named) == len(list((folder / "step_000001_images").iterdir())) >= 4
    for name in named:
        picture = np.asarray(Image.open(folder / name))
        assert picture.shape == (48, 48, 3) and picture.dtype == np.uint8
    environment = load_policy(config, None).tasks[0].settings.environment
    first = json.loads((folder / "step_000001.jsonl").read_text().splitlines()[0])
    shown = np.asarray(Image.open(folder / first["turns"][0]["images"][0]))
    room = environment.reset(first["seed"])
    np.testing.assert_array_equal(shown, sprites.draw(room, 8))

    # The export sees as the run did: its tower is the initial tower.
    tower, before = hf.load_tower(whole / "policy"), hf.load_tower(directory)
    assert tower.images == before.images and tower.model == before.model
    leaves = zip(*(jax.tree.leaves(x.params) for x in (tower, before)), strict=True)
    assert all(np.array_equal(a, b) for a, b in leaves)
    config.model.path = str(whole / "policy")
    policy = load_policy(config, None)
    metrics, _ = evaluate(policy.model, policy.params, policy.tasks)
    assert metrics["eval/return"] == pytest.approx(rows[3]["eval/return"])
    policy = for_sampling(restore_run(whole))
    again, _ = evaluate(policy.model, policy.params, policy.tasks)
    assert again["eval/return"] == rows[3]["eval/return"]


def test_a_tower_learns_by_adapters_resumes_and_is_exported(config, directory, tmp_path):
    config.model.lora.update(rank=2, tower=True)
    config.algorithm.kl_coef = 0.1
    config.diagnose.update(flow_every=0, probe_every=0, gradients_every=2, gradients_groups=2)
    config.steps = 2
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.train(config, whole) == 0
    for steps in (1, 2):
        config.steps = steps
        assert train.train(config, parts) == 0
    rows = timeless(whole)
    assert timeless(parts)[-1] == rows[2]
    # The sampler sees with the trained tower, the reference with the initial tower.
    assert all(row["rollout/logp_gap"] < 1e-4 for row in rows[1:])
    assert rows[2]["update/kl"] > 1e-6
    trained = restore_run(whole)
    moved = trained.adapters["tower"]["layers"]
    assert all(np.abs(pair["lora_b"]).max() > 1e-4 for pair in moved.values())

    assert not (whole / "adapter").exists()
    tower, before = hf.load_tower(whole / "policy"), hf.load_tower(directory)
    for name in ("q", "down"):
        kernels = (x.params["layers"][name]["kernel"] for x in (tower, before))
        assert np.abs(np.subtract(*kernels)).max() > 1e-4
    config.model.path, config.model.lora.rank = str(whole / "policy"), 0
    policy = load_policy(config, None)
    merged, _ = evaluate(policy.model, policy.params, policy.tasks)
    policy = for_sampling(trained)
    again, _ = evaluate(policy.model, policy.params, policy.tasks)
    assert merged["eval/return"] == pytest.approx(again["eval/return"])


@pytest.mark.parametrize("ahead", [0, 1])
def test_adapters_a_critic_and_a_reference_see(config, tmp_path, ahead):
    config.steps = 2
    config.model.lora.update(rank=2, tower=bool(ahead))
    config.algorithm.update(name="ppo", kl_coef=0.1, kl_in="reward" if ahead else "loss")
    config.rollout.update(ahead=ahead, slots=6)
    config.critic.warmup_steps = 0
    assert train.train(config, tmp_path / "run") == 0
    for row in timeless(tmp_path / "run")[1:]:
        assert row["update/update_norm"] > 0 and row["critic/count"] > 0
        assert np.isfinite(row["update/kl"]) and np.isfinite(row["critic/explained_variance"])


def test_slots_and_the_lock_step_learn_the_same(config, tmp_path):
    config.steps = 2
    found = []
    for slots in (0, 5):
        config.rollout.slots = slots
        assert train.train(config, tmp_path / str(slots)) == 0
        found.append(timeless(tmp_path / str(slots)))
    for a, b in zip(*found, strict=True):
        for name in ("rollout/return", "rollout/response_length", "eval/return"):
            assert a.get(name) == pytest.approx(b.get(name), nan_ok=True)
        if "update/loss" in a:
            assert a["update/loss"] == pytest.approx(b["update/loss"], abs=1e-4)


@pytest.mark.parametrize("served", [(), ("--config.rollout.slots=6", "--config.rollout.chunk=4")])
def test_two_processes_show_what_one_does(directory, tmp_path, served):
    """Processes exchange the images to register or show; both train the tower."""

    def command(name):
        return [
            *("-m", "ragen_jax.train", f"--workdir={tmp_path / name}", "--config.steps=2"),
            *("--config=configs/sokoban.py:tiny-vl", f"--config.model.path={directory}"),
            *("--config.model.lora.rank=2", "--config.model.lora.tower=True"),
            *("--config.optimizer.learning_rate=1e-3", "--config.optimizer.warmup_updates=0"),
            *("--config.eval.episodes=16", "--config.eval.every=2", "--config.env.max_turns=2"),
            *("--config.rollout.groups=4", "--config.rollout.compact=False"),
        ]

    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    one = on_devices(1, command("one"), **cache)
    _, err = one.communicate(timeout=900)
    assert one.returncode == 0, err[-3000:]
    words = [*command("two")[2:], *served]
    in_two_processes(words, devices=1, logs=tmp_path / "logs", timeout=900, **cache)
    for a, b in zip(*(timeless(tmp_path / name) for name in ("one", "two")), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"rollout/logp_gap"}:
            assert np.isclose(a[name], b[name], rtol=1e-4, atol=1e-4), (name, a[name], b[name])
        assert b.get("rollout/logp_gap", 0) < 1e-4


# ------------------------------------------------------------------------------ bad input


def refused(config, workdir, capsys):
    """Return the error line of a run that is refused at the start."""
    with pytest.raises(SystemExit) as exit_:
        train.train(config, workdir)
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.err + output.out
    return output.err.strip().splitlines()[-1]


def test_a_model_without_eyes_is_refused(config, agent, tmp_path, capsys):
    config.model.path = str(agent.directory)
    assert "has no vision tower" in refused(config, tmp_path / "run", capsys)


def test_adapters_of_a_tower_that_is_not_there_are_refused(config, agent, tmp_path, capsys):
    config.model.path = str(agent.directory)
    config.model.lora.update(rank=2, tower=True)
    assert "config.model.lora.tower" in refused(config, tmp_path / "run", capsys)


def test_a_model_without_a_file_of_its_images_is_refused(config, directory, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / images.FILE).unlink()
    (copy / "checksums.json").unlink()
    config.model.path = str(copy)
    assert images.FILE in refused(config, tmp_path / "run", capsys)


def test_images_that_the_model_cannot_be_shown_are_refused(config, directory, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    fields = json.loads((copy / images.FILE).read_text())
    fields |= {"min_pixels": 61 * 64, "max_pixels": 61 * 64}
    fields.pop("size", None)
    (copy / images.FILE).write_text(json.dumps(fields))
    (copy / "checksums.json").unlink()
    config.model.path = str(copy)
    config.env.options.size = (3, 20)
    config.env.options.min_solution = 1
    assert "max_pixels" in refused(config, tmp_path / "run", capsys)
