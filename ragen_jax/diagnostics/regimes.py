"""Where a run stands between reasoning and collapse, and an alarm before success shows it.

Two axes (RAGEN-2, section 2): the conditional entropy H(Z|X) of the reasoning, that is diversity
within an input, and its mutual information I(Z;X) with the input. Each is read relative to its own
level; low is below `low` of that.

    index  H(Z|X)  I(Z;X)
    0      high    high    diverse reasoning
    1      low     high    compressed: nearly deterministic, but still about the input
    2      high    low     template collapse: diverse, but about no input in particular
    3      low     low     low-entropy collapse

**The alarm** watches figures of each environment by itself:

    kind          figures                                               a sign where it has
    mi            collapse/first_turn/ and trajectory/mi_released       fallen; an alarm by itself
    mi_sign       the same, with a share of its own: a smaller fall     fallen
    valid_think   rollout/valid_think_rate                              fallen
    valid_action  rollout/valid_rate                                    fallen
    grounded      reasoning/grounded_rate                               fallen
    length        rollout/response_length                               fallen or risen
    entropy       collapse/first_turn/h_cond                            fallen or risen

It is on where the information has fallen, or two kinds are signs and one of them is not length or
entropy: healthy runs shorten and sharpen too, and a template reads as fluently as ever. All that
one matrix of cross scores says is one piece of evidence: retrieval does not count beside MI, and
`mi` and `mi_sign` count once. Beside another kind a smaller fall is enough, as each confirms the
other.

**Beyond its interval.** A step has few prompts, so single values say little. Of each figure two
running means are kept, one over about `recent` steps and one over about `long` steps (weights 1 /
steps, plain means at first), each with a half-width from those of its values. A value's half-width
is its own 95 % interval (<figure>_ci95, where the row has it) or 1.96 standard deviations of the
figure from step to step (root of half the mean squared difference of neighbours), whichever is
larger. With m = `margin`, which makes intervals of 84 % of those of 95 % (two of which, just not
overlapping, differ at the level of 5 %):

    fallen   recent + m * its half-width < share * (level - m * its half-width)
    risen    recent - m * its half-width > share * (level + m * its half-width)

**A level that rises.** The level is the long mean after the first `baseline` values. Of kinds that
only fall it becomes the long mean whenever the lower end of that one's interval (margin m) is above
its own: what was surely reached only ever rises, so that an information that first rises and then
crashes is compared with what it rose to. Of length and entropy the level stays.

A sign ends when the recent mean has been for `clear_patience` values in a row nearer to the level
(`recover` of the way, in logarithms). Steps without a figure leave all of it as it is.

**A level worth watching.** A figure is judged only while its level is above SURE * m half-widths of
its long mean: nearer to 0, a fall would be told from noise in hardly any run, and noise taken for a
fall in many. `python -m benchmarks alarm` simulates both error rates.

MI is the form of the released code (information.py), because the paper's is at most log N a
reasoning: a reasoning that names its prompt among N stands at that ceiling, and stays there
while its dependence on the prompt fades. Per token it also moves with the length.

Axes: E environments, F figures.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import numpy as np

from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.types import Array, Metrics

ACTIONS = ("warn", "stop", "checkpoint", "tighten", "off")
ALONE = ("mi",)  # kinds that are an alarm by themselves
CONFIRMED = "mi_sign"  # what counts beside other kinds in their place
# Kinds that are a sign where fallen.
FALLING = (*ALONE, CONFIRMED, "valid_think", "valid_action", "grounded")
EITHER = ("length", "entropy")  # a sign where fallen or risen, never an alarm by themselves
SIGNS = 2  # kinds that make an alarm
NAMES = ("diverse reasoning", "compressed", "template collapse", "low-entropy collapse")
SURE = 8  # times `margin` half-widths of its long mean: what a level must be above to be watched
NOISE_STEPS = 20  # values over which the differences of neighbours are averaged


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of each step that is compared with its level."""

    kind: str
    key: str  # in the row, of a run's only environment
    words: str  # for reasons


