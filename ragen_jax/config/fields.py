"""The fields of a config by dotted name, and the fields that a run never reads."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.configs.base import HELD_OUT, Config
from ragen_jax.core.domains import Field, Section, fields_by_name

FIELDS = fields_by_name(Config)  # dotted name -> Field, in the order of base.py


def field(config: Config | ConfigDict, dotted: str) -> Any:
    """Return config.a.b for "a.b"."""
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name) if isinstance(value, Section) else value[name]
    return value


# Sections that count as a single field.
WHOLE = tuple(name for name, field in FIELDS.items() if isinstance(field.default, dict))


def leaves(config: ConfigDict) -> dict[str, Any]:
    """Return {"a.b": value} of a config's fields; WHOLE and empty sections are leaves."""

    def walk(node, prefix):
        for name, value in node.items():
            name = prefix + name
            if isinstance(value, ConfigDict) and name not in WHOLE:
                yield from walk(value, f"{name}.")
            else:
                yield name, value

    return dict(walk(config, ""))


def entries(config: Config | ConfigDict) -> Iterator[tuple[str, Field, Callable[[str], str]]]:
    """Yield (name, `Field`, resolve) of all fields.

    `resolve` turns a name in the `Field`'s conditions into the name of the field that it means for
    this entry: for a field of also.NAME, env.x means also.NAME.env.x. Fields of also.NAME.env have
    the `Field`s of env, and also.NAME.groups has the `Field` of rollout.groups.
    """
    yield from ((name, domain, str) for name, domain in FIELDS.items())
    for other in config.also:
        yield f"also.{other}.groups", FIELDS["rollout.groups"], str

        def resolve(name, other=other):
            return f"also.{other}.{name}" if name.startswith("env.") else name

        for name, domain in FIELDS.items():
            if name.startswith("env."):
                yield resolve(name), domain, resolve


def is_within(name: str, parts: Sequence[str]) -> bool:
    """Whether a dotted field is one of the fields `parts`, or in one of these sections."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def plays_heldout(config: Config) -> bool:
    """Return whether a run of the config ever plays held-out problems."""
    return HELD_OUT.holds(*(field(config, name) for name in HELD_OUT.names))


def unused_fields(config: Config, names: Collection[str]) -> dict[str, str]:
    """Return {field: reason} for the fields in `names` that a run of the config never reads.

    Args:
      config: a config that passes check.check.
      names: dotted, as in FIELDS or in also; other names (options of environments) are ignored.
    """
    reasons = {}
    for name, domain, resolve in entries(config):
        if name not in names:
            continue
        for when in domain.read:
            deciding = {resolve(other): field(config, resolve(other)) for other in when.names}
            if not when.holds(*deciding.values()):
                decided = ", ".join(f"{other}={value}" for other, value in deciding.items())
                reasons[name] = f"with {decided}"
                break
    return reasons


def warning(reasons: Mapping[str, str]) -> str:
    """Return a line about fields that were set without effect, or "" if there are none.

    Args:
      reasons: {field: reason}, as returned by `unused_fields`.
    """
    by_reason = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    parts = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set but not read {why}"
        for why, names in by_reason.items()
    ]
    return "warning: " + "; ".join(parts) if parts else ""
