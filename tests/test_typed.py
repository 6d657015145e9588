"""Commands that new users type, right and wrong: the output of each, never a traceback."""

import shlex
import sys

import pytest
from cli_commands import call

# Warnings about running modules that are already imported, and about how ml_collections reads a
# config file.
pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")

RIGHT = {
    "ragen_jax": "python -m ragen_jax.train ",
    "ragen_jax -h": "python -m ragen_jax.train ",
    "ragen_jax.train -h": "--config.steps=100",
    "ragen_jax.train --help": "presets, after a colon: tiny, llm",
    "ragen_jax.lab list": "organism (",
    "ragen_jax.check_data --config=sokoban --rows=1": "sokoban: generated",
    "ragen_jax.check_data --rows=1 --config.env.options.size=(5,5) --config=sokoban": "seed 0",
}
WRONG = {
    "ragen_jax trian": "serve, retriever; did you mean train?",
    "ragen_jax.train --steps=3": "no flag --steps; did you mean --config.steps?",
    "ragen_jax.train steps=3": "unexpected argument 'steps=3'; overrides are --config.FIELD=VALUE",
    "ragen_jax.train --config=sokobam": "textarena, verifiers, webshop; did you mean sokoban?",
    "ragen_jax.train --config=mine": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config=" + 300 * "a" + ".py": "File name too long",
    "ragen_jax.evaluate --model=" + 300 * "a": "characters): File name too long",
    "ragen_jax.report " + 300 * "a": "characters): File name too long",
    "ragen_jax.plot folder --out=curves.png/x.png": "folder curves.png does not exist",
    "ragen_jax.train --config=sokoban --config=sudoku": "--config is given 2 times; give it once",
    "ragen_jax.train --config=sokoban+ppo": "recipes come after a preset: sokoban:tiny+ppo",
    "ragen_jax.train --config=sokoban:large": "has no preset 'large'; accepted: tiny, llm, smol",
    "ragen_jax.train --config=sokoban:tiny+pppo": "error: unknown recipe 'pppo'; did you mean ppo?",
    "ragen_jax.train --config=sokoban:llm": "preset llm needs --config.model.path=DIR_OR_HUB_ID",
    "ragen_jax.train --config.model.path=none --config=sokoban:llm": "no model directory none; it",
    "ragen_jax.train --config.env.name=chess": "config.env.name is 'chess'; it must be one of",
    "ragen_jax.train --config.step=3": "no field 'step'; did you mean \"steps\"?",
    "ragen_jax.train --config.steps=2.5": "config.steps is '2.5'; it must be a whole number from 0",
    "ragen_jax.train --config.optimizer.learning_rate=-1": "is -1.0; it must be a number above 0",
    "ragen_jax.train --config.optimizer.learning_rate=low": "it must be a number above 0, at",
    "ragen_jax.train --config.model.lora.tower=maybe": "is 'maybe'; it must be True or False",
    "ragen_jax.train --config.optimizer=3": "is a section; set its fields: --config.optimizer.NAME",
    "ragen_jax.train --config.steps.x=3": "a value of type int has no field 'x'",
    "ragen_jax.train --stall_timeout=soon": "--stall_timeout is 'soon'; it must be a number",
    "ragen_jax.evaluate --step=last": "--step is 'last'; it must be a whole number",
    "ragen_jax.train --config.filter.strategy=topp": "is 'topp'; it must be one of top_p, top_k",
    "ragen_jax.train --config.rollout.group_size=1": "a group of one has no variance",
    "ragen_jax.train --config.log.trackers=wandbb": "each item is one of tensorboard, wandb",
    "ragen_jax.train --workdir=file": "--workdir is file, a file; it must be a folder",
    "ragen_jax.evaluate": "give either --workdir (a run) or --model (a directory or hub id)",
    "ragen_jax.evaluate --workdir=folder": "is not a run folder: it has no config.json",
    "ragen_jax.evaluate --workdir=nowhere": "is not a run folder: it has no config.json",
    "ragen_jax.report": "name a run folder: python -m ragen_jax.report runs/NAME",
    "ragen_jax.report nowhere": "is not a run folder: it has no config.json",
    "ragen_jax.plot folder": "is not a run folder: it has no config.json",
    "ragen_jax.score": "score needs --model=DIR",
    "ragen_jax.export": "give --workdir, the folder of a run",
    "ragen_jax.lab": "give `list`, `pages`, or `run NAME` with a name from `list`",
    "ragen_jax.lab run everything": "unknown experiment 'everything'; known: ",
    "ragen_jax.retriever": "expected build or serve, got ''",
    "ragen_jax.retriever serve": "serve needs --index",
    "ragen_jax.preflight --config=sokoban:llm": "preset llm needs --config.model.path=",
    "ragen_jax.check_data --config=countdown --config.env.options.path=none": "no file none",
    "ragen_jax.warmstart --config.warmstart.rooms=0": "must be a whole number from 1 to",
    # Names of other tools.
    **{
        f"ragen_jax.train --{name}": f"; here it is called --config.{field}"
        for name, field in {
            "lr=1e-4": "optimizer.learning_rate",
            "learning_rate=1e-4": "optimizer.learning_rate",
            "config.rollout.n=8": "rollout.group_size",
            "config.lr=1e-4": "optimizer.learning_rate",
            "batch_size=64": "rollout.groups",
            "per_device_train_batch_size=8": "rollout.groups",
            "num_generations=8": "rollout.group_size",
            "config.rollout.n_samples=8": "rollout.group_size",
            "max_steps=100": "steps",
            "num_train_epochs=3": "steps",
            "max_completion_length=512": "rollout.max_new_tokens",
            "max_prompt_length=512": "env.max_context",
            "beta=0.04": "algorithm.kl_coef",
            "config.algorithm.entropy_coeff=0.01": "algorithm.entropy_coef",
            "config.algorithm.cliprange=0.2": "algorithm.clip_low",
            "bf16=True": "model.dtype",
            "model_name_or_path=Qwen/Qwen2.5-0.5B": "model.path",
            "report_to=wandb": "log.trackers",
            "wandb": "log.trackers",
            "save_steps=10": "checkpoint.every",
            "eval_steps=10": "eval.every",
            "gradient_checkpointing": "model.remat",
            "lora_r=8": "model.lora.rank",
            "tensor_parallel_size=2": "mesh.tensor",
            "reward_funcs=f": "env.options",
        }.items()
    },
    "ragen_jax.train --output_dir=out": "; the folder of a run is --workdir=DIR",
    "ragen_jax.train --resume": "; a run is resumed by train --workdir=RUN",
    "ragen_jax.train --resume_from_checkpoint=c": "; a run is resumed by train --workdir=RUN",
    # Folders and files.
    "ragen_jax.train --workdir=folder": "folder, which holds no run to resume; to start a new run",
    "ragen_jax.train folder": "folder, which holds no run to resume; to start a new run there, add",
    "ragen_jax.evaluate folder": "is not a run folder: it has no config.json",
    "ragen_jax.export folder": "is not a run folder: it has no config.json",
    "ragen_jax.report --workdir=folder": "is not a run folder: it has no config.json",
    "ragen_jax.train --config=config.yaml": "a config is a Python file with get_config(), or a na",
    "ragen_jax.train --config=empty.py": "empty.py has no function get_config(); configs/sokoban",
    "ragen_jax.train --config=renamed.py": "renamed.py has no function get_config(); configs/sok",
    "ragen_jax.train --config.env.options.width=16": "'width'; did you mean",
    "ragen_jax.check_data --config=faulty.py:own": "error: faulty:Lift has no preset 'grpo'; accep",
    "ragen_jax.train --config=faulty.py:unsplit --workdir=run": "must accept split='train' or",
    "ragen_jax.train --config=mine.py": "--config is 'mine.py', but there is no file mine.py",
    "ragen_jax.train --config=configs/sokobn.py": "configs/sokobn.py; did you mean sokoban?",
    # Errors in the user's config file.
    "ragen_jax.train --config=broken.py": "broken.py:1: SyntaxError: '(' was never closed",
    "ragen_jax.train --config=other.py": "other.py:1: ModuleNotFoundError: No module named 'not_t",
    "ragen_jax.train --config=faulty.py:name": "faulty.py:10: get_config: NameError: name 'confg'",
    "ragen_jax.train --config=faulty.py:key": "faulty.py:5: helper: KeyError: 'x'",
    "ragen_jax.train --config=faulty.py:type": "faulty.py:12: get_config: TypeError: Could not ov",
    "ragen_jax.train --config=faulty.py:value": "faulty.py:7: get_config: ValueError: too many",
    "ragen_jax.train --config=faulty.py:json": "faulty.py:14: get_config: JSONDecodeError: Expecti",
    "ragen_jax.train --config=faulty.py:file": "faulty.py:16: get_config: FileNotFoundError: ",
    "ragen_jax.train --config=faulty.py:preset": "error: configs/sokoban.py has no preset 'huge'",
    "ragen_jax.train --config=faulty.py:none": "get_config() of faulty.py must return a ConfigDict",
    "ragen_jax.train --config=faulty.py:none --config.steps=3": "NoneType has no field 'steps'; do",
    "ragen_jax.train --config=faulty.py:field": "is unknown; did you mean optimizer.learning_rate?",
    "ragen_jax.check_data --config=faulty.py:field": "; did you mean learning_rate?",
    "ragen_jax.train --config=faulty.py:class --workdir=run": "error: config.env.name: environment "
    "'faulty:Lift' lacks identity; an environment has actions",
    # Near names, and names that are near to nothing.
    "ragen_jax.train --config=frozenlake": "verifiers, webshop; did you mean frozen_lake?",
    "ragen_jax.train --config=sokoban:tinny": "tiny-vl, qwen2.5-vl-3b; did you mean tiny?",
    "ragen_jax.train --config=sokoban:tiny+grop": "'grop'; did you mean grpo? (--help lists the",
    "ragen_jax.lab run orgnism": "; did you mean organism?",
    "ragen_jax.train --config=sokoban:tiny+zzzzz": "unknown recipe 'zzzzz'; known: ppo,",
    "ragen_jax.train --config.rollout.groop_size=4": "no field 'groop_size'; did you mean",
    "ragen_jax.train --config.qqqq=4": "the config has no field 'qqqq' (configs/base.py lists",
    "ragen_jax.train --qqqq=4": "there is no flag --qqqq",
}


