"""Both error rates of the alarm, on simulated runs with known information.

    python -m benchmarks alarm [--repeats=RUNS] [--json]

A simulated reasoning consists of 8 to 19 tokens from a vocabulary of 12, and of neutral tokens,
which are equally likely under every prompt. Every prompt has a separate distribution,
softmax(c + s * theta): c is shared, theta differs between prompts, s is the strength of the
dependence. Turns of one room share half of theta's variance, and both scopes show the same rooms.
`differ` is the standard deviation of log-normal strengths of the rooms; at 0 all strengths are
equal. Each step draws new rooms, prompts and reasonings; its figures are those of a run:
`information_metrics` and `log_margin` of the true scores. `update_regimes` reads them, with the
settings of configs/base.py, along with validity, truth, length and entropy. Steps are drawn from
banks of scored steps, at a grid of strengths.

*False alarms*: the fraction of runs of 400 steps without a loss of information in which the alarm
is ever on. The processes of HEALTHY wander slowly, have heavy tails, or change the length of their
replies or the number of their prompts.
*Seen*: of the runs without an alarm in the first 100 steps, the fraction whose alarm is on within
15 steps (30 with a diagnosis every 5 steps) after information falls to half: half of `mi_seq`,
which is near its ceiling in the scenes of high retrieval, or half of `own_margin`, which has no
ceiling.

Axes: G rooms, N prompts, M reasonings, V tokens, R runs, T steps, L levels of the grid.
"""

import dataclasses
import sys
from collections.abc import Callable

import numpy as np
from scipy.special import log_softmax

from ragen_jax.configs.base import Regimes
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import log_margin
from ragen_jax.diagnostics.regimes import SCOPES, init_regimes, update_regimes

