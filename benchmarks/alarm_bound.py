"""The largest fraction of falls that any alarm can see from diagnoses every 5 steps, simulated.

    python -m benchmarks alarm-bound [--repeats=RUNS] [--json]

The simulated steps are those of the `alarm` case, in which rooms differ. Information falls to half
at once, between two diagnoses, and the alarm must be on within 30 steps: it decides by LOOKS
diagnoses (looks). A run of 400 steps has WINDOWS disjoint windows of LOOKS looks. An alarm that is
false in at most 5 % of healthy runs is, in at least one of these windows, on with probability at
most 0.05 / WINDOWS / 0.95 = LEVEL if it was quiet before. By the lemma of Neyman and Pearson, it
sees a fall in that window with at most the power of the likelihood-ratio test at LEVEL.

Assumptions: looks are independent (`steady`); the distributions before and after the fall are
known; other figures (validity, length, entropy) do not depend on information, as in the simulation.
A real alarm knows neither distribution and must stay quiet where information wanders, so it attains
less. The bounds differ in how much they know:

    figure    own_margin_log, the mean of both scopes, which the alarm reads; both distributions
    unknown   the same figure and the sizes of noise and fall, but not the level, which is estimated
              from the LOOKS_BEFORE looks before the fall: the test is at LEVEL for every constant
              level, hence for one between the two at which all looks resemble a fall most
    prompts   the margins of each prompt in both scopes, separately; both distributions
    strengths the strength of each room's dependence, without noise. All scores follow from it and
              from draws that do not depend on the fall, so this bounds every figure of the score
              matrix. Closed form: the logarithms are normal with standard deviation `differ`
    once      as `figure`, for an alarm that spends all of its 5 % on the window of this fall

`alarm` is the fraction that `update_regimes` sees with the settings of configs/base.py, among RUNS
runs that were quiet for 100 steps. `figure`, `unknown` and `prompts` use kernel estimates of the
densities from DENSITY samples, and sums of the log-likelihood ratios of SAMPLES other looks. An
estimated ratio has at most the power of the true one; `prompts` treats the prompts of a look as
independent, so it is a test rather than the best.

Axes: B looks, G rooms, M reasonings, V tokens, S sums, R runs.
"""

import dataclasses
import sys

import numpy as np
from scipy.special import log_softmax
from scipy.stats import gaussian_kde, norm

from benchmarks import alarm
from benchmarks.alarm import FALL_STEP, MAX_DELAY_EVERY_FIVE, SCOPES, STEPS, VOCABULARY, Scene
from configs import base
from ragen_jax.diagnostics.intervals import t_quantile
from ragen_jax.diagnostics.regimes import init_regimes, update_regimes

EVERY = 5  # steps between diagnoses
LOOKS = MAX_DELAY_EVERY_FIVE // EVERY
LOOKS_BEFORE = FALL_STEP // EVERY  # looks before the fall
WINDOWS = STEPS // EVERY // LOOKS
LEVEL = alarm.MAX_FALSE_RATE / WINDOWS / (1 - alarm.MAX_FALSE_RATE)
SINGLE_LEVEL = alarm.MAX_FALSE_RATE / (1 - alarm.MAX_FALSE_RATE)  # all of it in one window
DENSITY, SAMPLES, SUMS = 3000, 4000, 200_000
CHUNK = 100  # looks that are drawn at once
BOUNDS = ("figure", "unknown", "prompts", "strengths", "once", "alarm")  # columns of fractions
CASES = (  # scene, retrievals
    (Scene(8, 8, 0.7), (0.55, 0.75, 0.9)),
    (Scene(12, 8, 0.7), (0.55,)),
    (Scene(16, 8, 0.7), (0.55,)),
    (Scene(24, 8, 0.7), (0.55,)),
)


def gaussian_power(shift, level):
    """The power of the best test at a level between normal distributions of the same variance.

    Args:
      shift: distance of their means, in standard deviations of the sum of all looks.
    """
    return float(norm.cdf(shift - norm.isf(level)))


