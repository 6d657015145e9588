"""Where a run stands between reasoning and collapse, and an alarm before success shows it.

Two axes (RAGEN-2, section 2): the conditional entropy H(Z|X) of the reasoning, that is diversity
within an input, and the information that it has of the input. Each is read relative to its own
level; low is below `low` of that.

    index  H(Z|X)  information
    0      high    high         diverse reasoning
    1      low     high         compressed: nearly deterministic, but still about the input
    2      high    low          template collapse: diverse, but about no input in particular
    3      low     low          low-entropy collapse

**The alarm** watches figures of each environment separately:

    kind          figures                                               a sign where it has
    mi            collapse/first_turn/ and trajectory/own_margin        fallen; an alarm on its own
    mi_sign       the same, with a smaller fall                         fallen
    valid_think   rollout/valid_think_rate                              fallen
    valid_action  rollout/valid_rate                                    fallen
    grounded      reasoning/grounded_rate                               fallen
    length        rollout/response_length                               fallen or risen
    entropy       collapse/first_turn/h_cond                            fallen or risen

It is on where the information has fallen, or where two kinds are signs and one of them is neither
length nor entropy: healthy runs shorten and sharpen too, and a template reads as fluently as ever.
What "fallen" and "risen" mean, and how often they are said of a run that has not changed, is in
levels.py.

**Information** is `own_margin` (information.py), in nats a reasoning: how much likelier a reasoning
is under its own prompt than under the others. It estimates I(X;Z) plus the lautum information, is
not bounded by log N, and does not change with tokens that are as likely under every prompt: replies
may grow or shrink. `mi_seq` and retrieval are at their ceilings in healthy runs and stay there
while the dependence fades; `mi` and `mi_released`, per token, move with the length.

**Both scopes are one piece of evidence**: the mean of the margins of first turns and trajectories,
of which a step may have one. Its square root is compared, with the sign kept: margins vary with
their size, and prompts whose dependence is strong count for less. A value weighs as many prompts as
were scored (exp(mi_upper_bound)).

A sign ends when the recent mean has for `clear_patience` steps been nearer to the level (`recover`
of the way, in logarithms). Steps without a figure leave it as it is.

Axes: E environments, F figures.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import numpy as np

from ragen_jax.diagnostics.intervals import t_quantile
from ragen_jax.diagnostics.levels import Comparison, Levels, bound, init_levels, update_levels
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.types import Array, Metrics

ACTIONS = ("warn", "stop", "checkpoint", "tighten", "off")
ALONE = ("mi",)  # kinds that are an alarm on their own
CONFIRMED = "mi_sign"  # what counts next to other kinds in their place
# Kinds that are a sign where fallen.
FALLING = (*ALONE, CONFIRMED, "valid_think", "valid_action", "grounded")
EITHER = ("length", "entropy")  # a sign where fallen or risen, never an alarm on their own
SIGNS = 2  # kinds that make an alarm
NAMES = ("diverse reasoning", "compressed", "template collapse", "low-entropy collapse")
SCOPES = ("collapse/first_turn", "collapse/trajectory")
MARGINS = tuple(f"{scope}/own_margin" for scope in SCOPES)
Z95 = 1.96  # standard errors in a 95 % half-width, where the number of groups is not known


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of each step that is compared with its level."""

    kind: str
    keys: tuple[str, ...]  # in the row of a run's only environment; the mean of those it has
    words: str  # for reasons
    wander: float  # share of its level by which it wanders slowly in a healthy run

    @property
    def rooted(self) -> bool:
        """Whether the signed square root is compared."""
        return self.keys == MARGINS


