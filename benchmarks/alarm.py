"""Both error rates of the alarm, on simulated runs whose truth is known.

    python -m benchmarks alarm [--repeats=RUNS] [--json]

A simulated reasoning is 8 to 19 tokens out of 12. Every prompt has a distribution of its own,
softmax(c + s * theta): c is shared, theta its own, s the strength of the dependence. Turns of one
room share half of theta's variance. Where rooms `differ`, each has a strength of its own,
log-normal with that standard deviation. A step draws rooms, prompts and reasonings anew; its
figures are those of a run: `information_metrics` and `confidence_intervals` of the true scores.
They are read by `update_regimes` with the settings of configs/base.py. Steps are alike and
independent, so that the many runs draw theirs from a bank of scored ones.

*False alarms*: the share of stationary runs of 200 steps in which the alarm was ever on.
*Seen*: of the runs that were quiet after 100 steps, the share whose alarm is on within 15 steps
after the dependence falls to the strength that halves the mean of `mi_released`.

Axes: G rooms, N prompts, M reasonings, V tokens, R runs, T steps.
"""

import dataclasses
import sys

import numpy as np
from scipy.special import log_softmax

from ragen_jax.configs import base
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals
from ragen_jax.diagnostics.regimes import init_regimes, update_regimes

KEY = {
    "first_turn": "collapse/first_turn/mi_released",
    "trajectory": "collapse/trajectory/mi_released",
}
STEPS, FALL_AT, WITHIN = 200, 100, 15
RETRIEVALS = (0.2, 0.4, 0.55, 0.75, 0.9)
MOST_FALSE, LEAST_SEEN, SEEN_FROM = 0.05, 0.90, 0.55
VOCABULARY = 12
CALIBRATION = 300  # batches behind each mean that a strength is sought for
BANK = 1000  # steps that are scored; those of a run are drawn from them


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a step scores."""

    scope: str
    rooms: int
    turns: int  # reasonings of a room: of its first prompt, or each under a prompt of its own
    differ: float  # standard deviation of the logarithms of the rooms' strengths


SCENES = (
    Scene("first_turn", 8, 8, 0.0),
    Scene("first_turn", 8, 8, 0.7),
    Scene("first_turn", 8, 2, 0.0),
    Scene("first_turn", 32, 2, 0.0),
    Scene("first_turn", 32, 2, 0.7),
    Scene("trajectory", 8, 8, 0.0),
    Scene("trajectory", 8, 8, 0.7),
    Scene("trajectory", 8, 2, 0.0),
    Scene("trajectory", 32, 2, 0.0),
    Scene("trajectory", 32, 2, 0.7),
)


def draw(rng, scene, strength):
    """(score_MN, length_M, own_M, room_N) of one step."""
    G, M = scene.rooms, scene.rooms * scene.turns
    room_M = np.repeat(np.arange(G), scene.turns)
    theta_NV = rng.normal(size=(G, VOCABULARY))
    if scene.scope == "trajectory":
        theta_NV = np.sqrt(0.5) * (theta_NV[room_M] + rng.normal(size=(M, VOCABULARY)))
    room_N, own_M = (np.arange(G), room_M) if len(theta_NV) == G else (room_M, np.arange(M))
    strength_G = strength * np.exp(scene.differ * rng.normal(size=G))
    logits_NV = rng.normal(size=VOCABULARY) + strength_G[room_N, None] * theta_NV
    logp_NV = log_softmax(logits_NV, axis=1)
    length_M = rng.integers(8, 20, M)
    # A row's probabilities may sum to more than 1 by a rounding, which multinomial refuses.
    p_MV = np.exp(logp_NV[own_M])
    count_MV = rng.multinomial(length_M, p_MV / p_MV.sum(axis=1, keepdims=True))
    return count_MV @ logp_NV.T, length_M, own_M, room_N


def solve(excess, low, high):
    """The strength at which `excess` of it goes from below 0 to above, by bisection."""
    for _ in range(14):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return np.sqrt(low * high)


def mean_figures(scene, strength):
    """(mean mi_released, mean retrieval_acc), the same draws for every strength."""
    rng = np.random.default_rng(0)
    found = [information_metrics(*draw(rng, scene, strength)[:3]) for _ in range(CALIBRATION)]
    return np.mean([[x["mi_released"], x["retrieval_acc"]] for x in found], axis=0)


def strengths(scene, retrieval):
    """(strength with that retrieval, strength with half of its mi_released, its mi_released, its
    retrieval_acc: less where no strength has as much)."""
    strong = solve(lambda s: mean_figures(scene, s)[1] - retrieval, 0.01, 10.0)
    mi, reached = mean_figures(scene, strong)
    weak = solve(lambda s: mean_figures(scene, s)[0] - mi / 2, 0.001, strong)
    return strong, weak, mi, reached


def bank(seed, scene, strength, size):
    """(mi_released, its half-width) of so many steps, float64 [size, 2]."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(size):
        *scores, room_N = draw(rng, scene, strength)
        half = confidence_intervals(*scores, group_N=room_N)["mi_released_ci95"]
        found.append((information_metrics(*scores)["mi_released"], half))
    return np.array(found)


