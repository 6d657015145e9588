"""Renamed fields: the old name is refused, and old run folders can still be read."""

import json

import pytest
from cli_commands import call
from ml_collections import ConfigDict

from ragen_jax.config.check import check_domains
from ragen_jax.config.fields import FIELDS
from ragen_jax.config.renamed import FIXED, RENAMED
from ragen_jax.config.stored import read_run_config, same_run
from ragen_jax.configs import base


def test_every_new_name_is_a_field_and_no_old_one():
    assert RENAMED and set(RENAMED.values()) <= set(FIELDS) and not set(RENAMED) & set(FIELDS)


@pytest.mark.parametrize("old", RENAMED)
def test_a_command_names_the_new_name(old, tmp_path):
    code, _, stderr = call("ragen_jax.train", f"--workdir={tmp_path / 'run'}", f"--config.{old}=3")
    assert code == 2 and not (tmp_path / "run").exists()
    assert stderr.splitlines()[-1] == f"error: config.{old} is now called config.{RENAMED[old]}"


def test_so_does_a_part_of_a_renamed_section(tmp_path):
    code, _, stderr = call(
        "ragen_jax.train", f"--workdir={tmp_path / 'run'}", "--config.warmstart.thoughts.silent=0.5"
    )
    assert code == 2
    assert "thoughts.silent is now called config.warmstart.styles.silent" in stderr


@pytest.mark.parametrize("old", RENAMED)
def test_a_config_file_that_sets_an_old_name_is_refused(old):
    config = base.get_config()
    section, name = old.split(".")
    config[section][name] = 1.0
    with pytest.raises(ValueError, match=f"config.{old} is now called config.{RENAMED[old]}"):
        check_domains(config)


def test_the_folder_of_an_old_run_keeps_its_values(tmp_path, capsys):
    new = base.get_config()
    new.checkpoint.disk_retry_seconds = 7.0
    new.warmstart.styles = ConfigDict(dict(grounded=0.5, template=0.5))
    old = new.to_dict()
    old["checkpoint"]["patience"] = old["checkpoint"].pop("disk_retry_seconds")
    old["warmstart"]["thoughts"] = old["warmstart"].pop("styles")
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_run_config(tmp_path).to_dict() == new.to_dict()
    assert same_run(new, tmp_path) == []
    assert capsys.readouterr().out == ""


def test_a_damaged_section_with_an_old_name_is_no_traceback(tmp_path):
    config = base.get_config().to_dict() | {"checkpoint": "patience"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        read_run_config(tmp_path).checkpoint == "patience"
    )  # as in the file; the check refuses it
    with pytest.raises(ValueError, match="config.checkpoint"):
        check_domains(read_run_config(tmp_path))


def test_no_fixed_field_is_a_field():
    assert FIXED and not set(FIXED) & set(FIELDS)


@pytest.mark.parametrize("given", ["regimes.low", "regimes.length.fall"])
def test_a_command_names_the_constant_of_a_removed_field(given, tmp_path):
    code, _, stderr = call(
        "ragen_jax.train", f"--workdir={tmp_path / 'run'}", f"--config.{given}=0.4"
    )
    assert code == 2 and not (tmp_path / "run").exists()
    assert stderr.splitlines()[-1] == (
        f"error: config.{given} is no longer a field: the alarm uses {given[8:]} = 0.5 "
        "(constants in ragen_jax/diagnostics/regimes.py)"
    )


def test_a_config_file_that_sets_a_removed_field_is_refused():
    config = base.get_config()
    config.regimes.low = 0.4
    with pytest.raises(ValueError, match="regimes.low is no longer a field: .* low = 0.5 "):
        check_domains(config)
    config = base.get_config()
    config.regimes.length = ConfigDict(dict(fall=0.4))
    with pytest.raises(ValueError, match="regimes.length.fall is no longer a field"):
        check_domains(config)


def test_the_folder_of_a_run_with_removed_fields_is_resumed(tmp_path, capsys):
    old = base.get_config().to_dict()
    for name, value in FIXED.items():
        _, *section, last = name.split(".")
        place = old["regimes"].setdefault(section[0], {}) if section else old["regimes"]
        place[last] = value
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_run_config(tmp_path).to_dict() == base.get_config().to_dict()
    assert same_run(base.Config(), tmp_path) == []
    assert capsys.readouterr().out == ""
    old["regimes"] |= {"low": 0.6, "length": {"fall": 0.4}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert same_run(base.Config(), tmp_path) == []
    assert (
        "has config.regimes.low=0.6, config.regimes.length.fall=0.4, which are constants now"
        in (capsys.readouterr().out)
    )


def test_a_run_from_before_stop_strings_keeps_its_replies(tmp_path):
    old = base.get_config().to_dict()
    del old["rollout"]["stop"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert base.get_config().rollout.stop == ("</answer>",)
    assert read_run_config(tmp_path).rollout.stop == ()
