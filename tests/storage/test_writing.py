"""Every function that writes is in the table of docs/disks.md and handles errors as the table says.

The columns of the table are injected errors. They are injected into the calls below that the
function makes itself, found from the stack. A function that writes through others follows their
rules.
"""

import builtins
import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from file_write_sites import OURS, ROOT, places
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError

from ragen_jax.config import trust
from ragen_jax.model import hf, weights
from ragen_jax.model.qwen import ModelConfig, Qwen
from ragen_jax.report.page import write_report
from ragen_jax.run import checkpoint, workdir
from ragen_jax.run.folder import open_folder
from ragen_jax.run.log import MetricsLog, write_rollouts
from ragen_jax.run.reports import Reports
from ragen_jax.serving.record_file import RecordFile
from ragen_jax.storage import cache, compilation_cache, heartbeat, program_store, trackers
from ragen_jax.storage.atomic_io import (
    append_line,
    atomic_write,
    disk_error_message,
    make_folder,
    remove_leftovers,
)
from ragen_jax.storage.checksums import write_checksums
from ragen_jax.storage.console import console
from ragen_jax.storage.writers import map_array, save_array, save_figure

PAGE = ROOT / "docs" / "disks.md"
ERRORS = ("ENOSPC", "EROFS", "EPERM", "EMFILE")
PLACES = places()


def table():
    """{(file, function): the cells of its row} of the table in docs/disks.md."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3 + len(ERRORS):
            found[cells[0].strip("`"), cells[1].strip("`")] = cells[3:]
    return found


TABLE = table()


def test_every_place_that_writes_is_in_the_table():
    missing = [
        f"{file} {function}: {PLACES[file, function]}"
        for file, function in PLACES.keys() - TABLE.keys()
    ]
    assert not missing, f"{PAGE.name} lacks these places that write"
    assert not TABLE.keys() - PLACES.keys(), f"{PAGE.name} has places that write nothing any more"


NEW = """
import functools, os, shutil
from pathlib import Path
from ragen_jax.storage.atomic_io import with_retries, atomic_write
def one(path): path.write_text("x")
def two(path): with_retries(functools.partial(path.mkdir, parents=True), path)
def three(path): open(path, "a")
class Four:
    def five(self, path): os.replace(path, path)
def six(path): atomic_write(path, "x")
def seven(text, path): return open(path).read() + text.replace("a", "b")
def eight(path): path.open(mode="r+b")
"""


def test_a_new_place_is_found(tmp_path, monkeypatch):
    import file_write_sites

    (tmp_path / "ragen_jax").mkdir()
    (tmp_path / "ragen_jax" / "new.py").write_text(NEW)
    monkeypatch.setattr(file_write_sites, "ROOT", tmp_path)
    found = {function: calls for (_, function), calls in file_write_sites.places().items()}
    assert found == {
        **{"one": ["write_text"], "two": ["mkdir"], "three": ["open"], "Four.five": ["replace"]},
        **{"six": ["atomic_write"], "eight": ["open"]},
    }


# ------------------------------------------------------------------------------ injection

# Calls that change a file system, and calls that open an additional file.
CHANGING = [
    *((os, name) for name in ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "chmod")),
    *((os, name) for name in ("pwrite", "ftruncate", "utime", "posix_fallocate")),
    *((shutil, "copytree"), (fcntl, "flock"), (fcntl, "lockf")),
]


def inside(file, function):
    """Whether the function is on this thread's stack."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_qualname.replace("<locals>.", "")
        if name == function and frame.f_code.co_filename.endswith(f"/{file}"):
            return True
        frame = frame.f_back
    return False


