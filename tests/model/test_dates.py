"""Dates in chat templates: the given date, in English."""

import copy
import datetime
import locale

import numpy as np
import pytest
from chat_families import LLAMA, family

from ragen_jax.model.dates import NO_DAY, _codes, is_day, with_date
from ragen_jax.model.template import parse_chat_template
from ragen_jax.rollout.transcript import _ask

pytestmark = pytest.mark.fast

# Like Llama 3.2's template: it calls strftime_now if it is defined.
DATED = (
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}"
    "{% else %}{% set today = '26 Jul 2024' %}{% endif %}"
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + today }}"
    "{{ '<|eot_id|>' }}"
) + LLAMA.replace("bos_token + ", "")
ASKED = [{"role": "user", "content": "where?"}]


def dated(template=DATED):
    tokenizer = with_template(template)
    return lambda day=None: with_date(tokenizer, day).apply_chat_template(ASKED, tokenize=False)


def with_template(template):
    tokenizer = copy.deepcopy(family("llama").tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.medium
@pytest.mark.parametrize("date", [None, "2025-03-04"])
def test_prompts_are_the_same_on_two_days(on_day, date):
    tokenizer = with_template(DATED)
    found = []
    for day in (25, 26):
        on_day(day)
        template = parse_chat_template(tokenizer, "Rules.", date=date)
        found.append(template.begin("where?"))
        on_day(31 - day)  # a transcript may be rendered on a later day of the run
        shown = (("system", "Rules."), ("user", "where?"))
        assert np.array_equal(_ask(template, shown, "<think>"), found[-1])
        text = tokenizer.decode(found[-1])
        assert ("04 Mar 2025" if date else "26 Jul 2024") in text
    assert np.array_equal(*found)


@pytest.mark.medium
def test_a_day_changes_the_date_alone():
    show = dated()
    assert show("2026-11-25").replace("25 Nov 2026", "01 Feb 2027") == show("2027-02-01")
    assert show() == show(NO_DAY.isoformat()) != show("2026-11-25")


@pytest.mark.medium
def test_a_template_without_a_date_is_left_as_it_is():
    tokenizer = family("llama").tokenizer
    assert with_date(tokenizer, "2026-11-25") is tokenizer
    changed = with_template(DATED)
    assert with_date(changed, "2026-11-25") is not changed and changed.chat_template == DATED
    several = with_template({"default": DATED, "tool_use": "{{ strftime_now('%Y') }}"})
    found = with_date(several, "2026-11-25")
    assert found.apply_chat_template(ASKED, tokenize=False, tools=[{"name": "x"}]) == "2026"
    assert several.chat_template["default"] == DATED


@pytest.mark.medium
@pytest.mark.parametrize("start", ["\n  ", "  ", "", "{# about #}\n", "\n\n{%- if 1 %}{% endif %}"])
def test_the_rest_of_a_template_is_rendered_as_before(start):
    plain = with_template(start + "a {{ '%' }}\n  {% if true %}\n b\n{% endif %}")
    text = plain.apply_chat_template(ASKED, tokenize=False)
    asking = dated(plain.chat_template + "{% if false %}{{ strftime_now('%d') }}{% endif %}")
    assert asking("2026-11-25") == text


@pytest.mark.medium
def test_the_codes_are_those_of_strftime_in_english():
    """In the C locale, which is Python's default."""
    assert locale.setlocale(locale.LC_TIME) == "C"
    first = datetime.datetime(2024, 2, 25, tzinfo=datetime.UTC)
    for number in range(400):
        moment = first + datetime.timedelta(days=number)
        for code, text in _codes(moment.date()).items():
            assert text == moment.strftime(code), (code, moment)
    show = dated("{{ strftime_now('%A, %-d %B %%d 100%% %Y') }}{{ strftime_now('%m')|int + 1 }}")
    assert show("2026-03-04") == "Wednesday, 4 March %d 100% 20264"
    assert dated("{% macro f() %}{{ strftime_now('%y') }}{% endmacro %}{{ f() }}")() == "24"


def test_names_are_english_in_every_locale():
    """Checked in the locales that this machine has; strftime itself depends on the locale."""
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8"):
        try:
            before = locale.setlocale(locale.LC_TIME)
            locale.setlocale(locale.LC_TIME, name)
        except locale.Error:
            continue
        try:
            assert dated("{{ strftime_now('%A %B %c') }}")("2026-03-04") == (
                "Wednesday March Wed Mar  4 00:00:00 2026"
            )
        finally:
            locale.setlocale(locale.LC_TIME, before)


@pytest.mark.parametrize("text", ["2026-2-3", "20260203", "2026-02-30", "today", "2026-W06-2"])
def test_what_is_no_day_is_refused(text):
    assert not is_day(text) and is_day("2026-02-03")
    with pytest.raises(ValueError, match=f"the date is '{text}'; it must have the form YYYY-MM-DD"):
        parse_chat_template(with_template(DATED), date=text)


def test_a_template_that_makes_random_choices_is_refused():
    for template in ("{{ ['a', 'b'] | random }}", "{{ lipsum(n=1) }}", "{{ x|random|trim }}"):
        with pytest.raises(ValueError, match="chat template uses (random|lipsum), so the same"):
            parse_chat_template(with_template(LLAMA + template))
    for template in (
        "{# |random #} a | random, lipsum()",
        "{% set x = {'random': 1} %}{{ x.random }}",
    ):
        parse_chat_template(with_template(template + LLAMA))
