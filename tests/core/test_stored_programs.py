"""core/stored_programs.py and storage/program_store.py: programs that are traced once."""

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import time
import types
from pathlib import Path

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ragen_jax
from ragen_jax.algorithm.losses import Weights
from ragen_jax.core import stored_programs
from ragen_jax.core.compilation import compiled, struct_of
from ragen_jax.core.stored_programs import (
    Store,
    StoredProgram,
    UnknownValue,
    describe,
    kept_as_json,
    use_store,
)
from ragen_jax.model import qwen
from ragen_jax.model.qwen import ModelConfig
from ragen_jax.rollout.sample import Sampled
from ragen_jax.storage import program_store
from ragen_jax.storage.atomic_io import write_once
from ragen_jax.storage.program_store import fingerprint_of

pytestmark = pytest.mark.fast


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a test's program."""

    factor: float
    name: str = "a"


@pytest.fixture
def store(tmp_path):
    """Use a store in a new folder; yield (store, its warnings)."""
    warnings = []
    kept = Store(tmp_path, lambda: "fingerprint", write=write_once, warn=warnings.append)
    use_store(kept)
    yield kept, warnings
    use_store(None)


def make_program(traces):
    """Return a `StoredProgram` that appends to `traces` whenever it is traced."""

    def scale(settings, x, more=None, *, shift):
        traces.append(settings)
        y = settings.factor * x["a"] + shift
        return {"y": y, "more": more}, jnp.sum(y)

    return StoredProgram(scale, static_argnames="settings")


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_a_later_process_does_not_trace(store):
    x, traces = {"a": jnp.arange(3.0)}, []
    first = make_program(traces)(Settings(2.0), x, shift=np.float32(1))
    assert len(traces) == 1
    # A new object has nothing in memory, as in a new process.
    second = make_program(traces)(Settings(2.0), x, shift=np.float32(1))
    assert len(traces) == 1
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(first[0]["y"], [1, 3, 5])


@pytest.mark.parametrize(
    "change",
    ["static", "shape", "dtype", "tree", "weak", "precision", "mesh", "fingerprint"],
)
def test_whatever_a_trace_depends_on_makes_another_program(store, change):
    settings, x, shift, traces = Settings(2.0), {"a": jnp.arange(4.0)}, np.float32(1), []
    make_program(traces)(settings, x, shift=shift)
    context, mesh = contextlib.nullcontext(), jax.make_mesh((1,), ("data",))
    if change == "static":
        settings = Settings(3.0)
    elif change == "shape":
        x = {"a": jnp.arange(5.0)}
    elif change == "dtype":
        x = {"a": jnp.arange(4)}
    elif change == "tree":
        x = {"a": jnp.arange(4.0), "b": jnp.arange(4.0)}
    elif change == "weak":
        shift = 1.0
    elif change == "precision":
        context = jax.default_matmul_precision("float32")
    elif change == "mesh":
        context = jax.set_mesh(mesh)
    elif change == "fingerprint":
        use_store(dataclasses.replace(store[0], fingerprint=lambda: "of other code"))
    with context:
        y, _ = make_program(traces)(settings, x, shift=shift)
        expected = settings.factor * x["a"] + shift
    assert len(traces) == 2
    np.testing.assert_array_equal(y["y"], expected)


def test_without_a_store_or_within_a_trace_it_is_a_jitted_function(tmp_path):
    traces = []
    program = make_program(traces)
    x = {"a": jnp.ones(2)}
    np.testing.assert_array_equal(program(Settings(2.0), x, shift=0.5)[0]["y"], [2.5, 2.5])
    kept = Store(tmp_path, lambda: "", write=write_once, warn=pytest.fail)
    use_store(kept)
    try:
        gradient = jax.grad(lambda x: program(Settings(2.0), x, shift=0.5)[1])(x)
        np.testing.assert_array_equal(gradient["a"], [2, 2])
        assert list(tmp_path.iterdir()) == []
    finally:
        use_store(None)


def test_static_arguments_without_a_description_are_jitted_as_usual(store):
    factor, traces = 3.0, []

    def scale(function, x):
        traces.append(x)
        return function(x)

    program = StoredProgram(scale, static_argnames="function")

    def closure(x):
        return factor * x

    assert program(closure, jnp.float32(2)) == 6
    assert list(store[0].folder.iterdir()) == []
    assert program(closure, jnp.float32(2)) == 6
    assert len(traces) == 1


def test_classes_that_are_not_storable_are_jitted_as_usual(store):
    @flax.struct.dataclass
    class Pair:
        a: jax.Array
        b: jax.Array

    found = StoredProgram(lambda x: Pair(x, x + 1))(jnp.float32(1))
    assert found.b == 2
    assert list(store[0].folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_program_is_traced_again(store, damage):
    x, traces = {"a": jnp.ones(2)}, []
    make_program(traces)(Settings(2.0), x, shift=np.float32(1))
    (path,) = store[0].folder.iterdir()
    content = path.read_bytes()
    changed = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "changed": content[:1000] + b"x" + content[1001:],
    }
    path.write_bytes(changed[damage])
    y, _ = make_program(traces)(Settings(2.0), x, shift=np.float32(1))
    np.testing.assert_array_equal(y["y"], [3, 3])
    assert len(traces) == 2
    assert len(store[1]) == 1 and "is made again: it is damaged" in store[1][0]
    make_program(traces)(Settings(2.0), x, shift=np.float32(1))  # it was written anew
    assert len(traces) == 2