FIGURES = (
    Figure("mi", "collapse/first_turn/mi_released", "first-turn MI"),
    Figure("mi", "collapse/trajectory/mi_released", "trajectory MI"),
    Figure("mi_sign", "collapse/first_turn/mi_released", "first-turn MI"),
    Figure("mi_sign", "collapse/trajectory/mi_released", "trajectory MI"),
    Figure("valid_think", "rollout/valid_think_rate", "valid thinking"),
    Figure("valid_action", "rollout/valid_rate", "valid actions"),
    Figure("grounded", "reasoning/grounded_rate", "grounded facts"),
    Figure("length", "rollout/response_length", "length"),
    Figure("entropy", "collapse/first_turn/h_cond", "first-turn H(Z|X)"),
)
MI, H = 0, len(FIGURES) - 1  # the two axes
RISES_F = np.array([figure.kind in FALLING for figure in FIGURES])  # levels that may rise


@flax.struct.dataclass
class RegimeState:
    """What the alarm remembers, part of `types.TrainState`; float32 where not said otherwise."""

    count_EF: Array  # int32, values so far
    last_EF: Array  # the last of them
    noise_EF: Array  # running mean of half the squared differences of neighbours
    recent_EF: Array  # running mean over about `recent` values
    recent_variance_EF: Array  # of it, in squared half-widths
    long_EF: Array  # running mean over about `long` values
    long_variance_EF: Array
    level_EF: Array  # 0 before there are `baseline` values
    level_variance_EF: Array
    sign_EF: Array  # int32, 1 while the figure is a sign
    streak_EF: Array  # int32, values in a row that speak for ending the sign
    alarm_E: Array  # int32, steps that the alarm has been on; 0: it is off
    filter_scale_E: Array  # multiplies filter.value; falls where action is "tighten"


def init_regimes(environments: int = 1) -> RegimeState:
    """The `RegimeState` of a run that has not begun."""
    shape = (environments, len(FIGURES))
    whole = {"count_EF", "sign_EF", "streak_EF", "alarm_E"}
    arrays = {
        field.name: np.zeros(
            shape if field.name.endswith("_EF") else shape[:1],
            np.int32 if field.name in whole else np.float32,
        )
        for field in dataclasses.fields(RegimeState)
    }
    return RegimeState(**arrays | {"filter_scale_E": np.ones(environments, np.float32)})


def information_share(state: RegimeState) -> np.ndarray:
    """float64 [E]: first-turn MI over its level, as regime/mi_relative; NaN before there is one."""
    level_E = np.asarray(state.level_EF, np.float64)[:, MI]
    recent_E = np.asarray(state.recent_EF, np.float64)[:, MI]
    return np.divide(recent_E, level_E, out=np.full(len(level_E), np.nan), where=level_E > 0)


