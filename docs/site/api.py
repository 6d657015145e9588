"""The reference of the library as Markdown: names, arguments and docstrings of the public names."""

import importlib
import inspect
import re

import ragen_jax

SECTION = re.compile(r"(Args|Returns|Raises):")
ENTRY = re.compile(r"(  )(\S[^:]*): (.*)")  # "  reward_BT, value_BT: rewards"


def api_markdown() -> str:
    """Return a heading, a signature and the docstring of every public name, alphabetically."""
    return "\n\n".join(entry(name, *of) for name, of in sorted(public_names().items()))


def public_names() -> dict[str, tuple[str, str]]:
    """Return {name: (module, attribute)}: EXPORTS, and the commands that are functions as well."""
    commands = {name: ("ragen_jax.api", name) for name in ragen_jax.CALLABLE_MODULES}
    return ragen_jax.EXPORTS | commands


def entry(name: str, module: str, attribute: str) -> str:
    """Return a function's section: its signature without types, which the docstring gives."""
    function = getattr(importlib.import_module(module), attribute)
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    arguments = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return (
        f"## {name}\n\n"
        f"```python\nragen_jax.{name}{arguments}\n```\n\n"
        f"{docstring_markdown(inspect.getdoc(function) or '')}\n\n"
        f"Defined as `{module}.{attribute}`."
    )


def docstring_markdown(docstring: str) -> str:
    """A docstring, which is Markdown but for its sections, with these as lists.

    An entry of a section begins two spaces deep with its name and a colon; what is deeper goes on.
    """
    lines, inside = [], ""
    for line in docstring.splitlines():
        if found := SECTION.fullmatch(line):
            inside = found[1]
            lines += ["", f"**{inside}**", ""]
        elif not inside:
            lines.append(line)
        elif inside != "Returns" and (found := ENTRY.fullmatch(line)):
            lines.append(f"- `{found[2]}`: {found[3]}")
        else:
            lines.append(f"  {line.strip()}" if inside != "Returns" else line.strip())
    return "\n".join(lines)
