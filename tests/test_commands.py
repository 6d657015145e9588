"""The commands of README.md and docs/cli.md, and commands for a run folder, as a user types them.

They run in this process and share its compiled programs.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cli_commands import README, ROOT, call

from ragen_jax.config.stored import read_run_config
from ragen_jax.configs.experiments import EXPERIMENTS
from ragen_jax.configs.experiments.experiment import NONE, TOP_P
from ragen_jax.lab import arms, mechanism
from ragen_jax.lab.curves import SUCCESS
from ragen_jax.run import load, start
from ragen_jax.storage import program_store
from ragen_jax.storage.metrics_reader import read_metrics

# Warnings about running modules that are already imported, and about how ml_collections reads a
# config file.
pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")
MEASURED = ("time/", "throughput/", "memory/")
STOPPED = "no model is loaded here"


@pytest.fixture(autouse=True)
def home(agent, monkeypatch):
    """Use caches that hold the tests' agent, and run commands in the README's folder."""
    xdg = agent.directory.parent.parent / "home"
    xdg.mkdir(exist_ok=True)
    if not (xdg / "ragen_jax").exists():
        (xdg / "ragen_jax").symlink_to(agent.directory.parent.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(xdg))
    monkeypatch.chdir(ROOT)


SHORT = ["--config.steps=1", "--config.eval.every=0", "--config.diagnose.every=0"]
SHORT += ["--config.rollout.compact=False", "--config.eval.episodes=8"]
SHORT += ["--config.rollout.groups=2", "--config.rollout.group_size=4"]
SHORT += ["--config.optimizer.minibatches=1", "--config.optimizer.micro_batch=2"]
SMALL = ["--config.rollout.max_new_tokens=24", "--config.diagnose.micro_batch=4"]
SMALL += ["--config.env.max_turns=2"]
AGENT = ["--config.warmstart.rooms=1024", "--config.warmstart.success=0.0"]  # as in conftest.py
AGENT += ["--config.warmstart.check_every=150", "--config.warmstart.check_episodes=16"]

FEW = [f"--config.warmstart.{name}" for name in ("rooms=12", "batch=4", "max_updates=1")]
FEW += ["--config.warmstart.check_episodes=1", "--config.optimizer.micro_batch=2"]


def shortened(command, workdir, model):
    """Return the words of a README command, with options that make it short and local."""
    module, *words = shlex.split(command, comments=True)
    places = {"DIR_OR_HUB_ID": str(model), "runs/NAME": str(workdir), "step=240": "step=1"}
    places |= {
        "runs/fine_tuned/policy": str(model),
        "--workdir=runs/fine_tuned": f"--workdir={workdir}",
    }
    words = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in words]
    text = " ".join(words)
    if module == "ragen_jax.train":
        words += [f"--workdir={workdir}", *SHORT]
        if "configs/sokoban.py:qwen" in text:  # its weights are on the hub
            words += [f"--config.model.path={model}", "--config.model.dtype=float32"]
            words += ["--config.sampling_mesh.tensor=1", "--config.reward.overlong_buffer=2"]
        if ":smollm2" in text and "model.path" not in text:  # so are these
            words += [f"--config.model.path={model}", "--config.model.dtype=float32"]
        words += SMALL if "model.path" in " ".join(words) else AGENT
    elif module == "ragen_jax.sft":
        words += [f"--config.model.path={model}", "--config.rollout.max_new_tokens=4", *FEW]
    elif module == "ragen_jax.evaluate":
        words += ["--config.eval.episodes=4", "--config.diagnose.micro_batch=4"]
        words += ["--config.rollout.max_new_tokens=24"] if "--model" in text else []
        words += ["--config.diagnose.gradients_groups=4"] if "--gradients" in text else []
    return [module, *words]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(): return the folder of a short run of the default command; the run is made on first
    use."""

    @functools.cache
    def make():
        workdir = tmp_path_factory.mktemp("runs") / "default"
        code, _, err = call(*shortened("ragen_jax.train", workdir, None))
        assert code == 0, err
        return workdir

    return make


# ------------------------------------------------------------------------------ stored programs


