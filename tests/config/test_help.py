"""The commands' help, their message for an unknown flag or command, and the list of commands."""

import re
import subprocess
import sys

import pytest
from cli_commands import ROOT, call

from ragen_jax.__main__ import COMMANDS
from ragen_jax.configs import base, presets, recipes

# The warnings come from running modules that are already imported, and from the way ml_collections
# reads a config file.
pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")


def modules():
    """Names of the modules that run as `python -m ragen_jax.NAME`."""
    files = [*(ROOT / "ragen_jax").glob("*.py"), *(ROOT / "ragen_jax").glob("*/__main__.py")]
    for file in files:
        if '__name__ == "__main__"' in file.read_text() and file.parent.name != "ragen_jax":
            yield file.parent.name
        elif '__name__ == "__main__"' in file.read_text() and file.stem != "__main__":
            yield file.stem


def test_the_list_has_every_command():
    assert sorted(COMMANDS) == sorted(modules())
    setup = (ROOT / "setup.py").read_text()
    assert all(f'"{name.replace("_", "-")}"' in setup for name in COMMANDS)


@pytest.mark.parametrize("asked", ["-h", "--help"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, asked):
    code, out, err = call(f"ragen_jax.{command}", asked)
    assert (code, err) == (0, "")
    defined = re.findall(
        r'flags\.DEFINE_\w+\(\s*"(\w+)"',
        "".join(path.read_text() for path in files_of(command)),
    )
    flags = re.findall(r"^  --(\w+): \S", out, re.M)
    assert flags and set(defined) <= set(flags), "a flag is not told"
    reads_config = command not in ("retriever", "report", "plot", "score")
    assert ("config" in flags) == reads_config
    if reads_config:
        assert all(
            name in out
            for name in (*presets.PRESETS, *presets.VISION_LLMS, *recipes.RECIPES, "webshop")
        )
        assert out.strip().endswith(base.__file__)
    assert max(map(len, out.splitlines())) <= 100
    # Only commands with --workdir mention it, and only those that read a run import its code.
    assert ("--workdir" in out) == ("workdir" in flags)
    assert ("trust" in flags) == (command in ("train", "evaluate", "export", "serve"))


def test_the_help_of_train_says_what_its_refusal_says(tmp_path):
    code, _, err = call("ragen_jax.train", f"--workdir={tmp_path / 'new'}")
    assert code == 2 and "to start a new run there, add --config=sokoban" in err
    _, out, _ = call("ragen_jax.train", "--help")
    text = " ".join(out.split())
    assert "or sokoban; to start a run in a new --workdir, give --config or a --config." in text


def files_of(command):
    file = ROOT / "ragen_jax" / f"{command}.py"
    return [file if file.exists() else ROOT / "ragen_jax" / command / "__main__.py"]


def test_without_a_command_they_are_listed():
    for words in ((), ("-h",), ("--help",)):
        code, out, err = call("ragen_jax", *words)
        assert (code, err) == (0, "") and all(f"ragen_jax.{name} " in out for name in COMMANDS)
    code, out, err = call("ragen_jax", "trian")
    assert code == 2 and err.startswith("error: ragen_jax has no command 'trian'; accepted: train")
    assert err.endswith("; did you mean train?\n")


def run(code, *words):
    """Return (exit code, stdout, stderr) of Python code in a separate process."""
    command = [sys.executable, *code, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words, expected", [(["train", "--steps=3"], "--config.steps"), (["lab"], "`list`")]
)
def test_a_command_may_be_the_first_word(words, expected):
    code, out, err = run(["-m", "ragen_jax"], *words)
    assert (code, out) == (2, "") and expected in err


@pytest.mark.parametrize(
    "name, expected",
    [("ragen-check-data", "Show and play the problems"), ("ragen-train", "Train an LLM")],
)
def test_a_script_is_its_command(name, expected):
    script = f"import sys; sys.argv = ['/somewhere/bin/{name}', '--help']\n"
    code, out, err = run(["-c", script + "from ragen_jax.__main__ import script\nscript()"])
    assert code == 0 and out.startswith(expected), err


@pytest.mark.parametrize(
    "word, expected",
    [
        ("--steps=3", "no flag --steps; did you mean --config.steps?"),
        (
            "--seed=1",
            "did you mean --config.seed or --config.eval.seed or --config.warmstart.seed?",
        ),
        ("--groups=3", "did you mean --config.rollout.groups?"),
        ("--group_size=3", "did you mean --config.rollout.group_size?"),
        ("--eval.every=3", "did you mean --config.eval.every?"),
        ("--eval_every=3", "did you mean --config.eval.every?"),
        ("--filter.value=0.9", "did you mean --config.filter.value?"),
        ("--learning-rate=1e-4", "--config.optimizer.learning_rate"),
        ("--worldir=x", "did you mean --workdir?"),
        ("--frobnicate", "no flag --frobnicate"),
        ("--config.stepz=3", "no field 'stepz'; did you mean \"steps\"?"),
    ],
)
def test_what_is_meant_is_told(word, expected):
    code, out, err = call("ragen_jax.train", word)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert err.startswith("error: ") and expected in err
