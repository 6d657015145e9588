"""An environment in a user's file: the example of docs/environments/own.md."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_jax.envs import ENVS, RENAMED_METHODS, code_hash, find_env, make_env
from ragen_jax.envs.types import SolvableEnvironment
from ragen_jax.storage.metrics_reader import read_metrics

DOCS = Path(__file__).parents[2] / "docs/environments/own.md"
ROOT = Path(__file__).parents[2]
SHORT = [
    *("--config.steps=1", "--config.rollout.groups=2", "--config.rollout.group_size=2"),
    *("--config.optimizer.minibatches=1", "--config.optimizer.micro_batch=2"),
    *(
        "--config.eval.episodes=8",
        "--config.diagnose.flow_every=0",
        "--config.rollout.compact=False",
    ),
]
TINY = [
    *("--config.warmstart.rooms=64", "--config.warmstart.success=0.0"),
    *("--config.warmstart.check_every=2", "--config.warmstart.check_episodes=8"),
]


def example():
    """The first Python block of the page."""
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)[0]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's folder that contains the file of the page."""
    (tmp_path / "larger.py").write_text(example())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "larger", raising=False)
    yield tmp_path
    sys.modules.pop("larger", None)


def run(folder, *words):
    """(exit code, stderr) of the train command, started in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "ragen_jax.train", "--workdir=run", *words],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def test_the_example_is_short_and_keeps_the_contract(own):
    assert len([line for line in example().splitlines() if line.strip()]) <= 40
    found = {}
    for split in ("imitation", "train", "eval"):
        environment = make_env("larger:Larger", split=split)
        assert isinstance(environment, SolvableEnvironment)
        states = [environment.reset(seed) for seed in range(300)]
        found[split] = {environment.identity(state) for state in states}
        for state in states[:20]:
            (action,) = environment.solve(state)
            step = environment.step(state, action, None)
            assert step.done and step.reward == 1.0 and step.info["success"]
            assert state[action == "right"] == max(state)
    assert not found["train"] & found["eval"] and not found["imitation"] & found["eval"]


@pytest.mark.long
@pytest.mark.parametrize("preset", ["tiny", pytest.param("llm", marks=pytest.mark.slow)])
def test_the_example_trains(own, preset, language_model):
    words = [f"--config=larger.py:{preset}", *SHORT]
    words += TINY if preset == "tiny" else [f"--config.model.path={language_model}"]
    code, err = run(own, *words)
    assert code == 0, err
    rows = read_metrics(own / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1] and "eval/success" in rows[1]


def test_a_file_of_problems_is_kept_for_the_code_that_made_them(own):
    before = code_hash("larger:Larger")
    (own / "larger.py").write_text(example().replace("range(200)", "range(100)"))
    assert code_hash("larger:Larger") != before
    assert code_hash("sokoban") is None


READS_ONE = """
import sys
from ragen_jax.configs.base import Config
from ragen_jax.envs import ENVS

assert "sokoban" in ENVS and "none" not in ENVS and len(ENVS) == len(list(ENVS))
modules = {f"ragen_jax.envs.{place.partition(':')[0]}" for place in ENVS._classes.values()}
print(modules & sys.modules.keys())
ENVS["sokoban"]
print(modules & sys.modules.keys())
"""


def test_an_environment_is_imported_when_it_is_read():
    done = subprocess.run(
        [sys.executable, "-c", READS_ONE], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["set()", "{'ragen_jax.envs.sokoban'}"]


def test_a_name_of_ours_is_never_a_module(own):
    (own / "sokoban.py").write_text("raise RuntimeError")
    assert all(find_env(name) is build for name, build in ENVS.items())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nowhere:Class",
            "No module named 'nowhere'; start the command in the folder of nowhere.py",
        ),
        ("broken:Class", "module broken cannot be imported: ZeroDivisionError: division by zero"),
        ("larger:Smaller", "larger.py has no class Smaller"),
        ("larger:itertools", "larger.py has no class itertools"),
        ("larger.py:Larger", "module larger.py cannot be imported"),
        (
            "larger",
            f"unknown environment 'larger'; known: {', '.join(sorted(ENVS))}, or MODULE",
        ),
        ("larger:", "unknown environment 'larger:'"),
        ("../larger:Larger", "unknown environment '../larger:Larger'"),
    ],
)
def test_what_cannot_be_found_is_named(own, name, said):
    (own / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=re.escape(said)):
        make_env(name, split="train")


@pytest.mark.parametrize("old, new", RENAMED_METHODS.items())
def test_a_renamed_method_is_refused_with_its_new_name(own, old, new):
    """Otherwise its figures would be missing without a word."""
    (own / f"older_{old}.py").write_text(
        f"from larger import Larger\n\n\nclass Older(Larger):\n    def {old}(self): ...\n"
    )
    message = f"'older_{old}:Older': its method {old} is now called {new}; rename it in "
    with pytest.raises(ValueError, match=re.escape(message)):
        make_env(f"older_{old}:Older", split="train")


def test_the_command_names_it_in_one_line(own):
    (own / "larger.py").write_text(example().replace("larger:Larger", "larger:Smaller"))
    code, err = run(own, "--config=larger.py")
    assert code == 2 and err.count("\n") == 1
    assert "config.env.name: environment 'larger:Smaller'" in err and not (own / "run").exists()


SUBCLASS = """
from larger import Larger


class Harder(Larger):
    def __init__(self, **options):
        super().__init__(**options)


class Bare:
    actions = ("A",)

    def __init__(self, *, split):
        pass

    def reset(self, seed):
        return seed
"""


def test_a_subclass_may_pass_its_options_on(own, monkeypatch):
    (own / "harder.py").write_text(SUBCLASS)
    monkeypatch.delitem(sys.modules, "harder", raising=False)
    options = list(inspect.signature(find_env("larger:Larger")).parameters)
    environment = make_env("harder:Harder", split="train")
    assert environment.reset(3) == make_env("larger:Larger", split="train").reset(3)
    assert "split" in options
    with pytest.raises(ValueError, match="'harder:Harder' has an unknown option: .*'depth'"):
        make_env("harder:Harder", split="train", depth=3)
    with pytest.raises(ValueError, match="'larger:Larger' has no option 'depth'; accepted: "):
        make_env("larger:Larger", split="train", depth=3)


def test_a_missing_member_is_named(own, monkeypatch):
    (own / "harder.py").write_text(SUBCLASS)
    monkeypatch.delitem(sys.modules, "harder", raising=False)
    with pytest.raises(ValueError, match="'harder:Bare' lacks instructions, render, identity, st"):
        make_env("harder:Bare", split="train")
