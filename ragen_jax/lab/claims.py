"""The page of all claims of RAGEN-2: what the experiments that have been run say of each.

Written from the rows beside their pages; nothing is run.
"""

from pathlib import Path

from ragen_jax.configs.experiments import EXPERIMENTS, OTHERWISE
from ragen_jax.lab.curves import Verdict
from ragen_jax.lab.pages import PAGES
from ragen_jax.lab.recorded import read_runs
from ragen_jax.whole import write_whole


def verdicts(report: Path) -> dict[str, list[Verdict] | None]:
    """Experiment -> what its full form says of claims; None: it has no rows in the folder."""
    return {
        name: PAGES[name].verdicts(experiment, runs)
        if (runs := read_runs(report / f"{name}.jsonl"))
        else None
        for name, experiment in EXPERIMENTS.items()
    }


def write_claims(report: Path) -> str:
    """Writes claims.md into the folder of the pages; returns its text."""
    found = verdicts(report)
    lines = [
        "# The claims of RAGEN-2",
        "",
        "What the experiments of the laboratory say, from the rows beside their pages; written "
        "anew by every `python -m ragen_jax.lab run NAME`. The rules are on the pages and in the "
        "code that writes them. Undecided: an interval holds both answers.",
        "",
        "| claim | where | experiment | verdict | figures |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, of_page in found.items():
        for v in of_page or ():
            cells = (v.claim, v.source, f"[{name}]({name}.md)", f"**{v.verdict}**", v.figures)
            lines.append("| " + " | ".join(cells) + " |")
    for where, what, word, why in OTHERWISE:
        lines.append(f"| {what} | {where} | | **{word}** | {why} |")
    missing = [f"`{name}`" for name, of_page in found.items() if of_page is None]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    text = "\n".join(lines) + "\n"
    write_whole(report / "claims.md", text)
    return text
