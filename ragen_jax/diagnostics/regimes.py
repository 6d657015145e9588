"""The regime of a run between reasoning and collapse, and an alarm before success falls.

Two axes (RAGEN-2, section 2): the conditional entropy H(Z|X) of the reasoning, that is its
diversity for a given input, and its information about the input. Each is divided by its level; low
means below the fraction `low` of the level.

    index  H(Z|X)  information
    0      high    high         diverse reasoning
    1      low     high         compressed: nearly deterministic, but still about the input
    2      high    low          template collapse: diverse, but about no input in particular
    3      low     low          low-entropy collapse

**The alarm** watches figures of each environment separately:

    kind          figures                                               a sign if it has
    mi            collapse/first_turn/ and trajectory/own_margin_log    fallen; an alarm on its own
    mi_sign       the same, with a smaller fall                         fallen
    valid_think   rollout/valid_think_rate                              fallen
    valid_action  rollout/valid_rate                                    fallen
    grounded      reasoning/grounded_rate                               fallen
    length        rollout/response_length                               fallen or risen
    entropy       collapse/first_turn/h_cond                            fallen or risen

The alarm is on if the information has fallen, or if two kinds are signs and at least one of them is
neither length nor entropy: in healthy runs, length and entropy fall as well, and templates are as
fluent as reasoning. levels.py defines "fallen" and "risen" and their false-alarm rates.

**Information** is `own_margin` (information.py), in nats per reasoning: how much likelier a
reasoning is under its own prompt than under the others. It estimates I(X;Z) plus the lautum
information and is not bounded by log N. Tokens that are equally likely under every prompt do not
change it, so replies may grow or shrink. The alarm uses `own_margin_log` (intervals.py), the mean
over rooms of log(1 + margin): the plain mean is dominated by the few rooms with the largest
margins. `mi_seq` and retrieval are at their ceilings in healthy runs and stay there while the
dependence fades; `mi` and `mi_released`, per token, move with the length.

**Both scopes are one piece of evidence**: the mean of the figures of first turns and trajectories
(a step may have only one of the two). Fractions of the level are computed from exp(mean) - 1, a
typical room's margin. The weight of a value is the number of scored prompts (exp(mi_upper_bound)).
Rows of earlier versions have only `own_margin`, and are read as if all rooms had the same margin.

**A shallow fall needs more evidence.** Information that wanders seldom loses half; a collapse loses
more. While at least `low` of the level is left, z must exceed the bound by SHALLOW.

A sign ends when the recent mean has been nearer to the level (`recover` of the way, in logarithms)
for `clear_patience` steps. Steps without the figure leave the sign unchanged.

Axes: E environments, F figures.
"""

import dataclasses
import math
from collections.abc import Sequence

import flax.struct
import numpy as np

from ragen_jax.configs.base import Regimes
from ragen_jax.core.types import Array, Metrics
from ragen_jax.diagnostics.intervals import t_quantile
from ragen_jax.diagnostics.levels import Comparison, Levels, bound, init_levels, update_levels
from ragen_jax.diagnostics.stopping import Fired

