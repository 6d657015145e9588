"""The process in which math-verify compares answers: `compare.Judge` starts it as a script.

It reads a line of JSON for each comparison and writes a line of JSON. It imports nothing of
ragen_jax, ends when its input ends, and exits when a comparison takes too much time or memory.

A grader fails closed: an answer that cannot be parsed as a whole is wrong. math-verify parses the
parts of a text that it knows and drops the others, so `extract_math` first turns an answer into
mathematics without words, or refuses it.
"""

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from typing import Any

MEMORY = 2 << 30  # bytes of address space
DIGITS = 60  # digits at which numbers are compared
EXACT, ROUNDED = 1e-50, 1e-5  # relative difference of equal numbers: without, with decimals
DECIMALS = 1e-6  # absolute difference of equal numbers, as in math-verify's rounding

# A number among words, such as "5 dollars" or "the answer is 1,000": math-verify would read the
# letters as factors. Words have two letters or more, since "5 x" is a product.
_WORDED = re.compile(
    r"(?:[a-z]{2,}:? +)*\\?\$?([-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?) ?(\\?%)?"
    r"(?: +(?!pi\b)[a-z]{2,})*\.?",
    re.IGNORECASE,
)

# ---- words --------------------------------------------------------------------------------------

# Words before an answer that do not change its value. Any other word is refused.
_LEAD = set(
    "the an answer answers final is are was be it its so thus hence therefore result results value "
    "total equals equal to equalling of we get have has got there that this which solution correct "
    "right number my our gives giving give yields makes make costs cost he she they you them in "
    "all exactly area perimeter volume length width height distance speed age price probability "
    "amount for left remaining now then must should would will can only just simply ans".split()
)
# Words after a number are units and things, too many to list: "3 hours", "1/2 of the cake". The
# words below are refused: they change the value, doubt it, deny it or add another.
_CHANGES = set(
    "not no non never nor neither none nothing without except excluding unless but instead rather "
    "wrong incorrect false untrue invalid impossible mistaken mistake error fails failed fail lie "
    "lies nope nah neg contrary cannot cant isnt arent doesnt dont wasnt wont aint doubt doubtful "
    "unknown undefined unsure doubled tripled halved reversed negated inverted increased decreased "
    "reduced rounded raised hardly barely wrongly unlikely supposedly allegedly "
    "or and versus vs if maybe perhaps possibly probably guess else otherwise alternatively either "
    "is are was were be been being has have had does do did can could may might must shall should "
    "will would equals equal unequal differs different "
    "minus plus negative positive times multiplied divided divide over into add added subtract "
    "subtracted sum difference product quotient ratio remainder mod modulo modulus base choose "
    "power powers exponent exponential square squared squares cube cubed cubes root roots "
    "sqrt cbrt log logs ln lg exp sin cos tan sine cosine tangent cot sec csc arcsin arccos arctan "
    "sinh cosh tanh factorial absolute opposite inverse reciprocal "
    "less more fewer greater larger smaller bigger higher lower than least most above below under "
    "up down about around approximately approx roughly nearly almost circa some beyond exceeding "
    "exceeds minimum maximum min max between to through until till from off by out within "
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh "
    "sevenths eighth eighths ninth ninths tenth tenths eleventh twelfth twelfths twentieth "
    "hundredth hundredths thousandth thousandths millionth millionths billionth billionths "
    "percent percentage percents cent percentile permille basis pct bps "
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "hundred hundreds thousand thousands million millions billion billions trillion trillions "
    "quadrillion quadrillions quintillion mil mln mio bn tn lakh lakhs crore crores googol dozen "
    "dozens score gross couple pair pairs once twice thrice double triple quadruple point decimal "
    "infinity infinite inf nan pi repeating recurring periodic per_cent inclusive exclusive "
    "onwards upwards downwards mixed squareroot kilo mega giga milli micro nano".split()
)
_SCALES = {
    **{"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9},
    **{"trillion": 10**12, "dozen": 12, "lakh": 10**5, "crore": 10**7},
}
_PARTS = {
    **{"half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4},
    **{"fourths": 4, "fifth": 5, "fifths": 5, "sixth": 6, "sixths": 6, "eighth": 8, "eighths": 8},
    **{"tenth": 10, "tenths": 10, "hundredths": 100, "thousandths": 1000},
}
# Words before a number, with their mathematical meaning.
_BEFORE = {
    **{"minus": "-({})", "negative": "-({})", "plus": "({})", "positive": "({})"},
    **{"square root of": "\\sqrt{{{}}}", "sqrt of": "\\sqrt{{{}}}", "sqrt": "\\sqrt{{{}}}"},
    **{"root of": "\\sqrt{{{}}}", "cube root of": "\\sqrt[3]{{{}}}", "square of": "({})^{{2}}"},
    **{"cube of": "({})^{{3}}", "half of": "\\frac{{{}}}{{2}}", "twice": "2*({})"},
    **{"double": "2*({})", "log of": "\\log({})", "log": "\\log({})", "ln of": "\\ln({})"},
    **{"ln": "\\ln({})", "sin": "\\sin({})", "cos": "\\cos({})", "tan": "\\tan({})"},
    **{"factorial of": "({})!", "third of": "\\frac{{{}}}{{3}}", "quarter of": "\\frac{{{}}}{{4}}"},
}
# Words after a number that change it.
_AFTER = {
    **{"squared": "({})^{{2}}", "cubed": "({})^{{3}}", "factorial": "({})!"},
    **{"percent": "{}\\%", "per cent": "{}\\%"},
    **{word: f"({{}})*{factor}" for word, factor in _SCALES.items()},
    **{word: f"\\frac{{{{{{}}}}}}{{{{{part}}}}}" for word, part in _PARTS.items()},
}
_NUMBER = r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"


def _words(words: Any) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


# One operation: "minus 5", "the square root of 16", "3 million", "2 to the power of 3".
_VALUE = re.compile(
    rf"(?:(?:the +|an? +)?(?P<before>{_words(_BEFORE)}) +)?(?P<number>{_NUMBER})"
    rf"(?: +(?:to the power(?: of)? +(?P<power>{_NUMBER})|(?P<after>{_words(_AFTER)})\b))?"
    r"(?P<rest>.*)"
)
_UNITS = re.compile(  # after the words of a unit: an exponent of an area, a divisor of a speed
    r"(?: +(?:(?:square|sq|cubic) +)?[a-z]{2,}"
    r"(?:(?:(?<=cm|mm|km|in|ft)|(?<=units|yards)|(?<=feet|ches|ters))(?:\^\{?[23]\}?)|/[a-z]{1,6})?)*"
)
_AGREES = re.compile(r" +is +(?:(?:the|my|our|final|correct|right) +)*(?:answer|correct|right)")
_CLAUSE = re.compile(r".*\b(?:answer|result|solution|total)(?: +(?:is|equals)|:| *=)(?=[ :])[ :]*")


def _parse_words(text: str) -> str | None:
    """Return the mathematics of a lower-case text with words; None if it cannot be parsed."""
    lead = []
    while True:
        found = _VALUE.fullmatch(text)
        if found and (found["before"] or text[0] in "+-0123456789"):
            break
        word = re.match(r"([a-z]+)(?::? +| *= *)", text)
        if not word:
            return _product(text)  # as in "x equals y+1"
        single = len(word[1]) == 1 and (word[0].rstrip().endswith("=") or text[word.end() :] != "")
        if word[1] not in _LEAD and not (single and _is_name(text[word.end() :], word[1])):
            return None if lead or _CHANGES & set(_BARE.findall(text)) else _product(text)
        lead.append(word[1])
        text = text[word.end() :].lstrip("= ")
    value, rest = found["number"], found["rest"]
    changes = [found["power"], found["after"], found["before"]]
    if sum(map(bool, changes)) > 1 and not (
        found["before"] in _SIGNS and found["after"] in _SCALED
    ):
        return None  # "minus 5 squared" may mean two values
    if found["power"]:
        value = f"({value})^{{{found['power']}}}"
    elif found["after"]:
        value = _AFTER[found["after"]].format(value)
    if found["before"]:
        value = _BEFORE[found["before"]].format(value)
    rest = _AGREES.sub("", rest, count=1)
    if not rest:
        return value
    percent = re.match(r" ?\\?%", rest)
    if percent:
        value, rest = f"{value}\\%", rest[percent.end() :]
    units = _UNITS.fullmatch(rest)
    if units is None:
        return _product(text)
    rest = re.sub(r"\b(?:square|sq|cubic) +(?!roots?\b)(?=[a-z])", "", rest)
    return None if _CHANGES & set(re.findall("[a-z]+", rest)) else value


_SIGNS = ("minus", "negative", "plus", "positive")
_SCALED = (*_SCALES, *_PARTS, "percent", "per cent")
# A word that is neither a command nor an environment of LaTeX.
_BARE = re.compile(r"(?<![\\a-z])(?<!begin\{)(?<!end\{)[a-z]{2,}")


def _is_name(rest: str, letter: str) -> bool:
    """Return whether a letter before `rest` is a variable's name ("x equals 3") or the article."""
    return letter == "a" or rest.startswith(("is ", "equals ", "= "))


def _product(text: str) -> str | None:
    """Return mathematics whose letters are factors, without the words of a unit after it.

    None if there are other words of four letters or more.
    """
    units = re.fullmatch(r"(.*[0-9})])((?: +[a-z]{2,})+)", text)
    if units and not _BARE.search(units[1]) and not _CHANGES & set(_BARE.findall(units[2])):
        return units[1]
    words = set(_BARE.findall(text))
    if words & _CHANGES or any(len(word) > 3 for word in words):
        return None
    return text


# ---- marks --------------------------------------------------------------------------------------

_SIGN = str.maketrans({"\u2212": "-", "\uff0d": "-", "\ufe63": "-", "\u2010": "-", "\u2011": "-"})
_MARKS = {
    **{"\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u00f7": "/", "\u03c0": "\\pi "},
    **{"\u00b2": "^{2}", "\u00b3": "^{3}", "\u00b0": "^\\circ ", "\u00a0": " ", "\u202f": " "},
    **{"\u20ac": "", "\u00a3": "", "\u00a5": "", "\\$": "", "\\,": "", "\\!": "", "\\;": " "},
    **{"~": " ", "\\quad": " ", "\\displaystyle": "", "\\dfrac": "\\frac"},
    **{"\\tfrac": "\\frac", "\\cfrac": "\\frac"},
}
_FRACTIONS = {
    **{"\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}"},
    **{"\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}"},
}
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|tt)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_STYLED = re.compile(r"(?<![^\s(:])(\*\*|__|`|\*|_)(?=\S)([^*`_]+)(?<=\S)\1(?![^\s).,:;!?])")
_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,4})(?![\w.])")
_MIXED = re.compile(r"([-+]?)([0-9]+) +([0-9]+/[0-9]+)")
_COMMANDS = set(
    "frac sqrt pi infty cdot times div pm binom left right begin end log ln sin cos tan cot sec "
    "csc arcsin arccos arctan sinh cosh tanh exp cup cap in leq geq le ge lt gt circ degree "
    "mathbb alpha beta gamma delta epsilon theta lambda mu nu phi psi omega rho sigma tau overline "
    "setminus lfloor rfloor lceil rceil lvert rvert vert".split()
)
_KNOWN = re.compile(r"[A-Za-z0-9\s+\-*/^_=<>(){}\[\],.!|:%'\\&]*")
# Signs that the value is another, or only approximate: "x != 5", "<5", "\neq 5", "0.333...".
_REFUSED = re.compile(
    r"//|%\s*\\?%|[0-9]_|[0-9]\s*\.\s+[0-9]|[0-9]\s+\.[0-9]|[0-9]\s*\\in\b|"
    r"!=|<>|=/=|\.\.|(?<=\d),$|:\d|\d\s+\d|^\s*(?:[<>]|\\(?:leq?|geq?|lt|gt|leqslant|geqslant)\b)"
    r"|(?:[-+*/^=_<>&|'({\[]|\\(?:cdot|times|div|pm))\s*$|^\s*\\?%|[0-9]'|[0-9]\s*\|\s*[0-9]"
    r"|\\(?:ne|neq|not|neg|lnot|approx|sim|simeq|cong|ldots|cdots|dots|mp|nless|ngtr)(?![a-zA-Z])"
)


