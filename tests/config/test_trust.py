"""trust.py: importing code named in a run folder needs the user's own run, or --trust."""

import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from cli_commands import call

from ragen_jax.config.stored import read_run_config
from ragen_jax.config.trust import SIGNATURE, code_fields, require_trust, sign
from ragen_jax.configs import sokoban
from ragen_jax.envs import CODE_OPTIONS, ENVS, make_env, names_code
from ragen_jax.storage.atomic_io import atomic_write

DOCS = Path(__file__).parents[2] / "docs/environments/own.md"
PLANTED = "import builtins\nbuiltins.planted = True\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The folder in which a user starts commands. Its code shows whether it ran."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(PLANTED)
    yield tmp_path
    sys.modules.pop("theirs", None)


def ran():
    """Report whether the planted code has run, and reset the mark."""
    sys.modules.pop("theirs", None)
    return bool(sys.modules["builtins"].__dict__.pop("planted", False))


def foreign(folder, **fields):
    """Make a run folder as another user would."""
    config = sokoban.get_config()
    config.update_from_flattened_dict(fields)
    atomic_write(folder / "config.json", json.dumps(config.to_dict()))
    return config


NAMING = {
    "environment": {"env.name": "theirs:Env"},
    "reward": {"env.name": "dataset", "env.options.reward": "theirs:f"},
    "module": {"env.name": "gymnasium", "env.options.id": "a", "env.options.module": "theirs"},
    "id": {"env.name": "gymnasium", "env.options.id": "theirs:Env-v0"},
    "maker": {"env.name": "gymnasium", "env.options.id": "x", "env.options.maker": "os:system"},
    "warm start": {"env.name": "dataset", "warmstart.options.reward": "theirs:f"},
}


def folder_naming(folder, fields):
    config = sokoban.get_config().to_dict()
    for name, value in fields.items():
        *parts, last = name.split(".")
        section = config
        for part in parts:
            section = section[part]
        section[last] = value
    atomic_write(folder / "config.json", json.dumps(config))


@pytest.mark.parametrize("fields", NAMING.values(), ids=NAMING)
@pytest.mark.parametrize("command", ["evaluate", "export", "serve", "train"])
def test_a_folder_of_somebody_else_runs_no_code(here, command, fields):
    folder_naming(here / "run", fields)
    code, out, err = call(f"ragen_jax.{command}", "--workdir=run")
    assert code == 2 and err.count("error: ") == 1 and not ran(), (out, err)
    assert "error: run names code that would be imported: " in err and "--trust" in err
    assert all(f"config.{name}=" in err for name in [*fields][-1:])
    assert sorted(path.name for path in (here / "run").iterdir()) == ["config.json"]


def test_an_environment_of_a_mixture_counts(here):
    folder_naming(here / "run", {})
    config = json.loads((here / "run/config.json").read_text())
    config["also"] = {"other": {"groups": 2, "env": {**config["env"], "name": "theirs:Env"}}}
    atomic_write(here / "run/config.json", json.dumps(config))
    code, _, err = call("ragen_jax.evaluate", "--workdir=run")
    assert code == 2 and "config.also.other.env.name='theirs:Env'" in err and not ran()


def test_what_the_user_names_or_trusts_is_imported(here):
    folder_naming(here / "run", NAMING["environment"])
    for words in (["--trust"], ["--config.env.name=theirs:Env"]):
        code, _, err = call("ragen_jax.train", "--workdir=run", *words)
        assert code == 2 and "theirs.py has no class Env" in err and ran(), words


def test_the_report_of_a_folder_imports_nothing(here):
    folder_naming(here / "run", NAMING["environment"])
    atomic_write(here / "run/metrics.jsonl", json.dumps({"step": 1, "rollout/return": 0.5}) + "\n")
    call("ragen_jax.report", "run")
    assert not ran()


