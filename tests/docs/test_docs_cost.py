"""The time of the main command: one measured figure, repeated by every page that states it."""

import re

import pytest
from cli_commands import ROOT

pytestmark = pytest.mark.fast
PAGES = ("README.md", "docs/quick_start.md", "docs/results/index.md", "configs/sokoban.py")


def measured():
    """The figure in the measurement log, such as "4 to 8"."""
    notes = (ROOT / "benchmarks/NOTES.md").read_text()
    (section,) = re.findall(r"### Time of the main command\n(.*?)(?=\n##)", notes, re.S)
    (figure,) = re.findall(r"(\d+ to \d+)\s+minutes on two free CPU cores", section)
    return figure


@pytest.mark.parametrize("page", PAGES)
def test_a_page_states_the_measured_time(page):
    text = (ROOT / page).read_text()
    found = re.findall(r"(\d+ to \d+) min(?:utes)? (?:on two free CPU cores|in all)", text)
    assert found == [measured()]


def test_no_page_of_the_documentation_has_another_time():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for figure in re.findall(r"(\d+ to \d+) minutes on two free", path.read_text()):
            assert figure == measured(), path


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 700
