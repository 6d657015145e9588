"""The day that a chat template writes into prompts.

Some templates (Llama 3.2's) call `strftime_now`, for which transformers reads the clock. Prompts
would then depend on the day on which they are rendered, so every rendering here uses a fixed day.
Names of months and days are always English, regardless of the process's locale.
"""

import copy
import datetime
import itertools
from typing import TYPE_CHECKING

import jinja2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

AUTO = "auto"  # value of config.model.date that means the day on which the run starts
CLOCK = "strftime_now"  # the function that templates call
NO_DAY = datetime.date(2024, 7, 26)  # the day that Llama 3.2's template writes without a clock
_MONTHS = "January February March April May June July August September October November December"
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"


def is_day(text: str) -> bool:
    """Return whether a text is a date in the form YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def day_of(date: str) -> str | None:
    """Return the day of config.model.date; None if it is open, as in a run of the tiny agent."""
    return None if date == AUTO else date


def with_date(
    tokenizer: "PreTrainedTokenizerFast", date: str | None = None
) -> "PreTrainedTokenizerFast":
    """Return the tokenizer with a chat template whose clock always shows midnight of `date`.

    Args:
      tokenizer: not changed.
      date: YYYY-MM-DD; None: NO_DAY.

    Returns:
      A shallow copy, or `tokenizer` if its template does not ask for the date.

    Raises:
      ValueError: an invalid date, or a template that makes random choices.
    """
    if date is not None and not is_day(date):
        raise ValueError(f"the date is {date!r}; it must have the form YYYY-MM-DD")
    given = tokenizer.chat_template
    # A tokenizer with several templates has a dict from their names.
    texts = given if isinstance(given, dict) else {} if given is None else {"default": given}
    for text in texts.values():
        _refuse_chance(text)
    if not any(CLOCK in text for text in texts.values()):
        return tokenizer
    day = NO_DAY if date is None else datetime.date.fromisoformat(date)
    dated = {name: f"{_clock_macro(day)}\n{text}" for name, text in texts.items()}
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = dated if isinstance(given, dict) else dated["default"]
    return tokenizer


def _clock_macro(day: datetime.date) -> str:
    """Return a one-line Jinja macro that replaces `strftime_now`.

    transformers does not pass a caller's functions to a template, but a macro shadows the global
    function of the same name. The template drops the line break after the macro (trim_blocks), so
    the rendered text is otherwise unchanged.
    """
    replaced = "".join(f"|replace({code!r}, {text!r})" for code, text in _codes(day).items())
    return (
        f"{{% macro {CLOCK}(format) %}}{{% for part in format.split('%%') %}}"
        f"{{{{ '' if loop.first else '%' }}}}{{{{ part{replaced} }}}}"
        "{% endfor %}{% endmacro %}"
    )


def _codes(day: datetime.date) -> dict[str, str]:
    """Return {strftime code: its text} for midnight of a day, in English and UTC."""
    moment = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
    name, month = _DAYS.split()[day.weekday()], _MONTHS.split()[day.month - 1]
    short = f"{day.month:02}/{day.day:02}/{day.year % 100:02}"
    found: dict[str, str] = {"a": name[:3], "A": name, "b": month[:3], "B": month, "h": month[:3]}
    found |= {"c": f"{name[:3]} {month[:3]} {day.day:2} 00:00:00 {day.year}", "D": short}
    found |= {"F": day.isoformat(), "p": "AM", "P": "am", "r": "12:00:00 AM", "R": "00:00"}
    found |= {"T": "00:00:00", "x": short, "X": "00:00:00", "Z": "UTC", "z": "+0000"}
    found |= {"s": str(int(moment.timestamp())), "n": "\n", "t": "\t"}
    found |= {code: moment.strftime(f"%{code}") for code in "CdeGgHIjklmMSuUVwWyYf"}
    plain = {f"%{code}": text for code, text in found.items()}
    # Codes such as "%-d", without leading zeros or spaces.
    bare = {f"%-{code}": (found[code].lstrip("0 ") or "0") for code in "CdeGgHIjklmMSUVWyY"}
    return plain | bare


def _refuse_chance(template: str) -> None:
    """Refuse a template that makes random choices.

    Raises:
      ValueError: the template makes random choices.
    """
    try:
        tokens = [t for t in jinja2.Environment().lex(template) if t[1] != "whitespace"]
    except jinja2.TemplateSyntaxError:
        return  # rendering the template reports the error
    for before, (_, kind, text) in itertools.pairwise([(0, "", ""), *tokens]):
        drawn = text == "random" and before[2] == "|"
        if kind == "name" and (drawn or text == "lipsum"):
            raise ValueError(
                f"the tokenizer's chat template uses {text}, so the same messages would give "
                "different prompts over time; remove it from the template (chat_template.jinja)"
            )