def test_who_started_a_run_is_not_asked(here):
    folder_naming(here / "run", NAMING["environment"])
    config = read_run_config(here / "run")
    sign(here / "run", config)
    require_trust(here / "run", config)
    (here / "run").rename(here / "renamed")
    require_trust(here / "renamed", config)
    assert (here / "home/ragen_jax/key").stat().st_mode & 0o077 == 0

    # A config that somebody changed later is not the config that the user started.
    changed = json.loads((here / "renamed/config.json").read_text())
    changed["env"]["options"] = {"command": "other"}
    atomic_write(here / "renamed/config.json", json.dumps(changed))
    with pytest.raises(ValueError, match="belongs to another user, machine or config"):
        require_trust(here / "renamed", read_run_config(here / "renamed"))
    atomic_write(here / "renamed/config.json", json.dumps(config.to_dict()))
    require_trust(here / "renamed", config)

    # A key that other users can read proves nothing, and neither does another user's signature.
    (here / "home/ragen_jax/key").chmod(0o644)
    with pytest.raises(ValueError, match="other users can read .*key; delete it"):
        require_trust(here / "renamed", config)
    (here / "home/ragen_jax/key").unlink()
    with pytest.raises(ValueError, match="you did not start it on this machine"):
        require_trust(here / "renamed", config)
    sign(here / "other", config)  # makes a new key
    with pytest.raises(ValueError, match="belongs to another user, machine or config"):
        require_trust(here / "renamed", config)


def test_a_run_that_names_no_code_needs_no_key(here):
    config = foreign(here / "run")
    assert code_fields(config.to_dict()) == {}
    sign(here / "run", config)
    require_trust(here / "run", read_run_config(here / "run"))
    assert not (here / "run" / SIGNATURE).exists() and not (here / "home/ragen_jax").exists()


@pytest.mark.long
def test_a_run_with_an_own_environment_is_resumed_by_its_folder_alone(here, language_model):
    """As in docs/own_task.md: train with --config once, then resume with --workdir alone."""
    (here / "larger.py").write_text(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)[0])
    words = [f"--config.model.path={language_model}", "--config.steps=0", "--config.eval.every=0"]
    words += ["--config.rollout.groups=2", "--config.rollout.group_size=2"]
    words += ["--config.optimizer.minibatches=1", "--config.optimizer.micro_batch=2"]
    words += ["--config.checkpoint.export=False", "--config.rollout.max_new_tokens=8"]
    code, _, err = call("ragen_jax.train", "--config=larger.py:llm", "--workdir=run", *words)
    assert code == 0, err
    code, out, err = call("ragen_jax.train", "--workdir=run")
    assert code == 0 and "done: run" in out, err
    shutil.rmtree(here / "home")  # as on another machine
    code, _, err = call("ragen_jax.train", "--workdir=run")
    assert code == 2 and "config.env.name='larger:Larger'" in err
    assert call("ragen_jax.train", "--workdir=run", "--trust")[0] == 0
    assert call("ragen_jax.train", "--workdir=run")[0] == 0  # the trust was recorded


# ---------------------------------------------------------------- which options name code

SMALL = {"dataset": {"path": "rows.jsonl", "reward": "builtins:max"}, "gymnasium": {"id": "x"}}
VALUES = ("theirs", "theirs:f", "theirs:Env-v0", {"env_id": "theirs:Env-v0"}, {"a": "theirs:f"})


@pytest.mark.parametrize("name", ENVS)
def test_every_option_that_imports_is_known_to_name_code(here, name):
    (here / "rows.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    options = inspect.signature(ENVS[name]).parameters
    texts = [
        n for n, x in options.items() if n != "split" and not isinstance(x.default, int | float)
    ]
    found = set()
    for option in texts:
        for value in VALUES:
            try:
                make_env(name, **{**SMALL.get(name, {}), option: value}, split="train").reset(0)
            except Exception:  # any kind: most of these values are nonsense
                pass
            if ran():
                found.add(option)
    known = set(CODE_OPTIONS.get(name, ()))
    # These are arguments of engines, and are run by other processes.
    elsewhere = {"command", "mcp", "taskset", "settings", "python"}
    assert found <= known and known - found <= {"arguments", *elsewhere}
    assert not names_code(name)
