"""Renamed config fields: commands refuse the old names but read them in folders of old runs."""

from collections.abc import Sequence
from typing import Any

RENAMED = {  # old name -> new name
    "checkpoint.patience": "checkpoint.disk_retry_seconds",
    "warmstart.thoughts": "warmstart.styles",
}


def refuse_renamed(fields: Sequence[str]) -> None:
    """Refuse fields by their old names.

    Args:
      fields: dotted, without "config."; parts of a renamed section count as the section.

    Raises:
      ValueError: the message gives the new name of the first such field.
    """
    for given in fields:
        for old, new in RENAMED.items():
            if given == old or given.startswith(f"{old}."):
                raise ValueError(f"config.{given} is now called config.{new}{given[len(old) :]}")


def apply_renames(config: dict[str, Any]) -> None:
    """Move the values of old names in a nested config, in place, to the new names.

    If the new name already has a value, that value stays.
    """
    for old, new in RENAMED.items():
        section, name = old.split(".")
        if isinstance(config.get(section), dict) and name in config[section]:
            value = config[section].pop(name)
            config[section].setdefault(new.split(".")[1], value)
