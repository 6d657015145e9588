"""intervals.py: against explicit deletion, all permutations, and thousands of simulated batches.

Each simulated batch draws new prompts and new reasonings of each prompt. Scores are the true
log-likelihoods, so the mean of `information_metrics` over many batches is the in-batch information
that an interval should cover.
"""

import itertools
import math

import numpy as np
import pytest
from numpy.random import default_rng as fresh
from scipy.special import stdtrit
from scipy.stats import rankdata

from ragen_jax.diagnostics.information import information_metrics, within_metrics
from ragen_jax.diagnostics.intervals import (
    confidence_intervals,
    effective_trials,
    interval,
    log_margin,
    mean_with_interval,
    paired_gain,
    proportion_interval,
    rate_with_interval,
)
from ragen_jax.diagnostics.permutation import retrieval_p

pytestmark = pytest.mark.fast

INFORMATION = ("mi", "mi_seq", "mi_released")
ENTROPIES = ("h_cond", "h_cond_seq", "h_marginal", "h_marginal_seq")
FIGURES = (*INFORMATION, *ENTROPIES, "own_margin", "retrieval_acc")
T975 = {2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 7: 2.364624}  # tables of Student's t


def random_case(seed, M=14, N=6, strength=2.0, ids=None):
    """Scores, lengths, own columns and ids; columns with equal ids have equal scores."""
    rng = np.random.default_rng(seed)
    ids = np.arange(N) if ids is None else np.array(ids)
    length_M, prompt_M = rng.integers(1, 30, M), rng.integers(0, len(ids), M)
    score_MN = -rng.exponential(20.0, size=(M, 1)) + rng.normal(size=(M, len(ids)))
    score_MN[np.arange(M), prompt_M] += strength
    return score_MN[:, [ids.tolist().index(i) for i in ids]], length_M, prompt_M, ids


# ---- the jackknife ------------------------------------------------------------------------------


def deleted_one_by_one(score_MN, length_M, prompt_M, ids, group_N, part_N=None):
    """The half-widths, by deleting rows and columns of the matrix and recomputing the figures."""

    def figures(keep):
        columns = np.flatnonzero(keep)
        rows = np.flatnonzero(keep[prompt_M])
        case = score_MN[np.ix_(rows, columns)], length_M[rows]
        own_M = np.searchsorted(columns, prompt_M[rows])
        if part_N is None:
            return information_metrics(*case, own_M, prompt_id_N=ids[columns])
        return within_metrics(*case, own_M, part_N[columns], prompt_id_N=ids[columns])

    groups = sorted(set(group_N.tolist()))
    full, replicates = figures(ids == ids), [figures(group_N != g) for g in groups]
    part_N = np.zeros(len(ids), int) if part_N is None else part_N
    used = [p for p in set(part_N.tolist()) if len(set(ids[part_N == p].tolist())) > 1]
    rows = [m for m, own in enumerate(prompt_M) if part_N[own] in used]
    D = sum(len(set(ids[part_N == p].tolist())) for p in used if p in part_N[prompt_M])
    G, half = len(groups), {}
    for name in FIGURES[:-1]:
        values = [replicate[name] for replicate in replicates]
        center = sum(values) / G
        se = math.sqrt((G - 1) / G * sum((v - center) ** 2 for v in values))
        if name in INFORMATION:
            se = math.sqrt(se**2 + (full[name] / D / 2) ** 2)
        whole = name.endswith("_seq") or name == "own_margin"
        unit_M = np.ones(len(rows)) if whole else length_M[rows]
        matched_M = score_MN[rows, prompt_M[rows]]
        half[name + "_ci95"] = T975[G - 1] * se + 2.0**-23 * abs(np.mean(matched_M / unit_M))
    # Retrieval: one reasoning at a time, its first rank among the columns of its part.
    hits = {}
    for m in rows:
        columns = np.flatnonzero(part_N == part_N[prompt_M[m]])
        own = np.searchsorted(columns, prompt_M[[m]])
        one = information_metrics(score_MN[[m]][:, columns], [1], own, prompt_id_N=ids[columns])
        hits.setdefault(group_N[prompt_M[m]], []).append(one["retrieval_acc"])
    mean = sum(map(sum, hits.values())) / len(rows)
    G = len(hits)
    spread = sum((sum(hit) - len(hit) * mean) ** 2 for hit in hits.values())
    asked = len({(part_N[prompt_M[m]], ids[prompt_M[m]]) for m in rows})
    n, t = math.sqrt(len(rows) * asked), T975[G - 1]
    se = math.sqrt(G / (G - 1) * spread) / len(rows)
    error = t * math.sqrt(se**2 + (t / 2 / (n + t**2)) ** 2)
    half["retrieval_acc_ci95"] = min(error, max(mean, 1 - mean))
    return half


