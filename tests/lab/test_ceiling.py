"""lab/ceiling.py: claims about information at its ceiling cannot be judged."""

import math

import numpy as np
import pytest

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import Claim
from ragen_jax.lab import ceiling, correlations, gains, tasks, treatments
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab.correlations import MI_SEQ
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.lab.gains import MI

pytestmark = pytest.mark.fast


def world(level, *, margin=None, bound=None):
    """Three seeds of two arms at the fraction `level` of log 8; their differences are noise."""
    rng = np.random.default_rng(0)
    runs = {}
    for seed in range(3):
        for name in ("top-p 0.9", "no filter"):
            row = {MI: level[name] * math.log(8) + rng.normal(0, 1e-4), SUCCESS: 0.4}
            if margin is not None:
                row["collapse/first_turn/own_margin"] = margin[name] + rng.normal(0, 0.1)
            if bound is not None:
                row["collapse/first_turn/mi_upper_bound"] = bound
            runs["8 x 16", name, seed] = [row | {"step": step} for step in range(3)]
    return runs


def judged(runs, sign=1):
    claim = Claim("table 7: MI", "top-p 0.9", MI, sign)
    return gains.judge(claim, runs, EXPERIMENTS["members"])


def test_ceilings_by_hand():
    members = EXPERIMENTS["members"]

    def of(figure, experiment, setting, treatment, rows=()):
        return ceiling.ceiling(experiment, figure, setting, treatment, list(rows))

    assert of(MI, members, "8 x 16", "no filter") == pytest.approx(math.log(8))
    assert of(MI, EXPERIMENTS["groups"], "64 x 2", "no filter") == pytest.approx(math.log(64))
    assert of(MI, EXPERIMENTS["quarters"], "16 x 8", "quarter 1") == pytest.approx(math.log(16))
    assert of(MI_SEQ, members, "8 x 16", "no filter") == pytest.approx(math.log(16))
    fewer = of("probe/mi_seq", EXPERIMENTS["cures"], "entropy 0.05", "seven groups played")
    assert fewer == pytest.approx(math.log(32))
    assert of(SUCCESS, members, "8 x 16", "no filter") == math.inf
    assert of("collapse/first_turn/mi_released", members, "8 x 16", "no filter") == math.inf
    recorded = [{"step": 1, "collapse/first_turn/mi_upper_bound": 1.5}]
    assert of(MI, members, "8 x 16", "no filter", recorded) == 1.5
    assert ceiling.companions((MI, SUCCESS)) == (
        "collapse/first_turn/mi_upper_bound",
        "collapse/first_turn/own_margin",
    )


def test_both_sides_at_the_ceiling_cannot_be_judged():
    high = {"top-p 0.9": 0.995, "no filter": 0.985}
    found = judged(world(high))
    assert found.verdict == "cannot be judged (at the ceiling)" and found.p is None
    assert found.half_width < found.mean  # without the ceiling it would be reproduced
    below = {"top-p 0.9": 0.99, "no filter": 0.9}
    assert judged(world(below)).verdict == "reproduced"  # a fall from the ceiling is visible
    low = {"top-p 0.9": 0.5, "no filter": 0.4}
    assert judged(world(low)).verdict == "reproduced"
    # A ceiling that a run recorded takes precedence over that of its config.
    assert judged(world(low, bound=0.4 * math.log(8))).verdict.startswith("cannot")
    page = gains.markdown(EXPERIMENTS["members"], _page(high), "x.png")
    assert "2.07 (ceiling)" in page and "**cannot be judged (at the ceiling)**" in page


def test_a_claim_at_the_ceiling_is_judged_by_the_margin_if_recorded():
    high = {"top-p 0.9": 0.985, "no filter": 0.995}
    found = judged(world(high, margin={"top-p 0.9": 9.0, "no filter": 7.0}))
    assert found.verdict == "reproduced" and found.mean == pytest.approx(2, abs=0.3)
    assert found.figure == "collapse/first_turn/own_margin"
    found = judged(world(high, margin={"top-p 0.9": 7.0, "no filter": 9.0}))
    assert found.verdict == "reversed"
    assert set(ceiling.companions((MI,))) <= set(gains.FIGURES)
    assert "probe/own_margin" in correlations.FIGURES


def _page(level):
    """All arms of experiment members at a fraction of their ceiling."""
    rng = np.random.default_rng(1)
    return {
        ("8 x 16", name, seed): [
            {"step": step, MI: level.get(name, 0.99) * math.log(8), SUCCESS: rng.normal(0.4, 0.01)}
            for step in range(3)
        ]
        for seed in range(3)
        for name in EXPERIMENTS["members"].treatments
    }


def test_other_pages_respect_the_ceiling():
    from test_correlations import world as correlated
    from test_treatments import run as treated

    high = 0.99 * math.log(16)
    runs = {
        key: [row | ({MI_SEQ: high + 1e-6 * i} if MI_SEQ in row else {}) for row in rows]
        for i, (key, rows) in enumerate(correlated().items())
    }
    found = {v.claim.split("`")[1]: v for v in correlations.verdicts(EXPERIMENTS["figures"], runs)}
    assert found[MI_SEQ].verdict == ceiling.CANNOT_BE_JUDGED and found[MI_SEQ].p is None
    assert "cannot" not in found[correlations.MI_ZSCORE].verdict
    top = math.log(32)
    runs = {
        ("s", name, seed): treated(np.full(10, top - 1e-3 * seed - cut), [0.4 + cut, 0.4, 0.5])
        for seed in range(3)
        for name, cut in (("top-p 0.9", 0.0), ("top-p 1.0", 0.01), ("no filter", 0.02))
    }
    words = [v.verdict for v in treatments.verdicts(EXPERIMENTS["cures"], runs)]
    assert words[1] == ceiling.CANNOT_BE_JUDGED
    assert organism.verdicts(EXPERIMENTS["organism"], runs)[1].verdict == ceiling.CANNOT_BE_JUDGED
    kept = tasks.markdown(EXPERIMENTS["tasks"], _task(top), "x.png")
    assert "3.47 -> 3.47 (ceiling)" in kept
    assert "2.00 -> 2.00 |" in tasks.markdown(EXPERIMENTS["tasks"], _task(2.0), "x.png")


def _task(level):
    row = {tasks.MI: level, tasks.RETRIEVAL: 1.0, tasks.CHANCE: 1 / 32, tasks.ENTROPY: 1.0}
    row |= {tasks.VALID_RATE: 1.0, SUCCESS: 0.5, tasks.VARIANCE: 0.1}
    row |= dict.fromkeys(tasks.ANATOMY, 0.25)
    return {("task", "no filter", 0): [row | {"step": step} for step in range(3)]}