ALONE = ("mi",)  # kinds that are an alarm on their own
CONFIRMED = "mi_sign"  # replaces ALONE when signs are counted
# Kinds that are a sign if fallen.
FALLING = (*ALONE, CONFIRMED, "valid_think", "valid_action", "grounded")
EITHER = ("length", "entropy")  # a sign if fallen or risen, never an alarm on their own
SIGNS = 2  # number of kinds that make an alarm
NAMES = ("diverse reasoning", "compressed", "template collapse", "low-entropy collapse")
SCOPES = ("collapse/first_turn", "collapse/trajectory")
MARGINS = tuple(f"{scope}/own_margin_log" for scope in SCOPES)
MEANS = tuple(f"{scope}/own_margin" for scope in SCOPES)  # for rows without MARGINS
# Fraction of the level below which a kind is a sign; that of `mi` is config.regimes.mi.
FALL = {
    "mi_sign": 0.8,
    "valid_think": 0.9,
    "valid_action": 0.92,
    "grounded": 0.85,
    "length": 0.5,
    "entropy": 0.25,
}
RISE = {"length": 1.5, "entropy": 2.0}  # fraction of the level above which a kind is a sign
LOW = 0.5  # fraction of the level below which H(Z|X) and information are low (regime/index)
RECENT = 15  # steps in the recent mean, at least the last 4 to 6 values
LONGEST_LEVEL = 100  # maximum number of values in a level
CLEAR_PATIENCE = 5  # steps near the level that end a sign
RECOVER = 0.5  # definition of "near": this fraction of the logarithmic distance back to the level
SHALLOW = 0.6  # standard errors
RISE_WANDER = 0.08  # minimum wander, as a fraction of the level, when a level rises
Z95 = 1.96  # standard errors in a 95 % half-width, if the number of groups is unknown


@dataclasses.dataclass(frozen=True)
class Figure:
    """A metric that is compared with its level at each step."""

    kind: str
    keys: tuple[str, ...]  # metric names without a label; the mean of those present is used
    words: str  # name in printed reasons
    wander: float  # slow wander in a healthy run, as a fraction of the level
    rise: float = RISE_WANDER  # minimum wander when a level rises

    @property
    def log(self) -> bool:
        """Whether the figure is the logarithm of 1 + a margin."""
        return self.keys == MARGINS


FIGURES = (
    Figure("mi", MARGINS, "own-prompt margin", 0.14, 2 * RISE_WANDER),
    Figure("mi_sign", MARGINS, "own-prompt margin", 0.14, 2 * RISE_WANDER),
    Figure("valid_think", ("rollout/valid_think_rate",), "valid reasoning", 0.01),
    Figure("valid_action", ("rollout/valid_rate",), "valid actions", 0.01),
    Figure("grounded", ("reasoning/grounded_rate",), "true statements", 0.01),
    Figure("length", ("rollout/response_length",), "length", 0.05),
    Figure("entropy", ("collapse/first_turn/h_cond",), "first-turn H(Z|X)", 0.05),
)
MI, H = 0, len(FIGURES) - 1  # the two axes
# The levels of kinds that may rise or fall never rise.
RISE_F = np.array([figure.rise if figure.kind in FALLING else np.inf for figure in FIGURES])
LOG_F = np.array([figure.log for figure in FIGURES])


@flax.struct.dataclass
class RegimeState:
    """State of the alarm, part of `update.state.TrainState`; float32 unless stated otherwise."""

    levels: Levels
    sign_EF: Array  # int32, 1 while the figure is a sign
    back_EF: Array  # int32, first step with the mean near the level again; 0: none
    alarm_E: Array  # int32, number of steps that the alarm has been on; 0: off
    filter_scale_E: Array  # factor of filter.value; falls if the action is "tighten"


def init_regimes(environments: int = 1) -> RegimeState:
    """Return the `RegimeState` of a new run."""
    shape = (environments, len(FIGURES))
    return RegimeState(
        levels=init_levels(*shape),
        sign_EF=np.zeros(shape, np.int32),
        back_EF=np.zeros(shape, np.int32),
        alarm_E=np.zeros(environments, np.int32),
        filter_scale_E=np.ones(environments, np.float32),
    )


def relative(state: RegimeState) -> np.ndarray:
    """Return each figure's recent mean over its level, float64 [E, F]; NaN without a level."""
    level_EF = np.asarray(state.levels.level_EF, np.float64)
    recent_EF = np.asarray(state.levels.recent_EF, np.float64)
    level_EF, recent_EF = _to_margins(level_EF), _to_margins(recent_EF)
    return np.divide(recent_EF, level_EF, out=np.full(level_EF.shape, np.nan), where=level_EF > 0)