def check(got, want):
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert type(got[key]) is float
        np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strength", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("ids", [None, [0, 1, 2, 0, 1, 4], [3, 3, 3, 1, 2, 0, 7, 5, 3, 1]])
def test_against_deletion_one_by_one(seed, strength, ids):
    score_MN, length_M, prompt_M, ids = random_case(seed, strength=strength, ids=ids)
    got = confidence_intervals(score_MN, length_M, prompt_M, prompt_id_N=ids)
    check(got, deleted_one_by_one(score_MN, length_M, prompt_M, ids, ids))


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_a_group_is_deleted_with_all_its_prompts(seed, strength):
    # Prompts of four groups; the first two groups happen to share one (id 3).
    group_N = np.array([7, 7, 7, 2, 2, 5, 5, 5, 9, 9, 9])
    ids = np.array([3, 1, 1, 3, 4, 5, 6, 6, 8, 9, 10])
    score_MN, length_M, prompt_M, _ = random_case(seed, M=40, strength=strength, ids=ids)
    case = score_MN, length_M, prompt_M
    got = confidence_intervals(*case, prompt_id_N=ids, group_N=group_N)
    check(got, deleted_one_by_one(*case, ids, group_N))
    assert got != confidence_intervals(*case, prompt_id_N=ids)
    # The distinct prompts are the default groups.
    got = confidence_intervals(*case, prompt_id_N=ids, group_N=ids)
    assert got == confidence_intervals(*case, prompt_id_N=ids)


@pytest.mark.parametrize("seed", range(4))
def test_intervals_of_the_figures_within_parts(seed):
    group_N = np.repeat(np.arange(5), 4)
    part_N = np.array([0, 1, 1, 2] * 4 + [0, 0, 0, 4])  # the last column is alone in its part
    score_MN, length_M, prompt_M, ids = random_case(seed, M=60, N=20)
    ids[part_N == 0] = group_N[part_N == 0]  # the first prompts of a group are equal
    case = score_MN, length_M, prompt_M
    got = confidence_intervals(*case, prompt_id_N=ids, group_N=group_N, part_N=part_N)
    check(got, deleted_one_by_one(*case, ids, group_N, part_N))


def test_by_hand():
    # One reasoning per prompt, p(z | x):  0.4 0.1 0.1 / 0.2 0.4 0.2 / 0.1 0.1 0.1.
    # Without x1, z0 has log(0.4 / 0.25), and so on. Twice the mi_seq of each remainder:
    #   without x0: log(0.4 / 0.3) + log(0.1 / 0.1)  = 0.287682
    #   without x1: log(0.4 / 0.25) + log(0.1 / 0.1) = 0.470004
    #   without x2: log(0.4 / 0.25) + log(0.4 / 0.3) = 0.757686
    # Half of each: 0.143841 0.235002 0.378843, mean 0.252562, squares sum to 0.0280755,
    # se^2 = 2 / 3 * 0.0280755 = 0.0187170; mi_seq is a third of log(0.4 * 3 / 0.6) +
    # log(0.4 * 3 / 0.8) + log(0.1 * 3 / 0.3) = 0.366204, floor^2 = (0.366204 / 6)^2 = 0.0037251,
    # the root of their sum 0.149807, t(2) = 4.302653.
    score_MN = np.log([[0.4, 0.1, 0.1], [0.2, 0.4, 0.2], [0.1, 0.1, 0.1]])
    got = confidence_intervals(score_MN, [1, 1, 1], np.arange(3))
    assert got["mi_seq_ci95"] == pytest.approx(4.302653 * 0.149807, rel=1e-5)
    # h_cond: -log of 0.4 0.4 0.1 = 0.916291 0.916291 2.302585; the means of the three pairs are
    # 1.609438 1.609438 0.916291, mean 1.378389, squares sum to 0.320302.
    assert got["h_cond_ci95"] == pytest.approx(4.302653 * math.sqrt(0.320302 * 2 / 3), rel=1e-5)
    # First ranks 1, 1, 1/3, mean 7/9, deviations 2/9 2/9 -4/9: se = sqrt(3/2 * 24/81) / 3 = 2/9;
    # three observations, floor = 4.302653 / 2 / (3 + 18.51282) = 0.100002, the root of both
    # 0.243688, times t(2) 1.0485, which is more than the distance of 7/9 to 0.
    assert got["retrieval_acc_ci95"] == pytest.approx(7 / 9)