FIGURES = (
    Figure("mi", MARGINS, "margin of the own prompt", 0.05),
    Figure("mi_sign", MARGINS, "margin of the own prompt", 0.05),
    Figure("valid_think", ("rollout/valid_think_rate",), "valid thinking", 0.01),
    Figure("valid_action", ("rollout/valid_rate",), "valid actions", 0.01),
    Figure("grounded", ("reasoning/grounded_rate",), "grounded facts", 0.01),
    Figure("length", ("rollout/response_length",), "length", 0.05),
    Figure("entropy", ("collapse/first_turn/h_cond",), "first-turn H(Z|X)", 0.05),
)
MI, H = 0, len(FIGURES) - 1  # the two axes
RISES_F = np.array([figure.kind in FALLING for figure in FIGURES])  # levels that may rise
ROOTED_F = np.array([figure.rooted for figure in FIGURES])


@flax.struct.dataclass
class RegimeState:
    """What the alarm remembers, part of `types.TrainState`; float32 where not stated otherwise."""

    levels: Levels
    sign_EF: Array  # int32, 1 while the figure is a sign
    back_EF: Array  # int32, since which step its mean has been nearer to the level; 0: it is not
    alarm_E: Array  # int32, steps that the alarm has been on; 0: it is off
    filter_scale_E: Array  # multiplies filter.value; falls where action is "tighten"


def init_regimes(environments: int = 1) -> RegimeState:
    """The `RegimeState` of a run that has not begun."""
    shape = (environments, len(FIGURES))
    return RegimeState(
        levels=init_levels(*shape),
        sign_EF=np.zeros(shape, np.int32),
        back_EF=np.zeros(shape, np.int32),
        alarm_E=np.zeros(environments, np.int32),
        filter_scale_E=np.ones(environments, np.float32),
    )


def relative(state: RegimeState) -> np.ndarray:
    """float64 [E, F]: the recent mean of each figure over its level; NaN before there is one."""
    level_EF = np.asarray(state.levels.level_EF, np.float64)
    recent_EF = np.asarray(state.levels.recent_EF, np.float64)
    share_EF = np.divide(
        recent_EF, level_EF, out=np.full(level_EF.shape, np.nan), where=level_EF > 0
    )
    return np.where(ROOTED_F, np.sign(share_EF) * share_EF**2, share_EF)


def information_share(state: RegimeState) -> np.ndarray:
    """float64 [E]: information over its level, as regime/mi_relative; NaN before there is one."""
    return relative(state)[:, MI]


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
        nothing. "step", where a row has it, is the number of the step; otherwise it is the next.
      labels: of the environments, for the reasons; "" of a run's only one.

    Returns:
      (RegimeState, the metrics of each environment, list of `Fired`, at most one an environment).
      Metrics: regime/h_relative and regime/mi_relative (recent means over their levels) and
      regime/index (the table above), once there are levels; regime/signs (kinds that are signs);
      regime/alarm (0 or 1); regime/filter_scale where action is "tighten".
      Fired: "warn" and "checkpoint" when an alarm goes on; "stop" at every step that it is on;
      "tighten" when it goes on and after every further `tighten.every` steps.
    """
    state = _judge(state, settings, rows)
    share_EF = relative(state)
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


def _read(rows: Sequence[Metrics]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values, their standard errors or 0, their weights) of each row's figures, float64 [E, F];
    NaN: no value.

    Errors are those of margins. Intervals of rates hold for members of a group that are all alike,
    and are far wider than what rates near 1 do from step to step.
    """
    shape = (len(rows), len(FIGURES))
    value_EF, error_EF, weight_EF = np.full(shape, np.nan), np.zeros(shape), np.ones(shape)
    for e, row in enumerate(rows):
        for f, figure in enumerate(FIGURES):
            found = [(row[key], row.get(f"{key}_ci95", 0.0)) for key in figure.keys if key in row]
            found = [(x, half) for x, half in found if math.isfinite(x)]
            if not found:
                continue
            value_EF[e, f] = np.mean([x for x, _ in found])
            if figure.rooted:
                weight_EF[e, f] = prompts = _prompts(row)
                # Scopes share their rooms: as if their errors were one.
                halves = [half if math.isfinite(half) else 0.0 for _, half in found]
                quantile = t_quantile(prompts) if prompts > 1 else Z95
                error_EF[e, f] = np.sqrt(np.mean(np.square(halves))) / quantile
    size_EF = np.maximum(np.abs(value_EF), np.maximum(error_EF, np.finfo(np.float32).tiny))
    error_EF = np.where(ROOTED_F, error_EF / (2 * np.sqrt(size_EF)), error_EF)
    value_EF = np.where(ROOTED_F, np.sign(value_EF) * np.sqrt(np.abs(value_EF)), value_EF)
    return value_EF, error_EF, weight_EF


