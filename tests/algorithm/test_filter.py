"""filter.py against numbers computed by hand and against a plain Python walk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.algorithm.filter import (
    LOSS_SCALES,
    METRICS,
    STRATEGIES,
    group_scores,
    loss_scales,
    select_by_environment,
    select_groups,
    select_members,
)

pytestmark = pytest.mark.fast

jit_scores = jax.jit(group_scores, static_argnames="metric")


# ---------------------------------------------------------------- scores


def reference_score(metric, returns, entropies, lengths):
    """Compute the score of a group, member by member."""
    values = entropies if metric.startswith("entropy") else returns
    values = lengths if metric == "length" else values
    total = 0.0
    for value in values:
        total += float(value)
    mean = total / len(values)
    if metric == "reward_sum":
        return total
    if metric in ("reward_mean", "entropy", "length"):
        return mean
    if len(values) == 1:
        return 0.0
    square = 0.0
    for value in values:
        square += (float(value) - mean) ** 2
    variance = square / (len(values) - 1)
    return variance**0.5 if metric == "reward_std" else variance


def test_scores_by_hand():
    # group 0: 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, variance 14 / 3
    # group 1: all 5: variance 0
    return_GK = np.array([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]])
    length_GK = np.array([[10, 20, 30, 40], [1, 1, 1, 2]])
    want = {
        "reward_variance": [14 / 3, 0.0],
        "reward_std": [(14 / 3) ** 0.5, 0.0],
        "reward_sum": [12.0, 20.0],
        "reward_mean": [3.0, 5.0],
        "length": [25.0, 1.25],
        "entropy": [2.0, 0.0],  # 0, 2, 2, 4: mean 2, squares 4 + 4, variance 8 / 3
        "entropy_variance": [8 / 3, 0.0],
    }
    entropy_GK = np.array([[0.0, 2.0, 2.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    assert want.keys() == METRICS.keys()
    for metric, want_G in want.items():
        score_G = jit_scores(return_GK, metric, entropy_GK=entropy_GK, length_GK=length_GK)
        assert score_G.dtype == jnp.float32
        np.testing.assert_allclose(score_G, want_G, rtol=1e-6, err_msg=metric)
    np.testing.assert_allclose(group_scores(return_GK), [14 / 3, 0.0], rtol=1e-6)  # the default


@pytest.mark.parametrize("K", [1, 2, 7])
@pytest.mark.parametrize("metric", METRICS)
def test_scores_against_reference(metric, K):
    rng = np.random.default_rng(K)
    arrays = [rng.normal(size=(5, K)).astype(np.float32) * s for s in (3, 1, 50)]
    return_GK, entropy_GK, length_GK = arrays
    got_G = jit_scores(return_GK, metric, entropy_GK=entropy_GK, length_GK=length_GK)
    want = [reference_score(metric, *group) for group in zip(*arrays, strict=True)]
    np.testing.assert_allclose(got_G, want, rtol=1e-5, atol=1e-5)


def test_a_dead_group_scores_exactly_zero():
    # The float32 mean of 16 copies of 10.9 need not be 10.9; a group with a std of 1e-6 would be a
    # candidate.
    return_GK = np.full((40, 16), 0.1) + np.arange(40)[:, None] * 27.3
    assert not np.any(jit_scores(return_GK, "reward_std"))


def test_score_errors():
    return_GK = np.ones((2, 3))
    with pytest.raises(ValueError, match="'variance'; known: reward_variance, reward_std"):
        group_scores(return_GK, "variance")
    with pytest.raises(ValueError, match="needs entropy_GK"):
        group_scores(return_GK, "entropy")
    with pytest.raises(AssertionError):
        group_scores(return_GK, "length", length_GK=np.ones((2, 4)))
    with pytest.raises(AssertionError):
        group_scores(np.ones(3))


# ---------------------------------------------------------------- selection


def reference_kept(scores, *, strategy, value, mode, keep, include_zero, eps):
    """Select groups as PAPER.md defines it, with lists and a walk."""
    scores = [float(s) for s in scores]
    if strategy == "none":
        return set(range(len(scores)))
    candidates = [i for i, s in enumerate(scores) if include_zero or abs(s) > 1e-10]
    if not candidates:
        return set()
    if strategy == "top_p" and value >= 1:
        return set(candidates)
    largest = keep == "largest"
    ordered = sorted(candidates, key=lambda i: (-scores[i] if largest else scores[i], i))
    if strategy in ("top_k", "top_k_abs"):
        k = int(value * len(scores)) if strategy == "top_k" else int(value)
        return set(ordered[: min(max(k, 1), len(ordered))])
    if strategy == "min_p":
        best = scores[ordered[0]]
        if largest:
            return {i for i in candidates if scores[i] >= value * best - 1e-10}
        return {i for i in candidates if scores[i] <= best / value + 1e-10}
    walked, running = set(), 0.0
    if mode == "softmax":
        logits = [scores[i] if largest else -scores[i] for i in ordered]
        masses = [np.exp(x - max(logits)) for x in logits]
        for i, mass in zip(ordered, masses, strict=True):
            walked.add(i)
            running += mass / sum(masses)
            if running >= value:
                break
        return walked
    threshold = value * sum(scores[i] for i in candidates) - eps
    for i in ordered if largest else [i for i in ordered if scores[i] > 0]:
        if running >= threshold or scores[i] <= 0:
            break
        walked.add(i)
        running += scores[i]
    return walked if running >= threshold else set()


CASES = [
    dict(strategy=strategy, value=value, mode=mode, keep=keep, include_zero=zero, eps=eps)
    for strategy, value, mode, eps in [
        ("top_p", 0.9, "linear", 0.01),
        ("top_p", 0.5, "linear", 0.0),
        ("top_p", 1.0, "linear", 0.01),
        ("top_p", 0.87, "softmax", 0.01),
        ("top_k", 0.3, "linear", 0.01),
        ("top_k_abs", 3, "linear", 0.01),
        ("min_p", 0.2, "linear", 0.01),
        ("none", 0.9, "linear", 0.01),
    ]
    for keep in ("largest", "smallest")
    for zero in (False, True)
]


def random_scores(rng, count, G):
    """Return realistic variances (spread out, tied, zero, tiny, dead) and some signed metrics."""
    score_SG = rng.exponential(size=(count, G)) * 10 ** rng.uniform(-3, 1, (count, 1))
    tied_S = rng.random(count) < 0.5
    score_SG[tied_S] = np.round(score_SG[tied_S] * 4) / 4  # exact in float32, many ties
    score_SG[rng.random((count, G)) < 0.2] = 0.0
    score_SG[rng.random(count) < 0.05] = 0.0
    signed_S = rng.random(count) < 0.2
    score_SG[signed_S] *= rng.choice([-1, 1], (signed_S.sum(), G))
    return score_SG.astype(np.float32)


@pytest.mark.medium
@pytest.mark.parametrize("G, count", [(1, 100), (8, 700), (33, 200)])
def test_masks_against_reference(G, count):
    score_SG = random_scores(np.random.default_rng(G), count, G)

    @jax.jit
    @jax.vmap
    def all_masks(score_G):
        return jnp.stack([select_groups(score_G, **case) for case in CASES])

    keep_SCG = np.asarray(all_masks(score_SG))
    for scores, keep_CG in zip(score_SG, keep_SCG, strict=True):
        for case, keep_G in zip(CASES, keep_CG, strict=True):
            want = reference_kept(scores, **case)
            assert set(np.flatnonzero(keep_G).tolist()) == want, (case, scores)


SPREAD = [0.5, 5.0, 1.5, 3.0]
LOGS = [1e-9, np.log(3), np.log(4)]
THREES = [0.0, 3.0, 1.0, 3.0, 2.0]
HALF = dict(value=0.5)
UP = dict(keep="smallest")
SOFT = dict(mode="softmax")
ZERO = dict(include_zero=True)
TOP_K = dict(strategy="top_k")
TOP_K_ABS = dict(strategy="top_k_abs")
MIN_P = dict(strategy="min_p")
HAND = [
    # -- top_p, linear. Sum 10, threshold 0.9 * 10 - 0.01 = 8.99: 5, 8, 9.5 reaches it
    (SPREAD, {}, [1, 2, 3]),
    # sum 10, threshold 4.99: 5 reaches it; so does 4.995, because of eps
    ([5.0, 2.0, 3.0], HALF, [0]),
    ([4.995, 2.005, 3.0], HALF, [0]),
    ([4.995, 2.005, 3.0], HALF | dict(eps=0.0), [0, 2]),
    # from the smallest: 1, 3, 6 reaches 4.99
    ([4.0, 2.0, 3.0, 1.0], HALF | UP, [1, 2, 3]),
    # four equal scores of 1, threshold 1.99: two are selected, lower indices first
    ([1.0, 1.0, 1.0, 1.0], HALF, [0, 1]),
    # -- a batch without mass is rejected; 8 * 0.001: threshold 0.0072 - 0.01 < 0 before any step
    ([0.0] * 8, {}, []),
    ([0.0] * 8, ZERO, []),
    ([0.001] * 8, {}, []),
    # sum 0.012: threshold 0.0108 - 0.01 = 0.0008, one group reaches it
    ([0.0015] * 8, {}, [0]),
    # a threshold above the total: 0.9 * 2 + 1 = 2.8 > 2, so no group is selected
    ([1.0, 1.0], dict(eps=-1.0), []),
    # -- top_p, softmax. 7 / 8 = 0.875 < 0.9: it cannot reject a flat batch
    ([0.001] * 8, SOFT, list(range(8))),
    ([0.0] * 8, SOFT | ZERO, list(range(8))),
    ([0.0] * 8, SOFT, []),
    # softmax of 0, log 3, log 4 is 1/8, 3/8, 4/8: 4/8 reaches 0.49; 7/8 reaches 0.6
    (LOGS, SOFT | dict(value=0.49), [2]),
    (LOGS, SOFT | dict(value=0.6), [1, 2]),
    # negated: 1 : 1/3 : 1/4 = 12 : 4 : 3 of 19: 12/19 = 0.63, 16/19 = 0.84
    (LOGS, SOFT | UP | dict(value=0.6), [0]),
    (LOGS, SOFT | UP | dict(value=0.7), [0, 1]),
    (LOGS, SOFT | dict(value=0.0), [2]),  # at least one
    # -- top_k: int(0.5 * 5) = 2; ties: lower index; at least one group; candidates only
    (THREES, TOP_K | HALF, [1, 3]),
    (THREES, TOP_K | dict(value=0.2), [1]),
    (THREES, TOP_K | dict(value=0.01), [1]),
    (THREES, TOP_K | dict(value=1.0), [1, 2, 3, 4]),
    (THREES, TOP_K | dict(value=0.4) | UP, [2, 4]),
    (THREES, TOP_K_ABS | dict(value=3), [1, 3, 4]),
    (THREES, TOP_K_ABS | dict(value=99), [1, 2, 3, 4]),
    (THREES, TOP_K_ABS | dict(value=1) | UP | ZERO, [0]),
    # 0.0 and -0.0 are the same score
    ([-0.0, 0.0], TOP_K_ABS | dict(value=1) | ZERO, [0]),
    ([0.0, -0.0], TOP_K_ABS | dict(value=1) | ZERO, [0]),
    ([-0.0, 0.0], TOP_K_ABS | dict(value=1) | ZERO | UP, [0]),
    ([0.0, -0.0], TOP_K_ABS | dict(value=1) | ZERO | UP, [0]),
    # -- min_p: at least 0.25 * 4; at most 0.5 / 0.5
    ([0.5, 4.0, 1.0, 2.0], MIN_P | dict(value=0.25), [1, 2, 3]),
    ([0.5, 4.0, 1.0, 2.0], MIN_P | HALF | UP, [0, 2]),
    # -- value >= 1 keeps every candidate, "none" every group
    ([0.0, 2.0, 1e-11, 1.0], dict(value=1.0), [1, 3]),
    ([0.0, 2.0, 1e-11, 1.0], dict(value=1.0) | SOFT, [1, 3]),
    ([0.0, 2.0, 1e-11, 1.0], dict(value=2.0) | ZERO, [0, 1, 2, 3]),
    ([0.0, 2.0, 1e-11, 1.0], dict(strategy="none"), [0, 1, 2, 3]),
    # -- a NaN is never a candidate
    ([np.nan, 1.0], ZERO, [1]),
    ([np.nan, 1.0], ZERO | TOP_K | dict(value=1.0), [1]),
    ([np.nan, 1.0], ZERO | MIN_P, [1]),
]


@pytest.mark.medium
def test_selection_by_hand():
    @jax.jit  # one program for all cases: compiling forty takes longer than all other tests here
    def masks(rows):
        cases = zip(rows, HAND, strict=True)
        return [select_groups(score_G, **options) for score_G, (_, options, _) in cases]

    keeps = masks([np.asarray(scores, np.float32) for scores, _, _ in HAND])
    for keep_G, (scores, options, want) in zip(keeps, HAND, strict=True):
        assert keep_G.dtype == bool and keep_G.shape == (len(scores),)
        assert np.flatnonzero(np.asarray(keep_G)).tolist() == want, (scores, options)


def test_top_p_linear_can_always_reach_its_own_total():
    # The largest value below 1 is 1 in float32: the walk must compare with exactly the sum it
    # accumulates.
    score_SG = np.random.default_rng(0).exponential(size=(300, 33)).astype(np.float32)
    almost_one = float(np.nextafter(1.0, 0.0))
    select = jax.jit(jax.vmap(lambda s: select_groups(s, value=almost_one, eps=0.0)))
    assert np.all(np.any(select(score_SG), axis=1))


@pytest.mark.medium
def test_order_and_scale_do_not_matter():
    rng = np.random.default_rng(5)
    score_G = rng.exponential(size=12).astype(np.float32)
    order_G = rng.permutation(12)

    @jax.jit
    @jax.vmap
    def masks(score_G):
        values = [
            {"top_k_abs": 3, "quarter": 2, "pairs": 2}.get(strategy, 0.6) for strategy in STRATEGIES
        ]
        cases = zip(STRATEGIES, values, strict=True)
        return jnp.stack([select_groups(score_G, strategy=s, value=v, eps=0.0) for s, v in cases])

    keep_CG, shuffled_CG, scaled_CG = masks(np.stack([score_G, score_G[order_G], score_G * 64]))
    np.testing.assert_array_equal(shuffled_CG, keep_CG[:, order_G])
    np.testing.assert_array_equal(scaled_CG, keep_CG)


def test_selection_errors():
    score_G = np.ones(4)
    with pytest.raises(
        ValueError, match="'top'; known: top_p, top_k, top_k_abs, min_p, quarter, pairs, none"
    ):
        select_groups(score_G, strategy="top")
    with pytest.raises(ValueError, match="mode 'log'; known: linear, softmax"):
        select_groups(score_G, mode="log")
    with pytest.raises(ValueError, match="keep 'best'; known: largest, smallest"):
        select_groups(score_G, keep="best")
    with pytest.raises(ValueError, match="divides by value"):
        select_groups(score_G, strategy="min_p", value=0.0, keep="smallest")
    with pytest.raises(AssertionError):
        select_groups(np.ones((2, 2)))


# ---------------------------------------------------------------- environments


@pytest.mark.medium
@pytest.mark.parametrize("case", [CASES[0], CASES[13], CASES[16], CASES[26]], ids=str)
def test_each_environment_is_filtered_alone(case):
    score_SG = random_scores(np.random.default_rng(6), 50, 12)
    sizes = (3, 8, 1)

    @jax.jit
    @jax.vmap
    def masks(score_G):
        equal = select_by_environment(score_G, (4, 4, 4), **case)
        mapped = jax.vmap(lambda s: select_groups(s, **case))(score_G.reshape(3, 4))
        return select_by_environment(score_G, sizes, **case), equal, mapped.reshape(-1)

    ragged_SG, equal_SG, mapped_SG = map(np.asarray, masks(score_SG))
    np.testing.assert_array_equal(equal_SG, mapped_SG)
    for scores, keep_G in zip(score_SG, ragged_SG, strict=True):
        want, start = set(), 0
        for size in sizes:
            want |= {start + i for i in reference_kept(scores[start : start + size], **case)}
            start += size
        assert set(np.flatnonzero(keep_G).tolist()) == want, (case, scores)


@pytest.mark.medium
def test_environments_may_have_values_of_their_own():
    score_G = np.array([5.0, 3.0, 1.0, 1.0, 5.0, 3.0, 1.0, 1.0])
    keep_G = select_by_environment(score_G, (4, 4), value=(0.4, 0.9), eps=0.0)
    assert keep_G.tolist() == [True, False, False, False, True, True, True, False]


def test_environment_errors():
    with pytest.raises(ValueError, match="sum to 5, got 4 scores"):
        select_by_environment(np.ones(4), (2, 3))
    with pytest.raises(AssertionError):
        select_by_environment(np.ones((2, 2)), (2, 2))


# ---------------------------------------------------------------- members


@pytest.mark.medium
def test_members_by_hand():
    # order of 3, 1, 3, 0, 2 by falling return, ties by index: 0 2 4 1 3
    return_GK = np.array([[3.0, 1.0, 3.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    for top, bottom, want in [
        (1, 1, [[0, 3], [0, 4]]),
        (2, 0, [[0, 2], [0, 1]]),
        (0, 2, [[1, 3], [3, 4]]),
        (1, 3, [[0, 1, 3, 4], [0, 2, 3, 4]]),
        (3, 2, [[0, 1, 2, 3, 4]] * 2),
        (9, 9, [[0, 1, 2, 3, 4]] * 2),
    ]:
        keep_GK = select_members(return_GK, top=top, bottom=bottom)
        assert keep_GK.dtype == bool
        assert [np.flatnonzero(k).tolist() for k in np.asarray(keep_GK)] == want, (top, bottom)


@pytest.mark.parametrize("K, top, bottom", [(1, 1, 1), (4, 1, 2), (16, 4, 4), (5, 3, 3)])
def test_members_against_reference(K, top, bottom):
    return_SGK = random_scores(np.random.default_rng(K), 250 * 4, K).reshape(250, 4, K)
    return_SGK = np.round(return_SGK)  # many ties
    select = jax.jit(jax.vmap(lambda r: select_members(r, top=top, bottom=bottom)))
    keep_SGK = np.asarray(select(return_SGK))
    for returns, keep_K in zip(return_SGK.reshape(-1, K), keep_SGK.reshape(-1, K), strict=True):
        ranking = sorted(range(K), key=lambda k: (-float(returns[k]), k))
        want = {k for place, k in enumerate(ranking) if place < top or place >= K - bottom}
        assert set(np.flatnonzero(keep_K).tolist()) == want


def test_member_errors():
    with pytest.raises(ValueError, match="not both 0, got 0 and 0"):
        select_members(np.ones((2, 3)), top=0, bottom=0)
    with pytest.raises(ValueError, match="got -1 and 2"):
        select_members(np.ones((2, 3)), top=-1, bottom=2)
    with pytest.raises(AssertionError):
        select_members(np.ones(3), top=1, bottom=1)


# ---------------------------------------------------------------- loss scale


def test_loss_scales():
    want = {"none": (1, 1), "linear": (0.25, 1), "sqrt": (0.5, 1), "advantage": (1, 0.25)}
    assert {mode: loss_scales(0.25, mode) for mode in LOSS_SCALES} == want
    assert {loss_scales(1.0, mode) for mode in LOSS_SCALES} == {(1.0, 1.0)}
    # A sum over the kept rows already has a factor of 0.25; the scales add the rest.
    left = {mode: loss_scales(0.25, mode, summed=True) for mode in LOSS_SCALES}
    assert left == {
        "none": (1.0, 1.0),
        "linear": (1.0, 1.0),
        "sqrt": (2.0, 1.0),
        "advantage": (4.0, 0.25),
    }
    for mode in LOSS_SCALES.keys() - {"none"}:
        (whole, of_advantages), plain = left[mode], loss_scales(0.25, mode)
        assert (0.25 * whole, of_advantages) == plain
    np.testing.assert_allclose(jax.jit(lambda k: loss_scales(k, "sqrt"))(0.25), (0.5, 1.0))
    with pytest.raises(ValueError, match="'half'; known: none, linear, sqrt, advantage"):
        loss_scales(0.25, "half")


@pytest.mark.medium
def test_pairs_are_the_candidates_at_both_ends():
    score_G = np.array([0.5, 0.9, 0.0, 0.1, np.nan, 0.4, 0.9, 0.2])
    pairs = lambda n, **options: np.flatnonzero(  # noqa: E731
        select_groups(score_G, strategy="pairs", value=n, **options)
    ).tolist()
    assert pairs(1) == [1, 3]  # a tie goes to the lower index; score 0 is no candidate
    assert pairs(2) == [1, 3, 6, 7]
    assert pairs(9) == [0, 1, 3, 5, 6, 7]
    assert pairs(1, include_zero=True) == [1, 2]
    assert pairs(2, keep="smallest") == pairs(2)


def test_quarters_of_the_candidates():
    """Nine of ten groups are candidates: 3, 2, 2 and 2 of them per quarter, by falling score."""
    score_G = np.array([0.0, 9, 1, 8, 2, 7, 3, 6, 4, 5], np.float32)
    found = [
        np.flatnonzero(select_groups(score_G, strategy="quarter", value=q)) for q in (1, 2, 3, 4)
    ]
    assert [sorted(score_G[kept].tolist()) for kept in found] == [
        [7, 8, 9],
        [5, 6],
        [3, 4],
        [1, 2],
    ]
    # Select from the smallest; then, with all groups as candidates.
    assert select_groups(score_G, strategy="quarter", value=1, keep="smallest").tolist() == [
        score in (1, 2, 3) for score in score_G
    ]
    with_zero = select_groups(score_G, strategy="quarter", value=4, include_zero=True)
    assert sorted(score_G[np.asarray(with_zero)].tolist()) == [0, 1]
    assert not select_groups(np.zeros(8), strategy="quarter", value=1).any()