@pytest.mark.medium
def test_a_second_start_runs_stored_programs_and_gives_the_same_numbers(tmp_path):
    if program_store.fingerprint_of(now=time.time_ns())() is None:
        pytest.skip("programs of code that was changed within the last minute are not stored")
    # Processes of their own, so that no program is in memory.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    rows, files = [], []
    for number in range(3):
        words = [
            *shortened("ragen_jax.train", tmp_path / str(number), None)[1:],
            "--config.eval.every=1",
        ]
        if number == 2:
            environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # stores nothing
        command = [sys.executable, "-m", "ragen_jax.train", *words]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        read = read_metrics(tmp_path / str(number) / "metrics.jsonl")
        rows.append([{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read])
        files.append(sorted(path.name for path in (tmp_path / "compiled/traced").iterdir()))
    assert rows[0] == rows[1] == rows[2]
    assert len(files[0]) >= 5
    assert files[0] == files[1] == files[2]


# ------------------------------------------------------------------------------ the README


def test_the_readme_has_commands_of_every_kind():
    modules = [command.split()[0].removeprefix("ragen_jax.") for command in README]
    kinds = {"train", "evaluate", "export", "report", "plot", "lab", "preflight"}
    kinds |= {"check_data", "score", "sft"}
    assert set(modules) == kinds
    assert len(README) >= 12


@pytest.mark.parametrize("command", [c for c in README if c.startswith("ragen_jax.train")])
def test_a_training_command_of_the_readme_starts(command, language_model, tmp_path, monkeypatch):
    """Run up to the model: the command's flags are known, and their values are accepted and
    read."""

    def stop(config, workdir):
        raise ValueError(f"{STOPPED}: {config.model.path}")

    monkeypatch.setattr(load, "load_policy", stop)
    monkeypatch.setattr(start, "load_policy", stop)
    code, out, err = call(*shortened(command, tmp_path / "run", language_model))
    assert code == 2 and err.startswith(f"error: {STOPPED}"), err
    mine = [word for word in shlex.split(command, comments=True) if "=" in word]
    for word in mine:
        assert word.removeprefix("--config.").split("=")[0] not in out, "not read"
    own = any(name in command for name in ("DIR_OR_HUB_ID", "qwen", "smollm2"))
    assert own == (str(language_model) in err)


@pytest.mark.parametrize("command", [c for c in README if c.startswith("ragen_jax.sft")])
def test_a_fine_tuning_command_of_the_readme(command, language_model, tmp_path):
    code, out, err = call(*shortened(command, tmp_path / "taught", language_model))
    assert code == 0, err
    policy = tmp_path / "taught" / "policy"
    assert json.loads(out.splitlines()[-1]) == {"model": str(policy)}
    assert (policy / "model.safetensors").exists()
    assert "held-out loss" in (tmp_path / "taught" / "report.html").read_text()


@pytest.mark.parametrize(
    "module, code, expected",
    [
        ("ragen_jax.train", 2, f"error: {STOPPED}: tiny"),
        (
            "ragen_jax.lab",
            2,
            "error: give `list`, `pages`, or `run NAME` with a name from `list`",
        ),
        ("ragen_jax.evaluate", 2, "--workdir"),
    ],
)
def test_a_command_without_any_argument(module, code, expected, monkeypatch):
    """The README's first command has no arguments; all other tests add arguments."""

    def stop(config, workdir):
        raise ValueError(f"{STOPPED}: {config.model.path}")

    monkeypatch.setattr(load, "load_policy", stop)
    monkeypatch.setattr(start, "load_policy", stop)
    found, out, err = call(module)
    assert found == code and expected in out + err, out + err


def whole_commands():
    """Yield the commands that can run here; all but one of each kind are marked as slow."""
    for command in README:
        kind = command.split()[0]
        if kind in ("ragen_jax.train", "ragen_jax.evaluate", "ragen_jax.export"):
            quick = (
                "--samples" in command
                or kind == "ragen_jax.export"
                or ":llm" in command
                and kind == "ragen_jax.train"
            )
            quick = quick and "lora" not in command
            yield pytest.param(command, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("command", list(whole_commands()))
def test_a_command_of_the_readme_runs(command, run, language_model, tmp_path):
    workdir = run() if "runs/NAME" in command else tmp_path / "run"
    words = shortened(command, workdir, language_model)
    code, out, err = call(*words)
    assert code == 0, err
    if command.startswith("ragen_jax.train"):
        (row,) = read_metrics(workdir / "metrics.jsonl")
        assert row["step"] == 1 and row["rollout/logp_gap" if "update/loss" in row else "step"]
        assert out.splitlines()[-1] == f"done: {workdir}"
        lora = "lora.rank" in command
        assert (workdir / "policy").exists() and (workdir / "adapter").exists() == lora
    elif command.startswith("ragen_jax.export"):
        assert (workdir / "export_step_000001" / "policy" / "model.safetensors").exists()
    else:
        assert re.search(r"^eval at step \d: success [01]\.\d{3} ± ", out, re.M)
        assert ("pass_at_8 " in out) == ("--samples=8" in command)
        assert "its prompt" in out and re.search(r"^--all prints all \d+ figures$", out, re.M)
        assert len(out.splitlines()) <= 12
        code, out, _ = call(*words, "--all")
        assert code == 0 and ("gradient/" in out) == ("--gradients" in command)
        assert 0 <= float(re.search(r"^eval/success +(\S+)$", out, re.M)[1]) <= 1


def test_an_evaluation_says_why_replies_are_invalid_and_what_is_saved(language_model, tmp_path):
    command = "ragen_jax.evaluate --config=configs/sokoban.py:llm --model=DIR_OR_HUB_ID"
    words = shortened(command, tmp_path, language_model)
    code, out, err = call(*words)
    assert code == 0, err
    *_, reasons, prompt, reply, more, saved = out.splitlines()
    assert re.match(r"  \d+ of \d+ replies are not valid: \d+ .*; for example$", reasons)
    assert prompt.startswith("    prompt: ") and reply.startswith("    reply: <think>")
    assert more.startswith("--all prints all ")
    assert saved == "nothing was saved; --out=FILE.json saves the metrics"
    code, out, _ = call(*words, "--all", f"--out={tmp_path / 'metrics.json'}")
    assert (
        reasons in out and "nothing was saved" not in out and (tmp_path / "metrics.json").exists()
    )


def test_the_laboratory_lists_what_it_can_run():
    code, out, _ = call("ragen_jax.lab", "list")
    assert code == 0
    for name, experiment in EXPERIMENTS.items():
        assert f"{name} (" in out and experiment.question in out
    for words in (["run"], ["run", "nothing"], ["walk", "organism"], ["run", "organism", "more"]):
        code, _, err = call("ragen_jax.lab", *words)
        assert code == 2 and err.count("\n") == 1
        assert "nothing" not in words or f"known: {', '.join(EXPERIMENTS)}" in err
    code, _, err = call("ragen_jax.lab", "run", "collapse", "--quick")
    assert code == 2 and "has no shorter form" in err


@pytest.fixture
def planned(monkeypatch):
    """Record what the laboratory would run; nothing is run, and it ends with exit code 99."""
    plans = []

    def run_arms(plan, root, **_):
        plans.append((plan, root))
        return 99

    monkeypatch.setattr(arms, "run_arms", run_arms)
    return plans


def test_the_laboratory_command_of_the_readme(planned):
    """The command takes a quarter of an hour: here each arm's config is built and checked, not
    run."""
    (command,) = [line for line in README if line.startswith("ragen_jax.lab run organism")]
    code, _, err = call(*shlex.split(command, comments=True))
    assert code == 99, err
    ((plan, root),) = planned
    assert root == Path("runs/lab/organism_quick") and len(plan) == 6
    assert {arm.config.warmstart.styles["template"] for arm in plan} == {0.5}
    assert [arm.config.filter.strategy for arm in plan[:2]] == ["top_p", "none"]


def test_the_laboratory_names_what_its_experiment_sets_itself(planned):
    words = ["--config.warmstart.rooms=99", "--config.steps=5", "--config.eval.every=1"]
    code, out, err = call("ragen_jax.lab", "run", "collapse", *words)
    assert out.splitlines()[0] == (
        "warning: eval.every, steps are set but not read because experiment collapse sets its own "
        "values"
    )
    assert code == 99, err
    ((plan, _),) = planned
    assert len(plan) == 30 and {arm.config.warmstart.rooms for arm in plan} == {99}


@pytest.mark.slow
def test_the_laboratory_runs_and_goes_on(agent, tmp_path, monkeypatch):
    """Run real arms of a few replies, each in a separate process."""
    whole = EXPERIMENTS["organism"]
    common_fields = whole.common_fields | {"steps": 2, "eval.every": 1, "diagnose.probe_every": 1}
    small = dataclasses.replace(
        whole,
        seeds=(0,),
        treatments={"top-p 0.9": TOP_P, "no filter": NONE},
        common_fields=common_fields,
    )
    monkeypatch.setitem(EXPERIMENTS, "organism", small)
    words = ["run", "organism", f"--workdir={tmp_path / 'runs'}", f"--report={tmp_path / 'docs'}"]
    words += [f"--config.model.path={agent.directory}", "--config.eval.episodes=4"]
    words += ["--config.rollout.groups=3", "--config.rollout.group_size=2"]
    words += ["--config.diagnose.probe_problems=3", "--config.diagnose.flow_every=0"]
    words += ["--config.optimizer.minibatches=1", "--config.optimizer.micro_batch=6"]
    words += ["--config.env.max_turns=1"]
    code, out, err = call("ragen_jax.lab", *words)
    assert code == 0, out + err
    assert "2 of 2 arms" in out and out.count("done; ") == 2
    page = (tmp_path / "docs/organism.md").read_text()
    assert "| no filter | 0 |" in page and "`probe/mi_seq`" in page
    assert "| [organism](organism.md) | **" in (tmp_path / "docs/claims.md").read_text()
    before = {path: path.read_bytes() for path in tmp_path.rglob("metrics.jsonl")}
    assert len(before) == 2
    code, out, _ = call("ragen_jax.lab", *words)
    assert code == 0 and "arms" not in out.splitlines()[0]
    assert {path: path.read_bytes() for path in before} == before
    # Another machine has only the page.
    shutil.rmtree(tmp_path / "runs")
    code, out, _ = call("ragen_jax.lab", *words, "--reuse")
    assert code == 0 and f"2 of 2 arms are read from {tmp_path / 'docs/organism.jsonl'}" in out
    assert (tmp_path / "docs/organism.md").read_text() == page
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("upper", "seeds"), [(2.0, 3), (0.2, 5)])
def test_the_laboratory_ends_where_it_is_certain(upper, seeds, tmp_path, monkeypatch):
    """The information is kept by a bonus on the upper half, or is not, in arms that others ran."""
    pytest.importorskip("matplotlib")

    def run_arms(plan, root, **_):
        for arm in plan:
            at_upper = arm.treatment == mechanism.UPPER
            noise = np.random.default_rng(arm.seed).normal(0, 0.1, 2)[int(at_upper)]
            end = (upper if at_upper else 0.2) + noise
            rows = [{"step": 0, SUCCESS: 0.4}]
            for step, mi in ((4, 2.0), (8, end)):
                figures = dict.fromkeys(
                    (*mechanism.PULLS, *mechanism.NORMS, *mechanism.VARIANCES, mechanism.GROUNDED),
                    0.5,
                )
                rows.append({"step": step, mechanism.MI: mi, SUCCESS: 0.4} | figures)
            (root / arm.folder).mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (root / arm.folder / "metrics.jsonl").write_text(text)
        return 0

    monkeypatch.setattr(arms, "run_arms", run_arms)
    words = ["run", "mechanism", f"--workdir={tmp_path / 'runs'}", f"--report={tmp_path / 'docs'}"]
    code, out, err = call("ragen_jax.lab", *words)
    assert code == 0, out + err
    assert ("certain after 3 of 5 seeds" in out) == (seeds == 3)
    assert len(list((tmp_path / "runs").rglob("metrics.jsonl"))) == 3 * seeds
    assert f"{3 * seeds} runs of 8 steps" in (tmp_path / "docs/mechanism.md").read_text()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return the folder for quick forms; experiments with common arms share them."""
    return tmp_path_factory.mktemp("lab")


def run_quick(words, shared, optimised, monkeypatch):
    """Return the output of `python -m ragen_jax.lab WORDS`, with its arms optimized as a user's
    are."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    with optimised():
        code, out, err = call(*words, f"--workdir={shared}/runs", f"--report={shared}/docs")
    assert code == 0, err
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, x in EXPERIMENTS.items() if x.quick])
def test_the_quick_form_of_every_experiment(name, shared, optimised, monkeypatch):
    run_quick(("ragen_jax.lab", "run", name, "--quick"), shared, optimised, monkeypatch)
    assert (shared / f"docs/{name}_quick.md").exists()


