"""The reference of the settings, as Markdown, from configs/base.py.

python docs/site/settings_table.py
"""

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
    about = [meanings[parent]] if "." in parent else []
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
    """{field or section: its comment}, in their order, of the `SETTINGS` of configs/base.py.

    A field's comment is in the lines above it that hold nothing else, or behind it; a section's,
    too, behind the parenthesis that opens it. A section on one line has one comment, its own.
    """
    alone, behind = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            where = alone if token.line.lstrip().startswith("#") else behind
            where[token.start[0]] = token.string.lstrip("# ").strip()
    found = {}

    def walk(call: ast.Call, prefix: str, opened: int) -> None:
        for keyword in call.keywords:
            name, line, above = f"{prefix}{keyword.arg}", keyword.lineno, []
            while line - 1 in alone:
                line -= 1
                above.insert(0, alone[line])
            section = isinstance(keyword.value, ast.Call) and keyword.value.keywords
            own = behind.get(keyword.lineno)
            found[name] = " ".join([*above, *([own] if own else [])])
            if keyword.lineno == opened:
                found[name] = ""
            if section:
                walk(keyword.value, f"{name}.", keyword.lineno)

    (fields,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    ]
    assert isinstance(fields, ast.Call)
    walk(fields, "", 0)
    return found


if __name__ == "__main__":
    print(config_markdown())
