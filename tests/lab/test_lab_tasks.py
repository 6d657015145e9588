"""lab/tasks.py on simulated runs with a known outcome."""

import pytest

from ragen_jax.configs import reasoning_gym
from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import arms, tasks
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast


def run(mi, entropy=(1.0, 1.0), valid=(1.0, 1.0)):
    """Rows that go linearly from a first to a last value."""
    rows = [{"step": 0, SUCCESS: 0.25}]
    for step in range(0, 41, 5):
        share = min(step / 30, 1.0)  # so that the last two rows are at the end value
        row = {"step": step or 1, tasks.CHANCE: 1 / 32, tasks.VARIANCE: 0.1}
        for name, (first, last) in {
            tasks.MI: mi,
            tasks.ENTROPY: entropy,
            tasks.VALID_RATE: valid,
            tasks.RETRIEVAL: (0.9, 0.4),
            "anatomy/mixed": (0.5, 0.25),
            "anatomy/failed": (0.5, 0.75),
        }.items():
            row[name] = first + share * (last - first)
        rows.append(row | {"anatomy/solved": 0.0, "anatomy/tied": 0.0})
    return [*rows, {"step": 40, SUCCESS: 0.5}]


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (run((2.0, 1.5)), "kept"),
        (run((2.0, 0.9)), "template collapse"),
        (run((2.0, 0.9), entropy=(1.0, 0.7)), "low-entropy collapse"),
        (run((2.0, 0.9), entropy=(1.0, 3.0), valid=(1.0, 0.7)), "invalid replies"),
        (run((0.4, 0.0)), "little information"),
        (run((0.4, 0.0), valid=(0.7, 0.7)), "invalid replies"),
    ],
)
def test_what_becomes_of_a_run(rows, word):
    assert tasks.fate(rows) == word


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {
        ("gcd", "bonus 0.05", 60): run((2.0, 0.5)),
        ("gcd", "no bonus", 60): run((2.0, 1.9)),
        ("lcm", "bonus 0.05", 60): run((2.0, 0.5)),
        ("lcm", "no bonus", 60): run((0.2, 0.2)),
    }
    experiment = EXPERIMENTS["tasks"]
    text = write_page("tasks", tmp_path / "tasks.md", "run tasks", experiment, runs)
    assert "- bonus 0.05: template collapse 2\n- no bonus: kept 1, little information 1\n" in text
    assert (
        "| `lcm` | template collapse | 2.00 -> 0.50 | 1.00 -> 1.00 | 0.90 -> 0.40 (0.03) | "
        "1.00 -> 1.00 | 0.25 -> 0.38 | 0.100 -> 0.100 | "
        "50% / 0% / 50% / 0% -> 25% / 0% / 75% / 0% |"
    ) in text
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")


def test_twenty_tasks_each_with_settings_of_its_own():
    plan = arms.arms(EXPERIMENTS["tasks"], reasoning_gym.get_config("tiny"))
    assert len(plan) == 40
    options = [arm.config.env.options for arm in plan]
    assert len({o["task"] for o in options}) == 20 and {len(o["settings"]) for o in options} == {0}
    assert {o["level"] for o in options} == {0, 1}
