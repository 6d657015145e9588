"""lab/recorded.py: rows are read back unchanged, and only for the same config."""

import json

import pytest

from ragen_jax.configs import organism as organism_config
from ragen_jax.configs import sokoban
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.recorded import changed_fields, read_runs, trim_rows, write_runs

pytestmark = pytest.mark.fast

ROWS = [{"step": 0, "eval/success": 1 / 3}, {"step": 1, "update/loss": 0.1, "probe/mi_seq": 2.1}]


def plan(seeds=(2**31 + 5, 1), **changes):
    config = sokoban.get_config("tiny")
    config.update_from_flattened_dict({f"algorithm.{k}": v for k, v in changes.items()})
    arms = []
    for seed in seeds:
        of_arm = config.copy_and_resolve_references()
        of_arm.seed = seed
        arms.append(Arm("entropy 0.05", "a, b", seed, of_arm))
    return arms


def test_runs_come_back_for_the_same_config_alone(tmp_path):
    path, arms = tmp_path / "cures.jsonl", plan()
    assert read_runs(path) == read_runs(path, arms) == {}
    shown = trim_rows(ROWS, ("eval/success", "probe/mi_seq"))  # the page's figures
    assert shown == [{"step": 0, "eval/success": 0.3333333}, {"step": 1, "probe/mi_seq": 2.1}]
    runs = {arm.key: shown for arm in arms}
    write_runs(path, arms, runs)
    assert read_runs(path) == read_runs(path, arms) == runs
    assert read_runs(path, arms[1:]) == {arms[1].key: shown}
    assert list(read_runs(path, arms[::-1])) == [arm.key for arm in arms[::-1]]
    assert read_runs(path, plan(entropy_coef=0.5)) == {}
    assert read_runs(path, [*plan(seeds=(3,)), *plan(seeds=(1,))]) == {arms[1].key: shown}
    first = json.loads(path.read_text().splitlines()[0])
    assert first["config"]["seed"] == 2**31 + 5 and first["figures"]["probe/mi_seq"] == [None, 2.1]


def test_what_is_not_default():
    assert changed_fields(organism_config.get_config())["warmstart.styles.template"] == 0.5
    (arm,) = plan(seeds=(0,), entropy_coef=0.25)
    assert changed_fields(arm.config)["algorithm.entropy_coef"] == 0.25
    assert "algorithm.name" not in changed_fields(arm.config)
