"""The form of the entries of test_fields_*.py: what changing a field of configs/base.py changes."""

import dataclasses
from collections.abc import Callable

from ragen_jax.config.check import check
from ragen_jax.config.fields import field, unused_fields
from ragen_jax.configs import base


@dataclasses.dataclass(frozen=True)
class Entry:
    """Another value of a field, and the effect on a stage's outcome that its comment promises."""

    changed: object  # the other value
    claim: Callable  # (outcome before, outcome of the change) -> bool
    settings: dict = dataclasses.field(default_factory=dict)  # fields of both, by dotted names
    along: dict = dataclasses.field(default_factory=dict)  # changed with it, to share a run
    given: object = None  # what the stage gets besides the config


def configured(fields, start=base.get_config):
    """A config with some fields set; a field that takes a section is replaced by it."""
    config = start()
    for name, value in fields.items():
        section, last = name.rsplit(".", 1) if "." in name else ("", name)
        node = field(config, section) if section else config
        with config.unlocked():
            node[last] = value
    return config


def check_entry(name, entry, outcome, start=base.get_config):
    """Asserts that a field does what its entry claims, and that the claim says something.

    Args:
      outcome: (config, entry.given) -> what the claim is about.
      start: () -> the config that settings are put into.
    """
    before, after = (
        configured(entry.settings | more, start)
        for more in ({}, entry.along | {name: entry.changed})
    )
    assert field(before, name) != entry.changed
    for config in (before, after):
        check(config)
    assert not unused_fields(after, {name})
    before, after = (outcome(config, entry.given) for config in (before, after))
    assert entry.claim(before, after)
    assert not entry.claim(before, before)


def once(stage):
    """Wrap a stage so that it returns the same outcome for the same config."""
    found = {}

    def outcome(config, given):
        key = repr((config.to_json(sort_keys=True), given))
        if key not in found:
            found[key] = stage(config, given)
        return found[key]

    return outcome
