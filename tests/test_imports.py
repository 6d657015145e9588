"""Imports between the folders of the package: a type checker and Python see the same imports."""

import ast
import importlib.util

import pytest
from cli_commands import ROOT

FILES = sorted(
    path
    for folder in ("ragen_jax", "envs", "configs")
    for path in (ROOT / folder).rglob("*.py")
    if path != ROOT / "ragen_jax" / "__init__.py"  # its names are imported lazily
)


def hidden_imports(source):
    """Return our modules that a source imports only for the type checker."""
    return [
        node.module
        for block in ast.walk(ast.parse(source))
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ragen_jax")
    ]


@pytest.mark.medium
@pytest.mark.fast
def test_no_module_of_ours_is_imported_for_types_alone():
    """An import that only the type checker sees hides a cycle."""
    assert hidden_imports("if TYPE_CHECKING:\n    from ragen_jax.core import types") == [
        "ragen_jax.core"
    ]
    found = {str(path): hidden for path in FILES if (hidden := hidden_imports(path.read_text()))}
    assert len(FILES) > 200 and not found


@pytest.mark.fast
@pytest.mark.parametrize("folder", ["tests", "docs", "benchmarks"])
def test_folders_beside_the_package_are_no_part_of_it(folder):
    """Of the folders at the top of the tree, only envs and configs are packaged (setup.py)."""
    assert importlib.util.find_spec("ragen_jax.envs") is not None
    assert importlib.util.find_spec(f"ragen_jax.{folder}") is None
