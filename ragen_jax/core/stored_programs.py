"""Programs that are kept on disk, so that a later process does not trace them again.

JAX's compilation cache keeps what XLA compiles. Its name for a program is a hash of the lowered
program, so every process must trace and lower a program before it finds it. For small models that
takes longer than all else at a start (benchmarks/NOTES.md).

A `StoredProgram` keeps the lowered program (`jax.export`). Its name is a hash of all that the trace
depends on: the function, the static arguments, the shapes of the others, the mesh (of one device),
and a fingerprint of the process, which covers the code (storage/program_store.py). A call whose
static arguments cannot be described by their values is jitted as usual, and so is every call if
nothing is stored (`use_store`).

`kept_as_json` keeps what a trace is only needed to find out, such as the shapes of parameters.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax import export
from jax.core import Tracer
from jax.stages import Lowered, Wrapped

# JAX's options that a trace depends on and that can change within a process.
OPTIONS = ("jax_default_matmul_precision", "jax_enable_x64", "jax_debug_nans")
DIGEST = 32  # bytes of the hash at the start of a file

Class = TypeVar("Class")


class UnknownValue(Exception):
    """A value whose content cannot be described."""


@dataclasses.dataclass(frozen=True)
class Store:
    """Where programs are kept."""

    folder: Path
    # Returns a hash of all else that traces depend on, such as the code that is loaded so far; None
    # if that is unknown, so that nothing may be loaded or kept.
    fingerprint: Callable[[], str | None]
    write: Callable[[Path, bytes], None]
    warn: Callable[[str], None]


_store: Store | None = None


def use_store(store: Store | None) -> None:
    """Keep the programs of all `StoredProgram`s in `store`; None: keep none.

    Only for processes that use one device.
    """
    global _store
    _store = store


def stored(**options: Any) -> Callable[[Callable[..., Any]], "StoredProgram"]:
    """Return a decorator that makes a function a `StoredProgram`; options: as there."""
    return lambda function: StoredProgram(function, **options)


def storable(kind: type[Class]) -> type[Class]:
    """Let stored programs return a class; a decorator.

    Args:
      kind: a `flax.struct.dataclass` of arrays or a `NamedTuple`.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    if issubclass(kind, tuple):
        export.register_namedtuple_serialization(kind, serialized_name=name)
        return kind
    export.register_pytree_node_serialization(
        kind,
        serialized_name=name,
        serialize_auxdata=lambda _: b"",  # it has no static fields
        deserialize_auxdata=lambda _: (),
    )
    return kind


