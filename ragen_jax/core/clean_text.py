"""Text that others wrote: rows of files, observations, results of tools, errors, names of files.

`clean_text` makes it text that every file and tokenizer accepts, where it enters. `printable` makes
it text that no terminal takes for a command, where it is shown. Standard library only.
"""

import json
import re
import traceback
import unicodedata
from typing import Any

MOST_MESSAGE = 500  # characters of an error in one line
MOST_TRACEBACK = 20_000  # characters of a traceback, from its end
MOST_LINE = 4_000  # characters of a line that is shown
MARKS = 8  # combining marks in a row that are shown

_SURROGATES = re.compile("[\ud800-\udfff]")
_MARK = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_COMBINING = re.compile(f"({_MARK}{{{MARKS}}}){_MARK}+")


def clean_text(text: str) -> str:
    """Replace the halves of surrogate pairs, which no file and no tokenizer accepts, by U+FFFD.

    Halves that form a pair become its character. All else stays, control characters included: what
    a policy reads keeps its meaning.
    """
    text = str.__str__(text)  # of a subclass, whose methods may be anything
    if text.isascii() or not _SURROGATES.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def load_json(data: str | bytes, **options: Any) -> Any:
    """Parse JSON, with clean texts.

    Args:
      options: of json.loads.

    Raises:
      ValueError, RecursionError: as json.loads.
    """
    value = json.loads(data, **options)
    if isinstance(data, str):
        suspect = "\\ud" in data or "\\uD" in data or _SURROGATES.search(data) is not None
    else:  # U+D000 to U+DFFF begin with this byte in UTF-8
        suspect = b"\\ud" in data or b"\\uD" in data or b"\xed" in data or b"\x00" in data
    return _clean(value) if suspect else value


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_clean(name): _clean(each) for name, each in value.items()}
    return value


def printable(text: str) -> str:
    """Escape what a terminal would act on or not show, such as `\\x1b`; newlines and tabs stay.

    Escaped are control and format characters (bidirectional overrides, zero-width ones, tags),
    surrogates, and code points that are private or not assigned. Of a flood of combining marks the
    first MARKS stay.
    """
    text = str.__str__(text)
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text if text.isascii() else _COMBINING.sub(r"\1", text)
    return _COMBINING.sub(r"\1", "".join(map(_shown, text)))


def _shown(letter: str) -> str:
    if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode()


def shorten(text: str, most: int = MOST_LINE) -> str:
    """Cut a text to `most` characters, and append how many are missing."""
    missing = len(text) - most
    return text if missing <= 0 else f"{text[:most]}... ({missing} more characters)"


def one_line(text: str, most: int = MOST_LINE) -> str:
    """The words of a text in one printable line, cut at `most` characters."""
    return printable(shorten(" ".join(str.__str__(text).split()), most))


def error_message(error: BaseException) -> str:
    """The kind of an error and its message, clean. If its `__str__` raises, the message says so."""
    return f"{_kind(error)}: {_message(error)}"


def describe_error(error: BaseException) -> str:
    """`error_message` in one line of at most MOST_MESSAGE characters."""
    return " ".join(error_message(error).split())[:MOST_MESSAGE]


def format_error(error: BaseException) -> str:
    """The clean traceback of an error, at most MOST_TRACEBACK characters, which ends with the line
    of `describe_error`."""
    line = describe_error(error)
    try:
        text = clean_text("".join(traceback.format_exception(error))).rstrip()
    except BaseException as raised:  # by what foreign code has made of its exception
        if isinstance(raised, KeyboardInterrupt):
            raise
        text = "(no traceback: formatting it failed)"
    if len(text) > MOST_TRACEBACK:
        text = f"...{text[-MOST_TRACEBACK:]}"
    return text if text.split("\n")[-1] == line else f"{text}\n{line}"


def last_line(text: str) -> str:
    """The last line of a text that is not empty; "" of an empty text."""
    return text.strip().rpartition("\n")[2]


def _kind(error: BaseException) -> str:
    name = type.__dict__["__name__"].__get__(type(error))  # whatever a metaclass says
    return clean_text(name)


def _message(error: BaseException) -> str:
    try:
        return clean_text(str(error))
    except BaseException as raised:  # from a foreign __str__, which may raise anything
        if isinstance(raised, KeyboardInterrupt):
            raise
        return f"(its message cannot be shown: {_kind(raised)})"
