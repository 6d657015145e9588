"""The page on claims of other papers, tried on agents whose truth is known.

It is written from stored rows, without any run: a row per verdict of the experiments in REFEREE,
with the same claim on the language model next to it. p-values have Holm's correction over all
verdicts of the page.
"""

from pathlib import Path

from ragen_jax.configs.experiments import (
    EXPERIMENTS,
    NOT_TO_CONCLUDE,
    REFEREE,
    Experiment,
)
from ragen_jax.lab.curves import Verdict
from ragen_jax.lab.pages import PAGES
from ragen_jax.lab.recorded import stored_runs
from ragen_jax.lab.statistics import ERROR, holm, p_text
from ragen_jax.storage.atomic_io import atomic_write

DECIDED = ("reproduced", "reversed")
NOT_RUN = "not run"


def verdicts(report: Path, suffix: str = "") -> dict[str, list[Verdict] | None]:
    """Return {experiment: verdicts, or None if the folder has no rows of it}.

    Args:
      suffix: "_quick" for the rows of short forms.
    """
    names = [name for pair in REFEREE.items() for name in pair if name]
    found: dict[str, list[Verdict] | None] = {}
    for name in names:
        runs = stored_runs(report, name, EXPERIMENTS[name], suffix)
        found[name] = PAGES[name].verdicts(EXPERIMENTS[name], runs) if runs else None
    return found


def command(name: str, experiment: Experiment, count: int) -> str:
    """Return the command of an experiment, with its number of stored runs and machine time."""
    if experiment.rows:
        return f"`lab pages` (rows of [{experiment.rows}]({experiment.rows}.md))"
    cores = "one core" if experiment.cores == 1 else f"{experiment.cores} cores"
    return f"`lab run {name}`: {count} runs of {experiment.minutes:.2g} min on {cores}"


def write_referee(report: Path, suffix: str = "") -> str:
    """Write referee.md into the folder of the pages and return its text.

    Args:
      suffix: "_quick" to write referee_quick.md, from the rows of short forms.
    """
    found = verdicts(report, suffix)
    keyed = {(name, i): v for name, listed in found.items() for i, v in enumerate(listed or ())}
    numbers = {key: number for number, key in enumerate(keyed)}
    adjusted = holm({numbers[key]: v.p for key, v in keyed.items() if v.p is not None})

    def word(key: tuple[str, int]) -> str:
        """Return the verdict, marked if it remains decided with the correction."""
        v = keyed[key]
        survives = v.verdict in DECIDED and adjusted[numbers[key]] < ERROR
        return f"**{v.verdict}**{' †' if survives else ''}"

    def p(key: tuple[str, int]) -> str:
        return p_text(adjusted.get(numbers[key]))

    counts = {name: len(stored_runs(report, name, EXPERIMENTS[name], suffix)) for name in found}
    rows, missing = [], []
    for name, other in REFEREE.items():
        listed, counterparts = found[name], found.get(other)
        if listed is None:
            missing.append(name)
            continue
        same = {v.claim: (other, i) for i, v in enumerate(counterparts or ())}
        for i, v in enumerate(listed):
            key = same.get(v.claim)
            language, commands = NOT_RUN, [name]
            if key is not None:
                language = f"{keyed[key].figures}: {word(key)}"
                commands.append(key[0])
            cells = (
                *(f"{v.claim} ([{name}]({name}.md))", v.source, v.figures, language),
                *(word((name, i)), p((name, i))),
                "; ".join(command(x, EXPERIMENTS[x], counts[x]) for x in commands),
            )
            rows.append("| " + " | ".join(cells) + " |")
    decided = [key for key, v in keyed.items() if v.verdict in DECIDED]
    survive = [key for key in decided if adjusted[numbers[key]] < ERROR]
    lines = [
        "# Claims of other papers",
        "",
        "Claims about collapse of papers other than RAGEN-2, tried on agents whose truth is known: "
        "the [model organism](organism.md), tiny and as a language model (SmolLM2-135M). "
        "`python -m ragen_jax.lab run referee` makes the runs on the tiny agent, "
        "`run referee --quick` two rows of them, and `python -m ragen_jax.lab pages` writes this "
        "page from the stored rows without any run. The page of each experiment states its rule, "
        "which was committed before its runs.",
        "",
        f"The verdicts are those on the tiny agent, each with a confidence of "
        f"{100 * (1 - ERROR):.0f} % for its claim alone. p-values have Holm's correction for the "
        f"{len(adjusted)} tested claims of the page. Of the {len(decided)} decided verdicts, "
        f"{len(survive)} remain decided with the correction (below {ERROR:g}, marked †). "
        "*Undecided*: the interval includes both answers.",
        "",
        "| claim | paper | ours, tiny agent | ours, SmolLM2 | verdict | p (Holm) | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ]
    if missing:
        lines += [f"Not run yet: {', '.join(f'`{name}`' for name in missing)}.", ""]
    lines += ["## What would change our mind", ""]
    for name in REFEREE:
        shown = f"`{name}`" if name in missing else f"[{name}]({name}.md)"
        lines.append(f"- {shown}: {EXPERIMENTS[name].doubt}")
    lines += ["", "## What nobody should conclude", ""]
    lines += [f"- {sentence}" for sentence in NOT_TO_CONCLUDE]
    text = "\n".join(lines) + "\n"
    atomic_write(report / f"referee{suffix}.md", text)
    return text
