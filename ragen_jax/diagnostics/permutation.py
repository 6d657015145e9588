"""A permutation test of retrieval: is the own prompt ranked better than chance?

Axes as in information.py: M scored reasonings, N scoring prompts, D distinct prompts; G groups, as
in intervals.py; R permutations. NumPy float64 on the host, some milliseconds.

**Null hypothesis**: reasonings do not depend on anything in the prompt that they were sampled from:
observations, earlier replies, turn number. They are then M independent draws from one
distribution, and their prompts are a random assignment with the same number of reasonings per
prompt. So the labels prompt_M can be permuted over the rows of scores. This allows any dependence
of a score on its reasoning alone or on its prompt alone: some reasonings are likelier than others
under all prompts (longer reasonings are less likely), and some prompts favour all reasonings.
Labels are distinct prompts; columns of equal ids count as the best of them, as in
`information_metrics`. With `part_N` the null applies to each part: labels stay in their part.

**Permutations.** Without `group_N`, labels are permuted singly: all M! orders are equally likely.
With `group_N`, they are permuted by group: reasonings and labels are each laid out with the groups
in random order and the members of a group in random order, and are matched by position. The test
then also holds under a null in which reasonings of a group resemble each other, by a style that no
prompt shows, as prompts of a group do. With single permutations, up to 22 % of such batches of 8
rooms x 8 turns had p <= 0.05. The loss of power was at most 0.03, for powers of 0.1 to 0.55.
Members of a first-turn group share only their prompt, so if they resemble each other they depend
on it: permute singly there, since groups may be few (p is at least about 1 / G! if the turns of a
group are all alike).

**Statistic**: the number of distinct prompts of its part that rank below the own prompt, averaged
over reasonings. Prompts are ranked by

    score of reasoning m under prompt d - mean of d's scores over the part's reasonings.

Apart from the subtraction, the statistic is recall@k averaged over all k. A test on first ranks
(retrieval_acc) is weaker and found weak dependence two to five times less often: first ranks are
few, and a prompt that favours all reasonings takes most of them. A test on the mean score (mi_seq)
is slightly stronger on normal noise and weaker on heavy tails.

    p = (1 + permutations with at least the observed mean) / (1 + permutations)

The test is exact: P(p <= 0.05) is at most 0.05 under the null, and close to 0.05 with the default
number of permutations. This also holds for groups with styles if all groups have the same number of
reasonings in a part (with a third of the reasonings missing, or in parts by turn, strong styles
gave 0.09 to 0.14). The p-value is for a single batch; over many steps of a collapsed run, 5 % of
the p-values are below 0.05.
"""

import numpy as np

from ragen_jax.core.types import Array
from ragen_jax.diagnostics.information import best_columns, checked_scores, parts


def retrieval_p(
    score_MN: Array,
    prompt_M: Array,
    *,
    prompt_id_N: np.ndarray | None = None,
    group_N: np.ndarray | None = None,
    part_N: np.ndarray | None = None,
    rng: np.random.Generator,
    permutations: int = 999,
) -> float:
    """Return the permutation p-value of retrieval: is the own prompt ranked better than chance?

    The top of this file describes the null hypothesis, the permutations and the statistic.

    Args:
      score_MN, prompt_M, prompt_id_N: as in `information_metrics`.
      group_N, part_N: as in `intervals.confidence_intervals`; group_N None: labels are permuted
        singly.
      rng: generator for the permutations.
      permutations: number of permutations, R.

    Returns:
      float from 1 / (1 + R) to 1; 1 if all labels are the same.

    Raises:
      ValueError, AssertionError: as `information_metrics` does; permutations below 1.
    """
    ones_M = np.ones(len(score_MN))
    score_MN, _, own_M, prompt_id_N = checked_scores(score_MN, ones_M, prompt_M, prompt_id_N)
    if permutations < 1:
        raise ValueError(f"permutations is {permutations}; it must be at least 1")
    M, N = score_MN.shape
    part_N = np.zeros(N, int) if part_N is None else np.asarray(part_N)
    group_M = np.arange(M) if group_N is None else np.asarray(group_N)[own_M]

    below_MM = np.zeros((M, M), int)  # prompts ranked below the second reasoning's prompt
    for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N):
        _, answer = np.unique(prompt_id_N[columns], return_inverse=True)
        best = best_columns(score_MN[np.ix_(rows, columns)], answer)
        calibrated = best - np.mean(best, axis=0)
        rank = np.sum(calibrated[:, :, None] > calibrated[:, None, :], axis=2)
        below_MM[np.ix_(rows, rows)] = rank[:, answer[own_columns]]

    # The first layout is for the reasonings, the others are for the labels. Permutations relative
    # to a random permutation of the same kind keep the test exact for every kind.
    _, group_M = np.unique(group_M, return_inverse=True)
    _, part_M = np.unique(part_N[own_M], return_inverse=True)
    groups = np.max(group_M) + 1
    place_RG = np.argsort(rng.random((1 + permutations, groups)), axis=1)
    place_RM = part_M * groups + place_RG[:, group_M] + rng.random((1 + permutations, M))
    order_RM = np.argsort(place_RM, axis=1)
    as_good = np.sum(below_MM[order_RM[0], order_RM[1:]].sum(axis=1) >= np.trace(below_MM))
    return float((1 + as_good) / (1 + permutations))
