"""The commands in the code blocks of docs/: each runs, or stops only where a resource is missing.

Commands of README.md and docs/cli.md are run by tests/test_commands.py.
"""

import re
import shlex
import sys
import types

import pytest
from cli_commands import DOCS, README, ROOT, Written, call, commands_of
from simulated_runs import write_run

from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.lab import arms
from ragen_jax.preflight import compile as compiling
from ragen_jax.run import load, start
from ragen_jax.score import follow

pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")
STOPPED = "nothing is loaded here"
# Files, folders and servers that pages name and that only readers have.
ABSENT = (
    "train.parquet",
    "wiki-18.jsonl.gz",
    "FILE.jsonl",
    "FOLDER",
    "index=words",
    "index=vectors",
    "runs/teacher",
)
# page: field that a run sets only for `evaluate --gradients`
KEPT = {"results/gradient_buckets.md": "diagnose.gradients_groups"}


def plain(text):
    """The command without its comment, with one run name, and without --step."""
    words = shlex.join(shlex.split(text, comments=True))
    return re.sub(r" --step=\d+", "", re.sub(r"\bruns/\w+", "runs/NAME", words))


HERE = [command for command in DOCS if not command.needs]
OWN = [command for command in HERE if plain(command.text) not in set(map(plain, README))]


def of(*modules):
    """The commands of the modules, without those that another page has as well."""
    own = {plain(command.text): command for command in reversed(OWN)}.values()
    return [c for c in reversed(own) if c.text.split()[0].removeprefix("ragen_jax.") in modules]


@pytest.fixture
def reader(language_model, tmp_path, monkeypatch):
    """reader(command): its words, in a folder with the files that the pages describe."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    pages = [ROOT / f"docs/environments/{name}.md" for name in ("own", "engines")]
    text = "".join(page.read_text() for page in pages)
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        for name, content in {"larger": "class Larger", "hunt": "class Hunt"}.items():
            if content in code:
                (tmp_path / f"{name}.py").write_text(code)
                monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def words(command):
        text = re.sub(
            r"runs/\w+/export_\w+/policy|\bDIR(_OR_HUB_ID)?\b", str(language_model), command
        )
        return shlex.split(text, comments=True)

    yield words
    for name in ("larger", "hunt"):
        sys.modules.pop(name, None)


def stop(*_):
    raise ValueError(STOPPED)


def test_every_command_is_tried_or_says_what_it_needs():
    assert len(DOCS) > 40 and {command.needs for command in DOCS} <= {"", "wandb"}
    tried = ("train", "lab", "preflight", "report", "plot", "check_data", "retriever", "score")
    tried += ("serve",)
    left = {plain(command.text) for command in OWN} - {plain(c.text) for c in of(*tried)}
    assert left == set()


def test_what_stands_in_a_block():
    text = "<!-- needs: a GPU -->\n```bash\nfor a in x y; do for s in 0 1; do\n"
    text += "  A=1 python -m ragen_jax.train --b=$a$s \\\n    --c=1 [--d=2 ...]\ndone; done\n```\n"
    text += "```bash\nfor s in 3; do python -m ragen_jax.lab run x$s > y; done\n```\n"
    found = [(command.text, command.needs) for command in commands_of("page.md", text)]
    assert found == [("ragen_jax.train --b=x0 --c=1", "a GPU"), ("ragen_jax.lab run x3", "")]


def accepted(words, code, err):
    """Whether a command stopped at a missing resource, and not before."""
    (line,) = (
        x for x in err.splitlines() if not re.fullmatch(r"[a-z][^:]*(: .* s (so far|left))?", x)
    )
    absent = [name.partition("=")[2] or name for name in ABSENT if name in " ".join(words)]
    return code == 2 and any(x in line for x in (STOPPED, *absent)) and "flag" not in line.lower()


@pytest.mark.parametrize("command", of("train"), ids=str)
def test_a_training_command_starts(command, reader, monkeypatch):
    """Runs up to the model; the run or a later command reads every field that the command sets."""
    monkeypatch.setattr(load, "load_policy", stop)
    monkeypatch.setattr(start, "load_policy", stop)
    words = reader(command.text)
    if not any("--config" in word for word in words):  # it resumes a run: start one instead
        words.append("--config=sokoban")
    code, out, err = call(*words)
    assert accepted(words, code, err), err
    unread = re.findall(r"warning: (.*) is set but not read", out)
    assert unread == ([KEPT[command.page]] if command.page in KEPT else [])
    assert "are set but" not in out


@pytest.mark.parametrize("command", of("lab"), ids=str)
def test_an_experiment_is_planned(command, reader, monkeypatch):
    plans, ended = [], types.SimpleNamespace(returncode=99)
    monkeypatch.setattr(arms, "run_arms", lambda plan, *_, **__: plans.append(plan) or 99)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: ended)  # `run referee` runs experiments
    words = reader(command.text)
    code, _, err = call(*words)
    if words[2] in EXPERIMENTS and EXPERIMENTS[words[2]].rows:
        assert code == 2 and "holds no rows of" in err  # it only reads stored rows
    else:
        assert code == 99 and (len(plans[0]) > 1 if plans else words[2] == "referee"), err


@pytest.mark.parametrize("command", of("preflight"), ids=str)
def test_a_preflight_starts(command, reader, monkeypatch):
    monkeypatch.setattr(compiling, "find_topology", stop)
    words = reader(command.text)
    code, _, err = call(*words)
    assert accepted(words, code, err), err


@pytest.mark.parametrize("command", of("check_data", "retriever", "score"), ids=str)
def test_a_command_about_files(command, reader, monkeypatch):
    words = reader(command.text)
    monkeypatch.setattr(follow, "make_encoder", stop)  # it would wait for the files for ever
    code, out, err = call(*words)
    if any(name in command.text for name in ABSENT):
        assert accepted(words, code, err), err
    elif "--sample" in words:
        assert code == 0 and "reasoning that fits any prompt" in out, err
    else:
        assert code == 0 and out.startswith("larger:Larger: generated"), err


@pytest.mark.parametrize("command", of("serve"), ids=str)
def test_a_policy_is_served(command, reader):
    """As far as the run, which only a reader has."""
    code, _, err = call(*reader(command.text))
    (line,) = (
        x for x in err.splitlines() if not re.fullmatch(r"[a-z][^:]*(: .* s (so far|left))?", x)
    )
    assert code == 2 and line.startswith("error: runs/NAME"), err


ABOUT_RUNS = ("ragen_jax.report", "ragen_jax.plot")
FRONT = [Written("front", text, "") for text in README if text.startswith(ABOUT_RUNS)]


@pytest.mark.parametrize("command", [*of("report", "plot"), *FRONT], ids=str)
def test_a_command_about_runs(command, reader):
    for name in set(re.findall(r"runs/(\w+)", command.text)):
        write_run(ROOT.cwd() / "runs" / name, steps=30)
    code, out, err = call(*reader(command.text))
    assert code == 0, err
    assert (ROOT.cwd() / out.split()[0]).stat().st_size > 1000
