"""lab/referee.py: the table of claims of other papers, from stored rows."""

import shutil
from pathlib import Path

import pytest
from cli_commands import call
from test_lengths import world

from ragen_jax.configs import organism
from ragen_jax.configs.experiments import (
    EXPERIMENTS,
    NOT_TO_CONCLUDE,
    REFEREE,
    REFEREE_QUICK,
)
from ragen_jax.configs.experiments.experiment import RAGEN_2
from ragen_jax.lab.arms import Arm, arms, shorten
from ragen_jax.lab.ceiling import config_of
from ragen_jax.lab.pages import figures
from ragen_jax.lab.recorded import trim_rows, write_runs
from ragen_jax.lab.referee import verdicts, write_referee

pytestmark = pytest.mark.fast
DOCS = Path(__file__).parents[2] / "docs/lab"


def store(report, name, runs):
    plan = [Arm(*key, organism.get_config()) for key in runs]
    shown = {key: trim_rows(rows, figures(name)) for key, rows in runs.items()}
    write_runs(report / f"{name}.jsonl", plan, shown)


def test_the_table_names_what_was_not_run(tmp_path):
    store(tmp_path, "figures", world(1.0))
    text = write_referee(tmp_path)
    assert (tmp_path / "referee.md").read_text() == text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 3
    assert "| 8 of 8 runs (95 % CI 0.63 to 1.00) | not run | **reproduced** † | 0.0" in text
    assert (
        "Not run yet: `dead_groups`, `mismatch`, `signals`, `allocation`, "
        "`distillation`, `spikes`, `asking`, `faithfulness`." in text
    )
    assert "for the 3 tested claims of the page. Of the 2 decided verdicts, 2 remain" in text
    assert all(f"- {sentence}" in text for sentence in NOT_TO_CONCLUDE)
    assert all(EXPERIMENTS[name].doubt in text for name in REFEREE)


def test_the_language_model_is_next_to_the_tiny_agent(tmp_path):
    store(tmp_path, "figures", world(1.0))
    store(tmp_path, "language_detectors", world(-1.0))
    text = write_referee(tmp_path)
    (row,) = [line for line in text.splitlines() if line.startswith("| arms whose")]
    assert "Spearman +1.00 over 8 arms | Spearman -1.00 over 8 arms: **reversed** † |" in row
    assert len(verdicts(tmp_path)["lengths_language"]) == 3


def test_a_row_has_the_commands_of_both_agents(tmp_path):
    shutil.copy(DOCS / "spikes.jsonl", tmp_path)
    lines = (DOCS / "spikes_language.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"setting":"entropy 0.1"' in line]
    (tmp_path / "spikes_language.jsonl").write_text("".join(kept))
    rows = [line for line in write_referee(tmp_path).splitlines() if line.startswith("| `inter")]
    one, both = rows  # the rows of the language model have one of the two settings
    tiny = "`lab run spikes`: 20 runs of 0.8 min on one core"
    assert "| not run |" in one and one.endswith(f"| {tiny} |")
    language = "`lab run spikes_language`: 6 runs of 8 min on 2 cores"
    assert "not run" not in both and both.endswith(f"| {tiny}; {language} |")


def test_the_rows_name_experiments_on_other_papers():
    for name, other in REFEREE.items():
        assert EXPERIMENTS[name].paper != RAGEN_2
        assert not other or EXPERIMENTS[name].paper == EXPERIMENTS[other].paper
    assert set(REFEREE_QUICK) <= set(REFEREE)
    assert all(EXPERIMENTS[name].quick for name in REFEREE_QUICK)


@pytest.mark.medium
@pytest.mark.parametrize("name", [*REFEREE, *filter(None, REFEREE.values())])
def test_every_arm_has_a_valid_config(name):
    experiment = EXPERIMENTS[name]
    plan = arms(experiment, config_of(experiment, "", ""))
    sizes = (experiment.seeds, experiment.settings, experiment.treatments)
    count = 1
    for size in sizes:
        count *= len(size)
    assert len(plan) == count
    episodes = {arm.config.rollout.groups * arm.config.rollout.group_size for arm in plan}
    assert experiment.rows or len(episodes) == 1  # arms match in episodes
    if experiment.quick:
        assert arms(shorten(experiment), config_of(experiment, "", ""))


def test_run_referee_runs_its_experiments_in_turn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    shutil.copy(DOCS / "figures.jsonl", tmp_path)
    begun = []

    class Done:
        returncode = 0

    def run(words, **_):
        begun.append(words[3:])
        return Done()

    monkeypatch.setattr("subprocess.run", run)
    code, out, err = call("ragen_jax.lab", "run", "referee", f"--report={tmp_path}")
    assert code == 0, err
    assert begun == [["run", name, f"--report={tmp_path}"] for name in REFEREE]
    assert "| arms whose reasoning gets shorter" in out and (tmp_path / "referee.md").exists()
    code, _, _ = call("ragen_jax.lab", "run", "referee", "--quick", f"--report={tmp_path}")
    assert code == 0 and [words[1] for words in begun[len(REFEREE) :]] == list(REFEREE_QUICK)
    assert (tmp_path / "referee_quick.md").exists()
    Done.returncode = 3
    code, _, _ = call("ragen_jax.lab", "run", "referee", f"--report={tmp_path}")
    assert code == 3


def test_a_page_without_runs_needs_the_rows_of_another(tmp_path):
    pytest.importorskip("matplotlib")
    words = ("ragen_jax.lab", "run", "lengths", f"--report={tmp_path}")
    code, _, err = call(*words)
    assert code == 2 and "holds no rows of figures" in err and err.count("\n") == 1
    code, _, err = call(*words, "--quick")
    assert code == 2 and "has no shorter form" in err
    store(tmp_path, "figures", world(1.0))
    code, out, err = call(*words)
    assert code == 0, err
    assert (tmp_path / "lengths.md").exists() and (tmp_path / "referee.md").exists()
