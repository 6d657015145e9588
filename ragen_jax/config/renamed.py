"""Renamed and removed config fields: commands refuse them, folders of old runs are still read."""

from collections.abc import Sequence
from typing import Any

from ragen_jax.diagnostics import regimes

RENAMED = {  # old name -> new name
    "checkpoint.patience": "checkpoint.disk_retry_seconds",
    "warmstart.thoughts": "warmstart.styles",
}
FIXED = {  # removed field -> the constant that replaces it
    "regimes.recent": regimes.RECENT,
    "regimes.long": regimes.LONGEST_LEVEL,
    "regimes.clear_patience": regimes.CLEAR_PATIENCE,
    "regimes.recover": regimes.RECOVER,
    "regimes.low": regimes.LOW,
    "regimes.mi_sign": regimes.FALL["mi_sign"],
    "regimes.valid_think": regimes.FALL["valid_think"],
    "regimes.valid_action": regimes.FALL["valid_action"],
    "regimes.grounded": regimes.FALL["grounded"],
    "regimes.length.fall": regimes.FALL["length"],
    "regimes.length.rise": regimes.RISE["length"],
    "regimes.entropy.fall": regimes.FALL["entropy"],
    "regimes.entropy.rise": regimes.RISE["entropy"],
}

# Fields whose default changes the behavior of runs that were started without them -> the value that
# keeps it.
EARLIER = {"rollout.stop": []}


def refuse_renamed(fields: Sequence[str]) -> None:
    """Refuse fields that have another name now or no longer exist.

    Args:
      fields: dotted, without "config."; parts of a renamed section count as the section.

    Raises:
      ValueError: the message gives the new name or the value of the first such field.
    """
    for given in fields:
        for old, new in RENAMED.items():
            if given == old or given.startswith(f"{old}."):
                raise ValueError(f"config.{given} is now called config.{new}{given[len(old) :]}")
        fixed = [name for name in FIXED if name == given or name.startswith(f"{given}.")]
        if fixed:
            values = ", ".join(f"{name.partition('.')[2]} = {FIXED[name]}" for name in fixed)
            raise ValueError(
                f"config.{given} is no longer a field: the alarm uses {values} "
                "(constants in ragen_jax/diagnostics/regimes.py)"
            )


def apply_renames(config: dict[str, Any]) -> None:
    """Move the values of old names in a nested config, in place, to the new names.

    If the new name already has a value, that value stays.
    """
    for old, new in RENAMED.items():
        section, name = old.split(".")
        if isinstance(config.get(section), dict) and name in config[section]:
            value = config[section].pop(name)
            config[section].setdefault(new.split(".")[1], value)


def add_earlier(config: dict[str, Any]) -> None:
    """Add the fields of EARLIER that a nested config of an older run lacks, in place."""
    for field, value in EARLIER.items():
        section, name = field.split(".")
        if isinstance(config.get(section), dict):
            config[section].setdefault(name, value)


def drop_fixed(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of FIXED from a nested config, in place.

    Returns:
      {dotted name: value} of those whose value differs from the constant.
    """
    found = {}
    for name, constant in FIXED.items():
        *sections, last = name.split(".")
        parents = [config]
        for section in sections:
            inner = parents[-1].get(section)
            parents.append(inner if isinstance(inner, dict) else {})
        if last in parents[-1]:
            value = parents[-1].pop(last)
            if value != constant:
                found[name] = value
            if not parents[-1]:
                del parents[-2][sections[-1]]
    return found