def test_a_dominating_prompt_can_be_deleted():
    # lse(all) - own has no precision left: the remainder must be computed from the other columns.
    score_MN, length_M, prompt_M, ids = random_case(0, N=5, strength=1e5)
    got = confidence_intervals(score_MN, length_M, prompt_M)
    check(got, deleted_one_by_one(score_MN, length_M, prompt_M, ids, ids))


def test_copying_leaves_the_floor():
    N = 8
    score_MN = np.where(np.eye(N), 0.0, -1e4)
    got = confidence_intervals(score_MN, np.full(N, 5), np.arange(N))
    assert got["mi_seq_ci95"] == pytest.approx(T975[7] * math.log(8) / 16, rel=1e-5)
    assert got["mi_ci95"] == pytest.approx(T975[7] * math.log(8) / 80, rel=1e-5)
    # Wilson's interval for 8 hits of 8 is from 8 / (8 + t^2) to 1.
    wilson = (1 - 8 / (8 + T975[7] ** 2)) / 2
    assert got["retrieval_acc_ci95"] == pytest.approx(wilson, rel=1e-5)
    assert got["h_cond_ci95"] == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_ignoring_is_within_its_interval_of_zero(seed):
    rng = np.random.default_rng(seed)
    exact_MN = np.repeat(-rng.exponential(60.0, size=(64, 1)), 8, axis=1)
    rounded_MN = exact_MN * (1 + 2.0**-25 * rng.normal(size=(64, 8)))
    for score_MN in (exact_MN, rounded_MN.astype(np.float32)):
        case = score_MN, rng.integers(1, 40, 64), np.arange(64) % 8
        figures, half = information_metrics(*case), confidence_intervals(*case)
        for name in INFORMATION:
            assert abs(figures[name]) < half[name + "_ci95"] < 1e-4


def test_too_few_groups_have_no_interval():
    score_MN = np.random.default_rng(0).normal(size=(4, 3))
    assert confidence_intervals(score_MN[:, :2], np.ones(4), np.array([0, 1, 0, 1])) == {}
    assert confidence_intervals(score_MN, np.ones(4), np.arange(4) % 3, prompt_id_N=[1, 2, 1]) == {}
    assert confidence_intervals(score_MN, np.ones(4), np.array([2, 2, 2, 2])) == {}
    assert len(confidence_intervals(score_MN, np.ones(4), np.array([2, 2, 2, 1]))) == len(FIGURES)
    case = np.random.default_rng(0).normal(size=(4, 4)), np.ones(4), np.arange(4)
    assert confidence_intervals(*case, group_N=[0, 0, 1, 1]) == {}
    assert len(confidence_intervals(*case, group_N=[0, 0, 1, 2])) == len(FIGURES)
    # Without group 0 the first part has a single prompt; without group 1 both parts do.
    assert len(confidence_intervals(*case, group_N=[0, 1, 2, 2], part_N=[0, 0, 1, 1])) == len(
        FIGURES
    )
    assert confidence_intervals(*case, group_N=[0, 1, 1, 2], part_N=[0, 0, 1, 1]) == {}
    with pytest.raises(ValueError, match=r"length_M\[1\] = 0"):
        confidence_intervals(score_MN, [1, 0, 1, 1], np.zeros(4, int))
    with pytest.raises(AssertionError):
        confidence_intervals(*case, group_N=[0, 1, 2])


# ---- coverage -----------------------------------------------------------------------------------


def symbols(rng, N, M, concentration):
    """A prompt is a distribution over 20 symbols; a reasoning is 5 to 15 symbols drawn from it."""
    p_NV = rng.dirichlet(np.full(20, concentration), size=N) + 1e-12
    prompt_M, length_M = np.arange(M) % N, rng.integers(5, 16, M)
    count_MV = rng.multinomial(length_M, (p_NV / p_NV.sum(1, keepdims=True))[prompt_M])
    return count_MV @ np.log(p_NV).T, length_M, prompt_M


