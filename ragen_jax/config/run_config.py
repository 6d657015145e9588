"""The config of an earlier run in the form of a config file, whose argument is the run's folder.

command.py reads it where a command is given a run's --workdir and no --config.
"""

from ml_collections import ConfigDict

from ragen_jax.config.stored import read_run_config


def get_config(workdir: str) -> ConfigDict:
    """The config that a run wrote to its folder."""
    return read_run_config(workdir)
