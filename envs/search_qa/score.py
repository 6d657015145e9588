"""Scoring of answers: the rules of SQuAD's evaluation, and the reward of the released RAGEN.

Source: ragen/env/search/reward.py of mll-lab-nu/RAGEN (f1_score, evaluate_answer, compute_reward),
which follows HotpotQA's evaluation: SQuAD's normalization; yes and no are all or nothing.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

MIN_F1 = 0.3  # minimum F1 for a reward above 0

# Answers without partial credit: if either side is one of these, both must be equal.
ALL_OR_NOTHING = frozenset(("yes", "no", "noanswer"))

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score_answer(prediction: str, ground_truth: str | Sequence[str]) -> dict[str, float | bool]:
    """Score an answer against the right answer, or against the best of several right answers.

    Both are compared in `normal_form`. F1 is over their words, with counts: 2PR / (P + R), where P
    is the fraction of the prediction's words that are in the right answer and R the fraction of
    the right answer's words that are in the prediction. A right answer whose normal form is empty
    ("A", "The", "%") matches only the identical text: an empty prediction is never right.

    Args:
      prediction: any text.
      ground_truth: a text, or several, of which any counts as right.

    Returns:
      reward: 1.0 for an exact match, else F1 if it is at least MIN_F1, else 0.0
      f1: from 0 to 1, the largest over the right answers; 1.0 for an exact match
      exact_match: bool

    Raises:
      ValueError: prediction is not a text, or ground_truth is neither a text nor several texts.
    """
    if not isinstance(prediction, str):
        raise ValueError(f"prediction must be a text, got {prediction!r}")
    truths = [ground_truth] if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truths, Sequence) or not truths:
        raise ValueError(f"ground_truth must be a text or several, got {ground_truth!r}")
    for truth in truths:
        if not isinstance(truth, str):
            raise ValueError(f"ground_truth must hold texts alone, got {truth!r}")
    if any(_matches(prediction, truth) for truth in truths):
        return {"reward": 1.0, "f1": 1.0, "exact_match": True}
    f1 = max(_f1(normal_form(prediction), normal_form(truth)) for truth in truths)
    return {"reward": f1 if f1 >= MIN_F1 else 0.0, "f1": f1, "exact_match": False}


def normal_form(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation and articles, with single spaces.

    Punctuation is deleted first, without a space ("u.s." is "us", "a-b" is "ab"); then articles.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _matches(prediction: str, truth: str) -> bool:
    """Whether two texts have the same non-empty normal form, or are the same non-empty text."""
    answer, right = normal_form(prediction), normal_form(truth)
    if answer or right:
        return answer == right
    return bool(prediction.strip()) and prediction.strip() == truth.strip()


def _f1(answer: str, right: str) -> float:
    """Return the F1 of the words of two different texts in normal form."""
    if answer in ALL_OR_NOTHING or right in ALL_OR_NOTHING:
        return 0.0
    answer_words, right_words = answer.split(), right.split()
    common = (Counter(answer_words) & Counter(right_words)).total()
    if not common:
        return 0.0
    precision, recall = common / len(answer_words), common / len(right_words)
    return 2 * precision * recall / (precision + recall)
