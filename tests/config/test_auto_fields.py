"""Preset llm: fields set from the model's size and the devices, and fields the user keeps."""

import datetime
import json

import jax
import pytest
from cli_commands import call

from ragen_jax import train
from ragen_jax.config import command_line
from ragen_jax.config.auto_fields import fill_auto_fields, has_open_fields
from ragen_jax.config.build_environment import build_environment
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.fields import field
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.config.stored import read_run_config, same_run
from ragen_jax.configs import (
    bandit,
    countdown,
    deepcoder,
    frozen_lake,
    game_2048,
    metamathqa,
    mixture,
    presets,
    rubik,
    search_qa,
    sokoban,
    sudoku,
    webshop,
)
from ragen_jax.core.sharding import MESH_AXES
from ragen_jax.model import config_json, families, hf
from ragen_jax.run import load

CONFIGS = {
    "bandit": bandit,
    "countdown": countdown,
    "deepcoder": deepcoder,
    "frozen_lake": frozen_lake,
    "game_2048": game_2048,
    "metamathqa": metamathqa,
    "mixture": mixture,
    "rubik": rubik,
    "search_qa": search_qa,
    "sokoban": sokoban,
    "sudoku": sudoku,
    "webshop": webshop,
}


class Device:
    """A device of a given platform; the meshes only count them."""

    def __init__(self, platform):
        self.platform = platform


def model_directory(path, name):
    """Make a directory that holds only the config.json of a published shape."""
    path.mkdir()
    fields = config_json.from_config(families.SHAPES[name], "bfloat16")
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def settled(path, devices, preset="llm", **fields):
    config = sokoban.get_config(preset)
    config.model.path = path
    config.update_from_flattened_dict(fields)
    return load_config(config, devices=devices)


def test_the_model_of_every_preset_is_a_published_shape():
    for name, path in (presets.LLMS | presets.VISION_LLMS).items():
        shape = families.SHAPES[name.replace("gemma3", "gemma-3")]
        assert families.known_shape(path) == shape


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_has_the_preset(name, language_model):
    config = CONFIGS[name].get_config("llm")
    assert has_open_fields(config)
    config.model.path = str(language_model)
    config = load_config(config)
    build_meshes(config)
    for one in per_task_configs(config).values():
        assert one.env.prompt == "full" and one.env.context == "full"
        build_environment(one.env, "train")
    tokens = 4000 if name == "deepcoder" else 400  # a program takes more tokens than a move
    assert config.optimizer.learning_rate == 1e-6 and config.rollout.max_new_tokens == tokens
    assert json.loads(json.dumps(config.to_dict()))["model"]["dtype"] == "float32"


def test_what_follows_from_the_size_and_the_devices(tmp_path, language_model):
    tpus = [Device("tpu") for _ in range(8)]
    half = settled(model_directory(tmp_path / "half", "qwen2.5-0.5b"), tpus)
    three = settled(model_directory(tmp_path / "three", "qwen2.5-3b"), tpus)
    by_name = settled("Qwen/Qwen2.5-3B-Instruct", tpus)  # reads no files
    small = settled(str(language_model), jax.devices())
    assert by_name.optimizer == three.optimizer and by_name.mesh == three.mesh

    assert (small.model.dtype, half.model.dtype, three.model.dtype) == (
        *("float32", "bfloat16", "bfloat16"),
    )
    assert (small.model.remat, half.model.remat, three.model.remat) == (False, True, True)
    assert [c.mesh.fsdp for c in (small, half, three)] == [1, 1, -1]
    assert [c.mesh.data for c in (small, half, three)] == [-1, -1, 1]
    assert [getattr(three.sampling_mesh, axis) for axis in MESH_AXES] == [-1, 1, 1]
    assert [getattr(half.sampling_mesh, axis) for axis in MESH_AXES] == [0, 0, 0]
    # half: 4 rows per device, but a minibatch has only 32 rows; three: 1 per device; small: 4 on
    # its only device.
    assert half.optimizer.micro_batch == 32 and three.optimizer.micro_batch == 8
    assert small.optimizer.micro_batch == 4
    for config in (small, half, three):
        assert config.model.lora.rank == 0 and config.algorithm.name == "grpo"


