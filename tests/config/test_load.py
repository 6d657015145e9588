"""The frozen config: made once from the mutable config, with the same values, and read-only."""

import dataclasses
import json

import pytest

from ragen_jax.config import load
from ragen_jax.config.load import load_config
from ragen_jax.configs import mixture, sokoban
from ragen_jax.configs.base import Config, Regimes
from ragen_jax.core.domains import freeze, from_dict

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("module", [sokoban, mixture])
def test_the_frozen_config_has_the_values_of_the_mutable_one(module):
    given = module.get_config()
    before = given.to_json()
    config = load_config(given)
    assert json.dumps(config.to_dict(), indent=2) == json.dumps(given.to_dict(), indent=2)
    assert given.to_json() == before


def test_a_frozen_config_is_not_checked_again(monkeypatch):
    config = load_config(sokoban.get_config())
    monkeypatch.setattr(load, "check", None)
    assert load_config(config) is config


def test_nothing_of_it_can_be_changed():
    config = load_config(mixture.get_config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout.groups = 3
    for mapping in (config.env.options, config.also, config.warmstart.styles):
        with pytest.raises(ValueError, match="immutable"):
            mapping["size"] = (9, 9)
    assert config.also["countdown"].env.options["count"] == (3, 3)


def test_a_missing_or_unknown_field_is_named():
    config = sokoban.get_config()
    config.env.speed = 3
    with pytest.raises(ValueError, match="config.env.speed is unknown$"):
        freeze(Config, config)


def test_a_stored_section_of_another_version_is_read():
    stored = {"action": "stop", "retrieval": 0.75, "tighten": {"every": 7, "most": 2}}
    section = from_dict(Regimes, stored)
    assert section.action == "stop" and section.tighten.every == 7
    assert section.baseline == Regimes().baseline
