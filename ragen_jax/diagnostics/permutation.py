"""A test of retrieval: is the own prompt ranked better than luck would?

Axes as in information.py: M scored reasonings, N scoring prompts, D distinct prompts; G groups, as
in intervals.py; R permutations. NumPy float64 on the host, some milliseconds.

**Null**: reasonings do not depend on the prompt that they were sampled from, by nothing that it
shows: observations, earlier replies, turn number. They are then M independent draws from one
distribution, and which of them came from which prompt is as good as a random assignment with
the same number of reasonings to each prompt. So the labels prompt_M can be dealt out over the
rows of scores, whatever a score depends on: some reasonings are likelier than others under all
prompts (longer ones are less likely), some prompts favour all reasonings, and both stay what
they are. Labels are distinct prompts; columns of equal ids count as their best one, as in
`information_metrics`. With `part_N` the null is that of each part: labels stay in it.

**How labels are dealt.** Without `group_N` singly, all M! ways equally likely. With it, group
by group: reasonings and labels are each laid out with the groups in random order and those of a
group in random order, and meet in their places. So the test also holds for a null in which
reasonings of a group resemble each other, by a style that no prompt shows, as prompts of a
group do: dealt singly, up to 22 % of such batches of 8 rooms x 8 turns had p <= 0.05. It cost
at most 0.03 of a power of 0.1 to 0.55. Members of a first-turn group share one prompt and
nothing else, so that if they resemble each other they do depend on it: deal singly there,
since groups may be few (p is at least about 1 / G! where turns of a group are all alike).

**Statistic**: how many of the distinct prompts of its part rank below the own one, averaged
over reasonings, when they are ranked by

    score of reasoning m under prompt d - mean of d's scores over the part's reasonings.

Up to the subtraction it is recall@k averaged over all k. Whether the own prompt ranks first
(retrieval_acc) is a weaker test, which found weak dependence two to five times as rarely: first
ranks are few, and a prompt that favours all reasonings takes most of them. The mean score (a
test of mi_seq) is a little stronger on normal noise and weaker on heavy tails.

    p = (1 + dealings with at least the observed mean) / (1 + permutations)

Exact: P(p <= 0.05) is at most 0.05 under the null, and nearly that with the default number; of
styled groups too where all have as many reasonings in a part (where a third of the reasonings
were missing, or in parts by turn, strong styles gave 0.09 to 0.14). One batch's p is about that
batch; over many steps 5 % of a collapsed run's lie below 0.05.
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
    """Permutation p-value of retrieval: is the own prompt ranked better than luck would?

    The null, how labels are dealt and what is counted: at the top of this file.

    Args:
      score_MN, prompt_M, prompt_id_N: as in `information_metrics`.
      group_N, part_N: as in `intervals.confidence_intervals`; group_N None: labels are dealt
        singly.
      rng: of the permutations.
      permutations: how many, R.

    Returns:
      1 / (1 + R) to 1; 1 where the labels are all the same.

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

    below_MM = np.zeros((M, M), int)  # prompts ranked below that of the second reasoning
    for rows, columns, own_columns in parts(own_M, prompt_id_N, part_N):
        _, answer = np.unique(prompt_id_N[columns], return_inverse=True)
        best = best_columns(score_MN[np.ix_(rows, columns)], answer)
        calibrated = best - np.mean(best, axis=0)
        rank = np.sum(calibrated[:, :, None] > calibrated[:, None, :], axis=2)
        below_MM[np.ix_(rows, rows)] = rank[:, answer[own_columns]]

    # One layout for the reasonings, the others for the labels: permutations drawn relative to a
    # random one of their own kind keep the test exact whatever kind that is.
    _, group_M = np.unique(group_M, return_inverse=True)
    _, part_M = np.unique(part_N[own_M], return_inverse=True)
    groups = np.max(group_M) + 1
    place_RG = np.argsort(rng.random((1 + permutations, groups)), axis=1)
    place_RM = part_M * groups + place_RG[:, group_M] + rng.random((1 + permutations, M))
    order_RM = np.argsort(place_RM, axis=1)
    as_good = np.sum(below_MM[order_RM[0], order_RM[1:]].sum(axis=1) >= np.trace(below_MM))
    return float((1 + as_good) / (1 + permutations))