def test_a_full_disk_loses_nothing_but_the_store(store):
    def full(path, content):
        raise OSError(28, "No space left on device")

    use_store(dataclasses.replace(store[0], write=full))
    y, _ = make_program([])(Settings(2.0), {"a": jnp.ones(2)}, shift=np.float32(1))
    np.testing.assert_array_equal(y["y"], [3, 3])
    assert "No space left" in store[1][0]


def test_donated_arguments_are_donated(store):
    def add(x, y, more):
        return x + y, more + 1

    for _ in range(2):  # traced, then loaded
        program = StoredProgram(add, donate_argnames="more")
        x, y, more = jnp.ones(1000), jnp.ones(1000), jnp.zeros(10)
        program(x, y, more=more)
        assert more.is_deleted() and not x.is_deleted() and not y.is_deleted()


def test_random_keys_and_classes_of_ours_are_read_again(store):
    def sample(key, x):
        noise = jax.random.normal(key, x.shape)
        return Sampled(tokens_BT=x, logp_BT=noise, count_B=x, reply=None), key, Weights(x, noise)

    key, x = jax.random.key(3), jnp.ones(4)
    first, second = (StoredProgram(sample)(key, x) for _ in range(2))
    assert isinstance(second[0], Sampled) and second[1].dtype == key.dtype
    assert isinstance(second[2], Weights)
    assert len(list(store[0].folder.iterdir())) == 1
    np.testing.assert_array_equal(first[0].logp_BT, second[0].logp_BT)
    np.testing.assert_array_equal(second[0].logp_BT, jax.random.normal(key, (4,)))


def test_compiled_in_advance_is_what_the_call_runs(store):
    traces = []
    program = make_program(traces)
    x, shift = {"a": jnp.ones(3)}, np.float32(1)
    shapes = compiled(program, Settings(2.0), jax.tree.map(struct_of, x), shift=struct_of(shift))
    found = program(Settings(2.0), x, shift=shift)
    assert len(traces) == 1
    assert jax.tree.structure(shapes) == jax.tree.structure(found)
    assert [(s.shape, s.dtype) for s in jax.tree.leaves(shapes)] == [
        (y.shape, y.dtype) for y in jax.tree.leaves(found)
    ]
    assert len(program.programs) == 1


def test_outputs_keep_their_places_on_a_mesh(store):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def double(x):
        return jax.lax.with_sharding_constraint(2 * x, PartitionSpec("data", "model"))

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 2)), NamedSharding(mesh, PartitionSpec("data", None)))
        plain = jax.jit(double)(x)
        traced, loaded = (StoredProgram(double)(x) for _ in range(2))
    assert traced.sharding == loaded.sharding
    assert loaded.sharding.is_equivalent_to(plain.sharding, 2) and loaded.committed


def keep(calls, scale=2):
    """Return a function whose results are kept, as a new process would make it."""

    def listed(settings):
        calls.append(settings)
        return [[settings.name], scale, None]

    return kept_as_json(listed)


def test_a_later_process_reads_a_result(store):
    calls, settings = [], Settings(3.0)
    first = keep(calls)(settings)
    assert first == [["a"], 2, None] and calls == [settings]
    assert keep(calls, scale=5)(settings) == first and len(calls) == 1  # read, not computed
    keep(calls)(Settings(3.0, "b"))
    assert len(calls) == 2  # another argument
    use_store(dataclasses.replace(store[0], fingerprint=lambda: "of other code"))
    keep(calls)(settings)
    assert len(calls) == 3 and store[1] == []


def test_a_result_is_computed_where_nothing_can_be_kept(store):
    calls = []
    unknown = Settings(lambda x: x)
    once = keep(calls)
    assert once(unknown) is once(unknown) and len(calls) == 1
    use_store(dataclasses.replace(store[0], fingerprint=lambda: None))
    keep(calls)(Settings(3.0))
    use_store(None)
    keep(calls)(Settings(3.0))
    assert len(calls) == 3 and not list(store[0].folder.iterdir())


def test_a_damaged_result_is_computed_again(store):
    calls, settings = [], Settings(3.0)
    first = keep(calls)(settings)
    (file,) = store[0].folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert keep(calls)(settings) == first and len(calls) == 2
    assert [str(file) in warning for warning in store[1]] == [True]


def test_the_shapes_of_parameters_are_read_as_they_were_traced(store):
    config = ModelConfig(40, 16, 2, 4, 2, 4, 24, tied=False)
    traced = qwen._list_params(config)
    qwen._list_params.cache_clear(), qwen.boxed_shapes.cache_clear()
    assert qwen._list_params(config) == traced and len(list(store[0].folder.iterdir())) == 1
    key = jax.random.key(0)
    init = functools.partial(qwen.Qwen(config).init, key, jnp.zeros((1, 1), jnp.int32))
    expected = jax.eval_shape(init)["params"]
    assert jax.tree.structure(qwen.boxed_shapes(config)) == jax.tree.structure(expected)
    assert jax.tree.leaves(qwen.boxed_shapes(config)) == jax.tree.leaves(expected)


