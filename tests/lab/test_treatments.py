"""lab/treatments.py on simulated runs with known effects."""

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import treatments
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.model_organism import ENTROPY, GROUNDED, MI, OTHER, VALID_RATE
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast


def run(mi, success):
    """Rows with a probe every 4th step and an evaluation every 20th."""
    rows = [{"step": 0, SUCCESS: success[0]}]
    for step in range(1, 4 * len(mi) + 1):
        row = {"step": step, "update/count": 4.0, treatments.KEPT_GROUPS: 0.75}
        if step % 4 == 0:
            row |= {MI: mi[step // 4 - 1], ENTROPY: 1.5, GROUNDED: 0.25, OTHER: 0.1}
            row |= {VALID_RATE: 0.98}
        if step % 20 == 0:
            row[SUCCESS] = success[step // 20]
        rows.append(row)
    return rows


def world():
    """Three seeds at different levels: "keeps" keeps all information, "dear" costs success."""
    runs = {}
    for seed in range(3):
        level = 2.0 + 0.3 * seed
        noise = np.random.default_rng(seed).normal(0, 0.01, (5, 10))
        falling = level * np.array([1, 0.8, 0.4, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
        held = [0.40 + 0.01 * seed, 0.45, 0.5]
        of = {
            "keeps": (np.full(10, level), held),
            "top-p 0.9": (falling, held),
            "dear": (np.full(10, level), [0.4, 0.2 + 0.01 * seed, 0.1]),
            "worse": (level * np.array([1, 0.1] + [0.05] * 8), held),
            "no filter": (falling, held),
        }
        for (name, (mi, success)), extra in zip(of.items(), noise, strict=True):
            runs["s", name, seed] = run(mi + np.r_[0, extra[1:]], success)
    return runs


def test_what_is_measured_by_hand():
    rows = run([2.0, 1.6, 0.8, 0.4], [0.4])
    assert treatments.kept_figure(rows) == pytest.approx(4.8 / 4 / 2)
    assert treatments.half(rows) == pytest.approx(8 + 4 * 0.6 / 0.8)
    assert treatments.half(run([2.0, 1.6], [0.4])) == np.inf
    assert treatments.success(run([2.0] * 5, [0.4, 0.5])) == pytest.approx(0.45)
    assert treatments.last(rows, MI) == 0.4


def test_what_helps_and_at_what_cost():
    runs = world()
    expected = {"keeps": "at no cost", "top-p 0.9": "no", "dear": "at a cost", "worse": "worse"}
    assert {name: treatments.helps(runs, name) for name in expected} == expected
    gain, half_width = treatments.difference(runs, treatments.kept_figure, "keeps", "no filter")
    assert gain == pytest.approx(1 - 0.3, abs=0.02) and half_width < 0.02
    assert treatments.helps(runs, "keeps", "top-p 0.9") == "at no cost"


def test_a_treatment_that_does_nothing_is_called_so():
    runs = world()
    runs |= {("s", "idle", seed): list(runs["s", "no filter", seed]) for seed in range(3)}
    assert (
        treatments.outcomes(runs)["idle"]
        == "identical runs"
        != treatments.outcomes(runs)["top-p 0.9"]
    )
    text = treatments.verdict(runs, treatments.outcomes(runs))
    assert (
        "- no significant difference: `top-p 0.9`\n"
        "- runs identical to those with no filter: `idle`\n" in text
    )


def test_noise_alone_helps_as_rarely_as_it_should():
    """Three seeds without a difference: the interval excludes 0 in 5 % of the experiments."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        runs = {
            ("s", name, seed): run(2.0 + np.r_[0, rng.normal(0, 0.2, 9)], [0.4, 0.4, 0.4])
            for seed in range(3)
            for name in ("a", "no filter")
        }
        found.append(treatments.helps(runs, "a"))
    assert 0.02 < np.mean([x != "no" for x in found]) < 0.09


@pytest.mark.long
def test_a_page_of_idle_noise_helps_nobody_after_holm():
    """Twenty treatments without effect: one seems to help, none after Holm's correction."""
    rng, alone, together = np.random.default_rng(3), [], []
    names = [f"t{i}" for i in range(20)]
    for _ in range(40):
        runs = {
            ("s", name, seed): run(2.0 + np.r_[0, rng.normal(0, 0.2, 5)], [0.4, 0.4])
            for seed in range(3)
            for name in (*names, "no filter")
        }
        outcome = treatments.outcomes(runs)
        alone.append(sum(word != "no" for word in outcome.values()))
        together.append(any(p < 0.05 for p in treatments.correct_p_values(runs, outcome).values()))
    assert 0.3 < np.mean(alone) < 2 and np.mean(together) <= 0.1


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    text = write_page("cures", tmp_path / "cures.md", "run cures", EXPERIMENTS["cures"], world())
    assert (
        "- more information kept, at no cost in success: `keeps`\n"
        "- more information kept, at a cost in success: `dear`\n"
        "- less information kept: `worse`\n"
        "- no significant difference: `top-p 0.9`\n"
        "- still significant with Holm's correction for 4 treatments with different runs: `keeps`, "
        "`dear`, `worse`\n"
        "- more information kept than with top-p 0.9: `keeps`, `dear`\n"
    ) in text
    row = next(line for line in text.splitlines() if line.startswith("| keeps |"))
    assert row.startswith("| keeps | 160 | 0.75 | 1.00 | +0.70 ± 0.0")
    assert row.split(" | ")[5].startswith("+0.70 ± ")  # compared with top-p 0.9
    assert "| > 40 | 1.50 | 0.25 | 0.10 | 0.98 | 0.50 | +0.00 ± 0.00 | at no cost | 0.00" in row
    assert "table 9" not in text  # no run has a filter that is worse in table 9
    assert (tmp_path / "cures.png").read_bytes().startswith(b"\x89PNG")
    runs = {(s, "top-p 1.0" if t == "worse" else t, n): x for (s, t, n), x in world().items()}
    text = write_page("cures", tmp_path / "cures.md", "run cures", EXPERIMENTS["cures"], runs)
    assert "| top-p 0.9 | 0.38 | 0.50 | 0.84 | 0.30 | 1.64 | 1.50 |" in text
