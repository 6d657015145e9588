"""Commands that new users type, right and wrong: the output of each, never a traceback."""

import shlex

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
    "ragen_jax trian": "no command 'trian'; accepted: train, evaluate",
    "ragen_jax.train --steps=3": "no flag --steps; did you mean --config.steps?",
    "ragen_jax.train steps=3": "unexpected argument 'steps=3'; overrides are --config.FIELD=VALUE",
    "ragen_jax.train --config=sokobam": "textarena, webshop; did you mean sokoban?",
    "ragen_jax.train --config=mine.py": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config=broken.py": "'(' was never closed (broken.py, line 1)",
    "ragen_jax.train --config=other.py": "No module named 'not_there'",
    "ragen_jax.train --config=" + 300 * "a" + ".py": "File name too long",
    "ragen_jax.evaluate --model=" + 300 * "a": "characters): File name too long",
    "ragen_jax.report " + 300 * "a": "characters): File name too long",
    "ragen_jax.plot folder --out=curves.png/x.png": "folder curves.png does not exist",
    "ragen_jax.train --config=sokoban --config=sudoku": "--config is given 2 times; give it once",
    "ragen_jax.train --config=sokoban+ppo": "recipes come after a preset: sokoban:tiny+ppo",
    "ragen_jax.train --config=sokoban:large": "has no preset 'large'; accepted: tiny, llm, qwen",
    "ragen_jax.train --config=sokoban:tiny+pppo": "; did you mean ppo?",
    "ragen_jax.train --config=sokoban:llm": "preset llm needs --config.model.path=DIR_OR_HUB_ID",
    "ragen_jax.train --config.model.path=none --config=sokoban:llm": "no model directory none; it",
    "ragen_jax.train --config.env.name=chess": "config.env.name is 'chess'; it must be one of",
    "ragen_jax.train --config.step=3": "no field 'step'; did you mean \"steps\"?",
    "ragen_jax.train --config.steps=2.5": "--config.steps=2.5: invalid literal for int()",
    "ragen_jax.train --config.optimizer.learning_rate=-1": "is -1.0; it must be a number above 0",
    "ragen_jax.train --config.optimizer.learning_rate=low": "could not convert string to float",
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
    # Near names, and names that are near to nothing.
    "ragen_jax.train --config=frozenlake": "textarena, webshop; did you mean frozen_lake?",
    "ragen_jax.train --config=sokoban:tinny": "tiny-vl, qwen2.5-vl-3b; did you mean tiny?",
    "ragen_jax.train --config=sokoban:tiny+grop": "; did you mean grpo?",
    "ragen_jax.train --config=sokoban:tiny+zzzzz": "unknown recipe 'zzzzz'; known: ppo,",
    "ragen_jax.train --config.rollout.groop_size=4": "no field 'groop_size'; did you mean",
    "ragen_jax.train --config.qqqq=4": "the config has no field 'qqqq' (configs/base.py lists",
    "ragen_jax.train --qqqq=4": "there is no flag --qqqq",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Change to a user's folder outside this tree."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken.py").write_text("def get_config(\n")
    (tmp_path / "other.py").write_text("import not_there\nget_config = 1\n")
    (tmp_path / "empty.py").write_text("STEPS = 3\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    left = {path.name for path in tmp_path.iterdir()}
    theirs = {"folder", "file", "broken.py", "other.py", "empty.py", "__pycache__"}
    assert left <= theirs | {"curves.png"}, "something was left"


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