def update_regimes(
    state: RegimeState,
    settings: Mapping[str, Any],
    rows: Sequence[Metrics],
    labels: Sequence[str] = ("",),
) -> tuple[RegimeState, list[Metrics], list[Fired]]:
    """Counts one iteration.

    Args:
      state: arrays of any kind, as a checkpoint restores them.
      settings: the config's regimes section.
      rows: each environment's metrics of the iteration. A figure that is missing or not finite says
        nothing.
      labels: of the environments, for the reasons; "" of a run's only one.

    Returns:
      (RegimeState, the metrics of each environment, list of `Fired`, at most one an environment).
      Metrics: regime/h_relative and regime/mi_relative (first turns, recent means over their
      levels) and regime/index (the table above), once there are levels; regime/signs (kinds that
      are signs); regime/alarm (0 or 1); regime/filter_scale where action is "tighten".
      Fired: "warn" and "checkpoint" when an alarm goes on; "stop" at every step that it is on;
      "tighten" when it goes on and after every further `tighten.every` steps.
    """
    state = _take_in(state, settings, *_read(rows))
    with np.errstate(divide="ignore", invalid="ignore"):
        share_EF = np.where(state.level_EF > 0, state.recent_EF / state.level_EF, np.nan)
    action, metrics_E, fired = settings["action"], [], []
    alarm_E, filter_scale_E = np.array(state.alarm_E), np.array(state.filter_scale_E)
    for e, label in enumerate(labels):
        kinds = {f.kind for f, sign in zip(FIGURES, state.sign_EF[e], strict=True) if sign}
        alone = bool(kinds & set(ALONE))
        kinds = kinds - set(ALONE) | ({CONFIRMED} if alone else set())
        on = alone or (len(kinds) >= SIGNS and not kinds <= set(EITHER))
        alarm_E[e] = alarm_E[e] + 1 if on else 0
        metrics: Metrics = {"regime/signs": len(kinds), "regime/alarm": float(on)}
        index = None
        h, mi = share_EF[e, [H, MI]].tolist()
        if math.isfinite(h) and math.isfinite(mi):
            low = settings["low"]
            index = (h < low) + 2 * (mi < low)
            metrics |= {"regime/h_relative": h, "regime/mi_relative": mi, "regime/index": index}
        due = {
            "warn": alarm_E[e] == 1,
            "stop": True,
            "checkpoint": alarm_E[e] == 1,
            "tighten": (alarm_E[e] - 1) % settings["tighten"]["every"] == 0,
            "off": False,
        }
        if on and due[action]:
            reason = _reason(state, share_EF, e, label, index)
            if action == "tighten":
                tighter = np.float32(settings["tighten"]["factor"]) * filter_scale_E[e]
                filter_scale_E[e] = max(tighter, np.float32(settings["tighten"]["least"]))
                reason += f"; filter.value now times {filter_scale_E[e]:.3g}"
            fired.append(Fired(rule="regimes", action=action, reason=f"{reason} (regimes)"))
        if action == "tighten":
            metrics["regime/filter_scale"] = float(filter_scale_E[e])
        metrics_E.append(metrics)
    state = dataclasses.replace(state, alarm_E=alarm_E, filter_scale_E=filter_scale_E)
    return state, metrics_E, fired


def _read(rows: Sequence[Metrics]) -> tuple[np.ndarray, np.ndarray]:
    """(values, their half-widths or 0) of each row's figures, float32 [E, F]; NaN: no value."""

    def read(suffix, missing):
        table = [[row.get(figure.key + suffix, missing) for figure in FIGURES] for row in rows]
        return np.array(table, np.float32)

    half_EF = read("_ci95", 0.0)
    return read("", np.nan), np.where(np.isfinite(half_EF), half_EF, np.float32(0))


