"""clean_text.py: text that every file accepts and no terminal reads as a command."""

import asyncio
import json

import pytest
from hostile_texts import HOSTILE, raw_characters

from ragen_jax.core.clean_text import (
    MARKS,
    MOST_MESSAGE,
    MOST_TRACEBACK,
    clean_text,
    describe_error,
    format_error,
    last_line,
    load_json,
    one_line,
    printable,
)

pytestmark = pytest.mark.fast


def test_there_are_enough_hostile_texts():
    assert len(HOSTILE) >= 60 and len(set(HOSTILE.values())) == len(HOSTILE)


@pytest.mark.medium
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_become_text_that_can_be_written_and_shown(name):
    text = HOSTILE[name]
    clean = clean_text(text)
    assert clean.encode().decode() == clean == clean_text(clean)
    assert "\ufffd" in clean or clean == text or name == "pair of surrogates"
    shown = printable(text)
    assert not raw_characters(shown) and not raw_characters(one_line(text))
    assert "\n" not in one_line(text) and len(one_line(text)) < 50_000
    assert printable(shown) == shown
    error = describe_error(ValueError(text))
    assert error.encode() and len(error.splitlines()) == 1 and len(error) <= MOST_MESSAGE


def test_text_keeps_its_meaning():
    whole = "推理\tab\n\u3000\x00\x1b\u202e\U0001f600 é"
    assert clean_text(whole) == whole
    assert clean_text("\ud83d\ude00\ud83d!") == "\U0001f600\ufffd!"
    assert printable("推理\tab\n\u3000\U0001f600 é\xa0") == "推理\tab\n\u3000\U0001f600 é\xa0"
    assert printable("\x1b[31m\u202e\U000e0041\x00\x9b") == "\\x1b[31m\\u202e\\U000e0041\\x00\\x9b"
    assert printable("a" + "\u0301" * 100) == "a" + "\u0301" * MARKS


def test_a_str_of_another_class_is_only_text():
    class Text(str):
        def encode(self, *args):
            raise RuntimeError("no")

        __str__ = isascii = isprintable = replace = encode

    for clean in (clean_text, printable, one_line):
        assert clean(Text("a\ud800")) in ("a\ufffd", "a\\ud800")
        assert type(clean(Text("a"))) is str


@pytest.mark.medium
@pytest.mark.parametrize("name", HOSTILE)
def test_json_is_read_with_clean_texts(name):
    text = HOSTILE[name]
    value = {text: [text, {"a": text}], "b": 1}
    for data in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        for given in (data, data.encode(errors="surrogatepass")):
            found = load_json(given)
            assert found == {clean_text(text): [clean_text(text), {"a": clean_text(text)}], "b": 1}


class Mute(Exception):
    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__


class NoText(BaseException):
    def __str__(self):
        return 3


class Meta(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


class Nameless(Exception, metaclass=Meta):
    pass


ERRORS = [
    (Mute(), "Mute: (its message cannot be shown: SystemExit)"),
    (NoText(), "NoText: (its message cannot be shown: TypeError)"),
    (Nameless("a"), "Nameless: a"),
    (asyncio.CancelledError(), "CancelledError:"),
    (ValueError("a\n\u2028b"), "ValueError: a b"),
    (ValueError("\ud800"), "ValueError: \ufffd"),
    (SyntaxError("a", ("f", "x", "y", 3)), None),
    (ExceptionGroup("many", [Mute(), ValueError("\ud800")]), None),
]


@pytest.mark.parametrize(("error", "said"), ERRORS, ids=range(len(ERRORS)))
def test_an_error_is_described_whatever_it_is(error, said):
    try:
        raise error
    except BaseException as raised:
        assert said is None or describe_error(raised) == said
        text = format_error(raised)
    assert text.encode() and last_line(text) == describe_error(error)


def test_a_traceback_is_of_limited_length():
    try:
        raise ValueError("x" * 10_000_000)
    except ValueError as error:
        text = format_error(error)
    assert len(text) <= MOST_TRACEBACK + MOST_MESSAGE + 4
    assert last_line(text) == f"ValueError: {'x' * (MOST_MESSAGE - 12)}"
    assert last_line("") == last_line(" \n ") == ""