STEPS, FALL_STEP, MAX_DELAY, MAX_DELAY_EVERY_FIVE = 400, 100, 15, 30
RETRIEVALS = (0.3, 0.4, 0.55, 0.75, 0.9, 0.97)
MAX_FALSE_RATE, MIN_SEEN_RATE, MIN_SEEN_RETRIEVAL = 0.05, 0.90, 0.55
VOCABULARY = 12
CALIBRATION = 600  # number of first turns of each mean in the search for a strength
BANK = 250  # number of scored steps at each level of the grid
GRID_L = np.exp(np.linspace(np.log(0.2), np.log(2.2), 16))  # own_margin relative to the scene's
NEUTRAL = 4.0  # neutral tokens per other token, so that replies can get five times shorter
# level, standard deviation between steps, half-width: values of the tiny Sokoban agent
OTHER_FIGURES = {
    "rollout/valid_think_rate": (0.985, 0.005, 0.01),
    "rollout/valid_rate": (0.97, 0.01, 0.015),
    "reasoning/grounded_rate": (0.93, 0.02, 0.04),
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """The groups that each step scores."""

    rooms: int
    members: int  # number of reasonings of a room in each scope
    differ: float  # standard deviation of the logarithms of the rooms' strengths


SCENES = (
    Scene(8, 8, 0.0),
    Scene(8, 8, 0.7),
    Scene(8, 2, 0.0),
    Scene(32, 2, 0.0),
    Scene(32, 2, 0.7),
)


def _scores(rng, logits_NV, own_M):
    """Draw reasonings from their own prompts, neutral tokens included; return (score_MN, length_M).

    Args:
      logits_NV: of the token distribution of each prompt.
      own_M: int, own prompt of each reasoning.
    """
    logp_NV, M = log_softmax(logits_NV, axis=1), len(own_M)
    p_MV = np.exp(logp_NV[own_M])
    # By rounding, a row's probabilities may sum to more than 1, which multinomial refuses.
    tokens_M = rng.integers(8, 20, M)
    count_MV = rng.multinomial(tokens_M, p_MV / p_MV.sum(axis=1, keepdims=True))
    neutral_M = rng.poisson(NEUTRAL * tokens_M)
    neutral_logp_M = -rng.gamma(np.maximum(neutral_M, 1e-9))  # one nat per token on average
    return count_MV @ logp_NV.T + neutral_logp_M[:, None], tokens_M + neutral_M


def draw_step(rng, scene, strength, scopes=SCOPES):
    """Draw a step and return its collapse/ figures of `scopes`."""
    G, room_M = scene.rooms, np.repeat(np.arange(scene.rooms), scene.members)
    M = len(room_M)
    strength_G = strength * np.exp(scene.differ * rng.normal(size=G))
    shared_V, theta_GV = rng.normal(size=VOCABULARY), rng.normal(size=(G, VOCABULARY))
    own_MV = np.sqrt(0.5) * (theta_GV[room_M] + rng.normal(size=(M, VOCABULARY)))
    prompts = {
        SCOPES[0]: (theta_GV, np.arange(G), room_M),
        SCOPES[1]: (own_MV, room_M, np.arange(M)),
    }
    row = {}
    for scope in scopes:
        theta_NV, room_N, own_M = prompts[scope]
        logits_NV = shared_V + strength_G[room_N, None] * theta_NV
        scores = *_scores(rng, logits_NV, own_M), own_M
        metrics = information_metrics(*scores) | log_margin(scores[0], own_M, group_N=room_N)
        names = ("own_margin", "mi_seq", "mi_upper_bound", "retrieval_acc")
        names += ("own_margin_log", "own_margin_log_ci95")
        row |= {f"{scope}/{name}": metrics[name] for name in names}
    return row


def draw_steps(seed, scene, strength, count, scopes=SCOPES):
    """Draw independent steps and return {figure: float64 [count]}."""
    rng = np.random.default_rng(seed)
    rows = [draw_step(rng, scene, strength, scopes) for _ in range(count)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@dataclasses.dataclass(frozen=True)
class Bank:
    """Scored steps of a scene, at multiples of its information."""

    strength: float
    steps_L: list[dict[str, np.ndarray]]  # figures of steps at GRID_L times the scene's own_margin
    half_mi: float  # multiple of own_margin at which mi_seq is half
    retrieval: float


def draw_first_turns(seed, scene, strength):
    """As `draw_steps`, of first turns alone: {figure: float64 [CALIBRATION]}."""
    return draw_steps(seed, scene, strength, CALIBRATION, SCOPES[:1])


def find_strength(scene, retrieval):
    """Return the strength with the given first-turn retrieval, or with the highest possible."""
    low, high = 0.01, 10.0
    for _ in range(12):
        middle = np.sqrt(low * high)
        found = draw_first_turns(0, scene, middle)[f"{SCOPES[0]}/retrieval_acc"].mean()
        low, high = (middle, high) if found < retrieval else (low, middle)
    return np.sqrt(low * high)


def information_curve(scene, strength):
    """Return (strength_at, half_mi) of a scene at a strength.

    strength_at maps multiples of the scene's own_margin to strengths; half_mi is the multiple at
    which mi_seq is half.
    """
    strength_C = strength * np.exp(np.linspace(-2.2, 0.9, 16))
    curve_C = [draw_first_turns(1, scene, x) for x in strength_C]
    margin_C, mi_C = (
        np.maximum.accumulate([steps[f"{SCOPES[0]}/{name}"].mean() for steps in curve_C])
        for name in ("own_margin", "mi_seq")
    )
    log_C = np.log(strength_C)
    margin, mi = (np.interp(np.log(strength), log_C, x_C) for x_C in (margin_C, mi_C))
    half_mi = float(np.interp(mi / 2, mi_C, margin_C) / margin)
    return lambda multiple: np.exp(np.interp(multiple * margin, margin_C, log_C)), half_mi


def make_bank(scene, strength, size):
    """The `Bank` of a scene at a strength, `size` steps at each level."""
    strength_at, half_mi = information_curve(scene, strength)
    steps_L = [draw_steps(2 + i, scene, x, size) for i, x in enumerate(strength_at(GRID_L))]
    here = draw_first_turns(1, scene, strength)
    return Bank(
        strength=strength,
        steps_L=steps_L,
        half_mi=half_mi,
        retrieval=float(here[f"{SCOPES[0]}/retrieval_acc"].mean()),
    )


# ------------------------------------------------------------------------------ processes


def wander(rng, runs, deviation, persistence=0.9):
    """Return multiples of information that wander as AR(1) in logarithms, [R, T]."""
    noise_RT = deviation * rng.normal(size=(runs, STEPS))
    for t in range(1, STEPS):
        noise_RT[:, t] *= np.sqrt(1 - persistence**2)
        noise_RT[:, t] += persistence * noise_RT[:, t - 1]
    return np.exp(noise_RT)


def steady(rng, runs):
    return np.ones((runs, STEPS))


def heavy_tails(rng, runs):
    """Return a multiple 1 + 0.2 t for each step, t from Student's t with 3 degrees of freedom."""
    return np.clip(1 + 0.2 * rng.standard_t(3, size=(runs, STEPS)) / np.sqrt(3), 0.05, None)


@dataclasses.dataclass(frozen=True)
class Process:
    """Changes of the information and of the replies' length in a healthy run."""

    multiples: Callable[..., np.ndarray] = steady
    length: float = 1.0  # final length of replies relative to the initial length


HEALTHY = {
    "steady": Process(),
    "wanders by 10 %": Process(lambda rng, runs: wander(rng, runs, 0.10)),
    "wanders by 15 %": Process(lambda rng, runs: wander(rng, runs, 0.15)),
    "t(3)": Process(heavy_tails),
    "5 times longer": Process(length=5.0),
    "5 times shorter": Process(length=0.2),
}


def alarms(rng, get_bank, multiple_RT, length_RT, every=1):
    """Return whether the alarm is on, bool [R, T].

    Args:
      get_bank: step -> the `Bank` that it is drawn from.
      multiple_RT: information relative to the scene's.
      length_RT: length of replies relative to the initial length.
      every: number of steps between diagnoses.
    """
    settings = Regimes()
    R, T = multiple_RT.shape
    place_RT = np.interp(np.log(multiple_RT), np.log(GRID_L), np.arange(len(GRID_L)))
    level_RT = np.minimum((place_RT + rng.random((R, T))).astype(int), len(GRID_L) - 1)
    state, on, labels = init_regimes(R), [], [str(run) for run in range(R)]
    for t in range(T):
        rows = [{"step": t + 1, **_draw_other_figures(rng, length_RT[r, t])} for r in range(R)]
        if (t + 1) % every == 0:
            for r in range(R):
                steps = get_bank(t).steps_L[level_RT[r, t]]
                at = rng.integers(len(next(iter(steps.values()))))
                rows[r] |= {name: x[at] for name, x in steps.items()}
        # Each run is an environment of one state: environments are watched separately.
        state, found, _ = update_regimes(state, settings, rows, labels)
        on.append([metrics["regime/alarm"] for metrics in found])
    return np.array(on, bool).T


def _draw_other_figures(rng, length):
    """Return the other figures of a healthy step, without information."""
    row = {}
    for name, (level, deviation, half) in OTHER_FIGURES.items():
        row |= {name: level + deviation * rng.normal(), f"{name}_ci95": half}
    row["rollout/response_length"] = 70 * length * (1 + 0.01 * rng.normal())
    # 1 nat per neutral token, 0.5 per other token. Only the number of neutral tokens changes.
    share = 1 / (1 + NEUTRAL)
    row["collapse/first_turn/h_cond"] = 1 - 0.5 * share / max(length, share) + 0.01 * rng.normal()
    return row


def _lengths(runs, steps, end):
    """Return lengths that change from 1 to `end` in equal ratios, float64 [R, T]."""
    return np.broadcast_to(np.exp(np.linspace(0, np.log(end), steps)), (runs, steps))


def healthy_rates(runs, bank, processes=HEALTHY, every=1):
    """Return {process: fraction of runs with an alarm}, with a diagnosis every `every` steps."""
    found = {}
    for i, (name, process) in enumerate(processes.items()):
        rng = np.random.default_rng(i)
        length_RT = _lengths(runs, STEPS, process.length)
        on_RT = alarms(rng, lambda t: bank, process.multiples(rng, runs), length_RT, every)
        found[name + (f", every {every}" if every > 1 else "")] = float(on_RT.any(axis=1).mean())
    return found


def seen_rates(runs, bank, *, lengths=(1.0, 0.25, 4.0)):
    """Return {fall: fraction of the quiet runs in which the fall is seen}.

    Falls are to half, with the replies' length multiplied by each of `lengths`, and with a
    diagnosis every 5 steps.
    """
    found = {}
    falls = {"mi_seq": bank.half_mi, "own_margin": 0.5}
    cases = [(name, length, 1) for name in falls for length in lengths]
    cases += [(name, 1.0, 5) for name in falls]
    for i, (name, length, every) in enumerate(cases):
        rng, delay = np.random.default_rng(i), MAX_DELAY if every == 1 else MAX_DELAY_EVERY_FIVE
        multiple_RT = np.ones((runs, FALL_STEP + delay))
        length_RT = multiple_RT.copy()
        multiple_RT[:, FALL_STEP:], length_RT[:, FALL_STEP:] = falls[name], length
        on_RT = alarms(rng, lambda t: bank, multiple_RT, length_RT, every)
        quiet_R = ~on_RT[:, :FALL_STEP].any(axis=1)
        case = f"half of {name}" + (f", length x {length:g}" if length != 1 else "")
        case += ", every 5" if every > 1 else ""
        found[case] = float(on_RT[quiet_R][:, FALL_STEP:].any(axis=1).mean())
    return found


def prompt_rates(runs, strength, size):
    """Return {change of the number of prompts per step: fraction of runs with an alarm}.

    The changes: 24 rooms, then 8; 8, then 24; and one of 8, 16 and 24 at each step, at one strength
    of dependence.
    """
    steps = {
        rooms: draw_steps(rooms, Scene(rooms, 4, 0.0), strength, size) for rooms in (8, 16, 24)
    }
    banks = {rooms: Bank(strength, [x] * len(GRID_L), 0.5, 0.0) for rooms, x in steps.items()}
    drawn_T = np.random.default_rng(0).choice([8, 16, 24], STEPS)
    changes = {
        "24 prompts, then 8": lambda t: banks[24 if t < STEPS // 2 else 8],
        "8 prompts, then 24": lambda t: banks[8 if t < STEPS // 2 else 24],
        "8, 16 or 24 prompts": lambda t: banks[drawn_T[t]],
    }
    found = {}
    for i, (name, get_bank) in enumerate(changes.items()):
        ones_RT = np.ones((runs, STEPS))
        on_RT = alarms(np.random.default_rng(i), get_bank, ones_RT, ones_RT)
        found[name] = float(on_RT.any(axis=1).mean())
    return found


def report(runs):
    """Run the simulation and return the JSON object of the case."""
    rows = []
    for scene in SCENES:
        for retrieval in RETRIEVALS:
            bank = make_bank(scene, find_strength(scene, retrieval), BANK)
            row = dataclasses.asdict(scene) | {"retrieval": round(bank.retrieval, 3)}
            false = healthy_rates(runs, bank) | healthy_rates(runs, bank, every=5)
            row |= {"false": false, "seen": seen_rates(runs, bank)}
            rows.append(row)
            print(line(row), file=sys.stderr)  # printed at once, because the case takes hours
    for strength in (0.5, 1.3, 4.0):
        row = {"strength": strength, "false": prompt_rates(runs, strength, BANK)}
        rows.append(row)
        print(line(row), file=sys.stderr)
    return {
        "case": "alarm",
        "runs": runs,
        "targets": {
            "false at most": MAX_FALSE_RATE,
            f"seen from {MIN_SEEN_RETRIEVAL}": MIN_SEEN_RATE,
        },
        "rows": rows,
    }


def line(row):
    """Return the text of a row."""
    head = "  ".join(f"{name} {x}" for name, x in row.items() if name not in ("false", "seen"))
    parts = []
    for kind in ("false", "seen"):
        rates = [f"{name} {rate:.3f}" for name, rate in row.get(kind, {}).items()]
        parts += [f"    {kind}: " + "; ".join(rates)] if rates else []
    return "\n".join([head, *parts])


def as_table(found):
    """Return the text of a report."""
    lines = [line(row) for row in found["rows"]]
    lines.append(
        f"{found['runs']} runs each. false: fraction of runs of {STEPS} steps without a loss of "
        f"information that have an alarm (target: at most {MAX_FALSE_RATE}). seen: fraction of "
        f"falls with an alarm within {MAX_DELAY} steps, {MAX_DELAY_EVERY_FIVE} with a diagnosis "
        f"every 5 (target: at least {MIN_SEEN_RATE} from retrieval {MIN_SEEN_RETRIEVAL} on)"
    )
    return "\n".join(lines)
