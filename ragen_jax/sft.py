"""Fine-tune a language model on demonstrations: supervised fine-tuning (SFT).

    python -m ragen_jax.sft --config=countdown:smollm2-135m [--workdir=DIR]
                            [--config.warmstart.FIELD=VALUE ...]

The demonstrations are those of the environment's solver. If the folder holds an earlier
fine-tuning with the same settings, it is resumed. The result is DIR/policy, a Hugging Face
directory. `train` does the same before its first step if config.warmstart.fine_tune is set, and
keeps the result in the cache.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config.load import load_config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process
from ragen_jax.report.fine_tuning import write_page
from ragen_jax.run.fine_tune import fine_tune
from ragen_jax.run.fine_tune_updates import Interrupted
from ragen_jax.run.preemption import Preemption
from ragen_jax.run.workdir import lock_workdir, new_folder
from ragen_jax.storage.atomic_io import retry_disk_errors
from ragen_jax.storage.cache import cache_directory
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.heartbeat import heartbeat
from ragen_jax.storage.program_store import enable_program_store


def main(argv: Sequence[str]) -> None:
    del argv
    enable_compilation_cache()
    enable_program_store(command.config_files())
    with command.bad_input():
        given = CONFIG.value
        if given.model.path == "tiny":
            raise ValueError(
                "config.model.path is 'tiny'; python -m ragen_jax.warmstart builds the tiny agent, "
                "and this command fine-tunes a language model: use a preset such as "
                "--config=countdown:smollm2-135m, or --config.model.path=DIR_OR_HUB_ID"
            )
        given.warmstart.fine_tune = True
        config = load_config(given)
        retries = retry_disk_errors(config.checkpoint.disk_retry_seconds, console)
        with heartbeat(), retries:
            workdir = Path(WORKDIR.value or "")
            if not WORKDIR.value:
                name = f"sft-{config.env.name.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
                workdir = new_folder(Path("runs"), name)
            console(f"{workdir}: {config.env.name}, model {config.model.path}")
            with lock_workdir(workdir):
                preemption = Preemption(workdir)
                try:
                    policy = fine_tune(config, workdir, cache_directory(), preemption=preemption)
                except Interrupted as stopped:
                    console(f"stopped; resume with the same command and --workdir={workdir}")
                    sys.exit(stopped.exit_code)
                finally:
                    preemption.close()
                if is_main_process():
                    enter_phase("writing the page")
                    console(f"report: {write_page(workdir)}")
    print(json.dumps({"model": str(policy)}))


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Folder of the fine-tuning; an existing one is resumed."
    )
    command.run_command(main)
