"""Write the model of a run's checkpoint in the format that transformers and vLLM read.

    python -m ragen_jax.export --workdir=runs/NAME [--step=N] [--out=DIR] [--dtype=bfloat16]

Writes DIR/policy in Hugging Face format and, for a LoRA run, DIR/adapter in PEFT format. The
default of DIR is runs/NAME/export_step_N.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.model.weights import SAVE_DTYPES
from ragen_jax.run.load import restore_run, save_policy
from ragen_jax.run.model_card import card_of_run
from ragen_jax.storage.atomic_io import retry_disk_errors
from ragen_jax.storage.console import console
from ragen_jax.storage.links import refuse_links


def main(argv: Sequence[str]) -> None:
    del argv
    with command.bad_input():
        if not WORKDIR.value:
            raise ValueError("give --workdir, the folder of a run")
        if DTYPE.value not in SAVE_DTYPES:
            raise ValueError(f"--dtype is {DTYPE.value!r}; accepted: {', '.join(SAVE_DTYPES)}")
        names = command.overrides()
        if names or command.config_given():
            raise ValueError("a run is exported unchanged; remove --config and --config.FIELD")
        workdir = Path(WORKDIR.value)
        if not OUT.value:
            refuse_links(workdir)
        config, step, policy, adapters = restore_run(
            workdir, step=STEP.value, trust=flags.FLAGS.trust
        )
        folder = Path(OUT.value or workdir / f"export_step_{step:06d}")
        with retry_disk_errors(config.checkpoint.disk_retry_seconds, console):
            card = card_of_run(config, workdir, step)
            paths = save_policy(folder, config, policy, adapters, dtype=DTYPE.value, card=card)
    for path in paths:
        console(f"written: {path}")


if __name__ == "__main__":
    command.define_config(
        "that of the run in --workdir, which is exported unchanged", reads_run=True
    )
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
    STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
    OUT = flags.DEFINE_string("out", None, "Output folder.")
    DTYPE = flags.DEFINE_string(
        "dtype", "float32", "Dtype of the weights: float32, bfloat16, float16."
    )
    command.run_command(main)
