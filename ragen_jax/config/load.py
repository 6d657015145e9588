"""From the config that a command line or a config file gives to the frozen config of a run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from ragen_jax.config import command_line
from ragen_jax.config.auto_fields import fill_auto_fields, run_date
from ragen_jax.config.check import check
from ragen_jax.configs.base import Config


def load_config(
    config: ConfigDict | Config,
    workdir: Path | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Config:
    """Fill in a config's open fields, check it and freeze it; a frozen config is returned as is.

    Args:
      config: unchanged.
      workdir: folder of the run, maybe a new one; None: there is no run.
      devices: those of the run, or of the topology that it is planned for; None: all.

    Raises:
      ValueError: values that no run could use; the message names the field.
    """
    if isinstance(config, Config):
        return config
    config = config.copy_and_resolve_references()
    fill_auto_fields(config, jax.devices() if devices is None else devices)
    checked = check(config)
    date = run_date(checked.model, workdir, command_line.today())
    return dataclasses.replace(checked, model=dataclasses.replace(checked.model, date=date))
