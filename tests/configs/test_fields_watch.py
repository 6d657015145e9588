"""Fields of stopping and regimes: each is changed, and `stages.watch` judges some iterations."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field_entries import Entry, check_entry, once

from ragen_jax.config.check import check
from ragen_jax.configs import base
from ragen_jax.diagnostics import regimes
from ragen_jax.diagnostics.regimes import init_regimes
from ragen_jax.diagnostics.stopping import init_stopping
from ragen_jax.run.stages import watch
from ragen_jax.update.state import TrainState

pytestmark = pytest.mark.fast

# An iteration of a healthy run; signs of collapse are measured relative to its levels.
FIGURES = {
    "collapse/first_turn/own_margin": 20.0,
    "collapse/trajectory/own_margin": 20.0,
    "collapse/first_turn/h_cond": 1.0,
    "rollout/valid_think_rate": 1.0,
    "rollout/valid_rate": 1.0,
    "reasoning/grounded_rate": 1.0,
    "rollout/response_length": 20.0,
    "filter/kept_ratio": 0.5,
}
MI = "collapse/first_turn/own_margin", "collapse/trajectory/own_margin"
H = "collapse/first_turn/h_cond"
THINK, ACTION, GROUNDED = (
    "rollout/valid_think_rate",
    "rollout/valid_rate",
    "reasoning/grounded_rate",
)
LENGTH, KEPT = "rollout/response_length", "filter/kept_ratio"


def series(*parts):
    """Iterations from (count, figures that differ from FIGURES)."""
    return tuple((count, tuple(figures.items())) for count, figures in parts)


def watched(config, parts):
    """Watch a run of one environment, iteration by iteration. Return the iterations (from 1) at
    which each rule fired, with its action, and the regime/* figures of each iteration.

    `variance` is the mean over the groups of the variance of their returns."""
    tasks = [types.SimpleNamespace(label="")]
    checked = check(config)
    run = types.SimpleNamespace(tasks=tasks, stopping=checked.stopping, regimes=checked.regimes)
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
# A tenth of the mean is 0.175 over the first ten iterations, and 0.4 over the first four.
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


def alarms(o):
    """Iterations at which the alarm is on."""
    return [step for step, row in enumerate(o.rows, 1) if row["regime/alarm"]]


def last(name):
    return lambda o: o.rows[-1][f"regime/{name}"]


def never(a, b):
    return not alarms(b) and bool(alarms(a))


def later(a, b):
    return alarms(b)[0] > alarms(a)[0] > 0


def ends_later(a, b):
    """Whether the alarm ends later in `b`, given that it ends in both."""
    return max(alarms(b)) > max(alarms(a)) and max(alarms(b)) < len(b.rows)


def margin(value):
    return dict.fromkeys(MI, value)


def mi(*values):
    return series(*((count, margin(value)) for count, value in values))


COLLAPSED = mi((15, 20.0), (14, 0.2))
RECOVERED = mi((15, 20.0), (10, 0.2), (40, 20.0))


def fallen_with(key, value):
    """A collapse sign of one kind with a sign of another; together they raise an alarm."""
    other = ACTION if key != ACTION else THINK
    return series((15, {}), (12, {key: value, other: 0.01}))


def scale(o):
    """The filter's scale at the first nine iterations of the alarm."""
    return [round(row["regime/filter_scale"], 4) for row in o.rows[alarms(o)[0] - 1 :][:9]]


def tightened(o, every):
    """Whether the filter was tightened every `every` iterations, from the start of the alarm."""
    first, last_step = alarms(o)[0], len(o.rows)
    return at("regimes", o) == {"tighten": [*range(first, last_step + 1, every)]}


TIGHT = {"regimes.action": "tighten"}

REGIMES = {
    "regimes.action": Entry(
        "stop",
        lambda _, o: at("regimes", o) == {"stop": alarms(o)} and 16 < alarms(o)[0] < 21,
        given=COLLAPSED,
    ),
    # With more values in the level, the alarm starts later.
    "regimes.baseline": Entry(9, later, given=mi((7, 20.0), (20, 0.2))),
    "regimes.mi": Entry(0.5, never, given=mi((15, 20.0), (12, 12.0))),
    "regimes.tighten.every": Entry(2, lambda _, o: tightened(o, 2), TIGHT, given=COLLAPSED),
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


@pytest.mark.medium
@pytest.mark.parametrize("name", STOPPING)
def test_stopping(name):
    check_entry(name, STOPPING[name], outcome)


@pytest.mark.medium
@pytest.mark.parametrize("name", REGIMES)
def test_regimes(name):
    check_entry(name, REGIMES[name], outcome)


# Constants of the alarm: another value, its effect, and the iterations that show the effect.
CONSTANTS = {
    # A shorter mean falls earlier.
    "RECENT": (4, lambda a, b: later(b, a), mi((60, 20.0), (20, 6.0))),
    # A level of 50 values includes 20 later values, and a level of 20 includes none.
    "LONGEST_LEVEL": (
        20,
        lambda a, b: last("h_relative")(b) > last("h_relative")(a) + 0.05,
        series((30, {}), (120, {H: 1.3})),
    ),
    "CLEAR_PATIENCE": (9, ends_later, RECOVERED),
    # Back to 0.7 of the level: less than half of the way from 0.63, but more than a tenth.
    "RECOVER": (
        0.1,
        lambda a, b: alarms(b)[-1] < len(b.rows) == alarms(a)[-1],
        mi((15, 20.0), (10, 0.2), (60, 14.0)),
    ),
    "LOW": (
        0.05,
        lambda a, b: last("index")(a) == 3 and last("index")(b) == 0,
        series((15, {}), (9, margin(2.0) | {H: 0.1})),
    ),
    "FALL mi_sign": (0.5, never, series((60, {}), (20, margin(14.0) | {ACTION: 0.01}))),
    "FALL valid_think": (0.5, never, fallen_with(THINK, 0.6)),
    "FALL valid_action": (0.5, never, fallen_with(ACTION, 0.6)),
    "FALL grounded": (0.5, never, fallen_with(GROUNDED, 0.6)),
    "FALL length": (0.1, never, fallen_with(LENGTH, 5.0)),
    "RISE length": (3.0, never, fallen_with(LENGTH, 40.0)),
    "FALL entropy": (0.1, never, fallen_with(H, 0.2)),
    "RISE entropy": (3.0, never, fallen_with(H, 2.5)),
}


@pytest.mark.slow
@pytest.mark.medium
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_alarm(name, monkeypatch):
    changed, claim, given = CONSTANTS[name]
    monkeypatch.setattr(regimes, "CLEAR_PATIENCE", 2)  # ends an alarm sooner
    before = watched(base.get_config(), given)
    constant, _, kind = name.partition(" ")
    if kind:
        monkeypatch.setitem(getattr(regimes, constant), kind, changed)
    else:
        monkeypatch.setattr(regimes, constant, changed)
    after = watched(base.get_config(), given)
    assert claim(before, after) and not claim(before, before)