def test_what_the_user_set_stays(tmp_path):
    path = model_directory(tmp_path / "three", "qwen2.5-3b")
    tpus = [Device("tpu") for _ in range(8)]
    given = {
        **{"model.dtype": "float16", "model.remat": False, "mesh.data": 2, "mesh.fsdp": 4},
        **{"optimizer.micro_batch": 16, "sampling_mesh.tensor": 2, "rollout.group_size": 8},
    }
    config = settled(path, tpus, **given)
    assert {name: field(config, name) for name in given} == given
    assert config.sampling_mesh.data == -1
    assert settled(path, tpus, **{"mesh.data": 8, "mesh.fsdp": 1}).optimizer.micro_batch == 8
    named = settled("tiny", tpus, preset="tiny")  # this preset leaves no field open
    assert named.to_dict() == sokoban.get_config().to_dict()


def test_unusable_values_are_refused_before_they_are_reckoned_with(language_model):
    for name, value in (("optimizer.minibatches", 0), ("mesh.data", 10**9), ("env.max_turns", 0)):
        with pytest.raises(ValueError, match=f"config.{name} is {value}; it must be"):
            settled(str(language_model), jax.devices(), **{name: value})
    with pytest.raises(ValueError, match="config.optimizer.b1 is 2.0; it must be"):
        # refused before any download
        settled("somebody/unknown", jax.devices(), **{"optimizer.b1": 2.0})
    with pytest.raises(ValueError, match="preset llm needs --config.model.path=DIR_OR_HUB_ID"):
        fill_auto_fields(sokoban.get_config("llm"), jax.devices())
    with pytest.raises(ValueError, match="no model directory /none"):
        settled("/none", jax.devices())


