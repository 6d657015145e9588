"""run/interleave.py: steps whose updates imitate demonstrations."""

import json

import pytest

import ragen_jax
from ragen_jax.config.auto_fields import fill_auto_fields
from ragen_jax.config.check import check
from ragen_jax.configs import countdown, sokoban

pytestmark = pytest.mark.medium
SMALL = {
    **{"rollout.groups": 4, "rollout.group_size": 4, "env.max_turns": 2, "eval.episodes": 8},
    **{"steps": 4, "eval.every": 0, "diagnose.every": 0, "checkpoint.every": 2},
    **{"optimizer.minibatches": 1, "optimizer.micro_batch": 8, "report.every": 0},
    **{"optimizer.learning_rate": 3e-3, "filter.strategy": "none", "algorithm.kl_coef": 0.0},
    **{"algorithm.entropy_coef": 0.0, "algorithm.imitate_every": 2, "diagnose.tags_every": 1},
}


def rows_of(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "update/policy_loss" in row]


def test_every_second_step_imitates_and_a_resumed_run_gives_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = sokoban.get_config("tiny")
    config.warmstart.update(rooms=256, success=0.0, check_every=20, check_episodes=4)
    config.warmstart.update(layers=1, width=32)
    ragen_jax.train(config, workdir=tmp_path / "whole", overrides=SMALL)
    rows = rows_of(tmp_path / "whole")
    # In its only update, the advantage and ratio of every demonstrated token are 1.
    assert [row["update/policy_loss"] == pytest.approx(-1, abs=1e-5) for row in rows] == [
        *(False, True, False, True)
    ]
    assert all(row["update/count"] == 1 and "tags/healthy" in row for row in rows)
    ragen_jax.train(config, workdir=tmp_path / "run", overrides=SMALL | {"steps": 2})
    ragen_jax.train(workdir=tmp_path / "run", overrides={"steps": 4})
    shown = ("update/policy_loss", "update/grad_norm", "rollout/return", "tags/other_logp")
    assert [[row[x] for x in shown] for row in rows_of(tmp_path / "run")] == [
        [row[x] for x in shown] for row in rows
    ]


def test_a_fine_tuned_language_model_imitates_as_well(tmp_path, monkeypatch, language_model):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = countdown.get_config("llm")
    config.model.path = str(language_model)
    config.env.prompt = "brief"
    config.env.options.update(count=(2, 2), largest=30, targets=(10, 58))
    config.warmstart.update(fine_tune=True, rooms=24, batch=4, max_updates=1, warmup_updates=1)
    config.warmstart.update(check_every=1, check_episodes=2)
    config.log.trackers = ()
    small = SMALL | {"rollout.max_new_tokens": 8, "steps": 2, "checkpoint.every": 0}
    ragen_jax.train(config, workdir=tmp_path / "run", overrides=small)
    losses = [row["update/policy_loss"] for row in rows_of(tmp_path / "run")]
    assert [loss == pytest.approx(-1, abs=1e-5) for loss in losses] == [False, True]


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"model.path": "DIR"}, "warmstart.fine_tune"),
        (
            {"model.path": "D", "warmstart.fine_tune": True, "warmstart.demonstrations": "F"},
            "warmstart.demonstrations",
        ),
        ({"algorithm.name": "ppo"}, "algorithm.name"),
        ({"model.lora.rank": 2}, "model.lora.rank"),
    ],
)
def test_runs_that_cannot_imitate_are_refused(fields, name):
    config = sokoban.get_config("tiny")
    config.update_from_flattened_dict({"algorithm.imitate_every": 2, **fields})
    fill_auto_fields(config, [])
    with pytest.raises(ValueError, match=f"imitate_every is 2; it is for .* change {name}$"):
        check(config)