@pytest.mark.slow
def test_the_laboratory_command_of_the_readme_runs(shared, optimised, monkeypatch):
    (command,) = [line for line in README if line.startswith("ragen_jax.lab run organism")]
    out = run_quick(shlex.split(command, comments=True), shared, optimised, monkeypatch)
    assert "With no filter, 3 of 3 runs lost half of their information" in out


@pytest.mark.slow
def test_the_preflight_of_the_readme():
    (command,) = [line for line in README if line.startswith("ragen_jax.preflight")]
    code, out, err = call(*shlex.split(command))
    if importlib.util.find_spec("libtpu") is None:
        assert code == 2 and "pip install ragen_jax[tpu]" in err  # it gets as far as the compiler
    else:
        assert code == 0 and "A step takes at least" in out, err


# ------------------------------------------------------------------------------ a run's folder


def test_a_run_goes_on_with_the_settings_in_its_folder(run, tmp_path):
    workdir = run()
    held = read_run_config(workdir)
    code, out, err = call("ragen_jax.train", f"--workdir={workdir}")
    done = f"all 1 steps of {workdir} are done; to continue, give --config.steps=M with M above 1"
    assert code == 0 and done in out.splitlines() and "resuming" not in out, err
    assert read_run_config(workdir).to_dict() == held.to_dict()
    other = ["--config.rollout.groups=4", "--config.seed=1", "--config.checkpoint.keep=3"]
    code, _, err = call("ragen_jax.train", f"--workdir={workdir}", *other)
    assert code == 2 and len(err.splitlines()) == 1
    was = "holds a run with config.seed=0, config.rollout.groups=2, but this command has"
    assert was in err and "These may change: steps, eval., checkpoint., stopping." in err
    assert json.loads((workdir / "config.json").read_text()) == json.loads(held.to_json())