def _take_in(
    state: RegimeState, settings: Mapping[str, Any], value_EF: np.ndarray, half_EF: np.ndarray
) -> RegimeState:
    """The state behind a step's values: its means, levels and signs."""
    # float32 throughout, so that a run and its resumed twin add the same numbers.
    s = RegimeState(**{name: np.array(x) for name, x in vars(state).items()})
    unit, here_EF = np.float32(1), np.isfinite(value_EF)
    count_EF = s.count_EF + here_EF

    def put(old_EF, new_EF, where_EF=here_EF):
        return np.where(where_EF, new_EF, old_EF).astype(old_EF.dtype)

    def weight(values_EF, steps):
        """Of a new value in a running mean: a plain mean's at first."""
        return unit / np.clip(values_EF, 1, steps).astype(np.float32)

    change_EF = np.where(s.count_EF > 0, value_EF - s.last_EF, np.float32(0))
    w_EF = weight(s.count_EF, NOISE_STEPS)
    noise_EF = (unit - w_EF) * s.noise_EF + w_EF * change_EF**2 / np.float32(2)
    variance_EF = np.maximum(half_EF**2, np.float32(1.96**2) * noise_EF)
    s = dataclasses.replace(
        s,
        count_EF=count_EF.astype(np.int32),
        last_EF=put(s.last_EF, value_EF),
        noise_EF=put(s.noise_EF, noise_EF),
    )
    for name in ("recent", "long"):
        w_EF = weight(count_EF, settings[name])
        mean_EF, of_mean_EF = getattr(s, f"{name}_EF"), getattr(s, f"{name}_variance_EF")
        new_EF = (unit - w_EF) * mean_EF + w_EF * value_EF
        of_new_EF = (unit - w_EF) ** 2 * of_mean_EF + w_EF**2 * variance_EF
        s = dataclasses.replace(
            s,
            **{
                f"{name}_EF": put(mean_EF, new_EF),
                f"{name}_variance_EF": put(of_mean_EF, of_new_EF),
            },
        )
    s = _judge(s, settings, here_EF & (count_EF > settings["baseline"]))

    margin = np.float32(settings["margin"])
    surer_EF = s.long_EF - margin * np.sqrt(s.long_variance_EF) > (
        s.level_EF - margin * np.sqrt(s.level_variance_EF)
    )
    first_EF = here_EF & (count_EF == settings["baseline"])
    later_EF = here_EF & (count_EF > settings["baseline"]) & RISES_F & surer_EF
    return dataclasses.replace(
        s,
        level_EF=put(s.level_EF, s.long_EF, first_EF | later_EF),
        level_variance_EF=put(s.level_variance_EF, s.long_variance_EF, first_EF | later_EF),
    )


def _judge(state: RegimeState, settings: Mapping[str, Any], judged_EF: np.ndarray) -> RegimeState:
    """The state with the signs of the figures to be judged."""
    shares = [settings[figure.kind] for figure in FIGURES]
    shares = [x if isinstance(x, dict) else {"fall": x, "rise": math.inf} for x in shares]
    fall_F, rise_F = (np.array([x[way] for x in shares], np.float32) for way in ("fall", "rise"))
    margin, back = np.float32(settings["margin"]), np.float32(1 - settings["recover"])
    recent_EF, level_EF = state.recent_EF, state.level_EF
    half_EF, level_half_EF = (
        margin * np.sqrt(x) for x in (state.recent_variance_EF, state.level_variance_EF)
    )
    with np.errstate(invalid="ignore"):  # an endless share of a level that is not there
        beyond_EF = recent_EF + half_EF < fall_F * (level_EF - level_half_EF)
        beyond_EF |= recent_EF - half_EF > rise_F * (level_EF + level_half_EF)
        # The way back is longer: a share of it, in logarithms.
        inside_EF = (recent_EF >= fall_F**back * level_EF) & (recent_EF <= rise_F**back * level_EF)
    least_EF = np.float32(SURE) * margin * np.sqrt(state.long_variance_EF)
    judged_EF = judged_EF & (level_EF > least_EF)
    on_EF = state.sign_EF > 0
    streak_EF = np.where(on_EF & inside_EF, state.streak_EF + 1, 0)
    ends_EF = streak_EF >= settings["clear_patience"]
    sign_EF = np.where(on_EF, ~ends_EF, beyond_EF)
    return dataclasses.replace(
        state,
        sign_EF=np.where(judged_EF, sign_EF, state.sign_EF).astype(np.int32),
        streak_EF=np.where(judged_EF, streak_EF, state.streak_EF).astype(np.int32),
    )


def _reason(state: RegimeState, share_EF: np.ndarray, e: int, label: str, index: int | None) -> str:
    """A sentence with the numbers of an environment's signs."""
    words = [
        f"{figure.words} {state.recent_EF[e, f]:.3g}, {share_EF[e, f]:.2f} of its level "
        f"{state.level_EF[e, f]:.3g}"
        for f, figure in enumerate(FIGURES)
        if state.sign_EF[e, f]
    ]
    reason = f"{label}: " if label else ""
    reason += "signs of collapse: " + "; ".join(dict.fromkeys(words))  # a figure may be two kinds
    if index is not None:
        reason += f"; regime: {NAMES[index]}"
    return reason
