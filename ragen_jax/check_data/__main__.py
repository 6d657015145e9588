"""Show and play the problems of a config's environments, and check what the environments return.

    python -m ragen_jax.check_data --config=configs/metamathqa.py [--rows=3] [--plays=N]
                                   [--config.env.options.path=FILE] [--config.FIELD=VALUE ...]

For a file: the fields that are read, the number of problems that can be drawn, in all and in each
split, and the first problems. For generated problems: the first problems.

Problems are then played to their end by the expert, if there is one, and with random actions: all
problems of a file, 64 generated ones of each split, or --plays of each split. The members of the
environment are checked one by one, and a fault is printed with its file and line. With the
tokenizer of model.path, the first problem is shown as the model reads it, and the lengths of all
prompts are compared with the limits. No weights are loaded and nothing is compiled.

A file that cannot be used is reported in one line, and the exit code is 2. The same happens at the
end if an environment raised for a problem or breaks its contract.
"""

from collections.abc import Sequence

from absl import flags

from ragen_jax.check_data.describe import describe
from ragen_jax.config import command_line as command
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config
from ragen_jax.core.domains import freeze
from ragen_jax.storage.console_streams import show


def main(argv: Sequence[str]) -> None:
    del argv
    with command.bad_input():
        for name, value, least in (("rows", ROWS.value, 0), ("plays", PLAYS.value, 1)):
            if value is not None and value < least:
                raise ValueError(f"--{name} is {value}; it must be at least {least}")
        faults = []
        for config in per_task_configs(freeze(Config, CONFIG.value)).values():
            try:
                for line in describe(config, ROWS.value, PLAYS.value):
                    show(line)
            except ValueError as error:
                faults.append(str(error))
        if faults:
            raise ValueError("; ".join(faults))


if __name__ == "__main__":
    CONFIG = command.define_config()
    ROWS = flags.DEFINE_integer("rows", 3, "Number of problems to show.")
    PLAYS = flags.DEFINE_integer(
        "plays", None, "Problems of each split to play; default: all of a file, 64 generated ones."
    )
    command.run_command(main)