def evaluated(*words):
    code, out, err = call("ragen_jax.evaluate", *words, "--all")
    assert code == 0, err
    return dict(line.split() for line in out.splitlines() if line.startswith("eval/")), out


@pytest.mark.long
def test_an_evaluation_with_other_settings_has_its_own_file(run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run(), workdir)

    def written(*words):
        code, out, err = call("ragen_jax.evaluate", f"--workdir={workdir}", *words)
        assert code == 0, err
        (path,) = re.findall(r"^written: (.*)$", out, re.M)
        return Path(path)

    plain, gradients = written("--gradients"), workdir / "gradients" / "step_000001.json"
    assert plain == workdir / "evaluation_step_000001.json"
    before = plain.read_bytes(), gradients.read_bytes()
    warm = written("--config.eval.temperature=5.0", "--config.eval.episodes=8", "--gradients")
    twice = written("--samples=2")
    assert (plain.read_bytes(), gradients.read_bytes()) == before
    assert len({plain, warm, twice}) == 3 and warm.parent == twice.parent == workdir
    assert json.loads(warm.read_text())["set"] == {"eval.temperature": 5.0, "eval.episodes": 8}
    assert warm == written("--config.eval.temperature=5.0")  # the run has 8 episodes
    assert json.loads(twice.read_text())["samples"] == 2
    # The gradients of other groups are still gradients of the run.
    written("--config.diagnose.gradients_groups=4", "--gradients")
    assert plain.read_bytes() == before[0] and gradients.read_bytes() != before[1]