def channel(rng, N, M, spread):
    """A prompt is a point in 3-space with its own noise; a reasoning is the point plus noise."""
    point_N3, noise_N = spread * rng.normal(size=(N, 3)), np.exp(0.7 * rng.normal(size=N))
    prompt_M = np.arange(M) % N
    seen_M3 = point_N3[prompt_M] + noise_N[prompt_M, None] * rng.normal(size=(M, 3))
    distance_MN = np.sum((seen_M3[:, None] - point_N3) ** 2, axis=2)
    return -distance_MN / 2 / noise_N**2 - 3 * np.log(noise_N), rng.integers(5, 16, M), prompt_M


def coverage(simulate, N, M, strength, *, batches, names):
    """{name: (fraction of batches whose interval holds the truth, truth)}."""
    rng = np.random.default_rng(0)
    # The truth is the mean over four times as many separate batches, so its own error is small.
    truth = {name: 0.0 for name in names}
    for _ in range(4 * batches):
        figures = information_metrics(*simulate(rng, N, M, strength))
        truth = {name: truth[name] + figures[name] / (4 * batches) for name in names}
    hits = dict.fromkeys(names, 0)
    for _ in range(batches):
        case = simulate(rng, N, M, strength)
        figures, half = information_metrics(*case), confidence_intervals(*case)
        for name in names:
            hits[name] += abs(figures[name] - truth[name]) <= half[name + "_ci95"]
    return {name: (hits[name] / batches, truth[name]) for name in names}


@pytest.mark.medium
@pytest.mark.parametrize("simulate, strength", [(symbols, 5.0), (channel, 1.0)])
def test_intervals_cover_at_8_prompts(simulate, strength):
    found = coverage(simulate, 8, 64, strength, batches=300, names=("mi", "mi_seq"))
    for share, _ in found.values():  # the standard deviation is 0.013
        assert 0.90 <= share <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("N, M", [(8, 64), (8, 8), (16, 16), (64, 64)])
@pytest.mark.parametrize(
    "simulate, strength",
    [(symbols, 30.0), (symbols, 10.0), (symbols, 3.0), (channel, 0.5), (channel, 1.0)],
)
def test_intervals_cover(simulate, strength, N, M):
    names = ("mi", "mi_seq", "h_cond_seq", "h_marginal", "retrieval_acc")
    found = coverage(simulate, N, M, strength, batches=1000, names=names)
    print(simulate.__name__, strength, (N, M), found)
    assert found["mi_seq"][1] < 0.8 * math.log(N)
    for name in ("mi", "mi_seq"):
        assert 0.90 <= found[name][0] <= 0.98
    for name in ("h_cond_seq", "h_marginal"):
        assert 0.90 <= found[name][0]
    assert 0.85 <= found["retrieval_acc"][0]


@pytest.mark.slow
@pytest.mark.parametrize("N, M", [(8, 8), (16, 16), (64, 64)])
@pytest.mark.parametrize(
    "simulate, strength", [(symbols, 1.5), (symbols, 1.0), (channel, 2.0), (channel, 3.0)]
)
def test_intervals_cover_less_where_failures_are_rare(simulate, strength, N, M):
    found = coverage(simulate, N, M, strength, batches=1000, names=("mi_seq",))
    print(simulate.__name__, strength, (N, M), found)
    assert found["mi_seq"][1] > 0.5 * math.log(N)
    assert 0.86 <= found["mi_seq"][0]


@pytest.mark.slow
@pytest.mark.parametrize("N, M, strength", [(8, 64, 0.5), (8, 8, 0.5), (64, 64, 0.25)])
def test_intervals_near_the_bound_are_wide_rather_than_wrong(N, M, strength):
    share, truth = coverage(symbols, N, M, strength, batches=1000, names=("mi_seq",))["mi_seq"]
    assert 0.9 * math.log(N) < truth < math.log(N)
    assert share >= 0.90


# ---- the permutation test -----------------------------------------------------------------------


