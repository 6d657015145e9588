"""Generated questions: somebody has some things, and two or three things happen to them."""

import itertools
from collections.abc import Sequence

from ragen_jax.envs.metamathqa.questions import Question
from ragen_jax.envs.problems import Draws

TAG = 0xC0117D04  # tag of this environment's `Draws`

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry")
THINGS = ("apples", "books", "cards", "coins", "marbles", "pens", "shells", "stamps")

# Operation -> verb, as the reasoning names it -> sentence.
SENTENCES = {
    "+": {
        "gets": "{name} gets {n} more.",
        "finds": "{name} finds {n} more.",
        "buys": "{name} buys {n} more.",
    },
    "-": {
        "gives": "{name} gives {n} away.",
        "loses": "{name} loses {n}.",
        "sells": "{name} sells {n}.",
    },
    "*": {"makes": "A friend makes them {n} times as many."},
    "/": {"splits": "{name} splits them into {n} equal parts and keeps one."},
}
OPERATORS = "".join(SENTENCES)
START = "has"
SYMBOLS = {verb: symbol for symbol, verbs in SENTENCES.items() for verb in verbs}

MAX_OPERATIONS = 6
MAX_FACTOR = 5  # largest number in * and /
MAX_VALUE = 10**6

WORDS = (
    *("Question:", " A friend", " them", " times as many.", " into", " more.", " away."),
    *(" equal parts and keeps one.", " How many", " does", " have now?", START, f" {START}"),
    *(f" {name}" for name in (*NAMES, *THINGS, *SYMBOLS)),
)


def draw_question(
    draws: Draws, *, operations: tuple[int, int], largest: int, operators: str
) -> Question | None:
    """Make one attempt at a question; None if an intermediate value is not from 1 to `largest`.

    operations: (fewest, most) operations, uniform
    largest: largest number
    operators: operators to draw from; repeated operators are more frequent
    """
    name, thing = NAMES[draws.below(len(NAMES))], THINGS[draws.below(len(THINGS))]
    count = operations[0] + draws.below(operations[1] - operations[0] + 1)
    facts = [(START, 2 + draws.below(largest - 1))]
    sentences = [f"{name} {START} {facts[0][1]} {thing}."]
    for _ in range(count):
        symbol = operators[draws.below(len(operators))]
        verbs = tuple(SENTENCES[symbol])
        verb = verbs[draws.below(len(verbs))]
        n = 2 + draws.below((MAX_FACTOR if symbol in "*/" else largest) - 1)
        facts.append((verb, n))
        sentences.append(sentence(verb, name, n))
        if not 1 <= values(facts)[-1] <= largest:
            return None
    sentences.append(f"How many {thing} does {name} have now?")
    return Question(
        text=" ".join(sentences),
        answer=str(values(facts)[-1]),
        identity=identity(facts),
        facts=tuple(facts),
    )


def sentence(verb: str, name: str, n: int | str) -> str:
    """Return the sentence of an operation: "Anna gets 5 more."."""
    return SENTENCES[SYMBOLS[verb]][verb].format(name=name, n=n)


def values(facts: Sequence[tuple[str, int]]) -> list[int]:
    """Return the number of things at the start and after each operation.

    It is 0 after a division with a remainder, and from there on.
    """
    found = [facts[0][1]]
    for verb, n in facts[1:]:
        value = found[-1]
        match SYMBOLS[verb]:
            case "+":
                value += n
            case "-":
                value -= n
            case "*":
                value *= n
            case _:
                value = 0 if value % n else value // n
        found.append(value)
    return found


def identity(facts: Sequence[tuple[str, int]]) -> str:
    """Return numbers and operations as text.

    It does not depend on names, things and verbs, nor on the order of adjacent operations that
    commute.
    """
    parts = [(SYMBOLS[verb] in "+-", f"{SYMBOLS[verb]}{n}") for verb, n in facts[1:]]
    runs = itertools.groupby(parts, key=lambda part: part[0])
    ordered = (" ".join(sorted(text for _, text in run)) for _, run in runs)
    return " ".join([str(facts[0][1]), *ordered])


def list_operations(facts: Sequence[tuple[str, int]]) -> list[str]:
    """Return the operations one by one, as "12+5=17"."""
    return [
        f"{before}{SYMBOLS[verb]}{n}={after}"
        for (verb, n), (before, after) in zip(
            facts[1:], itertools.pairwise(values(facts)), strict=True
        )
    ]