class Injected:
    """Make the calls of a place fail with an errno, once `on`."""

    def __init__(self, monkeypatch, place, name):
        self.place, self.number, self.count = place, getattr(errno, name), 0
        self.patch = monkeypatch
        if name != "EMFILE":
            for module, call in CHANGING:
                if hasattr(module, call):
                    self.fail(module, call)
        self.fail(io, "open", self.opens)
        self.fail(builtins, "open", self.opens)
        self.fail(os, "open", lambda *_, **__: name == "EMFILE")
        self.fail(subprocess, "Popen", lambda *_, **__: name == "EMFILE")

    def opens(self, path, mode="r", *_, **__):
        return self.number == errno.EMFILE or bool(set(mode) & set("wax+"))

    def fail(self, owner, name, when=lambda *_, **__: True, raised=None):
        real = getattr(owner, name)

        def call(*arguments, **words):
            if inside(*self.place) and when(*arguments, **words):
                self.count += 1
                raise raised or self.error()
            return real(*arguments, **words)

        self.patch.setattr(owner, name, call)

    def error(self):
        return OSError(self.number, os.strerror(self.number), "a file")

    def rust(self):
        text = f"Error while serializing: I/O error: {os.strerror(self.number)}"
        return SafetensorError(f"{text} (os error {self.number})")


# ---------------------------------------------------------------------------- drivers of the places

DRIVERS = {}


def drives(file, *functions):
    def add(driver):
        DRIVERS.update({(file, function): driver for function in functions})
        return driver

    return add


@drives("ragen_jax/storage/atomic_io.py", "_replace")
def replace_a_file(tmp_path, injected):
    atomic_write(tmp_path / "a" / "b.json", "{}")


@drives("ragen_jax/storage/atomic_io.py", "make_folder")
def make_a_folder(tmp_path, injected):
    make_folder(tmp_path / "a" / "b")


@drives("ragen_jax/storage/atomic_io.py", "append_line.write")
def append_a_line(tmp_path, injected):
    with open(tmp_path / "a", "w+b", buffering=0) as file:
        append_line(file, "line\n")


GONE = 2**30 - 1  # no process has this id


@drives("ragen_jax/storage/atomic_io.py", "_remove_aside")
def remove_left_overs(tmp_path, injected):
    (tmp_path / f".a.writing-{GONE}").touch()
    with workdir.lock_workdir(tmp_path):
        pass


@drives("ragen_jax/storage/atomic_io.py", "_is_locked")
def remove_the_left_overs_of_a_lock(tmp_path, injected):
    (tmp_path / f".a.saving-{GONE}").mkdir()
    (tmp_path / "a.lock").touch()
    remove_leftovers(tmp_path)


@drives("ragen_jax/storage/atomic_io.py", "_remove_left_over_of")
def remove_the_left_overs_of_a_file(tmp_path, injected):
    (tmp_path / f".b.json.writing-{GONE}").touch()
    atomic_write(tmp_path / "b.json", "{}")


@drives("ragen_jax/config/trust.py", "_make_key")
def make_a_key(tmp_path, injected):
    injected.patch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trust._key(create=True)


@drives("ragen_jax/storage/compilation_cache.py", "refuse_shared_cache")
def use_a_folder_of_programs(tmp_path, injected):
    names = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")
    before = [getattr(jax.config, name) for name in names]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    try:
        compilation_cache.refuse_shared_cache()
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


@drives("ragen_jax/storage/writers.py", "save_array.save")
def save_an_array(tmp_path, injected):
    save_array(tmp_path / "a.npy", np.zeros(3))


@drives("ragen_jax/storage/writers.py", "map_array.create")
def map_an_array(tmp_path, injected):
    map_array(tmp_path / "a.npy", np.int32, (9,))


@drives("ragen_jax/storage/writers.py", "save_figure")
def save_a_figure(tmp_path, injected):
    figure = types.SimpleNamespace(savefig=lambda file, **_: file.write(b"x"))
    save_figure(figure, tmp_path / "a.png", dpi=1)


@pytest.fixture(scope="session")
def small(tokenizer):
    """A very small (model, params, tokenizer)."""
    config = ModelConfig(
        vocab_size=len(tokenizer),
        **dict(width=8, layers=1, heads=1, kv_heads=1, head_dim=8, mlp_width=8, max_positions=64),
    )
    params = {leaf.path: np.zeros(leaf.shape, np.float32) for leaf in weights.plan(config)}
    return Qwen(config), unflatten_dict(params), tokenizer


@drives("ragen_jax/model/hf.py", "replacement", "_begin_anew", "save")
@drives("ragen_jax/model/tokenizer_config.py", "save_tokenizer")
def save_a_model(tmp_path, injected, small):
    hf.save(tmp_path / "policy", *small)