def noisy(rng, N, M, signal=0.0):
    """Scores with an offset for each reasoning and for each prompt, and noise that grows with the
    length; `signal` is added for the own prompt."""
    prompt_M, length_M = np.arange(M) % N, rng.integers(10, 120, M)
    score_MN = -rng.exponential(40, size=(M, 1)) + 3 * rng.normal(size=N)
    score_MN = score_MN + 0.3 * np.sqrt(length_M)[:, None] * rng.normal(size=(M, N))
    score_MN[np.arange(M), prompt_M] += signal
    return score_MN, prompt_M


def test_against_all_permutations():
    rng = np.random.default_rng(1)
    for tied in (False, False, True):
        score_MN, _ = noisy(rng, 3, 6)
        if tied:  # two prompts that have equal scores for every reasoning
            score_MN[:, 2] = score_MN[:, 0]
        prompt_M = np.array([0, 0, 1, 1, 1, 2])
        calibrated_MN = score_MN - score_MN.mean(axis=0)
        rank_MN = rankdata(calibrated_MN, axis=1)
        observed = sum(rank_MN[m, n] for m, n in enumerate(prompt_M))
        dealt = [
            sum(rank_MN[m, n] for m, n in enumerate(labels))
            for labels in itertools.permutations(prompt_M)
        ]
        want = np.mean(np.array(dealt) >= observed)
        got = retrieval_p(score_MN, prompt_M, rng=fresh(0), permutations=20000)
        assert got == pytest.approx(want, abs=0.015)  # 4 standard deviations


def test_p_values_by_hand():
    # Of the 8! permutations of the labels, only the identity retrieves as well.
    score_MN = np.where(np.eye(8), 0.0, -50.0)
    assert retrieval_p(score_MN, np.arange(8), rng=fresh(0)) == 1 / 1000
    assert retrieval_p(score_MN, np.arange(8), rng=fresh(0), permutations=99) == 1 / 100
    # The opposite: every permutation is at least as good, as the own prompt always ranks last.
    assert retrieval_p(-score_MN, np.arange(8), rng=fresh(0)) == 1.0
    # All prompts are alike, so no permutation makes a difference.
    assert retrieval_p(np.full((6, 3), -4.0), np.arange(6) % 3, rng=fresh(0)) == 1.0
    assert retrieval_p(score_MN, np.zeros(8, int), rng=fresh(0)) == 1.0


def test_offsets_and_duplicates_do_not_matter():
    rng = np.random.default_rng(3)
    score_MN, prompt_M = noisy(rng, 8, 24, signal=1.0)
    p = retrieval_p(score_MN, prompt_M, rng=fresh([3, 4]))
    assert 0.001 < p < 0.9 and p == retrieval_p(score_MN, prompt_M, rng=fresh([3, 4]))
    moved_MN = score_MN + rng.normal(size=(24, 1)) + 9 * rng.normal(size=8)
    assert retrieval_p(moved_MN, prompt_M, rng=fresh([3, 4])) == p
    # A prompt stays a single prompt if some of its reasonings refer to a second column.
    twice_MN, own_M = np.hstack([score_MN, score_MN[:, [5]]]), prompt_M.copy()
    own_M[np.flatnonzero(prompt_M == 5)[1:]] = 8
    ids = [*range(8), 5]
    assert retrieval_p(twice_MN, own_M, prompt_id_N=ids, rng=fresh([3, 4])) == p
    assert retrieval_p(score_MN, prompt_M, rng=fresh([3, 5])) != p


@pytest.mark.medium
@pytest.mark.parametrize("N, M", [(8, 64), (16, 16)])
def test_false_alarms_and_power(N, M):
    rng = np.random.default_rng(0)
    alarms, found = 0, 0
    for seed in range(1000):
        alarms += retrieval_p(*noisy(rng, N, M), rng=fresh(seed), permutations=199) <= 0.05
    assert 30 <= alarms <= 70  # expected 50, standard deviation 7
    signal = {8: 1.0, 16: 2.0}[N]  # with noise of 1 to 3.3, another prompt is often the best
    for seed in range(100):
        found += retrieval_p(*noisy(rng, N, M, signal), rng=fresh(seed), permutations=199) <= 0.05
    assert found >= 80


@pytest.mark.slow
@pytest.mark.parametrize("N, M", [(8, 64), (16, 16), (64, 64)])
def test_false_alarms_of_the_default(N, M):
    rng = np.random.default_rng(1)
    alarms = sum(retrieval_p(*noisy(rng, N, M), rng=fresh(seed)) <= 0.05 for seed in range(1000))
    print((N, M), alarms)
    assert 30 <= alarms <= 70