def test_descriptions():
    same = (Settings(1.0), {"b": 1, "a": (None, np.arange(3))}, jnp.float32, dataclasses.replace)
    other = (Settings(1.0), {"a": (None, np.arange(3)), "b": 1}, jnp.float32, dataclasses.replace)
    assert describe(same) == describe(other)
    values = [1, 1.0, True, "1", b"1", None, (1,), [1], {1: 1}, np.int32(1), np.int64(1)]
    values += [np.ones(2), np.ones((2, 1)), np.zeros(2), Settings(1.0), Settings(1.0, "b")]
    values += [jnp.float32, jnp.int32, describe, dataclasses.replace]
    assert len({describe(x) for x in values}) == len(values)
    for unknown in (lambda x: x, object(), functools.partial(describe, 1), (1, {"a": object()})):
        with pytest.raises(UnknownValue):
            describe(unknown)


def write_old(file, text):
    """Write a file as if it had been changed two minutes ago."""
    file.write_text(text)
    before = time.time_ns() - 2 * program_store.RECENT
    os.utime(file, ns=(before, before))


@pytest.fixture
def fingerprint(monkeypatch):
    """fingerprint(files): the hash now, of a package whose files were not changed recently."""
    states = program_store._states
    package = str(Path(ragen_jax.__file__).parent.parent)

    def older(files):
        found = states(files).items()
        return {k: (s, 0 if k.startswith(package) else t) for k, (s, t) in found}

    monkeypatch.setattr(program_store, "_states", older)
    return lambda files=(): fingerprint_of(files, now=time.time_ns())


def test_fingerprint_depends_on_the_code(tmp_path, monkeypatch, fingerprint):
    file = tmp_path / "config.py"
    write_old(file, "x = 1\n")
    before = fingerprint([file])()
    assert fingerprint([file])() == before != fingerprint()()
    write_old(file, "x = 22\n")
    assert fingerprint([file])() != before
    later = fingerprint()
    plain = later()
    write_old(tmp_path / "loaded_later.py", "y = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import loaded_later

    assert later() not in (plain, None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert fingerprint()() != later()
    # From now on, this process runs other code than the file's.
    Path(loaded_later.__file__).write_text("y = 2\n")
    assert later() is None
    Path(loaded_later.__file__).unlink()  # which must not end a run
    assert later() is None
    sys.modules.pop("loaded_later")


def test_modules_beside_the_package_count(tmp_path, monkeypatch, fingerprint):
    before = fingerprint()()
    beside = types.ModuleType("ragen_jax_of_a_fork")
    beside.__file__ = f"{Path(ragen_jax.__file__).parent}_of_a_fork/objectives.py"
    states = program_store._states
    monkeypatch.setattr(
        program_store,
        "_states",
        lambda files: (
            states([f for f in files if f != beside.__file__])
            | {f: (1, 0) for f in files if f == beside.__file__}
        ),
    )
    monkeypatch.setitem(sys.modules, beside.__name__, beside)
    assert fingerprint()() not in (before, None)


def test_packages_of_another_folder_count_by_its_time(tmp_path, monkeypatch, fingerprint):
    """As those of the system, in a virtual environment that uses them."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    package = folder / "installed_elsewhere.py"
    write_old(package, "x = 1\n")
    write_old(folder / "other.py", "")
    os.utime(folder, ns=(0, 0))
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    importlib.import_module("installed_elsewhere")
    try:
        before = fingerprint()()
        write_old(package, "x = 22\n")  # files are not read one by one: there are thousands
        assert fingerprint()() == before is not None
        os.utime(folder, ns=(1, 1))  # as by an installation
        assert fingerprint()() not in (before, None)
    finally:
        del sys.modules["installed_elsewhere"]


def test_code_that_may_have_changed_since_it_was_loaded_is_not_stored(tmp_path, store):
    traces, x = [], {"a": jnp.ones(2)}
    use_store(dataclasses.replace(store[0], fingerprint=lambda: None))
    y, _ = make_program(traces)(Settings(2.0), x, shift=np.float32(1))
    np.testing.assert_array_equal(y["y"], [3, 3])
    assert list(store[0].folder.iterdir()) == []


def test_recent_changes_leave_the_code_unknown(tmp_path, fingerprint):
    file = tmp_path / "config.py"
    file.write_text("x = 1\n")
    assert fingerprint([file])() is None
    write_old(file, "x = 1\n")
    assert fingerprint([file])() is not None


def test_fingerprint_covers_every_file_of_the_package(monkeypatch):
    files = []
    monkeypatch.setattr(program_store, "_states", lambda paths: files.extend(paths) or {})
    fingerprint_of(now=0)
    for module in (stored_programs, program_store):
        assert module.__file__ in files
    for name in ("objectives.py", "sokoban/env.py", "configs/base.py", "model/qwen.py"):
        assert any(path.endswith(name) for path in files)
