"""report/fine_tuning.py: the page of a fine-tuning."""

import re
from html.parser import HTMLParser

import pytest

from ragen_jax.report.fine_tuning import render_page, write_page

pytestmark = pytest.mark.fast
ROWS = [
    {"step": 0, "sft/heldout_loss": 1.5, "eval/success": 0.0, "eval/valid_rate": 0.25},
    {"step": 1, "sft/loss": 1.0},
    {"step": 2, "sft/loss": 0.5, "sft/heldout_loss": 0.75, "eval/success": 0.5},
]


class Balance(HTMLParser):
    """Counts tags that are opened but not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_curves_and_checks_are_those_of_the_rows():
    page = render_page("a <run>", ROWS)
    parser = Balance()
    parser.feed(page)
    assert parser.open == [] and "Fine-tuning: a <run>" in parser.text and "<run>" not in page
    lines = [line.split() for line in re.findall(r"points='([^']*)'", page)]
    assert [len(line) for line in lines] == [2, 2, 2, 1]  # loss, held-out; success, valid
    (first, last), (begin, end) = lines[0], lines[1]
    # 1.0 of at most 1.5 nats is two thirds up; 0.5 is one third up.
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in (first, last))
    top = float(begin.split(",")[1])
    bottom = top + 1.5 * (y2 - y1) / 0.5
    assert x2 > x1 and y1 == pytest.approx(bottom - 2 / 3 * (bottom - top), abs=0.2)
    assert float(end.split(",")[1]) == pytest.approx((top + bottom) / 2, abs=0.2)
    assert page.count("<tr>") == 1 + 2  # checks only
    assert "from 0.00 to 0.50 in 2 updates" in page


def test_a_run_without_rows_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no finished update yet"):
        write_page(tmp_path)


def test_a_run_before_its_first_check_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sft/loss": 1.0}\n')
    assert "<svg" in write_page(tmp_path).read_text()