def test_groups_are_dealt_as_they_are():
    # Two groups of three turns: 2 * 3! * 3! permutations, of the 6! permutations of six labels.
    rng = np.random.default_rng(2)
    score_MN, _ = noisy(rng, 6, 6, signal=2.0)
    group_N = np.array([4, 1, 1, 4, 1, 4])
    rank_MN = rankdata(score_MN - score_MN.mean(axis=0), axis=1)

    def p(ways):
        dealt = [sum(rank_MN[m, n] for m, n in enumerate(labels)) for labels in ways]
        return np.mean(np.array(dealt) >= np.trace(rank_MN))

    every = list(itertools.permutations(range(6)))
    rooms = [way for way in every if len(set(zip(group_N, group_N[list(way)], strict=True))) == 2]
    assert len(rooms) == 72
    got = retrieval_p(score_MN, np.arange(6), group_N=group_N, rng=fresh(0), permutations=20000)
    assert got == pytest.approx(p(rooms), abs=0.015)
    got = retrieval_p(score_MN, np.arange(6), rng=fresh(0), permutations=20000)
    assert got == pytest.approx(p(every), abs=0.015)
    assert abs(p(rooms) - p(every)) > 0.03


def test_labels_stay_within_their_part():
    # Two parts of three turns: 3! * 3! permutations. Scores under the other part do not count.
    rng = np.random.default_rng(4)
    score_MN, _ = noisy(rng, 6, 6, signal=1.0)
    part_N = np.array(["b", "a", "b", "a", "a", "b"])
    score_MN = np.where(part_N[:, None] == part_N, score_MN, 99.0)
    below = 0
    values = []
    for part in "ab":
        rows = np.flatnonzero(part_N == part)
        block = score_MN[np.ix_(rows, rows)]
        rank = rankdata(block - block.mean(axis=0), axis=1)
        below += np.trace(rank)
        ways = itertools.permutations(range(3))
        values.append([sum(rank[m, n] for m, n in enumerate(way)) for way in ways])
    want = np.mean(np.add.outer(*values) >= below)
    got = retrieval_p(score_MN, np.arange(6), part_N=part_N, rng=fresh(0), permutations=20000)
    assert got == pytest.approx(want, abs=0.015)
    # No labels can be permuted if every part has one prompt.
    assert retrieval_p(score_MN, np.arange(6), part_N=np.arange(6), rng=fresh(0)) == 1.0


def test_permutations_are_refused_below_one():
    with pytest.raises(ValueError, match="permutations is 0"):
        retrieval_p(np.zeros((2, 2)), np.arange(2), rng=fresh(0), permutations=0)
    with pytest.raises(ValueError, match=r"prompt_M\[1\] = 2"):
        retrieval_p(np.zeros((2, 2)), np.array([0, 2]), rng=fresh(0))


# ---- rates over grouped trials -------------------------------------------------------------------


def test_an_interval_of_retrieval_ends_at_0_and_1():
    """Three prompts, reasonings of two: one is retrieved; t(1) = 12.7."""
    score_MN = np.array([[0.0, -9, -9], [0, -9.0, -9]]).repeat(4, axis=0)
    found = confidence_intervals(score_MN, np.ones(8), np.array([0, 1]).repeat(4))
    assert found["retrieval_acc_ci95"] == 0.5


