"""Write the page of each experiment, next to its figure."""

from pathlib import Path

from ragen_jax.configs.experiments import Experiment
from ragen_jax.lab import (
    asking,
    collapse,
    correlations,
    dead_groups,
    detectors,
    faithfulness,
    gains,
    lengths,
    mechanism,
    rivals,
    spikes,
    tasks,
    treatments,
)
from ragen_jax.lab import model_organism as organism
from ragen_jax.lab.curves import Runs
from ragen_jax.lab.identical import describe
from ragen_jax.storage.atomic_io import atomic_write, make_folder

PAGES = {
    "collapse": collapse,
    "organism": organism,
    **dict.fromkeys(("detectors", "language_detectors"), detectors),
    **dict.fromkeys(("cures", "ours", "ours_frozen_lake", "language"), treatments),
    "figures": correlations,
    "mechanism": mechanism,
    **dict.fromkeys(("algorithms", "groups", "quarters", "members", "slips", "sweeps"), gains),
    **dict.fromkeys((f"{x}_frozen_lake" for x in ("groups", "quarters", "members")), gains),
    "tasks": tasks,
    **dict.fromkeys(("dead_groups", "dead_groups_language"), dead_groups),
    **dict.fromkeys(("mismatch", "mismatch_language", "signals", "signals_language"), rivals),
    **dict.fromkeys(("allocation", "allocation_language"), rivals),
    **dict.fromkeys(("distillation", "distillation_language"), rivals),
    **dict.fromkeys(("asking", "asking_language"), asking),
    **dict.fromkeys(("spikes", "spikes_language"), spikes),
    **dict.fromkeys(("faithfulness", "faithfulness_language"), faithfulness),
    **dict.fromkeys(("lengths", "lengths_language"), lengths),
}
# Experiments that may end early (interim_analyses.py) -> function from the runs to the primary
# difference of each seed.
PRIMARY = {"mechanism": mechanism.primary}
COUNTED = ("update/count", "regime/alarm")  # metrics that every page uses


def figures(name: str) -> tuple[str, ...]:
    """Return the metrics that an experiment's page needs."""
    return (*PAGES[name].FIGURES, *COUNTED)


def write_page(name: str, path: Path, words: str, experiment: Experiment, runs: Runs) -> str:
    """Write an experiment's page to `path` and its figure next to it; return the text of the page.

    Args:
      words: arguments of `python -m ragen_jax.lab` that write this page.
    """
    import matplotlib

    matplotlib.use("Agg")
    page = PAGES[name]
    make_folder(path.parent)
    picture = path.with_suffix(".png")
    page.draw(runs, picture)
    head = ["# Laboratory: " + name, "", experiment.question, ""]
    head += ["```bash", f"python -m ragen_jax.lab {words}", "```", ""]
    cores = "one core" if experiment.cores == 1 else f"{experiment.cores} cores"
    head += [
        f"This command writes this page from the stored rows of {experiment.rows}, without runs."
        if experiment.rows
        else f"This command makes the runs, each about {experiment.minutes:.2g} min on "
        f"{cores}, and writes this page.",
        "",
    ]
    if identical_runs := describe(runs):
        head += [identical_runs, ""]
    text = "\n".join(head) + "\n" + page.markdown(experiment, runs, picture.name)
    text += f"\n## What would change our mind\n\n{experiment.doubt}\n"
    atomic_write(path, text)
    return text