def _to_margins(x_EF: np.ndarray) -> np.ndarray:
    """Convert logarithms of margins to margins in nats; leave other figures unchanged."""
    margin_EF = np.sign(x_EF) * np.expm1(np.where(LOG_F, np.abs(x_EF), 0.0))
    return np.where(LOG_F, margin_EF, x_EF)


def information_share(state: RegimeState) -> np.ndarray:
    """Return information over its level (regime/mi_relative), float64 [E]; NaN without a level."""
    return relative(state)[:, MI]


def update_regimes(
    state: RegimeState,
    settings: Regimes,
    rows: Sequence[Metrics],
    labels: Sequence[str] = ("",),
) -> tuple[RegimeState, list[Metrics], list[Fired]]:
    """Update the levels, signs and alarms with one iteration.

    Args:
      state: arrays of any kind, as a checkpoint restores them.
      settings: the config's regimes section.
      rows: each environment's metrics of the iteration. A figure that is missing or not finite
        is ignored. "step" is the number of the step; if missing, the next number is used.
      labels: names of the environments, for the reasons; "" if there is only one environment.

    Returns:
      (RegimeState, the metrics of each environment, list of `Fired`, at most one per environment).
      Metrics: regime/h_relative and regime/mi_relative (recent means over their levels) and
      regime/index (the table above), once there are levels; regime/signs (number of kinds that are
      signs); regime/alarm (0 or 1); regime/filter_scale if the action is "tighten".
      Fired: "warn" and "checkpoint" when an alarm starts; "stop" at every step while it is on;
      "tighten" when it starts and after every further `tighten.every` steps.
    """
    state = _judge(state, settings, rows)
    share_EF = relative(state)
    action, metrics_E, fired = settings.action, [], []
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
            index = (h < LOW) + 2 * (mi < LOW)
            metrics |= {"regime/h_relative": h, "regime/mi_relative": mi, "regime/index": index}
        due = {
            "warn": alarm_E[e] == 1,
            "stop": True,
            "checkpoint": alarm_E[e] == 1,
            "tighten": (alarm_E[e] - 1) % settings.tighten.every == 0,
            "off": False,
        }
        if on and due[action]:
            reason = _reason(state, share_EF, e, label, index)
            if action == "tighten":
                tighter = np.float32(settings.tighten.factor) * filter_scale_E[e]
                filter_scale_E[e] = max(tighter, np.float32(settings.tighten.least))
                reason += f"; filter.value is now multiplied by {filter_scale_E[e]:.3g}"
            fired.append(Fired(rule="regimes", action=action, reason=f"{reason} (regimes)"))
        if action == "tighten":
            metrics["regime/filter_scale"] = float(filter_scale_E[e])
        metrics_E.append(metrics)
    state = dataclasses.replace(state, alarm_E=alarm_E, filter_scale_E=filter_scale_E)
    return state, metrics_E, fired