def test_an_evaluation_honours_what_it_reads(run):
    own = [f"--workdir={run()}", "--config.diagnose.first_turn_samples=2"]
    plain, _ = evaluated(*own)
    warm, _ = evaluated(*own, "--config.eval.temperature=5.0", "--config.eval.seed=3")
    assert plain != warm  # random replies to other problems
    short, _ = evaluated(*own, "--config.rollout.max_new_tokens=2")
    assert float(short["eval/response_length"]) <= 2 < float(plain["eval/response_length"])
    easy, out = evaluated(*own, "--config.env.options.max_solution=4", "--config.env.max_turns=1")
    assert float(easy["eval/turns"]) == 1 < float(plain["eval/turns"])
    assert "warning" not in out
    _, out = evaluated(*own, "--config.env.window=2", "--config.env.format_penalty=-0.5")
    assert "warning: env.window is set but not read with env.context=single_turn" in out


@pytest.mark.parametrize(
    "words, named",
    [
        (
            ["--config.seed=1", "--config.optimizer.b1=0.5"],
            "config.seed, config.optimizer.b1 can",
        ),
        (["--config.eval.every=1"], "config.eval.every cannot be set when a run is evaluated"),
        (["--config.env.pool=64"], "config.env.pool cannot be set"),
        (["--config.diagnose.gradients_groups=8"], "config.diagnose.gradients_groups cannot"),
        (["--config=configs/sokoban.py"], "--config and --workdir are both given"),
        (["--config.eval.temperature=nan"], "config.eval.temperature is nan; it must be a number"),
        (["--config.env.options.size=(99,99)"], "config.env.options of 'sokoban': size must be"),
    ],
)
def test_an_evaluation_refuses_what_it_does_not_read(run, words, named):
    config, *others = [w for w in words if w.startswith("--config=")] or [None]
    words = [w for w in words if w != config]
    first = [config] if config else []
    code, out, err = call("ragen_jax.evaluate", *first, f"--workdir={run()}", *words)
    (line,) = err.splitlines()
    assert code == 2 and out == "" and line.startswith("error: ") and named in line


