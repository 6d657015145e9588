"""The reward of an answer: SQuAD's rules on cases worked out by hand."""

import collections
import itertools
import random
import re
import string

import pytest

from ragen_jax.envs.search_qa import score_answer
from ragen_jax.envs.search_qa.score import normal_form

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "text, form",
    [
        ("The  Beatles!", "beatles"),
        ("An apple a day", "apple day"),
        ("U.S.", "us"),
        ("a-b", "ab"),  # punctuation is removed first, so "a" is no article here
        ("theatre", "theatre"),
        ("the the", ""),
        ("  \n\t", ""),
        # only ASCII punctuation is removed
        ("\u00c9cole \u201cnormale\u201d", "\u00e9cole \u201cnormale\u201d"),
        ("1,000", "1000"),
        ("rock 'n' roll", "rock n roll"),
        ("\ud800 x", "\ud800 x"),
    ],
)
def test_normal_form(text, form):
    assert normal_form(text) == form


@pytest.mark.parametrize(
    "said, right, reward, f1, exact",
    [
        ("Paris", "paris", 1.0, 1.0, True),
        ("the Paris.", "Paris", 1.0, 1.0, True),
        ("Paris, France", "Paris", 2 / 3, 2 / 3, False),  # P 1/2, R 1
        ("Barack Obama", "Barack Hussein Obama", 0.8, 0.8, False),  # P 1, R 2/3
        ("it is Paris I think", "Paris", 1 / 3, 1 / 3, False),  # P 1/5, R 1
        ("I am sure that it is Paris", "Paris", 0.0, 0.25, False),  # P 1/7: F1 1/4 < 0.3
        ("London", "Paris", 0.0, 0.0, False),
        ("", "Paris", 0.0, 0.0, False),
        ("Paris", "", 0.0, 0.0, False),
        ("the", "a", 0.0, 0.0, False),  # both are empty after normalisation
        ("paris paris", "paris", 2 / 3, 2 / 3, False),  # repeated words count
        ("paris paris", "paris paris london", 0.8, 0.8, False),
        ("yes", "Yes.", 1.0, 1.0, True),
        ("yes it is", "yes", 0.0, 0.0, False),
        ("yes", "yes it is", 0.0, 0.0, False),
        ("no", "yes", 0.0, 0.0, False),
        ("no answer", "noanswer", 0.0, 0.0, False),
        ("no one", "no man", 0.5, 0.5, False),  # "no" within an answer is an ordinary word
        ("b a c", "a c b", 1.0, 1.0, False),  # the order of words does not affect F1
        (f"{'x ' * 16}y", "y", 0.0, 2 / 18, False),
        ("y z z z z", "y y y y y z", 4 / 11, 4 / 11, False),  # P 2/5, R 2/6
        ("a b c d e f", "f g h i j k", 0.0, 2 / 11, False),  # 1/5 and 1/6: one article is removed
    ],
)
def test_hand_computed(said, right, reward, f1, exact):
    scored = score_answer(said, right)
    assert scored == {
        "reward": pytest.approx(reward, abs=1e-12),
        "f1": pytest.approx(f1, abs=1e-12),
        "exact_match": exact,
    }


def test_the_edge_of_what_is_worth_anything():
    """F1 = 2c / (said + right): 0.3 with 3 of 10 + 10, below 0.3 with 3 of 11 + 10."""
    right = " ".join(f"r{i}" for i in range(10))
    common = "r0 r1 r2"
    assert score_answer(common + " x" * 7, right)["reward"] == pytest.approx(0.3)
    below = score_answer(common + " x" * 8, right)
    assert below["reward"] == 0.0 and below["f1"] == pytest.approx(6 / 21)


def test_the_best_of_several_right_answers_counts():
    assert score_answer("New York City", ["Boston", "New York"])["f1"] == pytest.approx(0.8)
    assert score_answer("nyc", ("New York", "NYC"))["exact_match"]
    assert score_answer("yes", ["yes sir", "Yes"])["reward"] == 1.0
    assert score_answer("yes sir", ["no", "sir"])["f1"] == pytest.approx(2 / 3)


EMPTY = ("", " ", "\n", "the", "a", "An", "THE", ".", "...", "a the.", "!?", "'")


@pytest.mark.parametrize("truth", ["The", "A.", "an a", "%", "", ["", " "], ["The", "..", ""]])
def test_a_prediction_of_which_nothing_is_left_is_not_right(truth):
    for said in EMPTY:
        assert score_answer(said, truth) == {"reward": 0.0, "f1": 0.0, "exact_match": False}, said


@pytest.mark.parametrize("said", EMPTY)
def test_an_empty_text_among_the_right_answers_matches_nothing(said):
    nothing = {"reward": 0.0, "f1": 0.0, "exact_match": False}
    assert score_answer(said, ["Paris", "", "A the"]) == nothing
    assert score_answer("Paris", ["", "paris"])["exact_match"]
    assert score_answer("Paris", ["", "the"]) == nothing


@pytest.mark.parametrize("text", ["A", "The", "%", "The The", "+"])
def test_a_right_answer_with_an_empty_normal_form_is_matched_by_itself(text):
    assert score_answer(f" {text} ", ["Paris", text])["exact_match"]
    assert score_answer(text + "x", text)["reward"] == 0.0


def squad(said, right):
    """An independent version of (exact match, F1) by SQuAD's definitions."""

    def form(text):
        bare = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in re.findall(r"\S+", bare) if word not in ("a", "an", "the")]

    if form(said) == form(right) == []:
        same = said == right != ""
        return same, float(same)
    said, right = form(said), form(right)
    if said == right:
        return True, 1.0
    special = (["yes"], ["no"], ["noanswer"])
    if said in special or right in special:
        return False, 0.0
    left, common = collections.Counter(right), 0
    for word in said:
        if left[word]:
            left[word] -= 1
            common += 1
    return False, 2 * common / (len(said) + len(right)) if common else 0.0


def test_four_hundred_drawn_cases_follow_the_rules():
    rng = random.Random(5)
    words = ["the", "a", "An", "yes", "no", "noanswer", "Paris", "paris!", "U.S.", "12", "x", "--"]
    seen = set()
    for _ in range(400):
        said, right = (" ".join(rng.choices(words, k=rng.randrange(5))) for _ in "ab")
        exact, f1 = squad(said, right)
        scored = score_answer(said, right)
        assert scored["exact_match"] == exact, (said, right)
        assert scored["f1"] == pytest.approx(f1, abs=1e-12), (said, right)
        assert scored["reward"] == (1.0 if exact else scored["f1"] if f1 >= 0.3 else 0.0)
        seen.add((exact, 0 < f1 < 0.3, f1 >= 0.3))
    assert len(seen) == 4


def test_f1_is_symmetric_and_within_bounds():
    texts = ["Paris", "Paris France", "yes", "", "x y z", "z y"]
    for a, b in itertools.product(texts, texts):
        one, other = score_answer(a, b), score_answer(b, a)
        assert one == other and 0.0 <= one["reward"] <= one["f1"] <= 1.0


@pytest.mark.parametrize(
    "said, right, message",
    [
        (None, "x", "prediction must be a text, got None"),
        ("x", [], r"ground_truth must be a text or several, got \[\]"),
        ("x", None, "ground_truth must be a text or several, got None"),
        ("x", 5, "ground_truth must be a text or several, got 5"),
        ("x", ["y", 5], "ground_truth must hold texts alone, got 5"),
    ],
)
def test_what_is_no_text_is_named(said, right, message):
    with pytest.raises(ValueError, match=message):
        score_answer(said, right)