def _read(rows: Sequence[Metrics]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (values, standard errors or 0, weights) of each row's figures, float64 [E, F].

    A value is NaN if missing. Only margins have errors: intervals of rates allow for identical
    members of a group, and are far wider than the variation of rates near 1 between steps.
    """
    shape = (len(rows), len(FIGURES))
    value_EF, error_EF, weight_EF = np.full(shape, np.nan), np.zeros(shape), np.ones(shape)
    for e, row in enumerate(rows):
        for f, figure in enumerate(FIGURES):
            if figure.log:
                found = [_log_margin(row, *keys) for keys in zip(MARGINS, MEANS, strict=True)]
            else:
                found = [(row.get(key, math.nan), 0.0) for key in figure.keys]
            found = [(x, half) for x, half in found if math.isfinite(x)]
            if not found:
                continue
            value_EF[e, f] = np.mean([x for x, _ in found])
            if figure.log:
                weight_EF[e, f] = prompts = _prompts(row)
                # Scopes share their rooms, so their errors are treated as fully correlated.
                halves = [half if math.isfinite(half) else 0.0 for _, half in found]
                quantile = t_quantile(prompts) if prompts > 1 else Z95
                error_EF[e, f] = np.sqrt(np.mean(np.square(halves))) / quantile
    return value_EF, error_EF, weight_EF


def _log_margin(row: Metrics, log_key: str, mean_key: str) -> tuple[float, float]:
    """Return (own_margin_log, half-width of its interval or 0) of a scope; (NaN, 0) if missing."""
    if log_key in row:
        return row[log_key], row.get(f"{log_key}_ci95", 0.0)
    mean, half = row.get(mean_key, math.nan), row.get(f"{mean_key}_ci95", 0.0)
    return math.copysign(math.log1p(abs(mean)), mean), half / (1 + abs(mean))


def _prompts(row: Metrics) -> float:
    """Return the number of prompts that a row's information is based on; 1 if unknown."""
    bounds = [row.get(f"{scope}/mi_upper_bound", math.nan) for scope in SCOPES]
    return next((math.exp(x) for x in bounds if math.isfinite(x)), 1.0)


def _judge(state: RegimeState, settings: Regimes, rows: Sequence[Metrics]) -> RegimeState:
    """Return the state after a step: update its levels and signs."""
    test = Comparison(
        baseline=settings.baseline,
        recent=RECENT,
        long=LONGEST_LEVEL,
        prior_F=np.array([figure.wander for figure in FIGURES]),
        rise_F=RISE_F,
        log_F=LOG_F,
    )
    value_EF, error_EF, weight_EF = _read(rows)
    before_E = np.asarray(state.levels.step_E)
    step_E = np.array(
        [row.get("step", before + 1) for row, before in zip(rows, before_E, strict=True)], int
    )
    on_EF = np.asarray(state.sign_EF) > 0
    fixed_EF = on_EF.copy()
    fixed_EF[:, LOG_F] = on_EF[:, LOG_F].any(axis=1, keepdims=True)
    levels, z_EF = update_levels(
        state.levels, test, step_E, value_EF, error_EF, weight_EF, fixed_EF
    )
    state = dataclasses.replace(state, levels=levels)
    share_EF = relative(state)

    fall = FALL | {"mi": settings.mi}
    fall_F = np.array([fall[figure.kind] for figure in FIGURES])
    rise_F = np.array([RISE.get(figure.kind, math.inf) for figure in FIGURES])
    with np.errstate(invalid="ignore"):  # before there is a level
        shallow_EF = LOG_F & (share_EF >= LOW)
    surely_EF = np.abs(z_EF) > bound(levels.count_EF) + SHALLOW * shallow_EF
    back = 1 - RECOVER
    with np.errstate(invalid="ignore"):  # before there is a level
        left_EF = surely_EF & ((share_EF < fall_F) | (share_EF > rise_F))
        near_EF = (share_EF >= fall_F**back) & (share_EF <= rise_F**back)
    here_EF = np.isfinite(value_EF)
    back_EF = np.asarray(state.back_EF)
    since_EF = np.where(back_EF > 0, back_EF, step_E[:, None])
    since_EF = np.where(here_EF, np.where(on_EF & near_EF, since_EF, 0), back_EF)
    ends_EF = (since_EF > 0) & (step_E[:, None] - since_EF + 1 >= CLEAR_PATIENCE)
    sign_EF = np.where(here_EF, np.where(on_EF, ~ends_EF, left_EF), on_EF)
    return dataclasses.replace(
        state,
        sign_EF=sign_EF.astype(np.int32),
        back_EF=np.where(sign_EF, since_EF, 0).astype(np.int32),
    )


def _reason(state: RegimeState, share_EF: np.ndarray, e: int, label: str, index: int | None) -> str:
    """Return a sentence with the numbers of an environment's signs."""
    recent_F = _to_margins(np.asarray(state.levels.recent_EF, np.float64))[e]
    level_F = _to_margins(np.asarray(state.levels.level_EF, np.float64))[e]
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
