"""Build the tiny agent: a small Qwen2.5-shaped model that imitates the environment's solver.

    python -m ragen_jax.warmstart --config=configs/sokoban.py

The result is a Hugging Face directory in the cache, named after a hash of its settings. `train` and
`evaluate` build it if the config's model is "tiny" and the directory does not exist yet.
"""

import json
from collections.abc import Sequence

from ragen_jax.config.check import check
from ragen_jax.config.command_line import bad_input, config_files, define_config, run_command
from ragen_jax.run.imitate import tiny_model
from ragen_jax.storage.atomic_io import retry_disk_errors
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.program_store import enable_program_store


def main(argv: Sequence[str]) -> None:
    del argv
    enable_compilation_cache()
    enable_program_store(config_files())
    with bad_input():
        config = check(CONFIG.value)
        with retry_disk_errors(config.checkpoint.disk_retry_seconds, console):
            directory = tiny_model(config)
    print(json.dumps({"model": str(directory)}))


if __name__ == "__main__":
    CONFIG = define_config()
    run_command(main)
