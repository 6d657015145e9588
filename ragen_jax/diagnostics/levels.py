"""A sequential test of whether a figure left its level, with a bounded error over a whole run.

A figure is a noisy number at each step. The test compares its *level*, from the start of the run,
with its *recent* mean:

    level   mean of the first third of the values, or of all but those of the last SINCE steps if
            these are more: at least `baseline` values, at most `long`
    recent  mean of the last third of the values: at least FEWEST values, at most those of the last
            `recent` steps or the last SPARSE values, whichever are more

In the test for a fall, the highest value of the level and the lowest recent value are left out (in
the test for a rise, the lowest and the highest), so that no single step decides. The test statistic
is

    z = (level - recent) / sqrt(v / W_recent + v / W_level + w^2 size^2 (c_recent + c_level))

where W is the sum of the weights of the values, v / weight the variance of a value, w the fraction
of its level by which a healthy figure wanders slowly, and c = 1 / (1 + steps / WANDER_STEPS) the
fraction of that variance that remains in a mean over that number of steps. size is the change of
the figure for a relative change of 1 in its quantity: the level itself or, for a figure that is
log(1 + x), x / (1 + x). A figure has *fallen* if z is above `bound` and recent is below a fraction
of the level that depends on its kind; *risen* likewise.

**The noise is estimated from the run.** v is the larger of half the mean squared difference of
neighbouring values and the mean of their squared standard errors (margins have them). w^2 is
estimated from the second differences of the means of blocks of BLOCK values (so that a steady rise
or fall is not wandering), in excess of their noise, and shrunk to the square of the figure's prior
with the weight of WANDER_WEIGHT blocks. A block weighs (p^2 / (p^2 + noise))^2, with p the prior,
at least LEAST_PRIOR: the variance of a block's estimate of w^2 is the square of its noise, so a
block that is nearly all noise hardly changes the bound. v and w are learnt from values that are at
least LAG values old, and not while the figure is a sign: a fall does not widen the bound that it is
tested against. Weights are the numbers of prompts if these are known, so that a step with 8 prompts
counts for a third of a step with 24.

**The bound grows** with the number n of values, 2.2 + 0.4 log(n / 25) between 2.2 and 3.3: the
chance of a false alarm is spent about evenly over the logarithm of the run's length, early falls
are detected early, and the error of a whole run stays bounded (`python -m benchmarks alarm`
measures it). This is a window-limited generalised likelihood-ratio test (Lai 1995, section 3;
Siegmund and Venkatraman 1995) of a change with unknown level and unknown time, for one window that
grows.

**A level does not fall.** While a figure is a sign, its level remains the mean of the same values.
**It may rise.** The lower end of the mean of the last RISE values is RISE_BOUND standard errors
below that mean, with a wander of at least the figure's `rise`. If the lower end is above the level,
it becomes the level: information that rises and then crashes is compared with the level that it
surely had.

Axes: E environments, F figures, A first values, Q last values. All state is float32 unless stated
otherwise, and each update replaces all of it, so that a resumed run computes the same numbers.
"""

import dataclasses

import flax.struct
import numpy as np

from ragen_jax.core.types import Array

FIRST = 100  # values kept from the start: maximum number for a level
LAST = 32  # values kept from the end
FEWEST = 4  # minimum number of values of a recent mean
SPARSE = 6  # maximum number of values of a recent mean if the last `recent` steps hold fewer
SINCE = 40  # newest steps excluded from the level, unless they hold two thirds of all values
LAG = 8  # delay, in values, before noise is estimated from a value
NOISE_VALUES = 40  # number of values over which noise is averaged
NOISE_DOUBT = 2.0  # v is multiplied by 1 + NOISE_DOUBT / (number of values it is learnt from)
BLOCK = 8  # number of values of a block, whose means show slow wandering
BLOCKS = 30  # number of blocks over which wandering is averaged
WANDER_WEIGHT = 4.0  # number of blocks that the prior of wandering counts as
LEAST_PRIOR = 0.05  # minimum prior in the weights of blocks
# Mean square of the second differences of blocks, over the variance of the wandering: 1.2 for AR(1)
# with a coefficient of 0.9.
WANDER_DIFFERENCES = 1.2
WANDER_STEPS = 20.0  # steps after which half of the wandering is averaged out
RISE, RISE_BOUND = 20, 3.0  # number of values whose mean may raise a level; standard errors
SURE = 4.0  # minimum level to be tested, in standard errors above 0