def test_a_folder_without_a_run_is_refused(tmp_path):
    code, _, err = call("ragen_jax.evaluate", f"--workdir={tmp_path}")
    assert code == 2 and "is not a run folder: it has no config.json" in err


def test_a_model_is_evaluated_with_what_evaluation_reads(language_model):
    words = ["--config=configs/sokoban.py:llm", f"--model={language_model}", "--config.steps=5"]
    words += ["--config.env.max_turns=1", "--config.rollout.max_new_tokens=4"]
    words += ["--config.eval.episodes=4", "--config.algorithm.lam=0.5", "--config.eval.every=7"]
    _, out = evaluated(*words, "--config.warmstart.rooms=128")
    assert out.splitlines()[0] == (
        "warning: steps, algorithm.lam, eval.every are set but not read by evaluate --model; "
        f"warmstart.rooms is set but not read with model.path={language_model}, "
        "warmstart.fine_tune=False"
    )
    code, _, err = call("ragen_jax.evaluate", f"--model={language_model}")
    assert code == 2 and "train a language model with --config=configs/sokoban.py:llm" in err


def test_preset_llm_says_what_it_needs():
    for module in ("ragen_jax.train", "ragen_jax.preflight"):
        code, out, err = call(module, "--config=configs/countdown.py:llm")
        (line,) = err.splitlines()
        assert code == 2 and out == "" and "preset llm needs --config.model.path=" in line


# ------------------------------------------------------------------------------ outside this tree


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Change to a user's folder, whose envs/ and configs/ are not ours."""
    for name in ("envs", "configs"):
        (tmp_path / name).mkdir()
        for file in ("__init__.py", "sokoban.py"):
            (tmp_path / name / file).write_text(f"raise RuntimeError('{name} of a user')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", [[], ["--config=sokoban:tiny+ppo"], ["--config", "frozen_lake"]])
def test_a_config_of_ours_has_a_name_everywhere(elsewhere, words):
    code, out, err = call("ragen_jax.train", *words, "--config.rollout.groups=0")
    assert (code, out) == (2, "") and err.startswith("error: config.rollout.groups is 0")


def test_an_unknown_name_is_answered_with_those_there_are(elsewhere):
    code, _, err = call("ragen_jax.train", "--config=sokobam")
    assert (
        code == 2 and "accepted: a file such as configs/mine.py, or one of bandit, countdown" in err
    )


