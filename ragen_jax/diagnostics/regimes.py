"""Where a run stands between reasoning and collapse, and an alarm before success shows it.

Two axes (RAGEN-2, section 2): the conditional entropy H(Z|X) of the reasoning, that is diversity
within an input, and its mutual information I(Z;X) with the input. Each is read relative to the
run's own mean over its first steps; low is below `low` of that.

    index  H(Z|X)  I(Z;X)
    0      high    high    diverse reasoning
    1      low     high    compressed: nearly deterministic, but still about the input
    2      high    low     template collapse: diverse, but about no input in particular
    3      low     low     low-entropy collapse

The alarm watches signs. A sign is a kind of figure that has left its first level:

    kind          figures, each relative to its own mean over the first steps       a sign where
    mi            collapse/*/mi_released                                            low
    retrieval     collapse/*/retrieval_acc - retrieval_chance                       low
    valid_think   rollout/valid_think_rate                                          low
    valid_action  rollout/valid_rate                                                low
    grounded      reasoning/grounded_rate                                           low
    length        rollout/response_length                                           low or high
    entropy       update/entropy, collapse/first_turn/h_cond                        low or high

A figure becomes a sign after `patience` steps in a row beyond its level, and is one until
`clear_patience` steps in a row were inside a level nearer to 1. Steps without the figure count
for nothing. The alarm is on where at least SIGNS kinds are signs and one of them is not length or
entropy: healthy runs shorten and sharpen too, and a template reads as fluently as ever.

MI is the form of the released code (information.py), because the paper's is at most log N a
reasoning: a reasoning that names its prompt among N stands at that ceiling, and stays there
while its dependence on the prompt fades. Per token it also moves with the length.
"""

import dataclasses
import math

import flax.struct
import numpy as np

from ragen_jax.diagnostics.stopping import Fired

