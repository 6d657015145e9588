"""The page of all claims of RAGEN-2, with verdicts from the completed experiments.

It is written from stored rows, without any run. Each verdict has a p-value, and a p-value that is
corrected for the number of tested claims on the page (Holm).
"""

from pathlib import Path

from ragen_jax.configs.experiments import EXPERIMENTS, OTHER_CLAIMS
from ragen_jax.configs.experiments.experiment import RAGEN_2
from ragen_jax.lab.curves import Verdict
from ragen_jax.lab.pages import PAGES
from ragen_jax.lab.recorded import stored_runs
from ragen_jax.lab.statistics import ERROR, holm, p_text
from ragen_jax.storage.atomic_io import atomic_write

DECIDED = ("reproduced", "reversed")


def verdicts(report: Path) -> dict[str, list[Verdict] | None]:
    """Return {experiment: verdicts of its full form, or None if the folder has no rows of it}.

    Only experiments on claims of RAGEN-2; referee.py has the others.
    """
    return {
        name: PAGES[name].verdicts(experiment, runs)
        if (runs := stored_runs(report, name, experiment))
        else None
        for name, experiment in EXPERIMENTS.items()
        if experiment.paper == RAGEN_2
    }


def write_claims(report: Path) -> str:
    """Write claims.md into the folder of the pages and return its text."""
    found = verdicts(report)
    every = [v for page_verdicts in found.values() for v in page_verdicts or ()]
    adjusted = holm({i: v.p for i, v in enumerate(every) if v.p is not None})
    decided = [i for i, v in enumerate(every) if v.verdict in DECIDED]
    surviving = [i for i in decided if adjusted[i] < ERROR]
    lines = [
        "# The claims of RAGEN-2",
        "",
        "The verdicts of the laboratory's experiments on the claims of the paper. Both "
        "`python -m ragen_jax.lab run NAME` and, without any run, `python -m ragen_jax.lab pages` "
        "write this page from the stored rows of all experiments. Each experiment's page states "
        "the rule of its verdicts. *Undecided*: the interval includes both answers, which is no "
        "evidence against a claim. *Too few settings*, *not testable*, *cannot be judged*: these "
        "runs cannot decide the claim.",
        "",
        f"Each verdict has a confidence of {100 * (1 - ERROR):.0f} % for its claim alone. The last "
        f"column has p-values with Holm's correction for the {len(adjusted)} claims tested on this "
        f"page. Of the {len(decided)} decided verdicts, {len(surviving)} remain decided with the "
        f"correction (below {ERROR:g}, marked †).",
        "",
        "| claim | source | experiment | verdict | result | p | p (Holm) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    number = 0
    for name, page_verdicts in found.items():
        for v in page_verdicts or ():
            tested = number in adjusted
            mark = " †" if number in surviving else ""
            cells = (
                *(v.claim, v.source, f"[{name}]({name}.md)", f"**{v.verdict}**{mark}", v.figures),
                *(p_text(v.p) if tested else "", p_text(adjusted[number]) if tested else ""),
            )
            lines.append("| " + " | ".join(cells) + " |")
            number += 1
    for source, claim, word, reason in OTHER_CLAIMS:
        lines.append(f"| {claim} | {source} | | **{word}** | {reason} | | |")
    missing = [f"`{name}`" for name, page_verdicts in found.items() if page_verdicts is None]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    text = "\n".join(lines) + "\n"
    atomic_write(report / "claims.md", text)
    return text
