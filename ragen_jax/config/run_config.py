"""The config of an earlier run in the form of a config file, whose argument is the run's folder.

command_line.py reads it if a command gets the --workdir of a run and no --config.
"""

from ml_collections import ConfigDict

from ragen_jax.config.stored import read_run_config


def get_config(workdir: str) -> ConfigDict:
    """Return the config that a run wrote to its folder."""
    return read_run_config(workdir)