@drives("ragen_jax/model/weights.py", "write_tensors.write")
def save_tensors(tmp_path, injected, small):
    injected.fail(weights, "save_file", lambda *_, **__: True, injected.rust())
    hf.save(tmp_path / "policy", *small)


@drives("ragen_jax/model/hf.py", "resolve")
def download_a_model(tmp_path, injected):
    import huggingface_hub

    injected.fail(huggingface_hub, "snapshot_download")
    hf.resolve("somebody/something")


@drives("envs/dataset/rows.py", "hub_source")
def download_a_data_set(tmp_path, injected):
    from ragen_jax.envs.dataset import rows

    package = types.SimpleNamespace(load_dataset=lambda *_, **__: None)
    injected.fail(package, "load_dataset")
    injected.patch.setitem(sys.modules, "datasets", package)
    injected.patch.setattr(rows.importlib.util, "find_spec", lambda name: True)
    rows.hub_source("somebody/something", subset="", split="train", revision="")


@drives("ragen_jax/run/load.py", "_copy")
def copy_the_tiny_agent(tmp_path, injected):
    from ragen_jax.configs import sokoban
    from ragen_jax.run import load

    (tmp_path / "agent").mkdir()
    injected.patch.setattr(load, "tiny_model", lambda config: tmp_path / "agent")
    load.load_policy(sokoban.get_config(), tmp_path)


@drives("ragen_jax/preflight/compile.py", "quiet_stderr")
def drop_stderr(tmp_path, injected):
    from ragen_jax.preflight.compile import quiet_stderr

    with quiet_stderr():
        pass


class _Stop(Exception):
    pass


@drives("ragen_jax/storage/heartbeat.py", "exit_on_stall", "exit_on_stall.watch")
def watch_progress(tmp_path, injected):
    targets = []
    thread = types.SimpleNamespace(start=lambda: None)
    start = lambda target, daemon: targets.append(target) or thread  # noqa: E731
    injected.patch.setattr(heartbeat.threading, "Thread", start)

    def stop(seconds):
        raise _Stop

    injected.patch.setattr(heartbeat.time, "sleep", stop)
    (tmp_path / heartbeat.FOLDER).mkdir()
    (tmp_path / heartbeat.FOLDER / "0.json").write_text("[0, 0]")
    heartbeat.exit_on_stall(tmp_path, 60.0)
    with pytest.raises(_Stop):  # the watchdog looks again
        targets[0]()


@drives("ragen_jax/run/reports.py", "Reports.write_if_due")
def report_in_the_background(tmp_path, injected):
    Reports(tmp_path, every=1, write_page=write_report).write_if_due(1)


@drives("ragen_jax/run/folder.py", "RunFolder.remove_stray_checkpoint")
def remove_a_stray_checkpoint(tmp_path, injected):
    with open_folder(tmp_path / "run") as folder:
        (tmp_path / "run").rename(tmp_path / "renamed")
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        folder.remove_stray_checkpoint()


@drives("ragen_jax/run/checkpoint.py", "Checkpoints.manager")
def open_checkpoints(tmp_path, injected):
    import orbax.checkpoint as ocp

    injected.fail(ocp, "CheckpointManager")
    _ = checkpoint.Checkpoints(tmp_path / "checkpoints").manager


class _Manager:
    def save(self, step, args):
        return True

    def wait_until_finished(self):
        pass


@drives("ragen_jax/run/checkpoint.py", "Checkpoints._save", "Checkpoints._abandoned_on_failure")
def save_a_checkpoint(tmp_path, injected):
    injected.patch.setattr(checkpoint, "SETTLE", 0)
    (tmp_path / "checkpoints").mkdir()
    checkpoints = checkpoint.Checkpoints(tmp_path / "checkpoints")
    checkpoints.manager = _Manager()
    place = "Checkpoints._save"
    injected.place = ("ragen_jax/run/checkpoint.py", place)
    injected.fail(checkpoints.manager, "save")
    checkpoints.save(1, {"x": np.zeros(3)})


