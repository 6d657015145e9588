"""config/, configs/, sharding.make_mesh: bad input is refused with one line that names it."""

import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_commands import call
from ml_collections import ConfigDict

from ragen_jax.algorithm import filter, losses
from ragen_jax.config.build_environment import build_environment, environment_settings
from ragen_jax.config.build_learner import step_rates
from ragen_jax.config.check import check
from ragen_jax.config.fields import field
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import minibatch_rows
from ragen_jax.config.stored import read_run_config, same_run
from ragen_jax.configs import (
    bandit,
    base,
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
from ragen_jax.core.sharding import MESH_AXES, data_shards, make_mesh
from ragen_jax.rollout.episode import Sampling
from ragen_jax.run import start
from ragen_jax.run.workdir import new_folder, set_evaluations_aside
from ragen_jax.storage.cache import content_hash

ROOT = Path(__file__).parents[2]
NAMED = ("tiny", *presets.LLMS)  # presets that leave no field open
CONFIGS = {
    "bandit": bandit,
    "countdown": countdown,
    "deepcoder": deepcoder,
    "frozen_lake": frozen_lake,
    "game_2048": game_2048,
    "metamathqa": metamathqa,
    "rubik": rubik,
    "search_qa": search_qa,
    "sokoban": sokoban,
    "sudoku": sudoku,
    "webshop": webshop,
}


def changed(**fields):
    """The tiny preset with changed fields; write a dot in a name as two underscores."""
    config = sokoban.get_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return config


# ---- check --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("preset", NAMED)
def test_every_preset_passes(name, preset):
    config = CONFIGS[name].get_config(preset)
    check(config)
    assert config.env.name == name
    assert config.model.path == presets.LLMS.get(preset, "tiny")
    environment = build_environment(config.env, "train")  # its options are accepted
    assert environment.render(environment.reset(0))
    # Every problem can be solved within the budgets.
    assert config.env.max_actions == config.env.max_turns * config.env.actions_per_turn
    assert len(environment.solve(environment.reset(0))) <= config.env.max_actions


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("preset", presets.VISION_LLMS)
def test_presets_of_models_that_see_are_of_environments_that_draw(name, preset):
    if name not in presets.DRAWING_ENVIRONMENTS:
        with pytest.raises(ValueError, match=f"{name}.py has no preset '{preset}'; acc") as error:
            CONFIGS[name].get_config(preset)
        assert "\n" not in str(error.value)
        return
    config = CONFIGS[name].get_config(preset)
    check(config)
    assert config.model.path == presets.VISION_LLMS[preset]
    assert config.env.options.observation == "image"
    # All other fields equal those of a text model of the same size.
    plain = CONFIGS[name].get_config("qwen3-4b")
    config.model.path, config.env.options.observation = plain.model.path, "grid"
    assert config.to_dict() == plain.to_dict()


def test_base_passes():
    check(base.get_config())


def test_batch_sizes_that_do_not_fit_are_refused_with_both_numbers():
    small = dict(rollout__groups=2, rollout__group_size=2, env__max_turns=3)
    check(changed(**small, optimizer__minibatches=4, optimizer__micro_batch=3))
    with pytest.raises(ValueError, match="optimizer.minibatches is 5.* only 4 episodes"):
        check(changed(**small, optimizer__minibatches=5, optimizer__micro_batch=1))
    with pytest.raises(ValueError, match="optimizer.micro_batch is 4.* at most 3 rows"):
        check(changed(**small, optimizer__minibatches=4, optimizer__micro_batch=4))


@pytest.mark.parametrize(
    "name, fields",
    [
        ("filter.value", dict(filter__value=0.0)),  # never keeps any group
        ("filter.value", dict(filter__value=1.5)),
        ("filter.value", dict(filter__strategy="top_k", filter__value=2.0)),
        ("filter.value", dict(filter__strategy="top_k_abs", filter__value=0.5)),
        ("filter.value", dict(filter__strategy="top_k_abs", filter__value=2.5)),
        ("filter.value", dict(filter__strategy="min_p", filter__value=1.1)),
        ("algorithm.clip_c", dict(algorithm__clip_c=1.0)),
        (
            "filter.value",
            dict(filter__strategy="min_p", filter__keep="smallest", filter__value=0.0),
        ),
        ("env.max_context", dict(env__max_context=22)),  # a reply of 22 tokens leaves no room
        ("env.pool", dict(env__pool=7)),  # there are 8 groups
        ("collect.explore", dict(collect__explore=0.5)),  # needs a pool
        ("collect.allocate", dict(collect__allocate=True)),
        ("collect.allocate", dict(env__pool=8, collect__explore=0.5, collect__allocate=True)),
        ("algorithm.entropy_gate", dict(algorithm__entropy_gate=0.5, diagnose__every=0)),
        (
            "algorithm.entropy_gate",
            dict(algorithm__entropy_gate=0.5, diagnose__gradients_every=1),
        ),
        # the filter drops the groups it applies to
        ("algorithm.zvp_coef", dict(algorithm__zvp_coef=0.1)),
        ("algorithm.virtual_rewards", dict(algorithm__virtual_rewards=1)),
        (
            "algorithm.virtual_rewards",
            dict(algorithm__virtual_rewards=1, algorithm__name="dr_grpo", filter__strategy="none"),
        ),
        ("filter.value", dict(filter__strategy="pairs", filter__value=1.5)),
        ("filter.strategy", dict(regimes__action="tighten", filter__strategy="min_p")),
        ("filter.strategy", dict(regimes__action="tighten", filter__strategy="none")),
        ("diagnose.gradients_edges", dict(diagnose__gradients_edges=(2.0, 1.0))),
        ("rollout.groups", dict(rollout__groups=2**14, rollout__group_size=2**10)),
        # too many for the tiny agent
        ("rollout.max_new_tokens", dict(rollout__max_new_tokens=32768)),
        ("warmstart.width", dict(warmstart__width=100)),  # not divisible by 4 heads
        ("warmstart.heads", dict(warmstart__kv_heads=3)),
        ("warmstart.batch", dict(warmstart__rooms=63)),
    ],
)
def test_values_that_no_run_could_use_are_refused(name, fields):
    with pytest.raises(ValueError, match=name):
        check(changed(**fields))


def test_values_at_the_edge_pass():
    check(changed(filter__strategy="top_k_abs", filter__value=3.0))
    check(changed(filter__strategy="min_p", filter__value=0.0))
    check(changed(filter__strategy="none", filter__value=0.0))
    check(changed(rollout__groups=2**12, rollout__group_size=2**7))
    check(changed(warmstart__rooms=64))
    check(changed(env__max_context=23))
    check(changed(diagnose__gradients_edges=(1.0, 2.0)))
    check(changed(env__pool=8, collect__explore=0.5))
    check(changed(algorithm__zvp_coef=0.1, filter__strategy="none"))
    check(changed(algorithm__virtual_rewards=1, filter__strategy="none"))
    check(changed(filter__strategy="pairs", filter__value=2.0))
    check(changed(regimes__action="tighten", filter__strategy="top_k", filter__value=0.5))


# ---- arithmetic and lookup ----------------------------------------------------------------------


def test_minibatch_rows_by_hand():
    sizes = dict(rollout__groups=8, rollout__group_size=16, env__max_turns=5)
    # single_turn: each turn of the 128 episodes is a separate row; full: one row per episode.
    assert minibatch_rows(changed(**sizes, optimizer__minibatches=4)) == 160
    assert minibatch_rows(changed(**sizes, optimizer__minibatches=4, env__context="full")) == 32
    # window: two turns in the first row, then one turn per row; the limit may cut any turn.
    window = dict(**sizes, optimizer__minibatches=4, env__context="window")
    assert [minibatch_rows(changed(**window, env__window=n)) for n in (1, 2, 5, 9)] == [
        *(160, 128, 32, 32)
    ]
    assert minibatch_rows(changed(**window, env__window=5, env__max_context=99)) == 160
    # 3 * 3 = 9 rows over 4 minibatches: the largest has 3.
    sizes = dict(rollout__groups=3, rollout__group_size=3, env__context="full")
    assert minibatch_rows(changed(**sizes, optimizer__minibatches=4)) == 3


def test_field_follows_dots():
    config = changed(rollout__groups=6)
    assert field(config, "rollout.groups") == 6
    assert field(config, "seed") == config.seed


def test_config_of_a_run_is_read_back(tmp_path):
    config = sokoban.get_config()
    (tmp_path / "config.json").write_text(config.to_json())
    assert read_run_config(tmp_path).env.max_turns == config.env.max_turns
    with pytest.raises(ValueError, match=f"{tmp_path}/none is not a run folder"):
        read_run_config(tmp_path / "none")


# ---- configs ------------------------------------------------------------------------------------


def defaults(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def test_base_says_what_the_functions_say():
    config = base.get_config()
    select = defaults(filter.select_groups)
    assert set(select) == {"strategy", "value", "mode", "keep", "include_zero", "eps", "unit"}
    for name in set(select) - {"eps", "unit"}:
        assert config.filter[name] == select[name], name
    assert (select["eps"], config.filter.eps) == (0.01, 0.0)  # the paper's; relative
    assert config.filter.metric == defaults(filter.group_scores)["metric"]
    for function in (losses.policy_terms, losses.policy_loss):
        assert config.algorithm.clip_c == defaults(function)["clip_c"]
    for name, value in defaults(Sampling).items():
        assert config.eval[name] == value, name


def test_fields_that_others_rely_on_are_there():
    names = """seed steps model.path env.name env.context rollout.groups rollout.group_size
        rollout.temperature rollout.max_new_tokens eval.every eval.episodes filter.strategy
        filter.value filter.metric algorithm.name algorithm.kl_coef algorithm.entropy_coef
        optimizer.learning_rate checkpoint.every diagnose.every mesh.data mesh.fsdp mesh.tensor"""
    for name in names.split():
        field(base.get_config(), name)


def test_configs_are_not_shared():
    sokoban.get_config().rollout.groups = 99
    assert sokoban.get_config().rollout.groups == base.get_config().rollout.groups != 99


@pytest.mark.parametrize("name", CONFIGS)
def test_an_unknown_preset_lists_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        CONFIGS[name].get_config("huge")
    accepted = ", ".join(presets.list_models(name))
    assert str(error.value) == f"configs/{name}.py has no preset 'huge'; accepted: {accepted}"


def departures(config):
    """Return {field: value} of the fields that differ from base.py."""
    before = dict(leaves(base.get_config()))
    return {name: value for name, value in leaves(config) if value != before.get(name, "no field")}


def leaves(config, prefix=""):
    for name, value in config.to_dict().items():
        if isinstance(value, dict) and value:
            yield from leaves(config[name], f"{prefix}{name}.")
        else:
            yield prefix + name, value


ROOMS = {
    "env.options.size": (6, 6),
    "env.options.num_boxes": 1,
    "env.options.observation": "grid",
    "env.options.min_solution": 3,
    "env.options.max_solution": 10,
}


def test_sokoban_is_what_its_results_were_measured_with():
    assert departures(sokoban.get_config("tiny")) == ROOMS | {
        "env.context": "single_turn",
        "env.prompt": "terse",
        "env.format_penalty": -1.0,
        "rollout.stop": (),
        "rollout.max_new_tokens": 22,
        "algorithm.kl_coef": 0.0,
        "optimizer.learning_rate": 1e-4,
        "critic.learning_rate": 1e-3,
        "optimizer.warmup_updates": 20,
        "optimizer.b2": 0.99,
        "optimizer.micro_batch": 16,
        "diagnose.trajectory_samples": 16,
        "diagnose.micro_batch": 128,
        "eval.episodes": 1024,
        "eval.every": 25,
        "checkpoint.every": 25,
        "steps": 250,
    }
    assert departures(sokoban.get_config("qwen2.5-3b")) == ROOMS | {
        "filter.eps": 0.01,
        "model.path": "Qwen/Qwen2.5-3B",
        "model.dtype": "bfloat16",
        "model.remat": True,
        "mesh.data": 1,
        "mesh.fsdp": -1,
        "sampling_mesh.data": -1,
        "sampling_mesh.fsdp": 1,
        "sampling_mesh.tensor": 2,
        "optimizer.micro_batch": 16,
        "diagnose.trajectory_samples": 24,
        "algorithm.name": "ppo",
    }


# ---- environments -------------------------------------------------------------------------------


def test_text_answers_are_one_action_a_turn():
    config = countdown.get_config()
    build_environment(config.env, "train")
    config.env.actions_per_turn = 2
    with pytest.raises(ValueError, match="config.env.actions_per_turn is 2; accepted: 1, because"):
        build_environment(config.env, "train")


def test_a_file_of_problems_counts_by_its_content(tmp_path):
    config = countdown.get_config()
    assert environment_settings(config.env) == {"env": "countdown", **config.env.options.to_dict()}
    settings = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).write_bytes(content)
        config.env.options.path = str(tmp_path / name)
        settings.append(environment_settings(config.env))
    assert settings[0] == settings[1] != settings[2]
    assert settings[0]["path"] == hashlib.sha256(b"1").hexdigest()
    config.env.options.path = str(tmp_path / "none")
    with pytest.raises(ValueError, match="config.env.options.path cannot be read: .*none"):
        environment_settings(config.env)


# ---- mesh ---------------------------------------------------------------------------------------


def test_meshes_over_all_devices():
    devices = jax.device_count()
    for name in MESH_AXES:
        sizes = dict.fromkeys(MESH_AXES, 1) | {name: -1}
        mesh = make_mesh(**sizes)
        assert dict(mesh.shape) == sizes | {name: devices}
        assert data_shards(mesh) == (1 if name == "tensor" else devices)
    assert dict(make_mesh(data=devices, fsdp=1, tensor=1).shape)["data"] == devices


def test_bad_meshes_are_refused_with_their_sizes():
    devices = jax.device_count()
    for sizes in ((-1, -1, 1), (0, 1, 1), (1, -2, 1)):
        data, fsdp, tensor = sizes
        match = f"mesh.data={data}, mesh.fsdp={fsdp}, mesh.tensor={tensor}: .*one may be -1"
        with pytest.raises(ValueError, match=match):
            make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    too_many = devices + 1
    for data, fsdp in ((too_many, 1), (-1, too_many)):
        match = f"mesh.data={data}, mesh.fsdp={fsdp}, .* does not fit {devices} device"
        with pytest.raises(ValueError, match=match):
            make_mesh(data=data, fsdp=fsdp, tensor=1)


def test_the_hash_of_a_file_is_read_anew_when_it_has_changed(tmp_path):
    file = tmp_path / "file"
    for content in (b"1", b"23", b"1"):
        file.write_bytes(content)
        os.utime(file, ns=(0, len(content)))
        assert content_hash(file) == hashlib.sha256(content).hexdigest()
    file.write_bytes(b"2")  # the same size as before
    assert content_hash(str(file)) == hashlib.sha256(b"2").hexdigest()
    with pytest.raises(OSError):
        content_hash(tmp_path / "none")


def test_the_hash_of_a_folder_is_of_names_and_contents(tmp_path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"1")
    (folder / "sub" / "b").write_bytes(b"2")
    found = [content_hash(folder)]
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved" / ".hidden").write_bytes(b"3")
    assert content_hash(str(tmp_path / "moved")) == found[0]
    (tmp_path / "moved" / "a").rename(tmp_path / "moved" / "c")
    found.append(content_hash(tmp_path / "moved"))
    (tmp_path / "moved" / "sub" / "b").write_bytes(b"4444")
    found.append(content_hash(tmp_path / "moved"))
    assert len(set(found)) == 3


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--config=configs/sokoban.py", "--config.rollout.grops=4"], "grops"),
        pytest.param(
            ["--config=configs/sokoban.py:huge"],
            "'huge'; accepted: tiny, llm, smollm2-135m",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--config=configs/sokoban.py", "--config.env.name=frozen"],
            "'frozen'; it must be one of ",
            marks=pytest.mark.slow,
        ),
        (["--config=configs/sokoban.py", "--config.model.path={tmp}/no-model"], "{tmp}/no-model"),
        pytest.param(
            ["--config=configs/no_such_file.py"], "configs/no_such_file.py", marks=pytest.mark.slow
        ),
        pytest.param(
            ["--config=configs/countdown.py", "--config.env.options.path={tmp}/none.parquet"],
            "there is no file {tmp}/none.parquet",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["field", "preset", "environment", "model", "file", "problems"],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(tmp_path, arguments, named):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ragen_jax.train", f"--workdir={tmp_path}/run"),
            *(argument.format(tmp=tmp_path) for argument in arguments),
        ],
        env=env | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert list(tmp_path.rglob("*")) == []  # neither a run nor a cache
    assert done.stdout == "" or re.fullmatch(r"\S+/run: \w+, model \S+, on 1 x cpu\n", done.stdout)
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and named.format(tmp=tmp_path) in lines[0]
    assert "Traceback" not in lines[0] and "\\" not in lines[0]  # no escaped quotes or newlines


def test_rates_of_a_steps_minibatches():
    config = base.get_config()
    config.steps, config.algorithm.name = 3, "ppo"
    config.optimizer.update(learning_rate=0.6, schedule="linear", warmup_updates=0, minibatches=2)
    config.critic.update(learning_rate=1.2, warmup_steps=1)
    # The policy's four updates are in the second and third step; the critic makes six.
    for step, policy, critic in ((2, [0.6, 0.45], [0.8, 0.6]), (3, [0.3, 0.15], [0.4, 0.2])):
        found = step_rates(config, step)
        np.testing.assert_allclose(found, [policy, critic], rtol=1e-6)
    config.algorithm.name = "grpo"  # no critic; the policy's six updates begin with the first step
    policy, critic = step_rates(config, 2)
    np.testing.assert_allclose(policy, [0.4, 0.3], rtol=1e-6)
    assert policy.dtype == np.float32 and len(critic) == 0


def test_a_run_from_before_a_field_has_what_it_did_then(tmp_path, capsys):
    before = changed(rollout__groups=5).to_dict()
    del before["warmstart"]["styles"], before["diagnose"]["probe_every"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    config = read_run_config(tmp_path)
    check(config)
    assert config.rollout.groups == 5
    assert config.to_json(sort_keys=True) == changed(rollout__groups=5).to_json(sort_keys=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(
        "lacks these fields, using defaults: config.diagnose.probe_every=0, "
        "config.warmstart.styles={}"
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    read_run_config(tmp_path)
    assert capsys.readouterr().out == ""


def test_so_have_the_environments_that_train_with_its_first(tmp_path, capsys):
    whole = mixture.get_config()
    before = whole.to_dict()
    for env in (before["env"], before["also"]["countdown"]["env"]):
        del env["time_limit"], env["workers"]
    (tmp_path / "config.json").write_text(json.dumps(before))
    config = read_run_config(tmp_path)
    check(config)
    assert config.to_json(sort_keys=True) == whole.to_json(sort_keys=True)
    assert "config.also.countdown.env.time_limit=0.0" in capsys.readouterr().out
    same_run(whole, tmp_path)


def test_what_an_old_run_lacks_is_told_once(tmp_path, capsys):
    old = changed().to_dict()
    del old["report"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = read_run_config(tmp_path)
    assert same_run(config, tmp_path) == []
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        line == f"{tmp_path / 'config.json'} lacks these fields, using defaults: "
        "config.report={'every': 50}"
    )


def test_a_run_with_fields_that_there_are_no_more_is_read_but_not_continued(tmp_path, capsys):
    old = mixture.get_config().to_dict()
    old["regimes"]["retrieval"] = 0.75
    old["also"]["countdown"]["env"]["speed"] = {"a": 1}
    (tmp_path / "config.json").write_text(json.dumps(old))
    config = read_run_config(tmp_path)
    check(config)
    assert config.to_json(sort_keys=True) == mixture.get_config().to_json(sort_keys=True)
    listed = "config.regimes.retrieval=0.75, config.also.countdown.env.speed={'a': 1}"
    assert capsys.readouterr().out == (
        f"{tmp_path / 'config.json'} has fields that no longer exist, ignored: {listed}\n"
    )
    with pytest.raises(
        ValueError, match="was written by another version: it has config.regimes.retrieval"
    ):
        same_run(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(json.dumps(old))


def test_options_of_an_environment_are_its_own(tmp_path, capsys):
    config = changed()
    config.env.options = ConfigDict({"anything": 3})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert read_run_config(tmp_path).env.options.anything == 3
    assert capsys.readouterr().out == "" and same_run(config, tmp_path) == []


def test_checkpoints_without_a_config_are_nobodys(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert same_run(changed(), tmp_path) == []
    (tmp_path / "checkpoints" / "20").mkdir()
    with pytest.raises(ValueError, match="has checkpoints but no config.json"):
        same_run(changed(), tmp_path)


@pytest.mark.parametrize(
    "fields, differs",
    [
        ({"steps": 300}, ["steps"]),
        ({"eval__every": 7, "eval__temperature": 1.0}, ["eval.every", "eval.temperature"]),
        ({"checkpoint__keep": 9, "rollout__save_every": 1}, None),
        ({}, []),
    ],
)
def test_what_may_change_in_a_run_is_told(fields, differs, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed().to_dict()))
    found = same_run(changed(**fields), tmp_path)
    names = [name.replace("__", ".") for name in fields]
    assert found == (sorted(names) if differs is None else differs)
    assert same_run(changed(**fields), tmp_path / "new") == []


def test_steps_of_a_stretched_learning_rate_stay(tmp_path):
    before = changed(optimizer__schedule="linear")
    (tmp_path / "config.json").write_text(json.dumps(before.to_dict()))
    with pytest.raises(ValueError, match=r"steps=250.*has 300; .*optimizer.schedule=linear"):
        same_run(changed(optimizer__schedule="linear", steps=300), tmp_path)


def test_another_config_names_the_fields_that_matter_and_counts_the_others(tmp_path):
    before = changed(optimizer__b1=0.5, algorithm__name="ppo", rollout__groups=5, seed=7)
    (tmp_path / "config.json").write_text(json.dumps(before.to_dict()))
    with pytest.raises(ValueError) as error:
        same_run(changed(model__path="some/model", optimizer__b2=0.5), tmp_path)
    message = str(error.value)
    assert message.startswith(
        f"{tmp_path} holds a run with config.model.path='tiny', config.algorithm.name='ppo', "
        "config.seed=7, but this command has 'some/model', 'grpo', 0 (and 3 more fields); resume "
        f"it with --workdir={tmp_path} alone, or use another --workdir. These may change: steps, "
    )


@pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")
@pytest.mark.parametrize("steps", [5, 74])
def test_a_run_does_not_end_before_the_step_that_it_has_reached(steps, tmp_path, monkeypatch):
    def load_policy(config, workdir):
        raise ValueError("a model is loaded")

    monkeypatch.setattr(start, "load_policy", load_policy)
    stored = sokoban.get_config().to_json() + "\n"
    (tmp_path / "config.json").write_text(stored)
    for step in (50, 75):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    words = [f"--workdir={tmp_path}", f"--config.steps={steps}"]
    code, _, err = call("ragen_jax.train", *words)
    assert code == 2 and err == (
        f"error: config.steps is {steps}, but step 75 of the run in {tmp_path} is saved; give "
        "--config.steps=75 to end the run there, or a larger number to continue it\n"
    )
    assert (tmp_path / "config.json").read_text() == stored
    start.check_steps(
        load_config(read_run_config(tmp_path)), tmp_path
    )  # the number of steps stored
    start.check_steps(load_config(changed(steps=75)), tmp_path)  # the run ends where it is


def test_earlier_evaluations_are_set_aside(tmp_path, capsys):
    set_evaluations_aside(tmp_path, 3)  # no evaluations yet
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "step_000000.json").write_text("[]")
    set_evaluations_aside(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["eval_until_step_000003"]
    assert (tmp_path / "eval_until_step_000003" / "step_000000.json").read_text() == "[]"
    assert "eval_until_step_000003" in capsys.readouterr().out


def test_folders_of_one_name_do_not_collide(tmp_path):
    found = [new_folder(tmp_path / "runs", "sokoban-20260101-000000") for _ in range(3)]
    names = [path.relative_to(tmp_path / "runs").as_posix() for path in found]
    assert names == [f"sokoban-20260101-000000{end}" for end in ("", "-2", "-3")]
    assert all(path.is_dir() for path in found)
