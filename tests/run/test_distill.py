"""On-policy distillation: the KL to a teacher on the student's own rollouts, without rewards."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import ragen_jax
from ragen_jax.config.check import check
from ragen_jax.config.fields import unused_fields
from ragen_jax.configs import organism, recipes, sokoban
from ragen_jax.model import hf
from ragen_jax.model.qwen import Qwen, init_params

pytestmark = pytest.mark.medium
SMALL = {
    **{"rollout.groups": 4, "rollout.group_size": 1, "env.max_turns": 2, "eval.episodes": 8},
    **{"steps": 4, "eval.every": 0, "diagnose.every": 0, "checkpoint.every": 2},
    **{"optimizer.minibatches": 1, "optimizer.micro_batch": 4, "report.every": 0},
    "optimizer.learning_rate": 3e-3,
}


@pytest.fixture(scope="module")
def student(agent, tmp_path_factory):
    """Return the directory of a smaller model than the agent, with random weights."""
    shape = dataclasses.replace(agent.model.config, width=32, layers=1, mlp_width=48)
    path = tmp_path_factory.mktemp("student") / "model"
    hf.save(path, Qwen(shape), init_params(shape, jax.random.key(0)), agent.tokenizer)
    return path


def config_of(student, teacher):
    config = sokoban.get_config("tiny")
    recipes.apply(config, ["distill"])
    config.model.path = str(student)
    config.algorithm.kl_reference = str(teacher)
    return config


def rows_of(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "update/kl" in row]


def disturbed(params, size):
    """Return parameters with noise of a fraction of each array's standard deviation."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten(
        [
            x + size * x.std() * jax.random.normal(key, x.shape)
            for x, key in zip(leaves, keys, strict=True)
        ]
    )


def test_a_student_comes_closer_to_its_teacher(agent, tmp_path):
    hf.save(tmp_path / "model", agent.model, disturbed(agent.params, 0.3), agent.tokenizer)
    config = config_of(tmp_path / "model", agent.directory)
    fields = SMALL | {"steps": 8, "rollout.groups": 8, "optimizer.micro_batch": 8}
    ragen_jax.train(config, workdir=tmp_path / "run", overrides=fields)
    kl = [row["update/kl"] for row in rows_of(tmp_path / "run")]
    assert len(kl) == 8 and np.mean(kl[-2:]) < 0.7 * kl[0], kl
    assert all(row["update/policy_loss"] == 0 for row in rows_of(tmp_path / "run"))


def test_a_resumed_run_gives_the_same_numbers(agent, student, tmp_path):
    config = config_of(student, agent.directory)
    ragen_jax.train(config, workdir=tmp_path / "whole", overrides=SMALL)
    ragen_jax.train(config, workdir=tmp_path / "run", overrides=SMALL | {"steps": 2})
    ragen_jax.train(workdir=tmp_path / "run", overrides={"steps": 4})
    whole, resumed = ([r["update/kl"] for r in rows_of(tmp_path / n)] for n in ("whole", "run"))
    assert whole == resumed


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_adapters_are_drawn_to_the_teacher_not_to_their_base_model(agent, student, tmp_path, kl_in):
    """With the base model as the reference, the KL of the first step would be 0."""
    config = config_of(student, agent.directory)
    config.model.lora.rank = 2
    if kl_in == "reward":
        config.algorithm.update(name="grpo", kl_kind="k1", kl_in="reward")
        config.rollout.group_size = 2
    fields = SMALL | {"steps": 1, "rollout.group_size": 2}
    ragen_jax.train(config, workdir=tmp_path / "run", overrides=fields)
    (row,) = rows_of(tmp_path / "run")
    assert abs(row["update/kl"]) > 0.1


def test_teachers_that_cannot_be_used_are_refused(agent, student, language_model, tmp_path):
    for teacher, message in (
        (language_model, r"kl_reference is .*, whose vocabulary \(\d+ ids\) is not that of the"),
        (tmp_path / "nowhere", "no model directory"),
        ("initial", "config.algorithm.name is 'distill'; it learns from the KL to a teacher only"),
    ):
        config = config_of(student, teacher)
        with pytest.raises(ValueError, match=message):
            ragen_jax.train(config, workdir=tmp_path / "run", overrides=SMALL)


def test_advantages_from_rewards_are_refused_or_named(student, agent):
    config = config_of(student, agent.directory)
    names = ("algorithm.soft_weights", "reward.normalize", "reward.grouping", "filter.strategy")
    unread = set(unused_fields(config, names))
    assert unread == {"algorithm.soft_weights", "reward.normalize", "reward.grouping"}
    config.algorithm.name = "grpo"
    assert set(unused_fields(config, names)) == {"reward.grouping"}  # without normalisation
    for name in ("zvp_coef", "virtual_rewards"):
        config = config_of(student, agent.directory)
        config.algorithm[name] = type(config.algorithm[name])(1)
        with pytest.raises(ValueError, match=f"config.algorithm.{name} is 1"):
            check(config)


def test_a_teacher_must_read_what_the_student_may_write(agent, student, tmp_path):
    shape = dataclasses.replace(agent.model.config, max_positions=100)
    hf.save(tmp_path / "teacher", Qwen(shape), agent.params, agent.tokenizer)
    config = config_of(student, tmp_path / "teacher")
    message = "reads at most 100 positions, but a prompt and its reply may have 32768; set env.max_"
    with pytest.raises(ValueError, match=message):
        ragen_jax.train(config, workdir=tmp_path / "run", overrides=SMALL)
    fields = SMALL | {"steps": 1, "env.max_context": 100}
    ragen_jax.train(config, workdir=tmp_path / "run", overrides=fields)
    assert len(rows_of(tmp_path / "run")) == 1


def test_a_teacher_of_the_warm_start_imitates_its_own_styles(tmp_path, monkeypatch):
    """Its KL is 0 with the styles of the policy, whose initial parameters it then has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = organism.get_config("sokoban+distill")
    config.algorithm.kl_reference = "warmstart"
    brief = dict(rooms=256, success=0.0, check_every=20, check_episodes=4, layers=1, width=32)
    config.warmstart.update(brief)
    kl = {}
    for name, styles in (("same", {}), ("other", dict(grounded=0.1, template=0.9))):
        config.lab.teacher_styles = styles
        fields = SMALL | {"steps": 1, "diagnose.probe_every": 0}
        ragen_jax.train(config, workdir=tmp_path / name, overrides=fields)
        (row,) = rows_of(tmp_path / name)
        kl[name] = row["update/kl"]
    assert abs(kl["same"]) < 1e-5 and kl["other"] > 1e-3, kl
    assert len(list((tmp_path / "cache/ragen_jax/models").glob("tiny_*[!.lock]"))) == 2
    config.model.path = "DIR"
    message = "config.algorithm.kl_reference is 'warmstart'; only the tiny agent, or a model with"
    with pytest.raises(ValueError, match=message):
        ragen_jax.train(config, workdir=tmp_path / "refused", overrides=SMALL)