def test_the_first_line_is_read_at_once_through_a_pipe(tmp_path):
    words = ["-m", "ragen_jax.train", f"--workdir={tmp_path}/run", *SHORT, *SMALL, *AGENT]
    usual = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=usual
    ) as process:
        line = process.stdout.readline()
        begun = (tmp_path / "run" / "metrics.jsonl").exists()
        process.kill()
    assert line.startswith(f"{tmp_path}/run: sokoban, model tiny, on ") and not begun


@pytest.mark.slow
def test_a_wheel_runs_beside_folders_of_the_same_names(elsewhere):
    """The wheel is built by pip, installed outside this tree, and run by another process."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir=wheel", str(ROOT)], check=True)
    (wheel,) = Path("wheel").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target=site", str(wheel)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "ragen_jax.train", "--config=sokoban", "--config.rollout.groups=0"],
        env=os.environ | {"PYTHONPATH": str(elsewhere / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: config.rollout.groups is 0")
    script = (
        "import ragen_jax.config.command_line as c, ragen_jax.envs as e; "
        "print(c.CONFIGS, e.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(elsewhere / "site")},
        capture_output=True,
        text=True,
    )
    assert [Path(p).is_relative_to(elsewhere / "site") for p in done.stdout.split()] == [True] * 2


# ------------------------------------------------------------------------------ one checkpoint


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """adapted(): return the folder of a LoRA run with two checkpoints; the run is made on first
    use."""

    @functools.cache
    def make():
        workdir = tmp_path_factory.mktemp("adapted") / "run"
        words = ["--config.steps=2", "--config.checkpoint.every=1", "--config.model.lora.rank=2"]
        words += ["--config.optimizer.learning_rate=1e-3", "--config.optimizer.warmup_updates=0"]
        words = [f"--workdir={workdir}", *SHORT, *AGENT, *words]
        code, out, err = call("ragen_jax.train", *words)
        assert code == 0, err
        return workdir

    return make


@pytest.mark.long
def test_any_checkpoint_is_evaluated_and_exported(adapted, tmp_path):
    workdir = adapted()
    own, last = f"--workdir={workdir}", {}
    for step in (1, 2):
        figures, _ = evaluated(own, f"--step={step}")
        content = json.loads((workdir / f"evaluation_step_00000{step}.json").read_text())
        printed = {name: float(value) for name, value in figures.items()}
        held = {name: content["metrics"][name] for name in printed}
        assert held == pytest.approx(printed, rel=1e-5) and content["model"] == str(workdir)
        assert content["metrics"] != last
        last = content["metrics"]
    newest, _ = evaluated(own, f"--out={tmp_path}/of/newest.json", "--config.eval.top_k=2")
    content = json.loads((tmp_path / "of" / "newest.json").read_text())
    assert content["set"] == {"eval.top_k": 2} and content["metrics"]["eval/turns"] > 0
    code, _, err = call("ragen_jax.evaluate", own, "--step=7")
    assert code == 2 and f"{workdir} has no checkpoint of step 7; available: 1, 2 (" in err
    code, _, err = call("ragen_jax.evaluate", "--model=x", "--step=1")
    assert code == 2 and "--step needs --workdir" in err

    code, out, err = call("ragen_jax.export", own, "--step=1")
    assert code == 0, err
    folder = workdir / "export_step_000001"
    written = [line for line in out.splitlines() if line.startswith("written: ")]
    assert written == [f"written: {folder}/adapter", f"written: {folder}/policy"]
    first, _ = evaluated(own, "--step=1")
    # The same words as in SHORT, which are in the run's config.json.
    words = [*SHORT, *AGENT][4:]
    for model in ("adapter", "policy"):
        found, _ = evaluated(f"--model={folder / model}", *words)
        assert found == first, model
    code, _, err = call("ragen_jax.export", own, "--dtype=int8")
    assert code == 2 and "--dtype is 'int8'; accepted: float32" in err
    code, _, err = call("ragen_jax.export", own, "--config.seed=1")
    assert code == 2 and "a run is exported unchanged" in err
