"""The page of all claims of RAGEN-2, with the verdicts of the completed experiments.

It is written from the stored rows; nothing is run. Each verdict has a p-value, and a p-value
corrected for all tested claims on the page (Holm).
"""

from pathlib import Path

from ragen_jax.configs.experiments import EXPERIMENTS, OTHERWISE
from ragen_jax.lab.curves import Verdict
from ragen_jax.lab.pages import PAGES
from ragen_jax.lab.recorded import read_runs
from ragen_jax.lab.statistics import ERROR, holm
from ragen_jax.storage.atomic_io import atomic_write

DECIDED = ("reproduced", "reversed")


def _p(value: float | None) -> str:
    """Format a p-value."""
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def verdicts(report: Path) -> dict[str, list[Verdict] | None]:
    """Return {experiment: verdicts of its full form}; None if the folder has no rows of it."""
    return {
        name: PAGES[name].verdicts(experiment, runs)
        if (runs := read_runs(report / f"{name}.jsonl"))
        else None
        for name, experiment in EXPERIMENTS.items()
    }


def write_claims(report: Path) -> str:
    """Write claims.md into the folder of the pages and return its text."""
    found = verdicts(report)
    every = [v for of_page in found.values() for v in of_page or ()]
    adjusted = holm({i: v.p for i, v in enumerate(every) if v.p is not None})
    decided = [i for i, v in enumerate(every) if v.verdict in DECIDED]
    survive = [i for i in decided if adjusted[i] < ERROR]
    lines = [
        "# The claims of RAGEN-2",
        "",
        "What the experiments of the laboratory say, from the stored rows of each page; written "
        "by every `python -m ragen_jax.lab run NAME`, and without running anything by "
        "`python -m ragen_jax.lab pages`. The rules are on the pages and in the code that writes "
        "them. Undecided: the interval includes both answers, no evidence against a claim. "
        "Too few settings, not testable, cannot be judged: the runs cannot answer.",
        "",
        f"Each verdict is at {1 - ERROR:.0%} for its claim alone. The last column is the p-value "
        f"by Holm's correction for the {len(adjusted)} claims tested on this page: of the "
        f"{len(decided)} decided verdicts, {len(survive)} hold for all claims together (below "
        f"{ERROR:g}, marked †).",
        "",
        "| claim | where | experiment | verdict | figures | p | p (Holm) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    number = 0
    for name, of_page in found.items():
        for v in of_page or ():
            tested = number in adjusted
            mark = " †" if number in survive else ""
            cells = (
                *(v.claim, v.source, f"[{name}]({name}.md)", f"**{v.verdict}**{mark}", v.figures),
                *(_p(v.p) if tested else "", _p(adjusted[number]) if tested else ""),
            )
            lines.append("| " + " | ".join(cells) + " |")
            number += 1
    for where, what, word, why in OTHERWISE:
        lines.append(f"| {what} | {where} | | **{word}** | {why} | | |")
    missing = [f"`{name}`" for name, of_page in found.items() if of_page is None]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    text = "\n".join(lines) + "\n"
    atomic_write(report / "claims.md", text)
    return text
