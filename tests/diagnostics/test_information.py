"""information.py: numbers by hand, loops, brute-force ranking, and two extreme policies."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.diagnostics.information import first_ranks, information_metrics, within_metrics

pytestmark = pytest.mark.fast

KEYS = {
    *("mi", "mi_seq", "h_cond", "h_marginal", "h_cond_seq", "h_marginal_seq"),
    *("retrieval_acc", "recall_at_2", "recall_at_4", "recall_at_8"),
    *("retrieval_chance", "recall_chance_at_2", "recall_chance_at_4", "recall_chance_at_8"),
    *("mi_zscore", "mi_zscore_seq", "marginal_std", "marginal_std_seq", "mi_upper_bound"),
    *("mi_released", "h_marginal_released", "mi_zscore_released", "marginal_std_released"),
    "own_margin",
}


def random_case(seed, M=12, N=5, strength=2.0):
    rng = np.random.default_rng(seed)
    length_M = rng.integers(1, 30, M)
    prompt_M = rng.integers(0, N, M)
    score_MN = -rng.exponential(20.0, size=(M, 1)) + rng.normal(size=(M, N))
    score_MN[np.arange(M), prompt_M] += strength
    return score_MN, length_M, prompt_M


def brute_force_hits(scores, ids, own_id, k):
    """P(own among the first k distinct answers), by counting over all orders of the columns."""
    best = {i: max(s for s, j in zip(scores, ids, strict=True) if j == i) for i in ids}
    hits = orders = 0
    for order in itertools.permutations(range(len(ids))):
        # a stable sort by score keeps ties in the order of the permutation
        answers = dict.fromkeys(ids[n] for n in sorted(order, key=lambda n: -best[ids[n]]))
        hits += own_id in list(answers)[:k]
        orders += 1
    return hits / orders


def reference(score_MN, length_M, prompt_M, std_eps=1e-3):
    """A loop over samples, with math.exp and no shift (the scores of the tests are moderate)."""
    N = len(score_MN[0])
    matched, marginal, matched_seq, marginal_seq, released = [], [], [], [], []
    for scores, length, own in zip(score_MN, length_M, prompt_M, strict=True):
        log_mean = math.log(sum(math.exp(s) for s in scores) / N)
        matched.append(scores[own] / length)
        marginal.append(log_mean / length)
        matched_seq.append(scores[own])
        marginal_seq.append(log_mean)
        released.append(math.log(sum(math.exp(s / length) for s in scores) / N))

    def mean(values):
        return sum(values) / len(values)

    def std(values):
        return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))

    def zscore(inside, outside):
        spread = std(outside) + std_eps
        return mean([(a - b) / spread for a, b in zip(inside, outside, strict=True)])

    return {
        "mi": mean([a - b for a, b in zip(matched, marginal, strict=True)]),
        "mi_seq": mean([a - b for a, b in zip(matched_seq, marginal_seq, strict=True)]),
        "h_cond": -mean(matched),
        "h_marginal": -mean(marginal),
        "h_cond_seq": -mean(matched_seq),
        "h_marginal_seq": -mean(marginal_seq),
        "mi_zscore": zscore(matched, marginal),
        "mi_zscore_seq": zscore(matched_seq, marginal_seq),
        "marginal_std": std(marginal),
        "marginal_std_seq": std(marginal_seq),
        "mi_upper_bound": math.log(N),
        "own_margin": mean(
            [
                scores[own] - mean([s for n, s in enumerate(scores) if n != own])
                for scores, own in zip(score_MN, prompt_M, strict=True)
            ]
        ),
        "mi_released": mean([a - b for a, b in zip(matched, released, strict=True)]),
        "h_marginal_released": -mean(released),
        "mi_zscore_released": zscore(matched, released),
        "marginal_std_released": std(released),
    }


def test_by_hand():
    # Two reasonings of 2 and 1 tokens, two prompts; p(z | x):
    #   z0: 0.6 under its own x0, 0.2 under x1: mean 0.4
    #   z1: 0.5 under x0, 0.1 under its own x1: mean 0.3
    score_MN = np.log([[0.6, 0.2], [0.5, 0.1]])
    got = information_metrics(score_MN, [2, 1], np.array([0, 1]))
    assert got.keys() == KEYS
    assert all(type(value) is float for value in got.values())
    # mi_seq = (log(0.6 / 0.4) + log(0.1 / 0.3)) / 2 = (0.405465 - 1.098612) / 2
    # mi     = (0.405465 / 2 - 1.098612) / 2
    # h_cond = (0.510826 / 2 + 2.302585) / 2;   h_marginal = (0.916291 / 2 + 1.203973) / 2
    # marginals -0.458145 and -1.203973: the population std is half their distance
    want = {
        "mi_seq": -0.346574,
        "mi": -0.447940,
        "h_cond": 1.278999,
        "h_marginal": 0.831059,
        "h_cond_seq": 1.406705,
        "h_marginal_seq": 1.060132,
        "marginal_std": 0.372914,
        "marginal_std_seq": 0.143841,
        "mi_zscore": -0.447940 / 0.373914,
        "mi_zscore_seq": -0.346574 / 0.144841,
        "mi_upper_bound": 0.693147,
        "retrieval_acc": 0.5,
        "retrieval_chance": 0.5,
        "recall_at_2": 1.0,
        "recall_chance_at_2": 1.0,
        "recall_at_8": 1.0,
        "recall_chance_at_8": 1.0,
        # released marginal of z0: log((sqrt 0.6 + sqrt 0.2) / 2) = log 0.610905 = -0.492813
        "h_marginal_released": (0.492813 + 1.203973) / 2,
        "mi_released": (-0.255413 + 0.492813 - 2.302585 + 1.203973) / 2,
        "marginal_std_released": 0.355580,
        "mi_zscore_released": -0.430606 / 0.356580,
        # log(0.6 / 0.2) = 1.098612 and log(0.1 / 0.5) = -1.609438
        "own_margin": -0.255413,
    }
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("seed", range(5))
def test_against_reference(seed):
    case = random_case(seed)
    got = information_metrics(*case)
    for key, value in reference(*case).items():
        np.testing.assert_allclose(got[key], value, rtol=1e-5, err_msg=key)
    from_jax = information_metrics(*(jnp.asarray(x) for x in case))
    np.testing.assert_allclose(from_jax["mi"], got["mi"], rtol=1e-4)
    loose = information_metrics(*case, std_eps=0.5)
    np.testing.assert_allclose(
        loose["mi_zscore"], reference(*case, std_eps=0.5)["mi_zscore"], rtol=1e-5
    )


@pytest.mark.parametrize("strength", [0.0, 1e-4, 3.0, 50.0])
def test_identity_of_entropies(strength):
    got = information_metrics(*random_case(1, M=64, N=16, strength=strength))
    for suffix in ("", "_seq"):
        total = got["mi" + suffix] + got["h_cond" + suffix]
        np.testing.assert_allclose(got["h_marginal" + suffix], total, rtol=1e-6)
    np.testing.assert_allclose(
        got["h_marginal_released"], got["mi_released"] + got["h_cond"], rtol=1e-6
    )
    assert got["mi_seq"] <= got["mi_upper_bound"] + 1e-12


@pytest.mark.medium
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_identity_of_entropies_of_any_scores(data):
    M, N = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9))
    score = st.floats(-500, 0, width=32)
    rows = st.lists(score, min_size=N, max_size=N)
    score_MN = np.array(data.draw(st.lists(rows, min_size=M, max_size=M)))
    length_M = data.draw(st.lists(st.integers(1, 200), min_size=M, max_size=M))
    prompt_M = np.array(data.draw(st.lists(st.integers(0, N - 1), min_size=M, max_size=M)))
    got = information_metrics(score_MN, length_M, prompt_M)
    for form in ("", "_seq"):
        total = got["mi" + form] + got["h_cond" + form]
        # mi and h_cond may cancel: the tolerance is relative to the larger of the three
        scale = max(abs(got["h_cond" + form]), abs(got["h_marginal" + form]))
        assert abs(got["h_marginal" + form] - total) <= 1e-6 * scale + 1e-12


def test_copy_policy_reaches_the_bound():
    # The reasoning names its prompt: certain under its own prompt, impossible under any other.
    N = 16
    score_MN = np.where(np.eye(N), 0.0, -1e4)
    got = information_metrics(score_MN, np.full(N, 5), np.arange(N))
    np.testing.assert_allclose(got["mi_seq"], math.log(N), rtol=1e-12)
    np.testing.assert_allclose(got["mi"], math.log(N) / 5, rtol=1e-12)
    assert got["h_cond"] == 0.0 and got["retrieval_acc"] == 1.0 and got["recall_at_8"] == 1.0


@pytest.mark.parametrize("ids", [None, [0, 1, 2, 0, 0, 3, 3, 4, 5, 6], [7] * 10])
def test_prompt_independent_policy_is_at_chance(ids):
    rng = np.random.default_rng(0)
    score_MN = np.repeat(-rng.exponential(30.0, size=(20, 1)), 10, axis=1)
    got = information_metrics(
        score_MN, rng.integers(1, 9, 20), rng.integers(0, 10, 20), prompt_id_N=ids
    )
    for key in ("mi", "mi_seq", "mi_released", "mi_zscore", "mi_zscore_seq"):
        np.testing.assert_allclose(got[key], 0.0, atol=1e-9, err_msg=key)
    np.testing.assert_allclose(got["retrieval_acc"], got["retrieval_chance"], rtol=1e-12)
    for k in (2, 4, 8):
        np.testing.assert_allclose(got[f"recall_at_{k}"], got[f"recall_chance_at_{k}"], rtol=1e-12)
        if ids is None:
            np.testing.assert_allclose(got[f"recall_chance_at_{k}"], k / 10, rtol=1e-12)


def test_chance_with_duplicates_by_hand():
    # Columns a a b c. Own = a: 2/4. Own = b: 1/4. First rank, mean of a, b: 0.375.
    # Second rank: P(a first or second) = 2/4 + P(b first) * 2/3 + P(c first) * 2/3 = 5/6;
    # P(b) = 1/4 + P(a first) * 1/2 + P(c first) * 1/3 = 7/12. Mean 17/24.
    # There are only three answers: certain at k = 4.
    got = information_metrics(
        np.zeros((2, 4)), [1, 1], np.array([1, 2]), prompt_id_N=["a", "a", "b", "c"]
    )
    for prefix in ("recall_at_", "recall_chance_at_"):
        np.testing.assert_allclose(got[prefix + "2"], 17 / 24, rtol=1e-12)
        assert got[prefix + "4"] == got[prefix + "8"] == 1.0
    assert got["retrieval_acc"] == pytest.approx(0.375) == got["retrieval_chance"]


def test_equal_prompts_are_one_answer():
    # Own = column 1 (id a). Its duplicate, column 0, scores best: a hit, though column 1 is third.
    got = information_metrics(
        np.array([[-1.0, -3.0, -2.0]]), [1], np.array([1]), prompt_id_N=[5, 5, 6]
    )
    assert got["retrieval_acc"] == 1.0
    assert got["retrieval_chance"] == pytest.approx(2 / 3)
    # Without ids, column 1 is third of three.
    got = information_metrics(np.array([[-1.0, -3.0, -2.0]]), [1], np.array([1]))
    assert got["retrieval_acc"] == got["recall_at_2"] == 0.0
    assert got["recall_at_4"] == 1.0  # k is capped at three columns
    # Own = b, after two columns that are both a: rank 2 among answers, 3 among columns.
    got = information_metrics(
        np.array([[-1.0, -1.0, -2.0, -3.0]]), [1], np.array([2]), prompt_id_N=[0, 0, 1, 2]
    )
    assert got["retrieval_acc"] == 0.0 and got["recall_at_2"] == 1.0


def test_ties_are_shared():
    # Own ties with one other after a better one: ranks 2 and 3 are equally likely.
    got = information_metrics(np.array([[-1.0, -2.0, -2.0, -9.0]]), [1], np.array([1]))
    assert got["retrieval_acc"] == 0.0
    assert got["recall_at_2"] == pytest.approx(0.5)
    assert got["recall_at_4"] == 1.0


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(12))
def test_ranking_against_brute_force(seed):
    rng = np.random.default_rng(seed)
    N = 6
    ids = rng.integers(0, 4, N).tolist()
    by_id = rng.integers(-3, 0, 4)  # few levels give many ties; duplicates have equal scores
    scores = [float(by_id[i]) for i in ids]
    own = int(rng.integers(N))
    got = information_metrics(np.array([scores]), [3], np.array([own]), prompt_id_N=ids)
    for k, acc, chance in [
        (1, "retrieval_acc", "retrieval_chance"),
        (2, "recall_at_2", "recall_chance_at_2"),
        (4, "recall_at_4", "recall_chance_at_4"),
    ]:
        want = brute_force_hits(scores, ids, ids[own], k)
        np.testing.assert_allclose(got[acc], want, atol=1e-12)
        want = brute_force_hits([0.0] * N, ids, ids[own], k)
        np.testing.assert_allclose(got[chance], want, atol=1e-12)


def test_order_of_rows_and_prompts_does_not_matter():
    score_MN, length_M, prompt_M = random_case(3, N=9)
    ids = np.array([0, 1, 2, 3, 3, 4, 5, 6, 0])
    got = information_metrics(score_MN, length_M, prompt_M, prompt_id_N=ids)
    rng = np.random.default_rng(4)
    order_M, order_N = rng.permutation(12), rng.permutation(9)
    shuffled = information_metrics(
        score_MN[order_M][:, order_N],
        length_M[order_M],
        np.argsort(order_N)[prompt_M[order_M]],
        prompt_id_N=ids[order_N] + 100,
    )
    for key, value in got.items():
        np.testing.assert_allclose(shuffled[key], value, rtol=1e-9, err_msg=key)


def test_long_reasonings_do_not_underflow():
    score_MN, length_M, prompt_M = random_case(5)
    got = information_metrics(score_MN, length_M, prompt_M)
    # A common factor on p(z | .) under every prompt carries no information.
    shifted = information_metrics(score_MN - 5000.0, length_M, prompt_M)
    np.testing.assert_allclose(shifted["mi_seq"], got["mi_seq"], rtol=1e-9)
    assert shifted["retrieval_acc"] == got["retrieval_acc"]


def test_one_prompt():
    got = information_metrics(np.array([[-3.0], [-4.0]]), [2, 2], np.array([0, 0]))
    assert got["mi"] == 0.0 and got["mi_upper_bound"] == 0.0 and got["retrieval_acc"] == 1.0


def test_errors():
    score_MN, length_M, prompt_M = np.zeros((2, 3)), [1, 1], np.array([0, 2])
    with pytest.raises(ValueError, match="at least one reasoning"):
        information_metrics(np.zeros((0, 3)), [], np.zeros(0, int))
    for bad in (np.nan, -np.inf):
        with pytest.raises(ValueError, match=r"score_MN\[1, 2\] = .*; 1 of 6 not finite"):
            spoilt_MN = score_MN.copy()
            spoilt_MN[1, 2] = bad
            information_metrics(spoilt_MN, length_M, prompt_M)
    with pytest.raises(ValueError, match=r"length_M\[1\] = 0"):
        information_metrics(score_MN, [1, 0], prompt_M)
    with pytest.raises(ValueError, match=r"prompt_M\[1\] = 3"):
        information_metrics(score_MN, length_M, np.array([0, 3]))
    with pytest.raises(ValueError, match="must be integer"):
        information_metrics(score_MN, length_M, np.array([0.0, 1.0]))
    with pytest.raises(AssertionError):
        information_metrics(score_MN, [1], prompt_M)
    with pytest.raises(AssertionError):
        information_metrics(score_MN, length_M, prompt_M, prompt_id_N=[0, 1])


# ---- within parts -------------------------------------------------------------------------------


def test_within_parts_by_hand():
    # Turn 0 has columns 0, 2, 3 (0 and 3 are one prompt), turn 1 columns 1 and 4. Turn 2 has column
    # 5 alone, so its reasoning is left out. p(z | x) of the others, own first, within their part:
    #   z0, own 0:  0.4  0.1 (x2)  0.4 (x3)    marginal 0.3
    #   z1, own 2:  0.1  0.4 (x0)  0.4 (x3)    marginal 0.3
    #   z2, own 1:  0.6  0.2 (x4)              marginal 0.4
    #   z3, own 4:  0.5  0.5 (x1)              marginal 0.5
    p_MN = np.full((5, 6), 0.9)
    p_MN[0, [0, 2, 3]] = [0.4, 0.1, 0.4]
    p_MN[1, [2, 0, 3]] = [0.1, 0.4, 0.4]
    p_MN[2, [1, 4]] = [0.6, 0.2]
    p_MN[3, [4, 1]] = [0.5, 0.5]
    found = within_metrics(
        np.log(p_MN),
        [2, 1, 1, 4, 3],
        np.array([0, 2, 1, 4, 5]),
        [0, 1, 0, 0, 1, 2],
        prompt_id_N=[7, 3, 8, 7, 4, 5],
    )
    assert found.keys() == KEYS
    log = math.log
    want = {
        "mi_seq": (log(0.4 / 0.3) + log(0.1 / 0.3) + log(0.6 / 0.4) + 0.0) / 4,
        # Columns 0 and 3 are one prompt: z0 has one other prompt, z1 two columns of one other.
        "own_margin": (log(0.4 / 0.1) + log(0.1 / 0.4) + log(0.6 / 0.2) + 0.0) / 4,
        "mi": (log(0.4 / 0.3) / 2 + log(0.1 / 0.3) + log(0.6 / 0.4) + 0.0) / 4,
        "h_cond": -(log(0.4) / 2 + log(0.1) + log(0.6) + log(0.5) / 4) / 4,
        "h_marginal_seq": -(2 * log(0.3) + log(0.4) + log(0.5)) / 4,
        "marginal_std_seq": np.std([log(0.3), log(0.3), log(0.4), log(0.5)]),
        "mi_upper_bound": (2 * log(3) + 2 * log(2)) / 4,
        # z0 first, z1 second, z2 first, z3 tied with one other
        "retrieval_acc": (1 + 0 + 1 + 0.5) / 4,
        "retrieval_chance": (2 / 3 + 1 / 3 + 1 / 2 + 1 / 2) / 4,
        "recall_at_2": 1.0,
        "recall_chance_at_2": 1.0,
    }
    for name, value in want.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    zscore = want["mi_seq"] / (want["marginal_std_seq"] + 1e-3)
    assert found["mi_zscore_seq"] == pytest.approx(zscore, rel=1e-12)
    assert found["mi"] + found["h_cond"] == pytest.approx(found["h_marginal"], rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_measured_apart_and_averaged_over_reasonings(seed):
    score_MN, length_M, prompt_M = random_case(seed, M=30, N=12)
    part_N = np.array(["a", "b", "c"])[np.arange(12) % 3]
    found = within_metrics(score_MN, length_M, prompt_M, part_N)
    blocks = {}
    for part in "abc":
        columns, rows = np.flatnonzero(part_N == part), np.flatnonzero(part_N[prompt_M] == part)
        own_M = np.searchsorted(columns, prompt_M[rows])
        block = score_MN[np.ix_(rows, columns)]
        blocks[part] = len(rows), information_metrics(block, length_M[rows], own_M)
    for name in KEYS:
        if "std" in name or "zscore" in name:  # computed over all reasonings together
            continue
        mean = sum(rows * figures[name] for rows, figures in blocks.values()) / 30
        assert found[name] == pytest.approx(mean, rel=1e-12), name
    # Columns of other parts do not matter; a single part gives the plain figures.
    moved_MN = np.where(part_N[prompt_M][:, None] == part_N, score_MN, -3.0)
    assert within_metrics(moved_MN, length_M, prompt_M, part_N) == found
    plain = information_metrics(score_MN, length_M, prompt_M)
    together = within_metrics(score_MN, length_M, prompt_M, np.zeros(12))
    assert together == pytest.approx(plain, rel=1e-12)


def test_what_all_prompts_of_a_part_share_does_not_count():
    # Three turns; every reasoning names its turn and nothing else.
    part_N = np.repeat(np.arange(3), 4)
    score_MN = np.where(part_N[:, None] == part_N, -1.0, -50.0)
    case = score_MN, np.ones(12, int), np.arange(12)
    assert information_metrics(*case)["mi_seq"] == pytest.approx(math.log(3), rel=1e-6)
    found = within_metrics(*case, part_N)
    assert found["mi_seq"] == pytest.approx(0, abs=1e-12)
    assert found["retrieval_acc"] == pytest.approx(found["retrieval_chance"]) == 1 / 4


def test_nothing_is_left_where_no_part_has_two_prompts():
    score_MN = np.random.default_rng(0).normal(size=(3, 4))
    case = score_MN, np.ones(3, int), np.arange(3)
    assert within_metrics(*case, [0, 1, 2, 3]) == {}
    assert within_metrics(*case, [0, 0, 1, 2], prompt_id_N=[5, 5, 6, 7]) == {}
    assert within_metrics(*case, [0, 1, 2, 2], prompt_id_N=[5, 5, 6, 7])["mi_upper_bound"] == (
        pytest.approx(math.log(2))
    )
    # Two prompts have no reasonings.
    assert within_metrics(score_MN, np.ones(3, int), np.zeros(3, int), [0, 1, 1, 1]) == {}
    with pytest.raises(AssertionError):
        within_metrics(*case, [0, 1, 2])
    with pytest.raises(ValueError, match=r"prompt_M\[2\] = 4"):
        within_metrics(score_MN, np.ones(3), np.array([0, 1, 4]), [0, 0, 1, 1])


def test_first_ranks_are_the_first_of_all_ranks():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.integers(0, 5, 8)
        score_MN = rng.integers(-2, 2, (6, 8)).astype(float)  # many ties
        own_M = rng.integers(0, 8, 6)
        found = information_metrics(score_MN, np.ones(6), own_M, prompt_id_N=ids)
        first_M = first_ranks(score_MN, own_M, ids)
        assert first_M.mean() == pytest.approx(found["retrieval_acc"], rel=1e-12)


# ---- the figure without a ceiling ---------------------------------------------------------------


def channel(rng, prompts, outcomes):
    """p(z | x) of each prompt, float64 [prompts, outcomes]."""
    return 0.9 * rng.dirichlet(np.ones(outcomes), size=prompts) + 0.1 / outcomes


def exact_margin(p_NZ):
    """own_margin of reasonings that occur as often as they are likely: one row for each outcome
    under each prompt, repeated in proportion to its probability."""
    N, Z = p_NZ.shape
    count_NZ = np.round(p_NZ * 2000).astype(int)
    p_NZ = count_NZ / count_NZ.sum(axis=1, keepdims=True)
    own_M = np.repeat(np.repeat(np.arange(N), Z), count_NZ.ravel())
    z_M = np.repeat(np.tile(np.arange(Z), N), count_NZ.ravel())
    with np.errstate(divide="ignore"):
        score_MN = np.maximum(np.log(p_NZ.T[z_M]), -1e3)
    margins = [
        information_metrics(score_MN[own_M == n], np.ones(sum(own_M == n)), own_M[own_M == n])
        for n in range(N)
    ]
    return np.mean([found["own_margin"] for found in margins]), p_NZ


@pytest.mark.parametrize("seed", range(3))
def test_own_margin_is_mutual_plus_lautum_information(seed):
    margin, p_NZ = exact_margin(channel(np.random.default_rng(seed), 5, 4))
    # By definition, for a prompt drawn from the five: I = KL(joint || product), and L is the
    # reverse divergence. Pairs of a prompt with itself have zero divergence and do not count.
    mean_Z, N = p_NZ.mean(axis=0), len(p_NZ)
    with np.errstate(divide="ignore", invalid="ignore"):
        mutual = np.nansum(p_NZ * np.log(p_NZ / mean_Z)) / N
        lautum = np.nansum(mean_Z * np.log(mean_Z / p_NZ)) / N
    assert margin * (N - 1) / N == pytest.approx(mutual + lautum, rel=1e-9)


def test_tokens_that_carry_nothing_change_no_margin():
    score_MN, length_M, prompt_M = random_case(0, M=40, strength=3.0)
    rng = np.random.default_rng(1)
    before = information_metrics(score_MN, length_M, prompt_M)
    for factor in (1.5, 5):
        more_M = np.round(factor * length_M).astype(int)
        longer = score_MN - rng.exponential(more_M)[:, None]
        after = information_metrics(longer, more_M, prompt_M)
        for name in ("own_margin", "mi_seq", "retrieval_acc"):
            assert after[name] == pytest.approx(before[name], abs=1e-9)
        assert after["mi_released"] < 0.9 * before["mi_released"]  # the figures per token do change


def test_own_margin_has_no_ceiling_and_adds_up():
    # Reasonings name their prompt, among 8, with growing certainty: other figures stay constant.
    for gap in (20.0, 40.0, 80.0):
        score_MN = np.where(np.eye(8), 0.0, -gap)
        got = information_metrics(score_MN, np.full(8, 5), np.arange(8))
        assert got["own_margin"] == pytest.approx(gap)
        assert got["mi_seq"] == pytest.approx(math.log(8)) and got["retrieval_acc"] == 1.0
    one, two = (random_case(seed, M=30)[0] for seed in (0, 1))
    _, length_M, prompt_M = random_case(0, M=30)
    parts = [information_metrics(x, length_M, prompt_M)["own_margin"] for x in (one, two)]
    both = information_metrics(one + two, length_M, prompt_M)["own_margin"]
    assert both == pytest.approx(sum(parts))


def test_prompts_that_are_all_one_leave_no_margin():
    score_MN, length_M, prompt_M = random_case(0)
    got = information_metrics(score_MN, length_M, prompt_M, prompt_id_N=[7] * 5)
    assert got["own_margin"] == 0.0