def _prompts(row: Metrics) -> float:
    """How many prompts a row's information is of; 1 where it does not say."""
    bounds = [row.get(f"{scope}/mi_upper_bound", math.nan) for scope in SCOPES]
    return next((math.exp(x) for x in bounds if math.isfinite(x)), 1.0)


def _judge(state: RegimeState, settings: Mapping[str, Any], rows: Sequence[Metrics]) -> RegimeState:
    """The state after a step's values: its levels and signs."""
    test = Comparison(
        baseline=settings["baseline"],
        recent=settings["recent"],
        long=settings["long"],
        prior_F=np.array([figure.wander for figure in FIGURES]),
        rises_F=RISES_F,
    )
    value_EF, error_EF, weight_EF = _read(rows)
    before_E = np.asarray(state.levels.step_E)
    step_E = np.array(
        [row.get("step", before + 1) for row, before in zip(rows, before_E, strict=True)], int
    )
    on_EF = np.asarray(state.sign_EF) > 0
    fixed_EF = on_EF.copy()
    fixed_EF[:, ROOTED_F] = on_EF[:, ROOTED_F].any(axis=1, keepdims=True)
    levels, z_EF = update_levels(
        state.levels, test, step_E, value_EF, error_EF, weight_EF, fixed_EF
    )
    state = dataclasses.replace(state, levels=levels)
    share_EF = relative(state)

    ranges = [settings[figure.kind] for figure in FIGURES]
    ranges = [x if isinstance(x, dict) else {"fall": x, "rise": math.inf} for x in ranges]
    fall_F, rise_F = (np.array([x[way] for x in ranges], float) for way in ("fall", "rise"))
    surely_EF = np.abs(z_EF) > bound(levels.count_EF)
    back = 1 - settings["recover"]
    with np.errstate(invalid="ignore"):  # before there is a level
        left_EF = surely_EF & ((share_EF < fall_F) | (share_EF > rise_F))
        near_EF = (share_EF >= fall_F**back) & (share_EF <= rise_F**back)
    here_EF = np.isfinite(value_EF)
    back_EF = np.asarray(state.back_EF)
    since_EF = np.where(back_EF > 0, back_EF, step_E[:, None])
    since_EF = np.where(here_EF, np.where(on_EF & near_EF, since_EF, 0), back_EF)
    ends_EF = (since_EF > 0) & (step_E[:, None] - since_EF + 1 >= settings["clear_patience"])
    sign_EF = np.where(here_EF, np.where(on_EF, ~ends_EF, left_EF), on_EF)
    return dataclasses.replace(
        state,
        sign_EF=sign_EF.astype(np.int32),
        back_EF=np.where(sign_EF, since_EF, 0).astype(np.int32),
    )


def _reason(state: RegimeState, share_EF: np.ndarray, e: int, label: str, index: int | None) -> str:
    """A sentence with the numbers of an environment's signs."""
    power_F = np.where(ROOTED_F, 2, 1)
    recent_F, level_F = state.levels.recent_EF[e] ** power_F, state.levels.level_EF[e] ** power_F
    words = [
        f"{figure.words} {recent_F[f]:.3g}, {share_EF[e, f]:.2f} of its level {level_F[f]:.3g}"
        for f, figure in enumerate(FIGURES)
        if state.sign_EF[e, f]
    ]
    reason = f"{label}: " if label else ""
    reason += "signs of collapse: " + "; ".join(dict.fromkeys(words))  # a figure may be two kinds
    if index is not None:
        reason += f"; regime: {NAMES[index]}"
    return reason
