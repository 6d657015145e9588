"""docs/scoring.ipynb runs from top to bottom, and finds what its text says."""

import re

import pytest
from command_line import ROOT

NOTEBOOK = ROOT / "docs/scoring.ipynb"


def printed(cells):
    """What each code cell has printed."""
    return [
        "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")
        for cell in cells
        if cell.cell_type == "code"
    ]


@pytest.mark.long
def test_the_notebook_runs(agent, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="pip install ragen_jax[docs]")
    nbclient = pytest.importorskip("nbclient", reason="pip install ragen_jax[docs]")
    # Its agent is that of the tests.
    (tmp_path / "ragen_jax").symlink_to(agent.directory.parent.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    committed = printed(notebook.cells)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    built, room, looking, template, dealt, arrays = printed(notebook.cells)
    assert "warm start" not in built
    assert room == committed[1] and arrays == committed[-1]
    figures = [dict(re.findall(r"(\w+) +(\S+)", text)) for text in (looking, template, dealt)]
    informed, constant, wrong = ({k: float(v) for k, v in row.items()} for row in figures)
    assert informed["mi_seq"] > 1.5 and informed["retrieval_acc"] >= 0.875
    assert informed["retrieval_p"] < 0.05 < min(constant["retrieval_p"], wrong["retrieval_p"])
    assert constant["mi_seq"] < 0.05 and constant["retrieval_acc"] == 0.125
    assert wrong["mi_seq"] < 0 and wrong["retrieval_acc"] == 0
