"""Clean text from outside: rows of files, observations, tool results, errors, file names.

`clean_text` is applied where text enters: every file and tokenizer accepts its result. `printable`
is applied where text is shown: no terminal interprets its result. Standard library only.
"""

import json
import re
import traceback
import unicodedata
from typing import Any

MOST_MESSAGE = 500  # characters of an error in one line
MOST_TRACEBACK = 20_000  # characters of a traceback, from its end
MOST_LINE = 4_000  # characters of a line that is shown
MARKS = 8  # the most consecutive combining marks that are shown

_SURROGATES = re.compile("[\ud800-\udfff]")
_MARK = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_COMBINING = re.compile(f"({_MARK}{{{MARKS}}}){_MARK}+")


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no file and no tokenizer accepts, by U+FFFD.

    Two surrogates that form a pair become their character. Everything else stays, control
    characters included, so that the text a policy reads keeps its meaning.
    """
    text = str.__str__(text)  # a subclass may override any method
    if text.isascii() or not _SURROGATES.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def load_json(data: str | bytes, **options: Any) -> Any:
    """Parse JSON and clean its strings.

    Args:
      options: keyword arguments for json.loads.

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
    """Escape characters that a terminal would interpret or hide; keep newlines and tabs.

    For example, the escape character becomes `\\x1b`. This covers control and format characters
    (bidirectional overrides, zero-width characters, tags), surrogates, and private or unassigned
    code points. At most MARKS consecutive combining marks are kept.
    """
    text = str.__str__(text)
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text if text.isascii() else _COMBINING.sub(r"\1", text)
    return _COMBINING.sub(r"\1", "".join(map(_escape, text)))


def _escape(letter: str) -> str:
    if letter.isprintable() or letter in "\n\t" or unicodedata.category(letter) == "Zs":
        return letter
    return letter.encode("unicode_escape").decode()


def shorten(text: str, most: int = MOST_LINE) -> str:
    """Cut a text to `most` characters, and append how many are missing."""
    missing = len(text) - most
    return text if missing <= 0 else f"{text[:most]}... ({missing} more characters)"


def one_line(text: str, most: int = MOST_LINE) -> str:
    """Return the words of a text as one printable line, cut at `most` characters."""
    return printable(shorten(" ".join(str.__str__(text).split()), most))


def error_message(error: BaseException) -> str:
    """Return an error's class name and clean message, or a note if its `__str__` raises."""
    return f"{_kind(error)}: {_message(error)}"


def describe_error(error: BaseException) -> str:
    """Return `error_message` as one line of at most MOST_MESSAGE characters."""
    return " ".join(error_message(error).split())[:MOST_MESSAGE]


def format_error(error: BaseException) -> str:
    """Return the clean traceback of an error, at most MOST_TRACEBACK characters.

    It ends with the line of `describe_error`.
    """
    line = describe_error(error)
    try:
        text = clean_text("".join(traceback.format_exception(error))).rstrip()
    except BaseException as raised:  # the exception's class may be broken
        if isinstance(raised, KeyboardInterrupt):
            raise
        text = "(no traceback: formatting it failed)"
    if len(text) > MOST_TRACEBACK:
        text = f"...{text[-MOST_TRACEBACK:]}"
    return text if text.split("\n")[-1] == line else f"{text}\n{line}"


def last_line(text: str) -> str:
    """Return the last nonempty line of a text; "" if the text is empty."""
    return text.strip().rpartition("\n")[2]


def _kind(error: BaseException) -> str:
    name = type.__dict__["__name__"].__get__(type(error))  # bypasses any metaclass
    return clean_text(name)


def _message(error: BaseException) -> str:
    try:
        return clean_text(str(error))
    except BaseException as raised:  # from a foreign __str__, which may raise anything
        if isinstance(raised, KeyboardInterrupt):
            raise
        return f"(its message cannot be shown: {_kind(raised)})"