class StoredProgram:
    """A jitted function whose programs are kept on disk."""

    def __init__(self, function: Any, **options: Any) -> None:
        """Wrap a function.

        Args:
          options: static_argnames and donate_argnames of `jax.jit`.
        """
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.full_name = f"{function.__module__}.{function.__qualname__}"
        self.function, self.jitted = function, jax.jit(function, **options)
        self.static = _names(options.get("static_argnames", ()))
        self.donated = _names(options.get("donate_argnames", ()))
        self.parameters = tuple(inspect.signature(function).parameters)
        self.programs: dict[Any, Wrapped | None] = {}  # None: it cannot be stored

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the function."""
        program, leaves = self._find(args, keywords)
        return self.jitted(*args, **keywords) if program is None else program(*leaves)

    def lower(self, *args: Any, **keywords: Any) -> Lowered:
        """Return the lowered program that a call with these arrays or shapes runs."""
        program, leaves = self._find(args, keywords)
        if program is None:
            return self.jitted.lower(*args, **keywords)
        return program.lower(*leaves)

    def _cache_size(self) -> int:
        """Return the number of jitted programs, under the name that jitted functions give it."""
        jitted: Any = self.jitted
        return jitted._cache_size()

    def _find(
        self, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[Wrapped | None, Sequence[Any]]:
        """Return (stored program of a call, the leaves of its arguments); None if it has none."""
        if _store is None:
            return None, ()
        named = dict(zip(self.parameters, args, strict=False)) | dict(keywords)
        static = {name: named.pop(name) for name in self.static if name in named}
        leaves, tree = jax.tree.flatten(named)
        call = Call(static, named, tuple(leaves), tree)
        if any(isinstance(x, Tracer) for x in leaves):  # it is part of another program
            return None, ()
        key = call.signature()
        if key not in self.programs:
            self.programs[key] = _load(self, call, _store)
        return self.programs[key], leaves


Jitted = Wrapped | StoredProgram


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call, by name."""

    static: dict[str, Any]
    named: dict[str, Any]  # all others
    leaves: tuple[Any, ...]  # of `named`
    tree: Any  # of `named`

    def signature(self) -> tuple[Any, ...]:
        """Return all that a program depends on and that can change within a process."""
        options = tuple(getattr(jax.config, name) for name in OPTIONS)
        static = tuple(sorted(self.static.items()))
        return static, self.tree, tuple(map(_kind, self.leaves)), jax.sharding.get_mesh(), options

    def name(self, function: str, fingerprint: str) -> str:
        """Return the name of the program, a hash of all that it depends on.

        Raises:
          UnknownValue: the content of a static argument cannot be described.
        """
        _, tree, *rest = self.signature()
        parts = [function, fingerprint, describe(self.static)]
        parts += [str(tree), *map(repr, rest)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def leaves_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the indices of the leaves of arguments."""
        owners = [name for name, x in sorted(self.named.items()) for _ in jax.tree.leaves(x)]
        return tuple(i for i, name in enumerate(owners) if name in names)


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _kind(x: Any) -> tuple[Any, ...]:
    """Return what a program depends on of an argument: an array, a shape or a number.

    There is one device, so shardings differ in name only.
    """
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        return x.shape, x.dtype, bool(getattr(x, "weak_type", False))
    return (type(x),)


def kept_as_json(function: types.FunctionType) -> Callable[..., Any]:
    """Keep the results of a function with the programs; a decorator.

    Args:
      function: returns what JSON holds, with lists instead of tuples. Its arguments are hashable.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.cache
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        store = _store
        fingerprint = None if store is None else store.fingerprint()
        if store is None or fingerprint is None:
            return function(*args)
        try:
            parts = name, fingerprint, describe(args)
        except UnknownValue:
            return function(*args)
        path = store.folder / hashlib.sha256("\n".join(parts).encode()).hexdigest()
        content = _read(path, store)
        if content is not None:
            return json.loads(content)
        result = function(*args)
        _keep(path, json.dumps(result).encode(), store, function.__name__)
        return result

    return call


def _load(program: StoredProgram, call: Call, store: Store) -> Wrapped | None:
    """Return the program of a call, from the leaves of its arguments; None if it is not storable.

    It is loaded from the store, or traced and kept there.
    """
    fingerprint = store.fingerprint()
    if fingerprint is None:
        return None
    try:
        path = store.folder / call.name(program.full_name, fingerprint)
    except UnknownValue:
        return None
    donated = call.leaves_of(program.donated)
    content = _read(path, store)
    if content is None:
        try:
            content = _trace(program, call, donated)
        except (NotImplementedError, ValueError):  # jax.export refuses some operations and classes
            return None
        _keep(path, content, store, program.name)
    # A new one is read back as well, so that this process runs the same program as later ones.
    exported = export.deserialize(bytearray(content))

    def run(*leaves):
        return exported.call(*leaves)

    run.__name__ = program.name
    return jax.jit(run, donate_argnums=donated)


def _trace(program: StoredProgram, call: Call, donated: tuple[int, ...]) -> bytes:
    """Return the program of a call, from the leaves of its arguments."""

    def run(*leaves):
        return program.function(**call.tree.unflatten(leaves), **call.static)

    run.__name__ = program.name
    exported = export.export(jax.jit(run, donate_argnums=donated))(*call.leaves)
    return bytes(exported.serialize())


def _keep(path: Path, content: bytes, store: Store, name: str) -> None:
    """Write a file of the store; print a line if that fails."""
    try:
        store.write(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        store.warn(f"warning: {name} is not kept for the next start: {error}")


def _read(path: Path, store: Store) -> bytes | None:
    """Return the content of a file; None if there is none or, with a line, if it is damaged."""
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[DIGEST:]).digest() == content[:DIGEST]:
            return content[DIGEST:]
        reason = "it is damaged"
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error)
    store.warn(f"warning: {path} cannot be read and is made again: {reason}")
    return None


def describe(x: Any) -> str:
    """Return a text that is the same for values for which programs are the same.

    Raises:
      UnknownValue: x contains something else than numbers, texts, arrays, enums, types, functions
        of modules, and dataclasses, tuples, lists and dicts of these.
    """
    if x is None or isinstance(x, (bool, int, float, str, bytes)):
        return repr(x)
    kind = f"{type(x).__module__}.{type(x).__qualname__}"
    if isinstance(x, enum.Enum):
        return f"{kind}.{x.name}"
    if isinstance(x, (np.ndarray, np.generic)):
        return f"{x.dtype}{x.shape}{hashlib.sha256(x.tobytes()).hexdigest()}"
    if isinstance(x, (tuple, list)):
        return f"{kind}({', '.join(map(describe, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{describe(k)}: {describe(v)}' for k, v in sorted(x.items()))}}}"
    if isinstance(x, (type, np.dtype)):
        return repr(x)
    if inspect.isfunction(x) and x.__closure__ is None and "<" not in x.__qualname__:
        return f"{x.__module__}.{x.__qualname__}"
    if dataclasses.is_dataclass(x):
        fields = (f"{f.name}={describe(getattr(x, f.name))}" for f in dataclasses.fields(x))
        return f"{kind}({', '.join(fields)})"
    raise UnknownValue(kind)
