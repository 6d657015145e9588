"""lab/claims.py: the verdicts of all pages, from the stored rows."""

import dataclasses

import pytest
from test_correlations import world as correlated
from test_detectors import world as probed
from test_gains import world as gained
from test_mechanism import world as pulled
from test_treatments import world as treated

from ragen_jax.configs import sokoban
from ragen_jax.configs.experiments import EXPERIMENTS, OTHER_CLAIMS
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.lab import gains
from ragen_jax.lab.arms import Arm
from ragen_jax.lab.claims import write_claims
from ragen_jax.lab.pages import PAGES, figures
from ragen_jax.lab.recorded import trim_rows, write_runs

pytestmark = pytest.mark.fast


def words(name, runs):
    return [v.verdict for v in PAGES[name].verdicts(EXPERIMENTS[name], runs)]


def test_the_verdicts_of_each_page():
    assert words("detectors", probed()) == ["reproduced", "undecided"]
    assert words("mechanism", pulled(-0.02, -0.01, 0.9, 0.3))[:2] == ["reproduced"] * 2
    assert words("mechanism", pulled(-0.01, -0.02, 0.3, 0.9))[:2] == ["reversed"] * 2
    assert words("figures", correlated())[:2] == ["reproduced", "reversed"]
    runs = {(s, "top-p 1.0" if t == "worse" else t, n): x for (s, t, n), x in treated().items()}
    assert words("cures", runs) == ["undecided", "reproduced"]  # equal success; information differs
    claim = Claim("table 5", "top-p", settings=("a",))
    experiment = dataclasses.replace(
        EXPERIMENTS["groups"], claims=(claim, dataclasses.replace(claim, settings=("b",)))
    )
    first, second = gains.verdicts(experiment, gained((0.1, -0.1)))
    assert (first.verdict, second.verdict) == ("reproduced", "reversed")
    assert first.claim == "`eval/success` is higher with `top-p` than with `no filter` (a)"


def test_the_page_says_what_was_run_and_what_not(tmp_path):
    for name, runs in (("detectors", probed()), ("mechanism", pulled(-0.02, -0.01, 0.9, 0.3))):
        plan = [Arm(*key, sokoban.get_config()) for key in runs]
        shown = {key: trim_rows(rows, figures(name)) for key, rows in runs.items()}
        write_runs(tmp_path / f"{name}.jsonl", plan, shown)
    text = write_claims(tmp_path)
    assert (tmp_path / "claims.md").read_text() == text
    row = "| section 5 | [mechanism](mechanism.md) | **reproduced** † | lower minus upper half"
    assert row in text
    assert "| section 4 | [detectors](detectors.md) | **reproduced** † | AUC 1.00" in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == 2 + 8 + len(OTHER_CLAIMS)
    (missing,) = [line for line in text.splitlines() if line.startswith("Not run yet")]
    assert "`organism`" in missing and "`mechanism`" not in missing


def test_every_page_has_verdicts():
    assert all(callable(page.verdicts) for page in PAGES.values())
    assert set(PAGES) == set(EXPERIMENTS)
