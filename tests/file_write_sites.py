"""Find the places in the source that write files, by parsing it.

A place is a function that calls something to make, change, move, remove or open files:
(file, function) -> the names of these calls.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("ragen_jax", "envs", "configs")
# Functions and methods that always write, called on any object.
WRITING = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "touch", "rename", "renames"),
    *("symlink_to", "hardlink_to", "symlink", "link", "unlink", "rmdir", "removedirs"),
    *("rmtree", "copytree", "copyfile", "copy2", "copymode", "move", "mkfifo", "mknod"),
    *("chmod", "chown", "utime", "truncate", "ftruncate", "posix_fallocate", "pwrite"),
    *("savez", "savez_compressed", "save_file", "save_pretrained", "savefig", "savetxt", "tofile"),
    *("open_memmap", "write_array", "download_and_prepare", "snapshot_download", "load_dataset"),
    *("hf_hub_download", "urlretrieve", "ArrayRecordWriter", "SummaryWriter", "EventsWriter"),
    *("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"),
    *("CheckpointManager", "flock", "lockf", "to_parquet", "to_csv", "write_table", "dump"),
}
OURS = {
    *("atomic_open", "atomic_write", "append_line", "make_folder", "save_array", "map_array"),
    *("save_figure", "write_tensors", "write_checksums", "lock_path", "replacement"),
    *("write_json", "write_once", "_replace"),
}
OWN_FILES = {
    *(
        "ragen_jax.storage.atomic_io",
        "ragen_jax.storage.writers",
        "ragen_jax.storage.checksums",
        "ragen_jax.run.workdir",
        "ragen_jax.storage.cache",
    ),
    *("ragen_jax.model.hf", "ragen_jax.model.weights"),
}
MODES = set("wax+")


def places():
    """Return {(file, function): names of the calls that write, in order}."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for function, call in _calls(ast.parse(path.read_text()), name):
                found.setdefault((name, function), []).append(call)
    return found


def _calls(tree, file):
    """Yield (function, name) of every call in a module that writes, and of every writing function
    that is passed as an argument (functools.partial(path.mkdir, ...), with_retries(path.touch,
    ...))."""
    known = {  # bare name -> the module that it is imported from, or this module
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    module = file.removesuffix(".py").replace("/", ".")
    known |= {node.name: module for node in tree.body if isinstance(node, ast.FunctionDef)}
    found = []

    def visit(node, place):
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{place}.{child.name}" if place else child.name
            if isinstance(child, ast.Call):
                handed = [child.func, *child.args]
                for target in handed:
                    name = _writes(target, child, known)
                    if name:
                        found.append((place or "module", name))
            visit(child, inner)

    visit(tree, "")
    return found


def _writes(target, call, known):
    """Return the name of `target` if calling it writes, else None."""
    if isinstance(target, ast.Attribute):
        name, of = target.attr, ast.unparse(target.value)
    elif isinstance(target, ast.Name):
        name, of = target.id, None
    else:
        return None
    called = target is call.func
    arguments = call.args if called else call.args[call.args.index(target) + 1 :]
    if name == "open":
        return "open" if _opens_to_write(of, arguments, call.keywords) else None
    if name == "replace":  # excludes str.replace, dataclasses.replace and date.replace
        one = len(arguments) == 1 and not call.keywords
        return name if of == "os" or (one and of not in (None, "dataclasses")) else None
    if name in OURS:
        own = known.get(name) in OWN_FILES if of is None else of in ("hf", "weights")
        return name if own else None
    if name == "save":
        return name if of is not None else None
    if name == "Popen":
        return name
    if name not in WRITING or (
        of is None and (known.get(name) or "ragen_jax").startswith("ragen_")
    ):
        return None
    return None if name == "dump" and of != "json" else name


def _opens_to_write(of, arguments, keywords):
    """Return whether an open() call has a mode that writes."""
    arguments = list(arguments)
    if of is None or of in ("io", "gzip", "os", "codecs"):
        arguments = arguments[1:]
    modes = [*arguments[:1], *(word.value for word in keywords if word.arg in ("mode", "flags"))]
    for mode in modes:
        if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
            return bool(MODES & set(mode.value))
        if of == "os":
            return "O_W" in ast.unparse(mode) or "O_RDWR" in ast.unparse(mode)
    return False
