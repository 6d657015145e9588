"""The committed pages match their stored rows, and one command writes them all."""

import shutil
from pathlib import Path

import pytest
from cli_commands import call

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import RAGEN_2
from ragen_jax.lab import referee
from ragen_jax.lab.claims import verdicts
from ragen_jax.lab.statistics import ERROR

pytestmark = pytest.mark.fast
DOCS = Path(__file__).parents[2] / "docs/lab"


def pages(report, *words):
    """(exit code, stdout, stderr) of `python -m ragen_jax.lab pages`."""
    return call("ragen_jax.lab", "pages", f"--report={report}", *words)


@pytest.mark.long
def test_the_committed_pages_are_what_their_rows_make(tmp_path):
    pytest.importorskip("matplotlib")
    for path in DOCS.glob("*.jsonl"):
        shutil.copy(path, tmp_path)
    code, out, err = pages(tmp_path)
    assert code == 0, err
    assert f"written: {tmp_path / 'claims.md'}" in out
    made = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    run = [n for n, x in EXPERIMENTS.items() if (DOCS / f"{x.rows or n}.jsonl").exists()]
    assert set(made) == {f"{name}.md" for name in (*run, "claims", "referee")}
    missing = [f"`{n}`" for n, x in EXPERIMENTS.items() if n not in run and x.paper == RAGEN_2]
    assert not missing or made["claims.md"].endswith(f"Not run yet: {', '.join(missing)}.\n")
    for name, text in made.items():
        assert text == (DOCS / name).read_text(), f"{name}: run python -m ragen_jax.lab pages"
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in run)


def test_a_folder_without_rows_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    for words, line in (
        ((), "holds no rows of any experiment"),
        (("more",), "unexpected argument 'more' after `pages`"),
    ):
        code, _, err = pages(tmp_path, *words)
        assert code == 2 and line in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
@pytest.mark.parametrize("page, count", [(verdicts, 59), (referee.verdicts, 118)])
def test_every_verdict_is_one_of_the_words_and_agrees_with_its_p(page, count):
    found = [v for of_page in page(DOCS).values() for v in of_page or ()]
    for v in found:
        if v.p is None:
            assert v.verdict.startswith(("too few", "not testable", "cannot be judged"))
        else:
            assert v.verdict in ("reproduced", "reversed", "undecided")
            assert (v.p < ERROR) == (v.verdict != "undecided"), v
    assert len(found) == count
