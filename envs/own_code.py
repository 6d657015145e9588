"""The source files of a user's own code: a module, its package and its imports."""

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

THIS_PACKAGE = "ragen_jax"
# Folders of installed packages, whose files are not the user's own.
INSTALL_FOLDERS = ("site-packages", "dist-packages")


def own_files(module: str) -> dict[str, Path]:
    """Return {module name: file} of a module and the user's own modules that it imports, sorted.

    Nothing is imported or executed: `import` statements are read from the sources, including those
    inside functions. If the module is part of a package, the package's other modules are included.
    The standard library, other installed packages and ragen_jax are not followed. Imports by
    computed names and data files are not detected.

    Args:
      module: dotted name, as Python would import it.

    Returns:
      {} if there is no such module.
    """
    top = module.partition(".")[0]
    found: dict[str, Path] = {}
    queue = [module, *_siblings(module)]
    while queue:
        name = queue.pop()
        # A package's __init__.py runs before its modules.
        for part in _with_parents(name):
            file = _find(part)
            is_followed = part == module or _is_own(part, file, top)
            if part in found or file is None or not is_followed:
                continue
            found[part] = file
            queue += _imports(file, part)
    return dict(sorted(found.items()))


def files_hash(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the names and contents of files, in hex digits.

    Raises:
      OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _siblings(module: str) -> list[str]:
    """Return the other modules of a module's package; [] if it is not in a package."""
    file, package = _find(module), module.rpartition(".")[0]
    if file is None or not package or package.partition(".")[0] == THIS_PACKAGE:
        return []
    stems = sorted(path.stem for path in file.parent.glob("*.py"))
    return [f"{package}.{stem}" for stem in stems if stem != "__init__"]


def _with_parents(name: str) -> list[str]:
    """Return ["a", "a.b", "a.b.c"] for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _find(name: str) -> Path | None:
    """Return the file of a module, found without importing anything; None if there is none."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # raised for __main__ and for modules made by hand
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder).joinpath(*rest)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


def _is_own(name: str, file: Path | None, own_top: str) -> bool:
    """Whether a module that the user's code imports is also the user's code."""
    top = name.partition(".")[0]
    if top == THIS_PACKAGE or file is None:
        return False
    if top == own_top:
        return True
    return top not in sys.stdlib_module_names and not is_installed(file)


def is_installed(file: Path) -> bool:
    """Whether a file belongs to the standard library or to an installed package."""
    paths = sysconfig.get_paths()
    return bool(set(INSTALL_FOLDERS) & set(file.parts)) or any(
        file.is_relative_to(paths[folder]) for folder in ("stdlib", "platstdlib")
    )


def _imports(file: Path, module: str) -> Iterator[str]:
    """Yield the names of modules that a source file may import, as they are written in it."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the file is hashed anyway
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            if base:
                # A name imported from a package may be a module of the package.
                yield from (f"{base}.{alias.name}" for alias in node.names)