FAULTY = """import json
from ragen_jax.configs import presets, sokoban

def helper():
    return {}["x"]
def get_config(what="tiny"):
    if what == "value": raise ValueError("too many")
    config = sokoban.get_config()
    if what == "name":
        return confg
    if what == "type":
        config.steps = "many"
    if what == "json":
        json.loads("{")
    if what == "file":
        open("nowhere")
    if what == "key":
        helper()
    if what == "preset":
        sokoban.get_config("huge")
    if what == "none":
        return None
    if what == "own":
        config.env.name = "faulty:Lift"
        presets.apply(config, "grpo")
    if what == "unsplit":
        config.env.name, config.env.options = "faulty:Unsplit", type(config)()
    if what == "field":
        config.optimizer.learning_rat = 1e-4
    if what == "class":
        config.env.name, config.env.options = "faulty:Lift", type(config)()
    return config
class Lift:
    actions = instructions = reset = render = step = words = solve = explain = ()
    def __init__(self, split):
        pass
class Unsplit(Lift):
    def __init__(self, width=8):
        pass
"""
RENAMED = """from ragen_jax.configs import base
def get_cfg():
    return base.get_config()
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Change to a user's folder outside this tree."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken.py").write_text("def get_config(\n")
    (tmp_path / "other.py").write_text("import not_there\nget_config = 1\n")
    (tmp_path / "empty.py").write_text("STEPS = 3\n")
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "renamed.py").write_text(RENAMED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    left = {path.name for path in tmp_path.iterdir()}
    theirs = {"folder", "file", "broken.py", "other.py", "empty.py", "faulty.py", "renamed.py"}
    assert left <= theirs | {"curves.png", "__pycache__"}, "something was left"


@pytest.mark.parametrize("typed", RIGHT)
def test_what_is_right_does_it(typed):
    code, out, err = call(*shlex.split(typed))
    assert (code, err) == (0, "") and RIGHT[typed] in out


@pytest.mark.parametrize("typed", WRONG)
def test_what_is_wrong_is_told_in_a_line(typed):
    code, out, err = call(*shlex.split(typed))
    (line,) = err.splitlines()
    assert code == 2 and line.startswith("error: ") and WRONG[typed] in line
    assert "Traceback" not in out + err
