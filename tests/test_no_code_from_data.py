"""No code from data: SECURITY.md's table lists every library call that could load code, with the
argument that forbids it."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]

# The last part of a dotted name, under any import alias.
LOADERS = {
    # Python's standard library
    *("import_module", "__import__", "run_module", "run_path", "exec_module"),
    *("load_module", "spec_from_file_location", "SourceFileLoader", "CDLL", "LoadLibrary"),
    *("Unpickler", "read_pickle"),
    # Hugging Face, Orbax, TFDS, JAX, Arrow, faiss, SymPy
    *("from_pretrained", "pipeline", "apply_chat_template", "load_dataset", "load_from_disk"),
    *("load_dataset_builder", "get_class_from_dynamic_module", "snapshot_download"),
    *("hf_hub_download", "safe_open", "load_file", "CheckpointManager", "PyTreeRestore"),
    *("StandardRestore", "builder_from_directory", "as_data_source", "deserialize_and_load"),
    *("read_table", "ParquetFile", "read_feather", "read_index", "enable_unsafe_deserialization"),
    *("sympify", "parse_expr", "parse_latex", "lambdify", "verify"),
}
# Modules whose `load` and similar functions may run code: marshal.loads does, json.loads does not.
MODULES = {
    *("np", "numpy", "pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"),
    *("torch", "tfds", "jsonpickle", "gym", "gymnasium", "textarena"),
}
OF_MODULES = ("load", "loads", "open", "unsafe_load", "full_load", "load_all", "make", "make_vec")
IN_FULL = {"os.system", "os.popen", "compile", "exec", "eval"}
SETTINGS = {"jax_compilation_cache_dir"}  # folder from which programs are loaded
# Never imported: the data that they read is code.
REFUSED = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "yaml", "jsonpickle"}


parsed = functools.cache(ast.parse)


def dotted(node: ast.expr) -> str:
    """Return the name of a call as written, such as "np.load", or "" for a call without a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "()"


def could_load_code(name: str) -> bool:
    *before, last = name.split(".")
    if last in OF_MODULES:
        return bool(before) and before[-1] in MODULES
    return last in LOADERS or name in IN_FULL or bool(before) and before[-1].startswith("Auto")


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield (name, call) of the calls in a source file that could load code."""
    tree, called = parsed(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called.add(node.func)
            values = {word.value for word in node.args if isinstance(word, ast.Constant)}
            if could_load_code(dotted(node.func)) or values & SETTINGS:
                yield dotted(node.func), node
    for node in ast.walk(tree):  # functions passed as arguments; their arguments are unknown
        if isinstance(node, ast.Attribute) and node not in called and could_load_code(dotted(node)):
            yield dotted(node), ast.Call(node, [], [], lineno=node.lineno)


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def table() -> dict[tuple[str, str], str]:
    """Return {(call, file): reason why it runs no code} of SECURITY.md's table."""
    text = (ROOT / "SECURITY.md").read_text().partition("\n## Calls that could load code\n")[2]
    rows = {}
    for line in text.partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            call, files, _, reason = (cell.strip() for cell in line.strip("|").split(" | "))
            for file in re.findall(r"`([^`]+)`", files):
                rows[call.strip("`"), file] = reason
    return rows


def lacks(call: ast.Call, reason: str) -> list[str]:
    """Return the arguments `name=value` in a row's reason that the call does not have."""
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    wanted = re.findall(r"`(\w+)=(\w+)`", reason)
    return [f"{name}={value}" for name, value in wanted if given.get(name) != value]


@pytest.mark.medium
def test_every_call_that_could_load_code_is_listed_with_the_argument_that_forbids_it():
    rows, found, faults = table(), set(), []
    for path in sources("ragen_jax", "envs", "configs", "launch"):
        file = str(path.relative_to(ROOT))
        for name, call in calls(path.read_text()):
            place = f"{file}:{call.lineno}: {name}"
            if (name, file) not in rows:
                faults.append(f"{place} is not in SECURITY.md, Calls that could load code")
                continue
            found.add((name, file))
            faults += [f"{place} lacks {word}" for word in lacks(call, rows[name, file])]
    faults += [
        f"{file}: {name} is in SECURITY.md but not there" for name, file in rows.keys() - found
    ]
    assert not faults, "\n".join(faults)


def test_the_tests_that_hold_a_promise_are_there():
    named = re.findall(r"`([\w/]*test_\w+\.py)`", (ROOT / "SECURITY.md").read_text())
    there = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(set(named)) > 20
    for name in named:
        assert any(path == name or path.endswith(f"/{name}") for path in there), name


@pytest.mark.medium
def test_no_source_imports_a_format_that_is_code_or_starts_a_shell():
    for path in sources("ragen_jax", "envs", "configs", "launch", "benchmarks"):
        for node in ast.walk(parsed(path.read_text())):
            names = [word.name for word in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
                # The table would miss a function imported as `from numpy import load`.
                hidden = node.module in MODULES and {word.name for word in node.names} & {
                    *OF_MODULES
                }
                assert not hidden, f"{path}:{node.lineno}: import {node.module}, not its {hidden}"
            assert not {name.partition(".")[0] for name in names} & REFUSED, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call):
                shell = [word for word in node.keywords if word.arg == "shell"]
                assert not shell, f"{path}:{node.lineno}: shell="


def test_developers_scripts_run_no_code_of_a_model_either():
    for path in sources("benchmarks", "docs"):
        for name, call in calls(path.read_text()):
            if name.startswith("Auto") and name.endswith(".from_pretrained"):
                assert not lacks(call, "`trust_remote_code=False`"), f"{path}:{call.lineno}"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("AutoConfig.from_pretrained(path)", "AutoConfig.from_pretrained"),
        ("transformers.AutoModel.from_config(c)", "transformers.AutoModel.from_config"),
        ("import pickle\npickle.loads(data)", "pickle.loads"),
        ("np.load(path)", "np.load"),
        ("jax.config.update('jax_compilation_cache_dir', x)", "jax.config.update"),
        ("eval(text)", "eval"),
        ("yaml.load(text)", "yaml.load"),
        ("functools.partial(np.load, path)", "np.load"),
    ],
)
def test_a_new_call_is_found(text, name):
    ((found, call),) = calls(text)
    assert found == name and lacks(call, "needs `allow_pickle=False`") == ["allow_pickle=False"]