ACTIONS = ("warn", "stop", "checkpoint", "tighten", "off")
TIGHTENED = ("top_p", "top_k", "top_k_abs")  # filter strategies that a lower value tightens
FALLING = ("mi", "retrieval", "valid_think", "valid_action", "grounded")  # kinds: a sign where low
EITHER = ("length", "entropy")  # kinds: a sign where low or high, never an alarm alone
SIGNS = 2  # kinds that make an alarm
NAMES = ("diverse reasoning", "compressed", "template collapse", "low-entropy collapse")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of each step that is compared with its mean over the first steps."""

    kind: str
    key: str  # in the row
    words: str  # for reasons
    above: str | None = None  # key of a number to take off first


FIGURES = {
    "mi_first": Figure("mi", "collapse/first_turn/mi_released", "first-turn MI"),
    "mi_trajectory": Figure("mi", "collapse/trajectory/mi_released", "trajectory MI"),
    "retrieval_first": Figure(
        "retrieval",
        "collapse/first_turn/retrieval_acc",
        "first-turn retrieval above chance",
        "collapse/first_turn/retrieval_chance",
    ),
    "retrieval_trajectory": Figure(
        "retrieval",
        "collapse/trajectory/retrieval_acc",
        "trajectory retrieval above chance",
        "collapse/trajectory/retrieval_chance",
    ),
    "valid_think": Figure("valid_think", "rollout/valid_think_rate", "valid thinking"),
    "valid_action": Figure("valid_action", "rollout/valid_rate", "valid actions"),
    "grounded": Figure("grounded", "reasoning/grounded_rate", "grounded facts"),
    "length": Figure("length", "rollout/response_length", "length"),
    "entropy": Figure("entropy", "update/entropy", "entropy"),
    "h_first": Figure("entropy", "collapse/first_turn/h_cond", "first-turn H(Z|X)"),
}


@flax.struct.dataclass
class RegimeState:
    """What the alarm remembers. Scalars, part of `types.TrainState`; keys are those of FIGURES."""

    total: dict[str, np.ndarray]  # float32, sum of the figure over its first steps
    count: dict[str, np.ndarray]  # int32, how many steps that are, at most `baseline`
    sign: dict[str, np.ndarray]  # int32, 1 while the figure is a sign
    streak: dict[str, np.ndarray]  # int32, steps in a row that speak for changing `sign`
    alarm: np.ndarray  # int32, steps that the alarm has been on; 0: it is off
    filter_scale: np.ndarray  # float32, multiplies filter.value; falls where action is "tighten"


def init_regimes():
    """The `RegimeState` of a run that has not begun."""

    def zeros(dtype):
        return {name: np.zeros((), dtype) for name in FIGURES}

    return RegimeState(
        total=zeros(np.float32),
        count=zeros(np.int32),
        sign=zeros(np.int32),
        streak=zeros(np.int32),
        alarm=np.zeros((), np.int32),
        filter_scale=np.ones((), np.float32),
    )


def update_regimes(state, settings, row):
    """Counts one iteration.

    Args:
      state: `RegimeState`; arrays of any kind, as a checkpoint restores them.
      settings: the config's regimes section as a dict.
      row: the iteration's metrics. A figure that is missing or not finite leaves its sign and
        streak as they are.

    Returns:
      (RegimeState, metrics, list of `Fired`, none or one). The metrics: regime/h_relative and
      regime/mi_relative (first turns, to the mean over the first `baseline` steps, or those so
      far), regime/index (the table above), where the row has both figures; regime/signs (kinds
      that are signs), regime/alarm (0 or 1); regime/filter_scale where action is "tighten".
      Fired: "warn" and "checkpoint" when the alarm goes on; "stop" at every step that it is on;
      "tighten" when it goes on and after every further `patience` steps.
    """
    # float32 throughout, so that a run and its resumed twin add the same numbers.
    total = {name: np.float32(x) for name, x in state.total.items()}
    count, sign, streak = (
        {name: int(x) for name, x in counts.items()}
        for counts in (state.count, state.sign, state.streak)
    )
    value, relative = {}, {}
    for name, figure in FIGURES.items():
        found = _read(row, figure)
        if found is None:
            continue
        value[name] = found
        settled = count[name] >= settings["baseline"]
        if not settled:
            total[name], count[name] = np.float32(total[name] + found), count[name] + 1
        if total[name] > 0:  # nothing to be compared with otherwise
            relative[name] = float(found / (total[name] / np.float32(count[name])))
        if settled and name in relative:
            sign[name], streak[name] = _judge(
                relative[name], figure.kind, sign[name], streak[name], settings
            )

    kinds = {FIGURES[name].kind for name in FIGURES if sign[name]}
    on = len(kinds) >= SIGNS and not kinds <= set(EITHER)
    alarm = int(state.alarm) + 1 if on else 0
    metrics = {"regime/signs": len(kinds), "regime/alarm": float(on)}
    if "h_first" in relative and "mi_first" in relative:
        h, mi = relative["h_first"], relative["mi_first"]
        low = settings["low"]
        metrics |= {
            "regime/h_relative": h,
            "regime/mi_relative": mi,
            "regime/index": (h < low) + 2 * (mi < low),
        }

    action, filter_scale = settings["action"], np.float32(state.filter_scale)
    due = {
        "warn": alarm == 1,
        "stop": True,
        "checkpoint": alarm == 1,
        "tighten": (alarm - 1) % settings["patience"] == 0,
        "off": False,
    }
    alarms = []
    if on and due[action]:
        words = []
        for name, figure in FIGURES.items():
            if sign[name] and name in relative:
                mean = total[name] / count[name]
                words.append(
                    f"{figure.words} {value[name]:.3g}, {relative[name]:.2f} of the first steps' "
                    f"{mean:.3g}"
                )
            elif sign[name]:
                words.append(f"{figure.words}, when last seen")
        reason = "signs of collapse: " + "; ".join(words)
        if "regime/index" in metrics:
            reason += f"; regime: {NAMES[metrics['regime/index']]}"
        if action == "tighten":
            tighter = np.float32(settings["tighten"]["factor"]) * filter_scale
            filter_scale = max(tighter, np.float32(settings["tighten"]["least"]))
            reason += f"; filter.value now times {filter_scale:.3g}"
        alarms.append(Fired(rule="regimes", action=action, reason=f"{reason} (regimes)"))
    if action == "tighten":
        metrics["regime/filter_scale"] = float(filter_scale)

    def arrays(numbers, dtype):  # as Orbax saves no NumPy scalars
        return {name: np.array(x, dtype) for name, x in numbers.items()}

    state = RegimeState(
        total=arrays(total, np.float32),
        count=arrays(count, np.int32),
        sign=arrays(sign, np.int32),
        streak=arrays(streak, np.int32),
        alarm=np.array(alarm, np.int32),
        filter_scale=np.array(filter_scale, np.float32),
    )
    return state, metrics, alarms


def _read(row, figure):
    """The figure of a step as float32; None where the row has none."""
    found = row.get(figure.key, math.nan)
    if figure.above is not None:
        found = found - row.get(figure.above, math.nan)
    return np.float32(found) if np.isfinite(found) else None


def _judge(relative, kind, sign, streak, settings):
    """(sign, streak) of a figure after a step at which it was `relative` to its first steps."""
    low, high = settings[kind], math.inf
    if kind in EITHER:
        low, high = low["fall"], low["rise"]
    if sign:  # the way back is longer: a share of it, in logarithms
        back = 1 - settings["recover"]
        speaks = low**back <= relative <= high**back
        patience = settings["clear_patience"]
    else:
        speaks = not low <= relative <= high
        patience = settings["patience"]
    streak = streak + 1 if speaks else 0
    return (1 - sign, 0) if streak >= patience else (sign, streak)