def likelihood_ratio_power(ratio_0S, ratio_1S, level):
    """The power of the test that rejects where the log-likelihood ratio is largest.

    Args:
      ratio_0S, ratio_1S: samples of it without and with a fall.
      level: probability of rejecting without a fall.
    """
    return float(np.mean(ratio_1S > np.quantile(ratio_0S, 1 - level)))


def sum_looks(rng, ratio_B, looks):
    """Sums of the log-likelihood ratios of `looks` looks drawn with replacement, float64 [SUMS]."""
    return sum(ratio_B[rng.integers(len(ratio_B), size=SUMS)] for _ in range(looks))


def log_density(samples):
    """The logarithm of a kernel estimate of the density of samples [count, D], a function of
    [..., D]."""
    kernel = gaussian_kde(samples.T)

    def at(x):
        found = kernel.logpdf(x.reshape(-1, x.shape[-1]).T)
        return found.reshape(x.shape[:-1])

    return at


def draw_margins(rng, scene, strength, looks):
    """sign(x) log(1 + |x|) of the mean margin x of each room's reasonings, float64 [B, G, scopes],
    drawn as `alarm.draw_step` does."""
    return np.concatenate(
        [
            _draw_chunk(rng, scene, strength, min(CHUNK, looks - start))
            for start in range(0, looks, CHUNK)
        ]
    )


def _draw_chunk(rng, scene, strength, B):
    G, room_M = scene.rooms, np.repeat(np.arange(scene.rooms), scene.members)
    M = len(room_M)
    strength_BG = strength * np.exp(scene.differ * rng.normal(size=(B, G)))
    shared_BV = rng.normal(size=(B, 1, VOCABULARY))
    theta_BGV = rng.normal(size=(B, G, VOCABULARY))
    own_BMV = np.sqrt(0.5) * (theta_BGV[:, room_M] + rng.normal(size=(B, M, VOCABULARY)))
    scopes = ((theta_BGV, np.arange(G), room_M), (own_BMV, room_M, np.arange(M)))
    found = []
    for theta_BNV, room_N, own_M in scopes:
        logp_BNV = log_softmax(shared_BV + strength_BG[:, room_N, None] * theta_BNV, axis=-1)
        p_BMV = np.exp(logp_BNV[:, own_M])
        tokens_BM = rng.integers(8, 20, (B, M))
        count_BMV = rng.multinomial(tokens_BM, p_BMV / p_BMV.sum(axis=-1, keepdims=True))
        # The mean over other prompts, from the mean over all of them.
        N = logp_BNV.shape[1]
        over_BMV = (logp_BNV[:, own_M] - logp_BNV.mean(axis=1, keepdims=True)) * N / (N - 1)
        margin_BM = (count_BMV * over_BMV).sum(axis=-1)
        margin_BG = margin_BM.reshape(B, G, scene.members).mean(axis=-1)
        found.append(np.sign(margin_BG) * np.log1p(np.abs(margin_BG)))
    return np.stack(found, axis=-1)


