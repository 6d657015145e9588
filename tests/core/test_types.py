"""The type annotations of the package."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

TREE = Path(__file__).parents[2]
FILES = [
    path.relative_to(TREE)
    for folder in ("ragen_jax", "envs", "configs")
    for path in sorted((TREE / folder).rglob("*.py"))
]


def functions(body, prefix=""):
    """Functions of a module and methods of its classes, without nested functions."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{node.name}.")


@pytest.mark.medium
@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_function_says_what_it_takes_and_gives(path):
    missing = []
    for name, node in functions(ast.parse((TREE / path).read_text()).body):
        a = node.args
        arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
        bare = [x.arg for x in arguments if x and not x.annotation]
        bare = [x for x in bare if x not in ("self", "cls") and not x.startswith("_")]
        if bare or not node.returns:
            missing.append(f"{name} (line {node.lineno}): {', '.join(bare) or 'what it returns'}")
    assert not missing