def extract_math(text: str) -> str | None:
    """Return an answer as mathematics without words; None if it cannot be parsed as a whole."""
    text = " ".join(text.translate(_SIGN).split())
    if re.match("[\u2013\u2014] ?[0-9]", text):  # a dash as a minus; between numbers it is a range
        text = f"-{text[1:]}"
    if re.fullmatch(f"-?[{''.join(_FRACTIONS)}]", text):
        return text.translate(str.maketrans(_FRACTIONS))
    if text.startswith("~") or "~~" in text:  # "about", and struck-out text
        return None
    text = re.sub(r"(?<!\\)\\ ", " ", text)
    for mark, meaning in _MARKS.items():
        text = text.replace(mark, meaning)
    text = re.sub(r"^#+ +", "", text)
    text = _STYLED.sub(r"\2", text)
    if "\\boxed" in text or "\\fbox" in text:
        return _boxed(text)
    text = _TEXT.sub(r" \1 ", text)
    text = re.sub(r"\\[()\[\]]", " ", text)
    if text.count("$") == 1 and not re.search(r"\$ ?[-+]?[.0-9]", text):
        return None
    text = " ".join(text.replace("$", "").split()).replace(" ^", "^")
    text = _STYLED.sub(r"\2", text).replace("**", "^")
    text = re.sub(r"(?<=[\w)}])[.;,]$", "", re.sub(r"(?<=[a-z]{2})!$", "", text)).lstrip("= ")
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return f"{mixed[1]}({mixed[2]}+{mixed[3]})"
    text = re.sub(r"\u221a ?([0-9]+|\([^()]*\)|[a-z])", r"\\sqrt{\1}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _SCIENTIFIC.sub(r"(\1)*10^{\2}", text)
    several = re.fullmatch(r"([^a-zA-Z]+) (?:or|and) ([^a-zA-Z]+)", text)
    if several:
        text = f"{several[1]},{several[2]}"
    if text.count("{") != text.count("}"):
        return None
    if set(re.findall(r"\\([a-zA-Z]+)", text)) - _COMMANDS and text != "\\emptyset":
        return None
    if not text or not _KNOWN.fullmatch(text) or _REFUSED.search(text):
        return None
    if not _BARE.search(text.lower()):
        return text
    text = re.sub(r"(?<![\\a-zA-Z])pi\b", r"\\pi", text)
    if not _BARE.search(text.lower()):
        return text
    worded = _WORDED.fullmatch(text)
    if worded:
        before, after = text[: worded.start(1)].lower(), text[worded.end(1) :].lower()
        if not (set(_BARE.findall(before)) - _LEAD or set(_BARE.findall(after)) & _CHANGES):
            return worded[1] + (worded[2] or "")
    clause = _CLAUSE.match(text.lower())
    if clause:
        if _CHANGES - {"is", "equals"} & set(_BARE.findall(clause[0])):
            return None
        text = text[clause.end() :]
    words = _parse_words(text.lower())
    return text if words == text.lower() else words  # letters of mathematics keep their case


def _boxed(text: str) -> str | None:
    """Return the mathematics of the last box, if it is closed and nothing around it changes it."""
    boxes, at = [], 0
    while found := _BOX.search(text, at):
        start, depth, at = found.end(), 0, found.end()
        while at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
            if depth <= 0:
                break
        if depth or text[start : start + 1] != "{":
            return None
        boxes.append((found.start(), at, text[start + 1 : at - 1]))
    start, end, inside = boxes[-1]
    around = [re.split(r"[.:;,]", text[:start])[-1], text[end:]]
    if len(boxes) > 1:
        between = text[boxes[-2][1] : start].strip(" $,")
        if between in ("", "and", "or"):
            inside, around[0] = f"{boxes[-2][2]} and {inside}", text[: boxes[-2][0]]
    for part in around:
        part = _BOX.sub("", part).replace("$", "").replace("\\%", "%")
        if _CHANGES - _LEAD & set(re.findall("[a-z]+", part.lower())):
            return None
    before, after = (part.replace("$", " ").strip() for part in around)
    if re.search(r"[0-9]$|[-+*/^<>~\u2013\u2248\u2260%']$|\\[a-z]+$", before) or re.match(
        r"[-+*/^<>!%?]|n't|\S*[0-9]", after
    ):
        return None
    return extract_math(inside)


# ---- comparison ---------------------------------------------------------------------------------


def expressions(text: str) -> list[Any]:
    """Return the mathematics that math-verify parses in an answer; [] if it cannot be parsed."""
    from math_verify import parse

    mathematics = extract_math(text)
    if mathematics is None:
        return []
    return parse(f"${mathematics}$", fallback_mode="no_fallback", parsing_timeout=0)


def compare(right: str, answer: str) -> dict[str, Any]:
    """Compare two answers.

    Returns "readable", whether `answer` is mathematics, and "equal", whether it is equivalent to
    `right`.
    """
    from math_verify import verify

    theirs = expressions(answer)
    ours = expressions(right) if theirs else []
    both = f"{right} {answer}".lower()
    percent = any(word in both for word in ("%", "percent", "per cent"))
    tolerance = ROUNDED if re.search(r"\.[0-9]", both) else EXACT
    equal = _is_value(right, answer) and _is_value(answer, right)
    equal = equal and any(
        verify([a], [b], timeout_seconds=0) and is_close(a, b, tolerance, percent)
        for a in ours
        for b in theirs
    )
    return {"equal": equal, "readable": bool(theirs)}


_NAME = re.compile(r"\\?[A-Za-z]+\s*(?:_\{?\w+\}?)?\s*(?:\([A-Za-z0-9, ]*\))?")


def _is_value(text: str, other: str) -> bool:
    """Return whether an equation gives a value: "x=5" and "2+3=5", not "2x=5".

    Two equations are left to math-verify, which compares them as a whole.
    """
    sides = (extract_math(text) or "").split("=")
    if len(sides) == 1 or "=" in (extract_math(other) or "") or re.search(r"[<>]", text):
        return True
    return all(
        _NAME.fullmatch(side.strip()) or compare(side, sides[-1])["equal"] for side in sides[:-1]
    )


def is_close(a: Any, b: Any, tolerance: float, percent: bool = False) -> bool:
    """Return whether two expressions that math-verify considers equal are close to each other.

    math-verify rounds to a number of decimals, so it considers all tiny numbers equal.

    tolerance: relative difference of two numbers: EXACT, or ROUNDED
    percent: whether 50 and 50% are equal
    """
    from sympy import Eq, Expr, FiniteSet, MatrixBase, Rational

    if a == b:
        return True
    a, b = (x.rhs if isinstance(x, Eq) else x for x in (a, b))
    if isinstance(a, Expr) and isinstance(b, Expr):
        names = sorted(a.free_symbols | b.free_symbols, key=str)
        at = {name: Rational(7 + 4 * i, 3) for i, name in enumerate(names)}
        a, b = (x.xreplace(_fractions(x)).doit().subs(at) for x in (a, b))
        factors = (1, 100, Rational(1, 100)) if percent else (1,)
        return any(_is_near(a * factor, b, tolerance) for factor in factors)
    if isinstance(a, FiniteSet) and isinstance(b, FiniteSet):
        found = all(any(is_close(x, y, tolerance, percent) for y in b) for x in a)
        return found and len(a) == len(b)
    pairs = (list(a), list(b)) if isinstance(a, MatrixBase) else (a.args, b.args)
    return len(pairs[0]) == len(pairs[1]) and all(
        is_close(x, y, tolerance, percent) for x, y in zip(*pairs, strict=True)
    )


def _fractions(x: Any) -> dict[Any, Any]:
    """Return {decimal: fraction} for an expression: a sum of decimals would keep 15 digits."""
    from sympy import Float, Rational

    return {number: Rational(str(number)) for number in x.atoms(Float)}


def _is_near(a: Any, b: Any, tolerance: float) -> bool:
    if a == b:
        return True
    if a.is_zero or b.is_zero:
        return bool((a - b).equals(0))
    difference, size = abs(a.evalf(DIGITS) - b.evalf(DIGITS)), abs(b.evalf(DIGITS))
    return bool(difference <= DECIMALS and difference <= tolerance * size)


def limit_cpu_time(seconds: int) -> None:
    """Let the system end this process after `seconds` more seconds of processor time."""
    set_limit(resource.RLIMIT_CPU, int(time.process_time()) + seconds + 1)


def set_limit(kind: int, most: int) -> None:
    """Set a limit of this process, if the system supports it and allows the value."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> None:
    """Answer lines until the input ends; the first output line says that the worker is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the signal is meant for the run
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other printed text must not mix with the answers
    seconds = int(sys.argv[1])
    compare("1", "1")  # imports the packages
    logging.disable()
    set_limit(resource.RLIMIT_AS, MEMORY)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        limit_cpu_time(seconds)
        try:
            answer = compare(*json.loads(line))
        except Exception as error:  # an answer may make SymPy raise anything
            answer = {"error": type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