def powers(rng, scene, strength_at, left):
    """{bound: the largest fraction of falls to `left` of own_margin that can be seen}."""
    # A constant level that is hard to distinguish from a fall: about the mean of all looks.
    constant = left ** (LOOKS / (LOOKS + LOOKS_BEFORE))
    count = DENSITY + SAMPLES
    before, after, constant = (
        draw_margins(rng, scene, strength_at(x), count) for x in (1.0, left, constant)
    )

    # 0: before the fall, 1: after it, c: at the constant level.
    figures = [x_BG2.mean(axis=(1, 2))[:, None] for x_BG2 in (before, after, constant)]
    log_0, log_1, log_c = (log_density(x_B1[:DENSITY]) for x_B1 in figures)
    of_0, of_1, of_c = (x_B1[DENSITY:] for x_B1 in figures)
    ratio_0S, ratio_1S = (sum_looks(rng, log_1(x) - log_0(x), LOOKS) for x in (of_0, of_1))
    level_S, fall_S = (
        sum_looks(rng, log_0(first) - log_c(first), LOOKS_BEFORE)
        + sum_looks(rng, log_1(last) - log_c(last), LOOKS)
        for first, last in ((of_c, of_c), (of_0, of_1))
    )

    room_0, room_1 = (log_density(x.reshape(-1, 2)[:DENSITY]) for x in (before, after))
    rooms_0S, rooms_1S = (
        sum_looks(rng, (room_1(x) - room_0(x)).sum(axis=-1), LOOKS)
        for x in (before[DENSITY:], after[DENSITY:])
    )
    ratio = abs(np.log(strength_at(left) / strength_at(1.0)))
    return {
        "figure": likelihood_ratio_power(ratio_0S, ratio_1S, LEVEL),
        "unknown": likelihood_ratio_power(level_S, fall_S, LEVEL),
        "prompts": likelihood_ratio_power(rooms_0S, rooms_1S, LEVEL),
        "strengths": gaussian_power(ratio * np.sqrt(LOOKS * scene.rooms) / scene.differ, LEVEL),
        "once": likelihood_ratio_power(ratio_0S, ratio_1S, SINGLE_LEVEL),
    }


def seen_rate(rng, runs, scene, strength_at, left):
    """The fraction of falls that the alarm sees, of the runs that were quiet before."""
    settings, labels = base.Regimes(), [str(run) for run in range(runs)]
    state, quiet_R = init_regimes(runs), np.ones(runs, bool)
    seen_R = np.zeros(runs, bool)
    quantile = t_quantile(scene.rooms) / np.sqrt(scene.rooms)
    for look in range(1, LOOKS_BEFORE + LOOKS + 1):
        multiple = 1.0 if look <= LOOKS_BEFORE else left
        x_RG2 = draw_margins(rng, scene, strength_at(multiple), runs)
        mean_R2, half_R2 = x_RG2.mean(axis=1), quantile * x_RG2.std(axis=1, ddof=1)
        rows = [{"step": look * EVERY} for _ in range(runs)]
        for i, scope in enumerate(SCOPES):
            for r in range(runs):
                rows[r] |= {
                    f"{scope}/own_margin_log": mean_R2[r, i],
                    f"{scope}/own_margin_log_ci95": half_R2[r, i],
                    f"{scope}/mi_upper_bound": np.log(scene.rooms),
                }
        state, found, _ = update_regimes(state, settings, rows, labels)
        on_R = np.array([metrics["regime/alarm"] for metrics in found], bool)
        if look <= LOOKS_BEFORE:
            quiet_R &= ~on_R
        else:
            seen_R |= on_R
    return float(seen_R[quiet_R].mean())


def report(runs):
    """The JSON object of the case."""
    rows = []
    for scene, retrievals in CASES:
        for retrieval in retrievals:
            rng = np.random.default_rng(0)
            strength_at, half_mi = alarm.information_curve(
                scene, alarm.find_strength(scene, retrieval)
            )
            for name, left in (("mi_seq", half_mi), ("own_margin", 0.5)):
                row = dataclasses.asdict(scene) | {"retrieval": retrieval, "half of": name}
                row |= powers(rng, scene, strength_at, left)
                row |= {"alarm": seen_rate(rng, runs, scene, strength_at, left)}
                rows.append(row)
                print(line(row), file=sys.stderr)  # it takes minutes
    return {"case": "alarm-bound", "runs": runs, "level": LEVEL, "looks": LOOKS, "rows": rows}


def line(row):
    """A row for people."""
    return "  ".join(
        f"{name} {x:.3f}" if name in BOUNDS else f"{name} {x}" for name, x in row.items()
    )


def as_table(found):
    """A report for people."""
    lines = [line(row) for row in found["rows"]]
    lines.append(
        f"falls seen within {LOOKS} diagnoses, false in at most {LEVEL:.4f} of {WINDOWS} windows "
        f"({SINGLE_LEVEL:.4f}: once); alarm: {found['runs']} runs"
    )
    return "\n".join(lines)