@flax.struct.dataclass
class Levels:
    """State of the test for each figure."""

    count_EF: Array  # int32, number of values so far
    step_E: Array  # int32, the last step
    first_step_EF: Array  # int32, step of the first value
    first_count_EF: Array  # int32, number of first values; no value is added while it is a sign
    first_EFA: Array  # the first values, and their weights
    first_weight_EFA: Array
    last_EFQ: Array  # the last values, newest last, with weights, squared errors and steps
    last_weight_EFQ: Array
    last_error_EFQ: Array
    last_step_EFQ: Array  # int32
    noise_EF: Array  # v from neighbouring values, and v from their standard errors
    error_EF: Array
    # Means of the last two full blocks, newest last, and their weights; 0: no block.
    block_EF2: Array
    block_weight_EF2: Array
    blocks_EF: Array  # sum of the weights of the second differences of blocks so far
    wander_EF: Array  # w^2 from their weighted mean square in excess of noise
    raised_EF: Array  # raised level, and the weight of its RISE values; 0: never raised
    raised_weight_EF: Array
    level_values_EF: Array  # int32, number of first values that the level is a mean of
    level_EF: Array  # level that recent is compared with; 0: no level yet
    recent_EF: Array


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Settings of the test."""

    baseline: int  # minimum number of values in a level
    recent: int  # number of steps of the recent mean
    long: int  # maximum number of values in a level
    prior_F: np.ndarray  # prior of a figure's slow wander, as a fraction of its level
    rise_F: np.ndarray  # minimum wander, as such a fraction, when a level rises; inf: never rises
    log_F: np.ndarray  # bool, whether a figure is log(1 + x); its fractions are then of x


def init_levels(environments: int, figures: int) -> Levels:
    """Return the `Levels` of a new run."""
    E, F = environments, figures
    shapes = {"E": (E,), "EF": (E, F), "EF2": (E, F, 2)}
    shapes |= {"EFA": (E, F, FIRST), "EFQ": (E, F, LAST)}
    whole = {"count_EF", "step_E", "first_step_EF", "last_step_EFQ"}
    whole |= {"first_count_EF", "level_values_EF"}
    return Levels(
        **{
            field.name: np.zeros(
                shapes[field.name.rsplit("_", 1)[1]], np.int32 if field.name in whole else "f4"
            )
            for field in dataclasses.fields(Levels)
        }
    )


def update_levels(
    levels: Levels,
    test: Comparison,
    step_E: np.ndarray,
    value_EF: np.ndarray,
    error_EF: np.ndarray,
    weight_EF: np.ndarray,
    fixed_EF: np.ndarray,
) -> tuple[Levels, np.ndarray]:
    """Add the values of a step, and test each figure.

    Args:
      step_E: int, number of the step, above that of the previous update.
      value_EF: NaN: no value, which leaves the figure unchanged.
      error_EF: standard error of a value; 0: unknown.
      weight_EF: above 0; the variance of a value is v / weight.
      fixed_EF: bool, whether a figure has left its level; its level and its noise then stay as
        they are.

    Returns:
      (Levels, z_EF float64: above 0 if recent is below the level; 0 without a value, without a
      level, or with a level that is less than SURE standard errors above 0).
    """
    here_EF = np.isfinite(value_EF)
    s = _append(levels, step_E, value_EF, error_EF, weight_EF, fixed_EF)
    s = _learn(s, test, here_EF, fixed_EF)
    count_EF = s.count_EF.astype(int)
    judged_EF = here_EF & (count_EF >= test.baseline + FEWEST)
    gap_EF = np.maximum(s.step_E[:, None] - s.first_step_EF, 0) / np.maximum(count_EF - 1, 1)

    within_EF = (s.step_E[:, None, None] - s.last_step_EFQ < test.recent) & (
        np.arange(LAST) >= LAST - np.minimum(count_EF, LAST)[..., None]
    )
    third_EF = count_EF // 3
    most_EF = np.maximum(within_EF.sum(axis=-1), SPARSE)
    recent_n_EF = np.minimum(np.maximum(third_EF, test.baseline), most_EF)
    recent_n_EF = np.clip(np.minimum(recent_n_EF, count_EF - test.baseline), FEWEST, LAST)
    since_EF = np.rint(SINCE / np.maximum(gap_EF, 1)).astype(int)
    level_n_EF = np.clip(np.maximum(third_EF, count_EF - since_EF), test.baseline, test.long)
    level_n_EF = np.minimum(level_n_EF, np.maximum(count_EF - recent_n_EF, 1))
    level_n_EF = np.minimum(level_n_EF, s.first_count_EF)
    level_n_EF = np.where(fixed_EF & (s.level_values_EF > 0), s.level_values_EF, level_n_EF)
    raised_EF = s.raised_weight_EF > 0

    v_EF = _noise(s, test)
    wander_EF = _wander(s, test)
    z_EF, found = np.zeros(value_EF.shape), {}
    for sign in (1, -1):  # a fall, a rise
        recent_EF, recent_w_EF = _mean(
            s.last_EFQ, s.last_weight_EFQ, LAST - recent_n_EF, LAST, drop=sign
        )
        level_EF, level_w_EF = _mean(s.first_EFA, s.first_weight_EFA, 0, level_n_EF, drop=-sign)
        level_EF = np.where(raised_EF, s.raised_EF, level_EF)
        level_w_EF = np.where(raised_EF, s.raised_weight_EF, level_w_EF)
        level_steps_EF = np.where(raised_EF, RISE, level_n_EF) * gap_EF
        left_EF = 1 / (1 + recent_n_EF * gap_EF / WANDER_STEPS)
        left_EF = left_EF + 1 / (1 + level_steps_EF / WANDER_STEPS)
        variance_EF = v_EF / recent_w_EF + v_EF / level_w_EF
        variance_EF += wander_EF * _size(level_EF, test) ** 2 * left_EF
        with np.errstate(invalid="ignore", divide="ignore"):
            z = (level_EF - recent_EF) / np.sqrt(variance_EF)
        sure_EF = level_EF > SURE * np.sqrt(v_EF / level_w_EF)
        z = np.where(judged_EF & sure_EF & np.isfinite(z), z, 0.0)
        towards_EF = sign * z > 0
        z_EF = np.where(towards_EF, z, z_EF)
        found[sign] = level_EF, recent_EF
    fallen_EF = found[1][1] <= found[1][0]
    level_EF = np.where(fallen_EF, found[1][0], found[-1][0])
    recent_EF = np.where(fallen_EF, found[1][1], found[-1][1])
    s = dataclasses.replace(
        s,
        level_values_EF=np.where(judged_EF, level_n_EF, s.level_values_EF).astype(np.int32),
        level_EF=np.where(judged_EF, level_EF, s.level_EF).astype("f4"),
        recent_EF=np.where(judged_EF, recent_EF, s.recent_EF).astype("f4"),
    )
    return _raise(s, test, judged_EF, v_EF, wander_EF), z_EF


def bound(count: Array) -> np.ndarray:
    """Return the value that z must exceed for a change, for figures with `count` values."""
    return np.minimum(2.2 + 0.4 * np.log(np.maximum(np.asarray(count), 25) / 25), 3.3)


def _append(
    s: Levels,
    step_E: np.ndarray,
    value_EF: np.ndarray,
    error_EF: np.ndarray,
    weight_EF: np.ndarray,
    fixed_EF: np.ndarray,
) -> Levels:
    """Append the values to the earlier values."""
    here_EF = np.isfinite(value_EF)
    s = Levels(**{name: np.array(x) for name, x in vars(s).items()})
    step_EF = np.broadcast_to(step_E[:, None], value_EF.shape)

    def shift(old_EFQ, new_EF):
        new_EFQ = np.concatenate([old_EFQ[..., 1:], new_EF[..., None]], axis=-1)
        return np.where(here_EF[..., None], new_EFQ, old_EFQ).astype(old_EFQ.dtype)

    early_EF = here_EF & ~fixed_EF & (s.first_count_EF < FIRST)
    at_EFA = early_EF[..., None] & (np.arange(FIRST) == s.first_count_EF[..., None])
    return dataclasses.replace(
        s,
        step_E=step_E.astype(np.int32),
        first_step_EF=np.where(here_EF & (s.count_EF == 0), step_EF, s.first_step_EF).astype("i4"),
        first_EFA=np.where(at_EFA, value_EF[..., None], s.first_EFA).astype("f4"),
        first_weight_EFA=np.where(at_EFA, weight_EF[..., None], s.first_weight_EFA).astype("f4"),
        last_EFQ=shift(s.last_EFQ, value_EF),
        last_weight_EFQ=shift(s.last_weight_EFQ, weight_EF),
        last_error_EFQ=shift(s.last_error_EFQ, error_EF**2),
        last_step_EFQ=shift(s.last_step_EFQ, step_EF),
        first_count_EF=(s.first_count_EF + early_EF).astype(np.int32),
        count_EF=(s.count_EF + here_EF).astype(np.int32),
    )


def _count_learnt(s: Levels, test: Comparison) -> np.ndarray:
    """Return the number of values that noise is estimated from, int [E, F]."""
    count_EF = s.count_EF.astype(int)
    return np.where(count_EF <= test.baseline, count_EF, np.maximum(test.baseline, count_EF - LAG))


def _learn(s: Levels, test: Comparison, here_EF: np.ndarray, fixed_EF: np.ndarray) -> Levels:
    """Update noise and wandering with the value that is now LAG values old."""
    learnt_EF = _count_learnt(s, test)
    before_EF = _count_learnt(dataclasses.replace(s, count_EF=s.count_EF - here_EF), test)
    new_EF = (learnt_EF > before_EF) & ~fixed_EF
    place_EF = LAST - (s.count_EF - learnt_EF) - 1  # position of that value among the last

    def value_back(x_EFQ, back=0):
        index_EF1 = np.clip(place_EF - back, 0, LAST - 1)[..., None]
        return np.take_along_axis(x_EFQ.astype(float), index_EF1, axis=-1)[..., 0]

    weight_EF, weight_before_EF = value_back(s.last_weight_EFQ), value_back(s.last_weight_EFQ, 1)
    has_before_EF = new_EF & (learnt_EF > 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        change_EF = (value_back(s.last_EFQ) - value_back(s.last_EFQ, 1)) ** 2
        change_EF = change_EF / (1 / weight_EF + 1 / weight_before_EF)

    def update_mean(old_EF, new_values_EF, number_EF, most, where_EF):
        rate_EF = 1 / np.clip(number_EF, 1, most)
        return np.where(where_EF, old_EF + rate_EF * (new_values_EF - old_EF), old_EF)

    noise_EF = update_mean(s.noise_EF, change_EF, learnt_EF - 1, NOISE_VALUES, has_before_EF)
    error_EF = update_mean(
        s.error_EF, value_back(s.last_error_EFQ) * weight_EF, learnt_EF, NOISE_VALUES, new_EF
    )

    full_EF = new_EF & (learnt_EF % BLOCK == 0)
    total_EF, sum_EF = np.zeros(full_EF.shape), np.zeros(full_EF.shape)
    for back in range(BLOCK):
        total_EF += value_back(s.last_weight_EFQ, back)
        sum_EF += value_back(s.last_weight_EFQ, back) * value_back(s.last_EFQ, back)
    first_EF, second_EF = np.moveaxis(np.asarray(s.block_EF2, float), -1, 0)
    first_w_EF, second_w_EF = np.moveaxis(np.asarray(s.block_weight_EF2, float), -1, 0)
    compared_EF = full_EF & (first_w_EF > 0)
    # The size of all values so far: there may be no level yet.
    so_far_EF = np.minimum(learnt_EF, s.first_count_EF)
    size_EF = _size(_mean(s.first_EFA, s.first_weight_EFA, 0, so_far_EF)[0], test)
    scale_EF = WANDER_DIFFERENCES * np.maximum(size_EF**2, np.finfo(np.float32).tiny)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_EF = sum_EF / total_EF
        square_EF = (mean_EF - 2 * second_EF + first_EF) ** 2 / scale_EF
        own_EF = np.maximum(noise_EF, error_EF) / scale_EF
        own_EF = own_EF * (1 / total_EF + 4 / second_w_EF + 1 / first_w_EF)
        prior_F = np.maximum(test.prior_F, LEAST_PRIOR) ** 2
        block_EF = np.where(compared_EF, (prior_F / (prior_F + own_EF)) ** 2, 0.0)
        blocks_EF = s.blocks_EF + block_EF
        rate_EF = np.minimum(block_EF / np.minimum(blocks_EF, BLOCKS), 1)
        wander_EF = s.wander_EF + rate_EF * (square_EF - own_EF - s.wander_EF)

    def push(old_EF2, new_EF):
        new_EF2 = np.stack([old_EF2[..., 1], new_EF], axis=-1)
        return np.where(full_EF[..., None], new_EF2, old_EF2).astype("f4")

    return dataclasses.replace(
        s,
        noise_EF=noise_EF.astype("f4"),
        error_EF=error_EF.astype("f4"),
        block_EF2=push(s.block_EF2, mean_EF),
        block_weight_EF2=push(s.block_weight_EF2, total_EF),
        blocks_EF=blocks_EF.astype("f4"),
        wander_EF=np.where(block_EF > 0, wander_EF, s.wander_EF).astype("f4"),
    )


def _noise(s: Levels, test: Comparison) -> np.ndarray:
    """Return v, the variance of a value of weight 1, float64 [E, F]."""
    doubt_EF = 1 + NOISE_DOUBT / np.maximum(_count_learnt(s, test), test.baseline)
    return np.maximum(s.noise_EF, s.error_EF).astype(float) * doubt_EF


def _wander(s: Levels, test: Comparison) -> np.ndarray:
    """Return w^2, the slow variance relative to the squared level, float64 [E, F]."""
    blocks_EF = s.blocks_EF.astype(float)
    known_EF = WANDER_WEIGHT * test.prior_F**2 + blocks_EF * s.wander_EF
    return np.maximum(known_EF / (WANDER_WEIGHT + blocks_EF), 0)


def _size(level_EF: np.ndarray, test: Comparison) -> np.ndarray:
    """Return the change of a figure for a relative change of 1 in its quantity, float64 [E, F]."""
    return np.where(test.log_F, -np.expm1(-np.abs(level_EF)), np.abs(level_EF))


def _mean(
    x_EFN: Array,
    weight_EFN: Array,
    first: np.ndarray | int,
    end: np.ndarray | int,
    drop: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (weighted mean, sum of weights) of the values from `first` to before `end`.

    Both are float64 [E, F]. The mean leaves out the lowest value if drop is 1, the highest if it
    is -1. The sum includes the weight of the value that is left out.
    """
    x_EFN, weight_EFN = np.asarray(x_EFN, float), np.asarray(weight_EFN, float)
    place = np.arange(x_EFN.shape[-1])
    inside_EFN = (place >= np.asarray(first)[..., None]) & (place < np.asarray(end)[..., None])
    w_EFN = np.where(inside_EFN, weight_EFN, 0.0)
    total_EF = np.maximum(w_EFN.sum(axis=-1), np.finfo(np.float32).tiny)
    if drop:
        order_EFN = np.where(inside_EFN, drop * x_EFN, np.inf)
        worst_EF1 = order_EFN.argmin(axis=-1)[..., None]
        several_EF1 = inside_EFN.sum(axis=-1, keepdims=True) > 2
        lowered = np.where(several_EF1, 0.0, np.take_along_axis(w_EFN, worst_EF1, axis=-1))
        w_EFN = w_EFN.copy()
        np.put_along_axis(w_EFN, worst_EF1, lowered, axis=-1)
    kept_EF = np.maximum(w_EFN.sum(axis=-1), np.finfo(np.float32).tiny)
    return (w_EFN * x_EFN).sum(axis=-1) / kept_EF, total_EF


def _raise(
    s: Levels, test: Comparison, judged_EF: np.ndarray, v_EF: np.ndarray, wander_EF: np.ndarray
) -> Levels:
    """Raise the levels to the lower ends of recent means, where these are higher."""
    count_EF = s.count_EF.astype(int)
    mean_EF, weight_EF = _mean(s.last_EFQ, s.last_weight_EFQ, LAST - RISE, LAST)
    rises_F = np.isfinite(test.rise_F)
    least_F = np.where(rises_F, test.rise_F, 0.0) ** 2
    spread_EF = v_EF / weight_EF + np.maximum(wander_EF, least_F) * _size(mean_EF, test) ** 2
    lower_EF = mean_EF - RISE_BOUND * np.sqrt(spread_EF)
    up_EF = judged_EF & rises_F & (count_EF > test.baseline + RISE) & (lower_EF > s.level_EF)
    return dataclasses.replace(
        s,
        raised_EF=np.where(up_EF, lower_EF, s.raised_EF).astype("f4"),
        raised_weight_EF=np.where(up_EF, weight_EF, s.raised_weight_EF).astype("f4"),
        level_EF=np.where(up_EF, lower_EF, s.level_EF).astype("f4"),
    )
