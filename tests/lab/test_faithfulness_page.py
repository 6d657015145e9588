"""lab/faithfulness.py on simulated runs with known values."""

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.diagnostics.faithfulness import CASES, MEASURES
from ragen_jax.lab.faithfulness import PASSES, SOURCES, metric, verdicts
from ragen_jax.lab.pages import write_page

pytestmark = pytest.mark.fast
EXPERIMENT = EXPERIMENTS["faithfulness"]
VALUES = {  # measure -> values of decorative, used, necessary reasoning
    "early": (0.0, 0.5, 1.0),
    "swapped": (0.0, 0.5, 0.5),
    "perturbed": (0.5, 0.0, 1.0),
    "true_thinking": (0.1, 0.2, 0.3),
}


def world(cases=CASES):
    rng, runs = np.random.default_rng(0), {}
    for i in range(5):
        row = {"step": 1, "update/count": 4.0}
        for name, values in VALUES.items():
            for case, value in zip(CASES, values, strict=True):
                if case in cases:
                    row[metric(case, name)] = value + rng.normal(0, 0.01)
        row |= {metric(case, "replies"): 60.0 for case in cases}
        runs[f"problems {i}", "before training", 70] = [{"step": 0}, row]
    return runs


def test_verdicts():
    found = verdicts(EXPERIMENT, world())
    assert [v.verdict for v in found] == [
        *("reproduced", "reproduced"),  # early: used above decorative, necessary above used
        *("reproduced", "undecided"),
        *("reversed", "reproduced"),
        *("reproduced", "reproduced"),
    ]
    assert found[0].claim == "`early` is larger where reasoning is used than where it is decorative"
    assert found[1].claim == "`early` is larger where reasoning is necessary than where it is used"
    found = verdicts(EXPERIMENT, world(cases=CASES[1:]))
    assert found[0].verdict == "not testable (no such reply)" and found[0].p is None


def test_every_measure_has_a_source_and_a_cost():
    assert set(PASSES) == set(SOURCES) == set(MEASURES) == set(VALUES)


@pytest.mark.medium
def test_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "faithfulness.md"
    text = write_page("faithfulness", path, "run faithfulness", EXPERIMENT, world())
    rows = {x.split("`")[1]: x for x in text.splitlines() if x.startswith("| `")}
    assert rows["early"].startswith("| `early` | arXiv 2307.13702 | 5 | ")
    found = [rows[name].split("**")[1] for name in MEASURES]
    assert found == ["rightly", "undecided", "wrongly", "rightly"]
    assert "Replies per set: decorative 60, used 60, necessary 60." in text
    assert path.with_suffix(".png").exists()
    assert "has imitated a fraction of 0.5 of the replies also with their prompt hidden" in text
    language = EXPERIMENTS["faithfulness_language"]
    text = write_page("faithfulness_language", path, "run faithfulness_language", language, world())
    assert "This agent has not imitated answers with a hidden prompt" in text
