"""The site: the settings table, the library page, the pictures, and a build with strict checks."""

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from cli_commands import ROOT

import ragen_jax
from ragen_jax.config.fields import FIELDS

SITE = ROOT / "docs/site"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(SITE)


def test_every_field_is_in_the_table_with_its_comment():
    from settings_table import config_markdown

    text = config_markdown()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", text, re.M))
    assert rows.keys() == FIELDS.keys()
    assert rows["filter.value"].split(" | ") == [
        "`0.9`",
        "parameter of the strategy; top\\_p: fraction of the variance mass kept; "
        "pairs: their number",
        "a number from 0 to 1000000",
        "`filter.strategy`",
    ]
    assert rows["model.lora.alpha"].split(" | ")[1] == (
        "Train low-rank adapters instead of the model; adapters are scaled by alpha / rank"
    )
    assert rows["mesh.data"].startswith("`-1` | splits rows | ")
    sections = re.findall(r"^## (.*)$", text, re.M)
    assert sections[:3] == ["The run", "model", "env"] and len(sections) == len(set(sections))


def test_comments_of_a_config_file():
    from settings_table import comments

    source = '''
class Inner(Section):
    """Two words,
    folded."""

    f: bool = flag(True)
    g: bool = flag(
        False,
    )  # after


class Part(Section):
    """A section."""

    d: bool = flag(True)
    e: Inner = Inner()


class Config(Section):
    """All."""

    a: int = whole(1, 0, 9)  # behind
    # Two lines
    # above.
    b: tuple[str, ...] = any_of(("x",), "xy")
    c: Part = Part()
'''
    assert comments(source) == {
        "a": "behind",
        "b": "Two lines above.",
        "c": "A section.",
        "c.d": "",
        "c.e": "Two words, folded.",
        "c.e.f": "",
        "c.e.g": "after",
    }


def test_every_public_name_has_its_docstring():
    from api import api_markdown, docstring_markdown

    text = api_markdown()
    names = [*ragen_jax.EXPORTS, *ragen_jax.CALLABLE_MODULES]
    assert re.findall(r"^## (\w+)$", text, re.M) == sorted(names)
    assert "ragen_jax.train(config=None, *, workdir=None," in text
    assert "ragen_jax.gae(reward_BT, value_BT, mask_BT, *, gamma, lam, next_row_B=None)" in text
    assert "- `gamma`: discount per sampled token." in text
    docstring = "What.\n\nArgs:\n  a, b: x\n    goes on.\n\nReturns:\n  y: z.\nRaises:\n  E: bad."
    assert docstring_markdown(docstring).splitlines() == [
        *("What.", "", "", "**Args**", "", "- `a, b`: x", "  goes on.", "  "),
        *("", "**Returns**", "", "y: z.", "", "**Raises**", "", "- `E`: bad."),
    ]


def test_pages_made_from_the_code_are_current():
    from reference import DOCS, MARK, PAGES, render

    assert len(PAGES) == 3
    for name in PAGES:
        page = (DOCS / name).read_text()
        assert MARK in page and page == render(name), "python docs/site/reference.py"


def test_pictures_are_those_that_the_script_draws():
    from pictures import DRAWN, PICTURES

    assert len(DRAWN) == 10
    page = (ROOT / "docs/pictures.md").read_text()
    assert re.findall(r"\(pictures/(\w+)\.svg\)", page) == list(DRAWN)
    assert {path.stem for path in PICTURES.glob("*.svg")} == DRAWN.keys()
    for name, draw in DRAWN.items():
        drawn = draw().svg()
        assert (PICTURES / f"{name}.svg").read_text() == drawn, "python docs/site/pictures.py"
        ElementTree.fromstring(drawn)


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    """The build checks links and anchors as well, and reports broken links."""
    pytest.importorskip("sphinx", reason="pip install ragen_jax[docs]")
    command = (ROOT / "CONTRIBUTING.md").read_text()
    (words,) = re.findall(r"sphinx-build (.*?) build/site", command)
    build = [sys.executable, "-m", "sphinx", *words.split(), str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tutorials = [path.stem for path in (ROOT / "docs/tutorials").glob("*.ipynb")]
    pages = "README", "docs/lab/claims", "benchmarks/NOTES", "docs/environments/own"
    for page in (*pages, *(f"docs/tutorials/{name}" for name in tutorials)):
        assert (tmp_path / f"site/{page}.html").exists()
    settings = (tmp_path / "site/docs/configuration.html").read_text()
    assert all(f">{name}<" in settings for name in FIELDS)
    library = (tmp_path / "site/docs/library.html").read_text()
    assert all(f'id="{name.lower()}"' in library for name in ragen_jax.EXPORTS)
