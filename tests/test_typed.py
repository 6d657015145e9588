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
    "ragen_jax.train --config=sokobam": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config=mine.py": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config": "which is not a config; accepted: a file such as",
    "ragen_jax.train --config=broken.py": "invalid syntax (broken.py, line 1)",
    "ragen_jax.train --config=other.py": "No module named 'not_there'",
    "ragen_jax.train --config=" + 300 * "a" + ".py": "File name too long",
    "ragen_jax.evaluate --model=" + 300 * "a": "characters): File name too long",
    "ragen_jax.report " + 300 * "a": "characters): File name too long",
    "ragen_jax.plot folder --out=curves.png/x.png": "folder curves.png does not exist",
    "ragen_jax.train --config=sokoban --config=sudoku": "--config is given 2 times; give it once",
    "ragen_jax.train --config=sokoban+ppo": "recipes come after a preset: sokoban:tiny+ppo",
    "ragen_jax.train --config=sokoban:large": "has no preset 'large'; accepted: tiny, llm, qwen",
    "ragen_jax.train --config=sokoban:tiny+pppo": "unknown recipe 'pppo'; known: ppo,",
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
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Change to a user's folder outside this tree."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "other.py").write_text("import not_there\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    left = {path.name for path in tmp_path.iterdir()}
    theirs = {"folder", "file", "broken.py", "other.py", "__pycache__"}
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
