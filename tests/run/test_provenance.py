"""provenance.py: the versions and sources of a run, and the warning if a resume has others."""

import json
import shutil
import sys
from types import SimpleNamespace

import jax
import pytest
from cli_commands import call

from ragen_jax import train
from ragen_jax.configs import dataset
from ragen_jax.envs import code_hash
from ragen_jax.envs.own_code import own_files
from ragen_jax.run import provenance
from ragen_jax.run.provenance import FILE, provenance_of

fast = pytest.mark.fast


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's importable folder with a package and a single-file module."""
    files = {
        "shop/__init__.py": "",
        "shop/tasks/__init__.py": "from .. import prices\n",
        "shop/tasks/coin.py": "import json, numpy\nfrom ..rules import rewards\nclass Coin: ...\n",
        "shop/tasks/beside.py": "SIDES = 2\n",
        "shop/prices.py": "import helper_of_shop\n",
        "shop/rules/__init__.py": "",
        "shop/rules/rewards.py": "def reward():\n    import helper_of_shop as h\n    return h.X\n",
        "shop/unrelated.py": "X = 1\n",
        "helper_of_shop.py": "import pytest\nfrom ragen_jax import envs\nX = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in ("shop", "helper_of_shop")]:
        del sys.modules[name]


@fast
def test_own_code_is_the_module_its_package_and_what_it_imports(own):
    files = own_files("shop.tasks.coin")
    assert list(files) == [
        *("helper_of_shop", "shop", "shop.prices", "shop.rules", "shop.rules.rewards"),
        *("shop.tasks", "shop.tasks.beside", "shop.tasks.coin"),
    ]
    assert files["helper_of_shop"] == own / "helper_of_shop.py"
    assert "shop" not in sys.modules  # nothing is imported
    assert own_files("no_such_module_here.at_all") == {}


@fast
@pytest.mark.parametrize("name", ["helper_of_shop.py", "shop/prices.py", "shop/tasks/beside.py"])
def test_another_helper_is_another_environment(own, name):
    before = code_hash("shop.tasks.coin:Coin")
    (own / "shop/unrelated.py").write_text("X = 2\n")
    assert code_hash("shop.tasks.coin:Coin") == before
    (own / name).write_text((own / name).read_text() + "# changed\n")
    assert code_hash("shop.tasks.coin:Coin") != before


@fast
def test_reward_functions_and_files_of_options_count(own, tmp_path):
    config = dataset.get_config()
    config.model.path = "tiny"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    config.env.options.update(path=str(rows), reward="shop.rules.rewards:reward")
    before = provenance_of(config, "3.12.0")
    (own / "helper_of_shop.py").write_text("X = 2\n")
    rows.write_text('{"prompt": "1+1", "answer": "3"}\n')
    now = provenance_of(config, "3.12.0")
    assert {name for name in now if now[name] != before[name]} == {
        "code of shop.rules.rewards:reward",
        "file of dataset's option path",
    }


@fast
def test_devices_versions_and_sources_are_recorded(monkeypatch):
    config = dataset.get_config()
    config.model.path = "tiny"
    before = provenance_of(config, "3.12.0")
    assert before["jax"] == jax.__version__ and len(before["sources of ragen_jax"]) == 64
    monkeypatch.setattr(provenance.metadata, "version", lambda name: f"9 of {name}")
    monkeypatch.setattr(jax, "device_count", lambda: 64)
    monkeypatch.setattr(provenance, "cores", lambda: 64)
    now = provenance_of(config, "3.13.0")
    changed = {name for name in now if now[name] != before[name]}
    packages = ["jax", "jaxlib", "flax", "optax", "numpy", "transformers", "tokenizers"]
    assert changed >= {"python", "devices", "cores", *packages}
    assert "sources of ragen_jax" not in changed


@pytest.fixture(scope="module")
def one_step(agent, tmp_path_factory):
    """The folder of a run of one step; do not change it."""
    config = agent.config.copy_and_resolve_references()
    config.model.path, config.steps = str(agent.directory), 1
    config.env.update(max_turns=2, max_actions=4)
    config.rollout.update(groups=2, group_size=2)
    config.optimizer.update(minibatches=1, micro_batch=4)
    config.diagnose.update(every=0, flow_every=0)
    config.eval.every = 0
    config.log.trackers = ()
    config.checkpoint.export = False
    config.report.every = 0
    folder = tmp_path_factory.mktemp("runs") / "one_step"
    assert train.train(config, folder) == 0
    return folder


@pytest.fixture
def stopped(one_step, agent, tmp_path, monkeypatch):
    """A copy of that run's folder, and the command that resumes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    folder = tmp_path / "run"
    shutil.copytree(one_step, folder)
    return SimpleNamespace(folder=folder, words=("ragen_jax.train", f"--workdir={folder}"))


def changed_to(folder, **values):
    """Change the recorded provenance of a run's last start."""
    path = folder / FILE
    records = json.loads(path.read_text())
    records[-1]["made_with"] |= values
    path.write_text(json.dumps(records))


def test_a_resume_names_what_has_changed_once(stopped):
    code, out, err = call(*stopped.words, "--strict")
    assert code == 0 and "numbers" not in out + err  # nothing has changed
    changed_to(stopped.folder, jax="0.0.1", devices="8 x TPU v5e", **{"code of a:B": "0" * 64})
    before = (stopped.folder / FILE).read_bytes()
    code, out, err = call(*stopped.words, "--strict")
    assert code == 2 and err.count("\n") == 1, err
    for text in (f"jax 0.0.1 -> {jax.__version__}", "devices 8 x TPU v5e -> ", "000 -> (none)"):
        assert text in err
    assert "numbers will differ" in err
    assert (stopped.folder / FILE).read_bytes() == before

    code, out, err = call(*stopped.words)
    (line,) = [line for line in (out + err).splitlines() if "numbers" in line]
    assert code == 0 and "jax 0.0.1 -> " in line and "numbers will differ" in line
    assert "numpy" not in line
    records = json.loads((stopped.folder / FILE).read_text())
    assert [each["after_step"] for each in records] == [0, 1]  # the history stays
    assert records[0]["made_with"]["jax"] == "0.0.1"
    code, out, err = call(*stopped.words, "--strict")
    assert code == 0 and "numbers" not in out + err


@pytest.mark.parametrize("content", [None, b"", b"[]", b'[{"made_with": {"jax": 3}}]', b"[" * 9999])
def test_a_run_without_a_record_says_so_once(stopped, content):
    path = stopped.folder / FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    code, _, err = call(*stopped.words, "--strict")
    assert code == 2 and err.count("\n") == 1 and str(path) in err, err
    if content in (None, b""):  # only two cases, because a start takes seconds
        code, out, err = call(*stopped.words)
        (line,) = [line for line in (out + err).splitlines() if "numbers may differ" in line]
        assert code == 0 and str(path) in line
        (record,) = json.loads(path.read_text())
        assert record["made_with"]["jax"] == jax.__version__
        code, out, err = call(*stopped.words, "--strict")
        assert code == 0 and "numbers" not in out + err
