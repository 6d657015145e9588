"""Links of every Markdown file and notebook lead to a file and a heading, as GitHub shows them."""

import json
import re
import subprocess
from urllib.parse import unquote

import pytest
from cli_commands import ROOT

from benchmarks.pages import read_introduction

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.M)
CODE = re.compile(r"^ *(```|~~~).*?^ *\1|`[^`\n]*`", re.M | re.S)


def pages():
    """Return {path: Markdown text} of all pages that git knows."""
    command = ["git", "ls-files", "*.md", "*.ipynb"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    found = {}
    for name in listed.stdout.split():
        text = (ROOT / name).read_text()
        if name.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
        found[ROOT / name] = text
    return found


def anchors(text):
    """Return the names that GitHub gives to the headings of a page."""
    found = {}
    for heading in HEADING.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = found[name] = found.get(name, -1) + 1
        yield f"{name}-{number}" if number else name
    yield from re.findall(r'<a (?:id|name)="([^"]+)"', text)


def dead_links(pages):
    """Return (page, link) of the links to a file or heading that does not exist."""
    found = []
    for page, text in pages.items():
        for link in LINK.findall(CODE.sub("", text)):
            if re.match(r"[a-z]+:", link):  # another site
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            known = not anchor or target not in pages or anchor in set(anchors(pages[target]))
            if not target.exists() or not known:
                found.append((str(page.relative_to(ROOT)), link))
    return found


def test_every_link_leads_somewhere():
    found = pages()
    names = {str(page.relative_to(ROOT)) for page in found}
    assert {"README.md", "benchmarks/floors.md", "docs/lab/claims.md"} <= names and len(names) > 70
    assert sum(len(LINK.findall(text)) for text in found.values()) > 300
    assert dead_links(found) == []


def test_pages_begin_with_the_introductions_of_the_benchmarks_that_write_them():
    for name, page in (("floors.md", "floors.md"), ("gym_tasks.md", "reasoning_gym.md")):
        text = (ROOT / "docs" / page).read_text()
        assert text.startswith(read_introduction(name)) and "](../docs/" not in text


def test_a_dead_link_is_found():
    page, report = ROOT / "docs/cli.md", ROOT / "docs/report.md"
    text = (
        "[a](nowhere.md) `[b](none.md)` [c](report.md#none) [d](report.md#it-is-1) [e](#f) [](#g)"
    )
    dead = dead_links({page: f"{text}\n\n# G\n", report: "## It is\n\n## `It` is\n"})
    assert dead == [("docs/cli.md", link) for link in ("nowhere.md", "report.md#none", "#f")]