def test_the_run_holds_what_was_settled_and_goes_on(language_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def config(steps):
        config = countdown.get_config("llm+grpo")
        config.model.path = str(language_model)
        config.rollout.update(groups=2, group_size=2, max_new_tokens=8, compact=False)
        config.optimizer.minibatches = 1
        config.update_from_flattened_dict({"eval.every": 0, "diagnose.every": 0, "steps": steps})
        return config

    assert train.train(config(1), tmp_path / "run") == 0
    stored = read_run_config(tmp_path / "run")
    assert stored.model.dtype == "float32" and stored.optimizer.micro_batch == 4
    assert stored.mesh.data == -1 and not has_open_fields(stored)
    assert train.train(config(2), tmp_path / "run") == 0
    assert "after step 1" in capsys.readouterr().out
    assert train.train(config(2), tmp_path / "run") == 0
    assert "all 2 steps of" in capsys.readouterr().out
    other = config(2)
    other.model.dtype = "bfloat16"
    with pytest.raises(SystemExit, match="2"):
        train.train(other, tmp_path / "run")
    assert "config.model.dtype='float32'" in capsys.readouterr().err


def test_the_day_of_a_run_is_filled_in_once(language_model, tmp_path, capsys, monkeypatch):
    def config(path=language_model, **fields):
        made = sokoban.get_config("qwen2.5-0.5b")
        made.update_from_flattened_dict({"model.path": str(path), **fields})
        return made

    def settled_on(day, made, workdir):
        monkeypatch.setattr(command_line, "today", lambda: datetime.date(2026, 11, day))
        return load_config(made, workdir)

    run = tmp_path / "run"
    run.mkdir()
    first = settled_on(25, config(), run)
    assert first.model.date == "2026-11-25"
    (run / "config.json").write_text(json.dumps(first.to_dict()))
    again = settled_on(26, config(), run)
    assert again.model.date == "2026-11-25" and same_run(again, run) == []
    assert same_run(config(), run) == []  # date still open, as in a check for the same run
    other = settled_on(26, config(**{"model.date": "2026-11-26"}), run)
    assert other.model.date == "2026-11-26"
    with pytest.raises(ValueError, match="holds a run with config.model.date='2026-11-25'"):
        same_run(other, run)
    assert settled_on(26, config(), None).model.date == "2026-11-26"
    assert settled_on(26, config("tiny"), run).model.date == "auto"
    assert not capsys.readouterr().out

    unbegun = config()  # a config not filled in yet, as the laboratory may leave it
    (run / "config.json").write_text(json.dumps(unbegun.to_dict()))
    assert settled_on(27, config(), run).model.date == "2026-11-27"
    assert not capsys.readouterr().out
    old = first.to_dict()
    del old["model"]["date"]
    (run / "config.json").write_text(json.dumps(old))
    found = settled_on(27, config(), run)
    assert found.model.date == "2026-11-27" and same_run(found, run) == []
    line = f"{run}/config.json lacks these fields, using defaults: config.model.date='2026-11-27'\n"
    assert capsys.readouterr().out == line


@pytest.mark.slow
def test_a_run_resumed_on_another_day_has_the_same_prompts(
    dated_model, tmp_path, monkeypatch, on_day, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def train_to(steps, day, name):
        on_day(day)
        config = countdown.get_config("llm+grpo")
        config.model.path = str(dated_model)
        config.rollout.update(groups=2, group_size=2, max_new_tokens=8, compact=False, save_every=1)
        config.optimizer.minibatches = 1
        config.update_from_flattened_dict({"eval.every": 0, "diagnose.every": 0, "steps": steps})
        config.update_from_flattened_dict({"eval.episodes": 4, "checkpoint.every": 1})
        assert train.train(config, tmp_path / name) == 0

    def prompts(name):
        found = []
        for path in sorted((tmp_path / name / "rollouts").glob("*.jsonl")):
            for episode in map(json.loads, path.read_text().splitlines()):
                found += [turn["prompt_ids"] for turn in episode["turns"]]
                assert all(turn["prompt_exact"] for turn in episode["turns"])
        return found

    train_to(2, 25, "whole")
    train_to(1, 25, "cut")
    train_to(2, 26, "cut")
    assert prompts("cut") == prompts("whole")
    tokenizer = hf.load_tokenizer(dated_model)
    assert {tokenizer.decode(ids)[:24] for ids in prompts("cut")} == {"Today Date: 25 Nov 2026\n"}
    assert read_run_config(tmp_path / "cut").model.date == "2026-11-25"
    assert hf.load_tokenizer(tmp_path / "cut" / "policy").chat_template == tokenizer.chat_template

    on_day(28)
    shown = []
    chat = load.build_tasks
    monkeypatch.setattr(
        load, "build_tasks", lambda *a, **k: shown.append(chat(*a, **k)) or shown[-1]
    )
    own, model = f"--workdir={tmp_path / 'cut'}", f"--model={dated_model}"
    short = ["--config.eval.episodes=4", "--config.rollout.max_new_tokens=4"]
    given = [model, "--config=countdown:llm", *short, f"--out={tmp_path}/model.json"]
    for words in ([own, *short], given, [*given, "--config.model.date=2024-05-06"]):
        code, _, err = call("ragen_jax.evaluate", *words)
        assert code == 0, err
    assert call("ragen_jax.export", own)[0] == 0
    texts = [tokenizer.decode(tasks[0].settings.chat.template.begin("x")) for tasks in shown]
    days = ["25 Nov 2026", "28 Nov 2026", "06 May 2024", "25 Nov 2026"]
    assert [text[12:23] for text in texts] == days
    assert json.loads((tmp_path / "model.json").read_text())["date"] == "2024-05-06"


def test_the_sizes_cover_all_models():
    assert set(presets.SIZE_FIELDS) == set(presets.ROWS_PER_DEVICE)
    assert list(presets.SIZE_FIELDS)[-1] == float("inf")
    for fields in presets.SIZE_FIELDS.values():
        assert {"model.path", "model.dtype", "optimizer.micro_batch", *fields} == set(
            presets.OPEN_FIELDS
        )