def test_a_rate_by_hand():
    """From tables of Clopper and Pearson: 0 of 8, 4 of 8, 8 of 8, 5 of 20."""
    for part_G, whole_G, low, high in [
        ([0] * 8, [1] * 8, 0.0, 0.3694),
        ([1, 0] * 4, [1] * 8, 0.1570, 0.8430),
        ([1] * 8, [1] * 8, 0.6306, 1.0),
        ([1] * 5 + [0] * 15, [1] * 20, 0.0866, 0.4910),
        ([0] * 8, [16] * 8, 0.0, 0.3105),  # members that never differ may be copies: 10 trials
        ([16, 0] * 4, [16] * 8, 0.1610, 0.8390),  # members of a group agree: 8.2 trials
    ]:
        found = proportion_interval(np.array(part_G), np.array(whole_G))
        np.testing.assert_allclose(found, (low, high), atol=1e-4)
        rate = np.sum(part_G) / np.sum(whole_G)
        metrics = rate_with_interval("x", np.array(part_G), np.array(whole_G))
        want = {"x": rate, "x_ci95": max(high - rate, rate - low)}
        assert metrics == pytest.approx(want, abs=1e-4)
    assert effective_trials(np.array([0, 1, 1]), np.ones(3)) == pytest.approx(3)
    # The posterior by hand: each group has 1 of 2, so its likelihood is that of a disagreement,
    # 2 p (1 - p) (1 - r); with a uniform prior, the 0.8 quantile of (1 - r)^8 is 1 - 0.2^(1/9).
    r = 1 - 0.2 ** (1 / 9)
    assert effective_trials(np.ones(8), np.full(8, 2)) == pytest.approx(16 / (1 + r), rel=0.02)
    # Between one trial per group (if all groups have the same size) and all trials.
    rng = np.random.default_rng(0)
    for _ in range(200):
        whole_G = rng.integers(1, 20, rng.integers(1, 9))
        n = effective_trials(rng.integers(0, whole_G + 1), whole_G)
        assert whole_G.sum() ** 2 / (whole_G**2).sum() <= n <= whole_G.sum() + 1e-9


def test_rates_with_too_few_groups_and_what_is_no_rate():
    assert rate_with_interval("x", np.zeros(2), np.zeros(2)) == {}
    assert rate_with_interval("x", np.array([1, 0, 0]), np.array([2, 2, 0])) == {"x": 0.25}
    with pytest.raises(ValueError, match="0 to whole successes in each group, got 3 of 2"):
        rate_with_interval("x", np.array([1, 3, 0]), np.array([2, 2, 2]))
    # A mean can be any number: 30 tokens in 2 replies, 10 in 1, 5 in 1; by the jackknife.
    deleted = np.array([15 / 2, 35 / 3, 40 / 3])
    half = T975[2] * math.sqrt(2 / 3 * np.sum((deleted - deleted.mean()) ** 2))
    found = mean_with_interval("x", np.array([30, 10, 5]), np.array([2, 1, 1]))
    assert found == pytest.approx({"x": 45 / 4, "x_ci95": half})


