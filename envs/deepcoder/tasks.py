"""Generated problems: a few steps over numbers or words, and their results.

A problem is one Python expression over the input, composed from the steps below. Its tests are the
expression's values for drawn inputs, and so is its identity: two problems with the same results on
all probes are the same problem, whatever their wording.
"""

import ast
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragen_jax.envs.problems import Draws

TAG = 0xDEE9C0DE  # tag of this environment's `Draws`

PROBES = 24  # inputs that distinguish problems
MAX_STEPS = 5
MAX_OPERAND = 9  # largest number in a problem; the smallest is 2

# Step of the family "numbers" -> (its wordings, the new expression for x).
ARITHMETIC: dict[str, tuple[tuple[str, ...], str]] = {
    "+": (("Add {n}.", "Increase it by {n}."), "({x}+{n})"),
    "-": (("Subtract {n}.", "Take away {n}."), "({x}-{n})"),
    "*": (("Multiply by {n}.",), "({x}*{n})"),
    "max": (("Take the larger of it and {n}.", "Make it at least {n}."), "max({x},{n})"),
    "min": (("Take the smaller of it and {n}.", "Make it at most {n}."), "min({x},{n})"),
}

# (wording, source), for a number x, a word x, or all of them, xs; {k} is drawn.
_KEEP_NUMBERS = (
    ("Keep the numbers greater than {k}.", "x > {k}"),
    ("Keep the numbers less than {k}.", "x < {k}"),
    ("Keep the numbers divisible by {k}.", "x % {k} == 0"),
    ("Drop the numbers divisible by {k}.", "x % {k} != 0"),
    ("Keep the numbers from -{k} to {k}.", "-{k} <= x <= {k}"),
    ("Keep them all.", "True"),
)
_CHANGE_NUMBERS = (
    ("Add {k} to each.", "x + {k}"),
    ("Multiply each by {k}.", "x * {k}"),
    ("Subtract each from {k}.", "{k} - x"),
    ("Square each and add {k}.", "x * x + {k}"),
    ("Replace each by its remainder by {k} (from 0 to {k} minus 1).", "x % {k}"),
    ("Replace each by its absolute value times {k}.", "abs(x) * {k}"),
)
_FINISH_NUMBERS = (
    ("their sum", "sum({xs})"),
    ("the largest of them, or 0 if there is none", "max({xs}, default=0)"),
    ("the smallest of them, or 0 if there is none", "min({xs}, default=0)"),
    ("how many different ones there are", "len(set({xs}))"),
    ("the sum of the different ones", "sum(set({xs}))"),
    ("the sum of every second one, the first one included", "sum({xs}[::2])"),
    ("the sum of the last {k} of them, or of all if there are fewer", "sum({xs}[-{k}:])"),
)
_KEEP_WORDS = (
    ("Keep the words of at least {k} letters.", "len(x) >= {k}"),
    ("Keep the words of at most {k} letters.", "len(x) <= {k}"),
    ("Keep the words that begin with one of the first {k} letters of the alphabet.",)
    + ("x[0] < 'abcdefghijk'[{k}]",),
    ("Keep them all.", "True"),
)
_CHANGE_WORDS = (
    ("Turn each round, last letter first.", "x[::-1]"),
    ("Write each in capital letters.", "x.upper()"),
    ("Cut each to its first {k} letters.", "x[:{k}]"),
    ("Cut the first {k} letters off each.", "x[{k}:]"),
    ("Write each {k} times without a gap.", "x * {k}"),
    ("Sort the letters of each.", "''.join(sorted(x))"),
)
_FINISH_WORDS = (
    ("them in alphabetical order, joined by hyphens", "'-'.join(sorted({xs}))"),
    ("them in reverse order, joined by hyphens", "'-'.join({xs}[::-1])"),
    ("how many letters they have in all", "sum(map(len, {xs}))"),
    ("how many different ones there are", "len(set({xs}))"),
    ("the first letters of those that have any, joined", "''.join(x[:1] for x in {xs})"),
    ("the last {k} of them joined by hyphens, or all if there are fewer", "'-'.join({xs}[-{k}:])"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """A generated problem before its tests.

    steps: wordings of the steps, in order
    expression: the result, over the names of `family`
    """

    family: str
    steps: tuple[str, ...]
    expression: str


@dataclass(frozen=True, slots=True)
class Family:
    """The common properties of problems of one kind.

    input_text: description of the input
    names: names of its values
    read: source code that reads them
    draw: draws -> input values
    task: (draws, (fewest, most) steps) -> a task; some families have a fixed number of steps
    """

    input_text: str
    names: tuple[str, ...]
    read: str
    draw: Callable[[Draws], tuple[object, ...]]
    task: Callable[[Draws, Sequence[int]], Task]


def _numbers(draws: Draws) -> tuple[object, ...]:
    return tuple(draws.below(41) - 20 for _ in range(3))


def _list(draws: Draws) -> tuple[object, ...]:
    return ([draws.below(61) - 30 for _ in range(1 + draws.below(12))],)


def _words(draws: Draws) -> tuple[object, ...]:
    def word():
        return "".join("abcdefghijklmnop"[draws.below(16)] for _ in range(1 + draws.below(8)))

    return ([word() for _ in range(1 + draws.below(8))],)


def draw_steps(draws: Draws, count: Sequence[int]) -> Task:
    """Return a task with (fewest, most) steps of arithmetic over a, b and c."""
    steps, expression = ["Start with a."], "a"
    for _ in range(count[0] + draws.below(count[1] - count[0] + 1)):
        name = tuple(ARITHMETIC)[draws.below(len(ARITHMETIC))]
        wordings, source = ARITHMETIC[name]
        operand = ("b", "c", *map(str, range(2, MAX_OPERAND + 1)))[draws.below(MAX_OPERAND + 1)]
        steps.append(wordings[draws.below(len(wordings))].format(n=operand))
        expression = source.format(x=expression, n=operand)
    return Task("numbers", tuple(steps), strip_brackets(expression))


def strip_brackets(expression: str) -> str:
    """Return an expression of `draw_steps` without unnecessary brackets."""
    return ast.unparse(ast.parse(expression, mode="eval")).replace(" ", "")


def list_partial_expressions(expression: str) -> list[str]:
    """Return the expression of `draw_steps` after each step, "a" first."""
    tree, found = ast.parse(expression, mode="eval").body, []
    while True:
        found.append(ast.unparse(tree).replace(" ", ""))
        match tree:
            case ast.BinOp(left=before) | ast.Call(args=[before, _]):
                tree = before
            case _:
                return found[::-1]


def _pipeline(family: str, *choices: Sequence[tuple[str, str]]) -> Callable[..., Task]:
    def draw(draws: Draws, count: Sequence[int]) -> Task:
        steps, sources = [], []
        for choice in choices:
            wording, source = choice[draws.below(len(choice))]
            k = 2 + draws.below(MAX_OPERAND - 1)
            steps.append(wording.format(k=k))
            sources.append(source.replace("{k}", str(k)))
        keep, change, finish = sources
        chosen = "xs" if keep == "True" else f"[x for x in xs if {keep}]"
        expression = finish.replace("{xs}", f"[{change} for x in {chosen}]")
        return Task(family, (*steps[:2], f"The answer: {steps[2]}."), expression)

    return draw


FAMILIES: dict[str, Family] = {
    "numbers": Family(
        "three whole numbers a, b and c on one line",
        ("a", "b", "c"),
        "a, b, c = map(int, input().split())",
        _numbers,
        draw_steps,
    ),
    "list": Family(
        "whole numbers on one line",
        ("xs",),
        "xs = list(map(int, input().split()))",
        _list,
        _pipeline("list", _KEEP_NUMBERS, _CHANGE_NUMBERS, _FINISH_NUMBERS),
    ),
    "words": Family(
        "words of small letters on one line",
        ("xs",),
        "xs = input().split()",
        _words,
        _pipeline("words", _KEEP_WORDS, _CHANGE_WORDS, _FINISH_WORDS),
    ),
}


def compute_answer(task: Task, values: Sequence[object]) -> object:
    """Return the right answer. The expression consists of this file's constants alone."""
    return _compile(FAMILIES[task.family].names, task.expression)(*values)


@functools.lru_cache(maxsize=16)
def _compile(names: tuple[str, ...], expression: str) -> Callable[..., object]:
    return eval(f"lambda {', '.join(names)}: {expression}", {})


@functools.cache
def _probes(family: str) -> list[tuple[object, ...]]:
    draws = Draws(0, 0, TAG)
    return [FAMILIES[family].draw(draws) for _ in range(PROBES)]


def identity(task: Task) -> str:
    """Return the same text for tasks with the same results on all probes of their family."""
    found = [compute_answer(task, values) for values in _probes(task.family)]
    return f"{task.family} {hashlib.sha256(repr(found).encode()).hexdigest()[:32]}"


def format_input(values: Sequence[object]) -> str:
    """Return the values on one line, as a program reads them."""
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    return " ".join(map(str, words)) + "\n"
