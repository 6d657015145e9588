"""Fields of stopping and regimes: each changed where `stages.watch` judges some iterations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fields import Entry, check_entry, configured, once

from ragen_jax.diagnostics.regimes import init_regimes
from ragen_jax.diagnostics.stopping import init_stopping
from ragen_jax.run.stages import watch
from ragen_jax.types import TrainState

pytestmark = pytest.mark.fast

# An iteration of a healthy run; what is a sign of collapse needs levels, which are these.
FIGURES = {
    "collapse/first_turn/mi_released": 2.0,
    "collapse/trajectory/mi_released": 2.0,
    "collapse/first_turn/h_cond": 1.0,
    "rollout/valid_think_rate": 1.0,
    "rollout/valid_rate": 1.0,
    "reasoning/grounded_rate": 1.0,
    "rollout/response_length": 20.0,
    "filter/kept_ratio": 0.5,
}
MI, H = "collapse/first_turn/mi_released", "collapse/first_turn/h_cond"
THINK, ACTION, GROUNDED = (
    "rollout/valid_think_rate",
    "rollout/valid_rate",
    "reasoning/grounded_rate",
)
LENGTH, KEPT = "rollout/response_length", "filter/kept_ratio"


def series(*parts):
    """Iterations from (how many, figures that differ from FIGURES)."""
    return tuple((count, tuple(figures.items())) for count, figures in parts)


def watched(config, parts):
    """What a run of one environment says of iterations, one after the other: the numbers (from 1)
    of those at which each rule fired, with what action, and each one's regime/* figures.

    `variance` is the mean over the groups of the variance of their returns."""
    tasks = [types.SimpleNamespace(label="")]
    settings = dict(stopping=config.stopping.to_dict(), regimes=config.regimes.to_dict())
    run = types.SimpleNamespace(tasks=tasks, **settings)
    state = TrainState(
        params=None,
        opt_state=None,
        step=jnp.int32(0),
        seed_cursor={},
        kl_scale=None,
        stopping=init_stopping(),
        regimes=init_regimes(),
    )
    fired, rows = [], []
    for count, figures in parts:
        for _ in range(count):
            row = FIGURES | dict(figures)
            spread = np.sqrt(row.pop("variance", 1.0) / 2)
            returns = [np.array([[-spread, spread]] * 3, np.float32)]
            state, now, found = watch(run, state, row, returns)
            rows.append(found)
            fired += [(len(rows), one.rule, one.action) for one in now]
    return types.SimpleNamespace(fired=fired, rows=rows, state=jax.device_get(state))


def at(rule, o):
    """{action: iterations at which a rule fired with it}."""
    found = {}
    for step, name, action in o.fired:
        if name == rule:
            found.setdefault(action, []).append(step)
    return found


def fires(rule, **expected):
    return lambda _, o: at(rule, o) == {action: [*steps] for action, steps in expected.items()}


# ---- stopping -----------------------------------------------------------------------------------

NARROW = series((10, {}), (3, {"variance": 0.05}), (1, {}), (6, {"variance": 0.05}))
# A tenth of the mean is 0.175 over the first ten, and 0.4 over the first four.
START = series((4, {"variance": 4.0}), (6, {"variance": 0.25}), (8, {"variance": 0.15}))
POOR = {"eval/success": 0.005}
FAILED = series((1, POOR), (1, {"eval/success": 0.5}), (2, {}), (7, POOR), (1, {}), (1, POOR))
EMPTY = series((1, {}), (7, {KEPT: 0.0}), (1, {}))
SKIPPED = series((1, {}), (4, {"update/skipped": 1}), (1, {}), (2, {"critic/skipped": 1}))

STOPPING = {
    "stopping.variance.action": Entry("warn", fires("variance", warn=[19]), given=NARROW),
    "stopping.variance.patience": Entry(
        2, fires("variance", stop=[12, 13, 16, 17, 18, 19, 20]), given=NARROW
    ),
    "stopping.variance.ratio": Entry(0.04, fires("variance"), given=NARROW),
    "stopping.variance.baseline": Entry(4, fires("variance", stop=range(9, 19)), given=START),
    "stopping.success.action": Entry("off", fires("success"), given=FAILED),
    "stopping.success.patience": Entry(7, fires("success", stop=[11, 13]), given=FAILED),
    "stopping.success.least": Entry(0.005, fires("success"), given=FAILED),
    "stopping.empty.action": Entry("warn", fires("empty", warn=[6]), given=EMPTY),
    "stopping.empty.patience": Entry(7, fires("empty", stop=[8]), given=EMPTY),
    "stopping.nonfinite.action": Entry("warn", fires("nonfinite", warn=[4]), given=SKIPPED),
    "stopping.nonfinite.patience": Entry(2, fires("nonfinite", stop=[3, 4, 5, 8]), given=SKIPPED),
}


# ---- regimes ------------------------------------------------------------------------------------


def plain():
    """Numbers that are easy to count with: the last value is the mean, intervals do not matter, and
    nothing but MI is a sign unless a test says so."""
    return configured(
        {
            **{"regimes.baseline": 4, "regimes.recent": 1, "regimes.long": 4},
            **{"regimes.margin": 0.0, "regimes.clear_patience": 2},
        }
    )


def alarms(o):
    """Iterations at which the alarm is on."""
    return [step for step, row in enumerate(o.rows, 1) if row["regime/alarm"]]


def alarmed(*steps):
    return lambda _, o: alarms(o) == [*steps]


def last(name):
    return lambda o: o.rows[-1][f"regime/{name}"]


def never(a, b):
    return not alarms(b) and bool(alarms(a))


def mi(*values):
    return series(*((count, {MI: value}) for count, value in values))


COLLAPSED = mi((5, 2.0), (9, 0.1))
# From step to step it changes by 0.8, and falls by as much.
NOISY = mi(*((1, 2.0 + 0.4 * (-1) ** t) for t in range(6)), (2, 1.3))


def fallen_with(key, value):
    """A fall of one kind beside a sign of another: together they are an alarm."""
    other = ACTION if key != ACTION else THINK
    return series((5, {}), (3, {key: value, other: 0.01}))


def scale(o):
    return [round(row["regime/filter_scale"], 4) for row in o.rows[5:]]


TIGHT = {"regimes.action": "tighten"}

REGIMES = {
    "regimes.action": Entry(
        "stop", lambda _, o: at("regimes", o) == {"stop": [*range(6, 15)]}, given=COLLAPSED
    ),
    # With one value there is a level.
    "regimes.baseline": Entry(1, alarmed(2, 3), given=mi((1, 2.0), (2, 0.5))),
    # Means of half the new value and half of what was: 1.7, 1.3, 1.1, 1.65, 1.9 and 2.1. Below 1.5
    # is a sign, and two above 1.73 end it.
    "regimes.recent": Entry(
        2, alarmed(7, 8, 9, 10), given=mi((5, 2.0), (1, 1.4), (2, 0.9), (3, 2.2))
    ),
    # Behind eight steps of 4.0 the level is 3.8, or 3.2.
    "regimes.long": Entry(100, never, given=mi((5, 2.0), (8, 4.0), (3, 2.6))),
    "regimes.margin": Entry(3.0, never, given=NOISY),
    "regimes.clear_patience": Entry(4, alarmed(6, 7, 8, 9), given=mi((5, 2.0), (1, 0.1), (5, 2.0))),
    # 0.8 of the level is not half of the way back from 0.75, but a tenth of it.
    "regimes.recover": Entry(0.1, alarmed(6, 7), given=mi((5, 2.0), (1, 0.1), (5, 1.6))),
    "regimes.low": Entry(
        0.05,
        lambda a, b: last("index")(a) == 3 and last("index")(b) == 0,
        given=series((5, {}), (1, {MI: 0.2, H: 0.1})),
    ),
    "regimes.mi": Entry(0.5, never, given=mi((5, 2.0), (3, 1.2))),
    "regimes.mi_sign": Entry(0.5, never, given=series((5, {}), (3, {MI: 1.6, ACTION: 0.01}))),
    "regimes.valid_think": Entry(0.5, never, given=fallen_with(THINK, 0.6)),
    "regimes.valid_action": Entry(0.5, never, given=fallen_with(ACTION, 0.6)),
    "regimes.grounded": Entry(0.5, never, given=fallen_with(GROUNDED, 0.6)),
    "regimes.length.fall": Entry(0.1, never, given=fallen_with(LENGTH, 5.0)),
    "regimes.length.rise": Entry(3.0, never, given=fallen_with(LENGTH, 40.0)),
    "regimes.entropy.fall": Entry(0.1, never, given=fallen_with(H, 0.2)),
    "regimes.entropy.rise": Entry(3.0, never, given=fallen_with(H, 2.5)),
    "regimes.tighten.every": Entry(
        2,
        lambda _, o: at("regimes", o) == {"tighten": [6, 8, 10, 12, 14]},
        TIGHT,
        given=COLLAPSED,
    ),
    "regimes.tighten.factor": Entry(
        0.9,
        lambda _, o: scale(o) == [0.9] * 3 + [0.81] * 3 + [0.8] * 3,
        TIGHT,
        given=COLLAPSED,
    ),
    "regimes.tighten.least": Entry(
        0.93,
        lambda _, o: scale(o) == [0.95] * 3 + [0.93] * 6,
        TIGHT,
        given=COLLAPSED,
    ),
}

outcome = once(watched)


@pytest.mark.parametrize("name", STOPPING)
def test_stopping(name):
    check_entry(name, STOPPING[name], outcome)


@pytest.mark.parametrize("name", REGIMES)
def test_regimes(name):
    check_entry(name, REGIMES[name], outcome, plain)
