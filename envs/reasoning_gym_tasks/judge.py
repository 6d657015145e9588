"""Corrections of the package's scores, so that an answer without reading the question earns 0.

Many scorers of reasoning-gym give partial credit for any text, for a copy of the question, or for
a nearby number; `coin_flip` gives full credit for "0". `benchmarks.floors` measures the rewards of
such answers; docs/reasoning_gym.md has the table.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# Scores up to this value are given for any text or any JSON ("0.01 json parsable", "0.05").
PARTICIPATION = 0.05

# Tasks whose partial scores reward closeness, position or length, so that a constant, a hedge, a
# copy of the question or its data in the given order earns more than PARTICIPATION. Only a score
# of 1 counts for them.
RIGHT_OR_NOTHING = frozenset(
    (
        *("calendar_arithmetic", "complex_arithmetic", "rectangle_count", "time_intervals"),
        *("polynomial_equations", "prime_factorization", "fraction_simplification"),
        *("emoji_mystery", "figlet_font", "letter_jumble", "sentence_reordering"),
        *("spell_backward", "string_manipulation", "word_sorting", "game_of_life"),
        *("futoshiki", "mini_sudoku", "sudoku", "knights_knaves", "propositional_logic"),
        *("acre", "course_schedule", "mahjong_puzzle", "syllogism"),  # "Yes No" contains both
    )
)

# Move letters of tasks whose scorers skip all other text, so that prose is a random walk.
MOVES = {"quantum_lock": "ABCabc", "sokoban": "UDLR"}

COIN_FLIP_TOLERANCE = Fraction(1, 10_000)  # of a probability; the package's tolerance

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def correct_score(task: str, answer: str, entry: Mapping[str, Any], score: float) -> float:
    """Return the corrected score of an answer, given the package's score in [0, 1].

    Args:
      task: name in the package.
      answer: any text.
      entry: the item, as the package made it.
      score: score by the package's scorer.

    Returns:
      float in [0, 1]: 1 for a right answer, less for a partly right answer.
    """
    if task == "coin_flip":
        return float(_is_probability(answer, entry))
    if task in MOVES and re.search(r"[^\W_]", re.sub(f"[{MOVES[task]}]", "", answer)):
        return 0.0
    if task == "polynomial_equations" and not _has_number(entry["answer"]):
        return float(not answer.strip(" \n\"'"))  # no solution: an empty text was asked for
    if score >= 1:
        return score
    if task in RIGHT_OR_NOTHING or score <= PARTICIPATION:
        return 0.0
    return 0.0 if _is_hedge(answer, entry, score) else score


def _is_probability(answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether an answer is the probability of a `coin_flip`, within COIN_FLIP_TOLERANCE.

    The package scores the common prefix of the two decimals, divided by the shorter one's length:
    full credit for "0" against "0.2095".
    """
    exact = entry["metadata"]["rational"]
    try:
        value = Fraction(answer.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return False
    return abs(value - Fraction(exact["numerator"], exact["denominator"])) <= COIN_FLIP_TOLERANCE


def _has_number(text: str) -> bool:
    return re.search(r"\d", text) is not None


def _is_hedge(answer: str, entry: Mapping[str, Any], score: float) -> bool:
    """Whether a score is for the right answer among others, or as a part of another answer.

    For an answer that contains the right answer, most scorers give the fraction of its length: half
    for "10" if "1" is right, a third for "1 2". An answer with more numbers than the right answer
    hedges.
    """
    right = entry["answer"]
    if not isinstance(right, str) or not right or right not in answer:
        return False
    if not math.isclose(score, len(right) / len(answer)):
        return False  # the score has another reason
    numbers = len(_NUMBER.findall(right))
    if numbers and len(_NUMBER.findall(answer)) > numbers:
        return True
    whole = rf"(?<![\w.+\-/])(?<!\d,){re.escape(right)}(?!\w|[./,]\d)"
    return re.search(whole, answer) is None