def alarms(scene, figure_RT2):
    """Whether the alarm is on, bool [R, T], in runs with these (figure, half-width)."""
    key, settings = KEY[scene.scope], base.get_config().regimes.to_dict()
    runs, steps, _ = figure_RT2.shape
    labels = [str(run) for run in range(runs)]
    state, on = init_regimes(runs), []
    for t in range(steps):
        rows = [{key: value, f"{key}_ci95": half} for value, half in figure_RT2[:, t]]
        # Environments of one state are watched apart, as runs are.
        state, found, _ = update_regimes(state, settings, rows, labels)
        on.append([metrics["regime/alarm"] for metrics in found])
    return np.array(on, bool).T


def error_rates(runs, scenes, retrievals):
    """One dict for each scene and retrieval: its sizes, `false` and `seen`, and whether met."""
    rows = []
    for scene in scenes:
        for i, retrieval in enumerate(retrievals):
            strong, weak, mi, reached = strengths(scene, retrieval)
            rng = np.random.default_rng(i)
            same, after = bank(2 * i, scene, strong, BANK), bank(2 * i + 1, scene, weak, BANK // 2)
            still_RT = alarms(scene, rng.choice(same, (runs, STEPS)))
            falls = rng.choice(same, (runs, FALL_AT)), rng.choice(after, (runs, WITHIN))
            fall_RT = alarms(scene, np.concatenate(falls, axis=1))
            quiet_R = ~fall_RT[:, FALL_AT - 1]
            seen_R = fall_RT[quiet_R, FALL_AT:].any(axis=1)
            false, seen = still_RT.any(axis=1).mean(), seen_R.mean()
            met = false <= MOST_FALSE and (retrieval < SEEN_FROM or seen >= LEAST_SEEN)
            found = dict(retrieval=reached, mi=mi, false=false, seen=seen)
            found = {name: round(float(x), 4) for name, x in found.items()}
            rows.append(dataclasses.asdict(scene) | found | {"met": bool(met)})
            print(line(rows[-1]), file=sys.stderr)  # it takes an hour
    return rows


def report(runs):
    """The JSON object of the case."""
    return {
        "case": "alarm",
        "runs": runs,
        "targets": {"false at most": MOST_FALSE, f"seen from {SEEN_FROM}": LEAST_SEEN},
        "rows": error_rates(runs, SCENES, RETRIEVALS),
    }


def line(row):
    """A row for people."""
    return (
        f"{row['scope']:<11} {row['rooms']:>5} {row['turns']:>5} {row['differ']:>6} "
        f"{row['retrieval']:>9.2f} {row['mi']:>6.3f} {row['false']:>6.3f} {row['seen']:>5.3f}"
        f"  {'met' if row['met'] else 'missed'}"
    )


def as_table(found):
    """A report for people."""
    runs, lines = found["runs"], ["scope       rooms turns differ retrieval     MI  false  seen"]
    lines += [line(row) for row in found["rows"]]
    lines.append(
        f"{runs} runs each: false of {STEPS} stationary steps, target at most {MOST_FALSE}; seen "
        f"within {WITHIN} steps, target at least {LEAST_SEEN} from retrieval {SEEN_FROM} on"
    )
    return "\n".join(lines)