@drives("ragen_jax/run/checkpoint.py", "set_damaged_aside")
@drives("ragen_jax/run/checkpoint.py", "find_damage")
def set_a_checkpoint_aside(tmp_path, injected):
    for step in (1, 2):
        folder = tmp_path / "checkpoints" / str(step) / checkpoint.ITEM
        folder.mkdir(parents=True)
        (folder / "array").write_text("good")
        write_checksums(folder)
    (folder / "array").write_text("bad!")
    checkpoint.find_damage(tmp_path, repair=True)


def _generate(tmp_path):
    from ragen_jax.run.datasets import load_or_generate

    return load_or_generate(
        "numbers",
        {},
        features={"number": np.int64},
        generate=lambda: [{"number": 1}],
        directory=tmp_path,
    )


@drives("ragen_jax/storage/datasets.py", "_prepare")
def generate_a_data_set(tmp_path, injected):
    _generate(tmp_path)


@drives("ragen_jax/storage/datasets.py", "open_or_generate")
def generate_a_data_set_anew(tmp_path, injected):
    place, injected.place = injected.place, ("nothing", "nothing")
    _generate(tmp_path)
    (record,) = tmp_path.rglob("*array_record*")
    record.write_bytes(record.read_bytes()[:-1])
    injected.place = place
    _generate(tmp_path)


@drives("ragen_jax/storage/compilation_cache.py", "enable_compilation_cache", "delete_oldest")
def fill_a_compilation_cache(tmp_path, injected):
    import jax

    (tmp_path / "ragen_jax" / "compiled").mkdir(parents=True)
    (tmp_path / "ragen_jax" / "compiled" / "program").write_text("x")
    injected.patch.setenv("XDG_CACHE_HOME", str(tmp_path))
    injected.patch.setattr(compilation_cache, "MOST", 0)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compilation_cache.enable_compilation_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@drives("ragen_jax/storage/program_store.py", "enable_program_store")
def use_a_program_store(tmp_path, injected):
    import jax

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    injected.patch.setattr(jax, "device_count", lambda: 1)
    try:
        program_store.enable_program_store()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@drives("ragen_jax/storage/atomic_io.py", "write_once")
def store_a_program(tmp_path, injected):
    from ragen_jax.core.stored_programs import Store, StoredProgram, use_store
    from ragen_jax.storage.atomic_io import write_once
    from ragen_jax.storage.console import console

    use_store(Store(tmp_path, lambda: "code", write=write_once, warn=console))
    try:
        assert StoredProgram(lambda x: x + 1)(1.0) == 2
    finally:
        use_store(None)


@drives("ragen_jax/serving/record_file.py", "RecordFile.__init__")
def open_a_record(tmp_path, injected):
    RecordFile(tmp_path / "record.jsonl").close()


@drives("ragen_jax/run/log.py", "MetricsLog.__init__")
def open_the_log(tmp_path, injected):
    MetricsLog(tmp_path / "metrics.jsonl", last_step=-1).close()


@drives("ragen_jax/run/log.py", "write_rollouts")
def save_rollouts(tmp_path, injected):
    (tmp_path / "step_000001_images").mkdir()
    (tmp_path / "step_000001_images" / "left.png").touch()
    write_rollouts(tmp_path / "step_000001.jsonl", [], None, None, ())


def _follow(tmp_path, name):
    (tmp_path / "metrics.jsonl").touch()
    follower = trackers.Follower(name, tmp_path / "metrics.jsonl", {}, console)
    follower.end(0)
    assert follower.wait(60)


@drives("ragen_jax/storage/trackers.py", "open_tensorboard")
def follow_with_tensorboard(tmp_path, injected):
    _follow(tmp_path, "tensorboard")


@drives("ragen_jax/storage/trackers.py", "open_mlflow")
def follow_with_mlflow(tmp_path, injected):
    client = lambda uri: types.SimpleNamespace(search_experiments=lambda: Path(uri[10:]).touch())  # noqa: E731
    package = types.SimpleNamespace(MlflowClient=client, entities=None)
    kind = trackers.Kind(
        "json", lambda _, folder, config: trackers.open_mlflow(package, folder, config)
    )
    injected.patch.setitem(trackers.TRACKERS, "mlflow", kind)
    injected.patch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.new").touch()
    _follow(tmp_path, "mlflow")


