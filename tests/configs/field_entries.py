"""The form of the entries of test_fields_*.py: the effects of changing a field of base.py."""

import dataclasses
from collections.abc import Callable

from ragen_jax.config.check import check
from ragen_jax.config.fields import field, unused_fields
from ragen_jax.configs import base


@dataclasses.dataclass(frozen=True)
class Entry:
    """Another value of a field, and its documented effect on a stage's outcome."""

    changed: object  # the other value
    claim: Callable  # (outcome before, outcome after the change) -> bool
    # fields set in both configs, by dotted names
    settings: dict = dataclasses.field(default_factory=dict)
    # fields changed with it, so that entries share a run
    along: dict = dataclasses.field(default_factory=dict)
    given: object = None  # the stage's input besides the config


def configured(fields, start=base.get_config):
    """A config with some fields set; a field whose value is a section is replaced."""
    config = start()
    for name, value in fields.items():
        section, last = name.rsplit(".", 1) if "." in name else ("", name)
        node = field(config, section) if section else config
        with config.unlocked():
            node[last] = value
    return config


def check_entry(name, entry, outcome, start=base.get_config):
    """Assert that a field has the effect that its entry claims, and that the claim can fail.

    Args:
      outcome: (config, entry.given) -> the outcome that the claim reads.
      start: () -> the config in which the settings are set.
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
