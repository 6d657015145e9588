"""Shared fixtures: CPU only, the tiny tokenizer and agent, hand-made turns."""

import contextlib
import dataclasses
import datetime
import fcntl
import gc
import os
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs compiled by one module, worker or child process are loaded by the others.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled_")
    os.environ["COMPILED_BY_TESTS"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# Most of the suite's time is spent compiling programs that run only a few times, so XLA skips most
# optimizations. JAX_DISABLE_MOST_OPTIMIZATIONS=0 tests the programs of a real run, in three times
# the time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The newer of XLA's two CPU compilers takes twice as long, and splitting a program into 32 parts
# for 32 threads takes a quarter longer. XLA crashes on unknown flags, so they are set only for
# versions that have them.
if version("jaxlib").startswith("0.10."):
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from ragen_jax.config import command_line as command
from ragen_jax.config.build_environment import build_environment
from ragen_jax.configs import sokoban
from ragen_jax.core.memory import keep_freed_memory
from ragen_jax.core.types import Episode, Turn
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model import hf, qwen, weights
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.run.imitate import tiny_model
from ragen_jax.storage import program_store

keep_freed_memory()
# Files that run first, so that no worker is left with a long one at the end.
LONGEST = [
    Path(__file__).parent / name
    for name in ("core/test_sharding.py", "test_train.py", "update/test_trees.py")
]
CORE = "fast and not medium and not long and not slow"  # tests that `pytest` runs without arguments
STANDARD = "not long and not slow"  # tests that run when a file is named


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Choose the tests if the command line does not: the core, on two workers, or a named file."""
    option = config.option
    if not option.markexpr:
        named = config.args_source is pytest.Config.ArgsSource.ARGS
        option.markexpr = STANDARD if named or option.keyword else CORE
        # A worker gets the same command line and must not start workers.
        worker = hasattr(config, "workerinput")
        if option.markexpr == CORE and not worker and getattr(option, "numprocesses", 0) is None:
            option.numprocesses, option.dist = 2, "loadfile"


def pytest_configure(config):
    """Keep the order of pytest_collection_modifyitems when several workers run the files."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path, config):
    """Skip files without core tests: importing them would take as long as the core tests."""
    if config.option.markexpr == CORE and collection_path.name.startswith("test_"):
        return True if "mark.fast" not in collection_path.read_text() else None
    return None


def pytest_unconfigure(config):
    """Delete the compiled programs, in the first process only."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.get("COMPILED_BY_TESTS", ""), ignore_errors=True)


def pytest_collection_modifyitems(items):
    """Run the longest files first, which need the agent. Files without the agent follow, to keep
    the other workers busy while one worker builds it. Other files with the agent come last."""
    needs = {item.path for item in items if "agent" in item.fixturenames}
    items.sort(key=lambda item: (item.path not in LONGEST, item.path in needs))


def pytest_collection_finish():
    """Collect garbage less often, and leave the objects of modules out. Tracing makes many objects,
    so that collecting took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


MAPPINGS = Path("/proc/self/maps")  # memory mappings of this process, one per line


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers after each test. A Python process started in the background
    ignores SIGINT, so tests start with the handlers of a foreground process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def programs_of_the_module():
    """Drop compiled programs before there are too many. Each program holds several memory mappings,
    and XLA's CPU backend crashes when a process reaches Linux's limit (vm.max_map_count,
    65,530)."""
    yield
    if not MAPPINGS.exists() or MAPPINGS.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def optimised():
    """Return a context in which XLA optimizes, for programs that run for long."""

    @contextlib.contextmanager
    def context():
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", False)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)

    return context


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(Sokoban.words)


@pytest.fixture(scope="session")
def make_turn():
    """make_turn(prompt, sampled, ...) -> `Turn`; log-probs are -0.1, -0.2, ... unless given."""

    def make(
        prompt,
        sampled,
        *,
        message="",
        logp=None,
        reasoning=(0, 0),
        actions=(),
        valid=True,
        reward=0.0,
    ):
        logp = [-0.1 * (i + 1) for i in range(len(sampled))] if logp is None else logp
        return Turn(
            prompt=np.array(prompt, np.int32),
            message=message,
            sampled=np.array(sampled, np.int32),
            logp=np.array(logp, np.float32),
            reasoning=reasoning,
            answer=(0, 0),
            actions=tuple(actions),
            valid=valid,
            reward=reward,
            info={},
        )

    return make


@pytest.fixture(scope="session")
def make_episode():
    """make_episode(group, member, turns) -> `Episode`."""

    def make(group, member, turns, *, success=False):
        return Episode(
            seed=100 + group, group=group, member=member, turns=tuple(turns), success=success
        )

    return make


@dataclasses.dataclass(frozen=True)
class Agent:
    """A tiny agent after a few imitation updates: its replies are well-formed and often wrong."""

    config: object
    directory: Path
    home: Path  # XDG_CACHE_HOME of commands that run in this worker's process
    model: object
    params: dict
    tokenizer: object
    environment: object


@pytest.fixture(scope="session")
def agent(tmp_path_factory, optimised):
    """An `Agent`, built by the real warm start with very small settings."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # shared by all workers
    folder = Path(os.environ.get("AGENT_OF_TESTS", folder))  # set by mutation_testing.py
    config = sokoban.get_config()
    config.warmstart.update(rooms=1024, success=0.0, check_every=150, check_episodes=16)
    with open(folder / "agent.lock", "w") as lock, optimised():
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory = tiny_model(config, folder / "agent")
    model, params, tokenizer = hf.load(directory)
    environment = build_environment(config.env, "train")
    home = tmp_path_factory.mktemp("xdg")
    return Agent(config, directory, home, model, params, tokenizer, environment)


@pytest.fixture(autouse=True)
def forget_traced_layers():
    """Trace layers again in each test: a test may change their constants or functions."""
    qwen.run_block.clear_cache()


@pytest.fixture(autouse=True)
def no_stored_programs(monkeypatch):
    """Trace all programs of commands that run in this process: a test may change the code."""
    monkeypatch.setattr(program_store, "use_store", lambda store: None)


@pytest.fixture(scope="session")
def language_model(tmp_path_factory):
    """Return the directory of a small Qwen2.5-shaped model with random weights. Its tokenizer has
    byte tokens and a chat template, but no environment's words."""
    tokenizer = build_tokenizer(())
    config = ModelConfig(
        vocab_size=len(tokenizer) + 3,
        width=16,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_width=24,
        max_positions=4096,
    )
    directory = tmp_path_factory.mktemp("models") / "language_model"
    rng, params = np.random.default_rng(0), {}
    for leaf in weights.plan(config):
        params[leaf.path] = (0.1 * rng.standard_normal(leaf.shape)).astype(np.float32)
    hf.save(directory, Qwen(config), unflatten_dict(params), tokenizer)
    return directory


@pytest.fixture(scope="session")
def dated_model(language_model, tmp_path_factory):
    """`language_model` with a chat template that begins with the date."""
    directory = tmp_path_factory.mktemp("models") / "dated_model"
    shutil.copytree(language_model, directory)
    (directory / "checksums.json").unlink(missing_ok=True)
    template = directory / "chat_template.jinja"
    asked = "{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\n' }}"
    template.write_text(asked + template.read_text())
    return directory


@pytest.fixture
def on_day(monkeypatch):
    """set_clocks(day): set the clocks of commands and chat templates to a day of November 2026."""

    import transformers.utils.chat_template_utils as chat_templates

    def set_clocks(day):
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 11, day)

        monkeypatch.setattr(chat_templates, "datetime", Clock)
        today = datetime.date(2026, 11, day)
        monkeypatch.setattr(command, "today", lambda: today)

    return set_clocks
