"""The reference of the settings as Markdown, from configs/base.py."""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.config.fields import FIELDS, leaves
from ragen_jax.configs import base

BASE = Path(base.__file__)
HEAD = (
    "| field | default | meaning | accepted | read as decided by |",
    "| --- | --- | --- | --- | --- |",
)


def config_markdown() -> str:
    """A table of fields for each section of configs/base.py, in its order."""
    values = leaves(base.get_config())
    meanings = comments(BASE.read_text(encoding="utf-8"))
    sections: dict[str, list[str]] = {}
    for name in meanings:
        if name in values:
            section = name.partition(".")[0] if "." in name else ""
            sections.setdefault(section, []).append(row(name, values[name], meanings))
    parts = []
    for section, rows in sections.items():
        title = f"## {section}" if section else "## The run"
        about = [text(meanings[section]), ""] if meanings.get(section) else []
        parts.append("\n".join([title, "", *about, *HEAD, *rows]))
    return "\n\n".join(parts)


def row(name: str, value: Any, meanings: dict[str, str]) -> str:
    """A field's row; what is said of its subsection (model.lora) stands before its own meaning."""
    parent = name.rpartition(".")[0]
    about = [meanings[parent].rstrip(".")] if "." in parent else []
    about = "; ".join(part for part in (*about, meanings[name]) if part)
    domain = FIELDS[name]
    deciding = dict.fromkeys(other for when in domain.read for other in when.names)
    read = ", ".join(f"`{other}`" for other in deciding) if deciding else ""
    default = repr(value.to_dict() if isinstance(value, ConfigDict) else value)
    return f"| `{name}` | `{default}` | {text(about)} | {text(domain.what)} | {read} |"


def text(plain: str) -> str:
    """Plain text in a cell of a table."""
    return re.sub(r"([|<>*_\[\]`])", r"\\\1", plain)


def comments(source: str) -> dict[str, str]:
    """{field or section: what is said of it}, in their order, of the `Config` of configs/base.py.

    A field's comment is in the lines above it that hold nothing else, or after it; a section's is
    the docstring of its class.
    """
    alone, trailing = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = alone if token.line.lstrip().startswith("#") else trailing
            where[token.start[0]] = token.string.lstrip("# ").strip()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    found = {}

    def walk(section: ast.ClassDef, prefix: str) -> None:
        for node in section.body:
            if not isinstance(node, ast.AnnAssign):
                continue
            name, line, above = f"{prefix}{ast.unparse(node.target)}", node.lineno, []
            inner = classes.get(ast.unparse(node.annotation))
            if inner is not None:
                found[name] = " ".join((ast.get_docstring(inner) or "").split())
                walk(inner, f"{name}.")
                continue
            while line - 1 in alone:
                line -= 1
                above.insert(0, alone[line])
            own = [trailing[n] for n in range(node.lineno, node.end_lineno + 1) if n in trailing]
            found[name] = " ".join([*above, *own])

    walk(classes["Config"], "")
    return found