@drives("ragen_jax/storage/cache.py", "lock_path")
def lock_a_folder(tmp_path, injected):
    with cache.lock_path(tmp_path / "models" / "tiny"):
        pass


@drives("ragen_jax/run/workdir.py", "lock_workdir")
@drives("ragen_jax/storage/cache.py", "open_locked")
def own_a_folder(tmp_path, injected):
    with workdir.lock_workdir(tmp_path / "run"):
        pass


@drives("ragen_jax/run/workdir.py", "new_folder")
def make_a_new_folder(tmp_path, injected):
    workdir.new_folder(tmp_path / "runs", "sokoban")


@drives("ragen_jax/run/workdir.py", "set_evaluations_aside")
def set_evaluations_aside(tmp_path, injected):
    (tmp_path / "eval").mkdir()
    workdir.set_evaluations_aside(tmp_path, 3)


@drives("ragen_jax/lab/arms.py", "_begin")
def begin_an_arm(tmp_path, injected):
    from ragen_jax.lab import arms

    config = types.SimpleNamespace(to_dict=dict)
    if injected.number != errno.EMFILE:  # do not start a process
        injected.fail(subprocess, "Popen")
    injected.patch.setattr(arms, "sign", lambda *_: None)  # signing has a separate row
    arms._begin(types.SimpleNamespace(config=config), tmp_path / "arm")


@drives("envs/search_qa/passages.py", "write_passages")
@drives("envs/search_qa/words.py", "_join")
def index_a_corpus(tmp_path, injected):
    from ragen_jax.retriever.build import build_words

    (tmp_path / "corpus.jsonl").write_text('{"contents": "two words"}\n')
    build_words(str(tmp_path / "corpus.jsonl"), str(tmp_path / "index"), stem=False)


@drives("envs/webshop/shop_cache.py", "_make_folder", "_write")
@drives("envs/webshop/search.py", "Index.save")
def keep_a_shop(tmp_path, injected):
    from ragen_jax.envs.webshop import shop_cache
    from ragen_jax.envs.webshop.catalogue import generate_catalogue
    from ragen_jax.envs.webshop.files import Paths

    injected.patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    products = generate_catalogue(9, seed=3)
    injected.patch.setattr(shop_cache, "read_products", lambda *_, **__: products)
    injected.patch.setattr(shop_cache, "deal_released", lambda goals: goals)
    for name in ("products", "attributes"):
        (tmp_path / name).touch()
    shop_cache.open_shop(Paths(tmp_path / "products", tmp_path / "attributes"), seed=0)


# ------------------------------------------------------------------------------ outcomes


def outcome(drive):
    """The outcome as the user sees it."""
    try:
        drive()
    except ValueError:
        return "input"
    except Exception as error:
        return "refused" if disk_error_message(error) is not None else f"a traceback: {error!r}"
    return "continues"


DRIVEN = sorted(DRIVERS.keys() & TABLE.keys())


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("place", DRIVEN, ids=lambda place: f"{Path(place[0]).stem}-{place[1]}")
def test_a_place_does_what_the_table_says(place, name, tmp_path, monkeypatch, capsys, small):
    injected = Injected(monkeypatch, place, name)
    words = [small] if "small" in DRIVERS[place].__code__.co_varnames else []
    found = outcome(lambda: DRIVERS[place](tmp_path, injected, *words))
    monkeypatch.undo()
    if not injected.count:
        found = "-"
    elif found == "continues" and "warning" in capsys.readouterr().out:
        found = "warns"
    assert found == dict(zip(ERRORS, TABLE[place], strict=True))[name]


def test_every_other_place_writes_through_those():
    """Functions that only call ours are refused as ours are; the table's text covers the others."""
    elsewhere = {place for place, cells in TABLE.items() if cells[0].startswith("see below")}
    others = PLACES.keys() - DRIVERS.keys() - elsewhere
    # these write into memory, or are hf.save
    harmless = {"save", "savez", "savez_compressed", "savefig"}
    for place in others:
        assert set(PLACES[place]) <= OURS | harmless, place
        assert set(TABLE[place]) == {"through"}, place