@pytest.mark.medium
@pytest.mark.parametrize("G", [8, 32])
@pytest.mark.parametrize("K", [4, *(pytest.param(K, marks=pytest.mark.slow) for K in (16, 80))])
def test_intervals_of_rates_cover(G, K):
    """Beta-binomial groups of even and uneven sizes; two members correlate by 0 to 0.9."""
    rng = np.random.default_rng(G + K)
    least, widths = {}, {}
    for rate in (0.01, 0.02, 0.05, 0.1, 0.5, 0.9, 0.95, 0.98, 0.99):
        for correlation in (0.0, 0.1, 0.3, 0.6, 0.9):
            for uneven in (False, True):
                inside, wide = 0, []
                for _ in range(400):
                    own_G = np.full(G, rate)
                    if correlation:
                        a = (1 - correlation) / correlation
                        own_G = rng.beta(rate * a, (1 - rate) * a, G)
                    whole_G = rng.integers(K // 2, 2 * K, G) if uneven else np.full(G, K)
                    found = rate_with_interval("x", rng.binomial(whole_G, own_G), whole_G)
                    inside += abs(found["x"] - rate) <= found["x_ci95"]
                    wide.append(found["x_ci95"])
                least[rate, correlation, uneven] = inside / 400
                widths[rate, correlation, uneven] = np.mean(wide)
    assert min(least.values()) >= 0.93, sorted(least.items(), key=lambda x: x[1])[:3]
    # Not too wide if groups do not differ: the lower bound is 1.96 standard errors.
    plain = 1.96 * math.sqrt(0.25 / (G * K))
    assert widths[0.5, 0.0, False] < 1.75 * plain


@pytest.mark.parametrize("correlation, widest", [(0.0, 0.05), (0.02, 0.08)])
def test_intervals_of_high_rates_are_as_narrow_as_the_data_allow(correlation, widest):
    """Valid replies of a step of 8 groups x 16 episodes x 5 turns; 1.96 errors are 0.013, 0.021."""
    rng, rate = np.random.default_rng(0), 0.97
    inside, wide, draws = 0, [], 400
    for _ in range(draws):
        own_G = np.full(8, rate)
        if correlation:
            a = (1 - correlation) / correlation
            own_G = rng.beta(rate * a, (1 - rate) * a, 8)
        found = rate_with_interval("x", rng.binomial(80, own_G), np.full(8, 80))
        inside += abs(found["x"] - rate) <= found["x_ci95"]
        wide.append(found["x_ci95"])
    assert inside >= 0.95 * draws and np.mean(wide) < widest
    # Failures of a single group show that members are alike, and that other groups may fail.
    alone = rate_with_interval("x", np.array([80] * 7 + [61]), np.full(8, 80))
    assert alone["x_ci95"] > 0.2


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("G", [8, 32])
def test_intervals_of_groups_whose_members_are_copies_cover(G, rate):
    rng, draws = np.random.default_rng(1), 400
    found = [
        rate_with_interval("x", 16 * rng.binomial(1, rate, G), np.full(G, 16)) for _ in range(draws)
    ]
    assert sum(abs(x["x"] - rate) <= x["x_ci95"] for x in found) >= 0.93 * draws


def test_log_margin_by_hand():
    # Reasonings of two prompts of one group, and of two other groups.
    score_MN = np.array(
        [[0.0, -3, -5, -7], [-2, -1.0, -4, -6], [-9, -9, 0.0, -9], [-1, -1, -1, -4.0]]
    )
    own_M, group_N = np.array([0, 1, 2, 3]), np.array([0, 0, 1, 2])
    margin_M = [5, -1 + 4, 9, -4 + 1]
    x_G = np.array([math.log(1 + (margin_M[0] + margin_M[1]) / 2), math.log(10), -math.log(4)])
    found = log_margin(score_MN, own_M, group_N=group_N)
    assert found["own_margin_log"] == pytest.approx(x_G.mean())
    half = stdtrit(2, 0.975) * x_G.std(ddof=1) / math.sqrt(3)
    assert found["own_margin_log_ci95"] == pytest.approx(half)
    # Groups without a reasoning do not count; two groups have no interval.
    found = log_margin(score_MN[:3], own_M[:3], group_N=group_N)
    assert found == {"own_margin_log": pytest.approx(x_G[:2].mean())}
    alike = log_margin(score_MN[:, [0, 0, 0]], np.zeros(4, int), prompt_id_N=np.zeros(3))
    assert alike == {"own_margin_log": 0.0}


# ---- gains over the same problems ---------------------------------------------------------------


def test_the_gain_of_few_problems_by_hand():
    """Four failed problems: variance (0 + 1) / 6, standard error 1 / 6, t(5) = 2.571."""
    for same in (np.zeros(4), np.ones(4)):
        gain, half = paired_gain(same, [same])
        assert gain == 0 and half == pytest.approx(2.5706 / 6, abs=1e-4)
    # Differences 1, 1, 0, 0: centre 2 / 6, mean square 3 / 6.
    gain, half = paired_gain([0, 0, 0, 1], [[1, 1, 0, 1]])
    error = math.sqrt((3 / 6 - 1 / 9) / 6)
    assert gain == 0.5 and half == pytest.approx(0.5 - 1 / 3 + 2.5706 * error, abs=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("problems", [4, 16, 256])
@pytest.mark.parametrize("later", [1, 3])
def test_the_interval_of_a_gain_covers(problems, later):
    rng, draws = np.random.default_rng(0), 1000
    for before, after in itertools.product((0.01, 0.05, 0.5, 0.99), repeat=2):
        for again in (0.0, 0.7):  # fraction of problems whose luck is the same in all evaluations
            luck = rng.random((draws, 1, problems))
            new = rng.random((draws, later + 1, problems))
            same = rng.random((draws, later + 1, problems)) < again
            score = np.where(same, luck, new)
            covered = 0
            for draw in score:
                gain, half = paired_gain(draw[0] < before, draw[1:] < after)
                covered += abs(gain - (after - before)) <= half
            assert covered >= 0.9 * draws, (before, after, again)


def test_runs_that_agree_are_not_certain():
    assert interval([0.0, 0.0, 0.0], halves=[3.0, 4.0, 0.0]) == (0.0, 5 / 3)
    assert interval([1.0, 2.0, 3.0], halves=[0.1] * 3)[1] == pytest.approx(
        4.3027 / 3**0.5, abs=1e-3
    )
