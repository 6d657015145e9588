"""The reference of the library, as Markdown: names, arguments and docstrings of ragen_jax.EXPORTS.

python docs/site/api.py
"""

import inspect
import re

import ragen_jax

SECTION = re.compile(r"(Args|Returns|Raises):")
ENTRY = re.compile(r"(  )(\S[^:]*): (.*)")  # "  reward_BT, value_BT: rewards"


def api_markdown() -> str:
    """A heading, a signature and the docstring of every public name, in order of the alphabet."""
    return "\n\n".join(entry(name, getattr(ragen_jax, name)) for name in sorted(ragen_jax.EXPORTS))


def entry(name: str, function: object) -> str:
    """One function: its signature without types, which the docstring gives with their shapes."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    arguments = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    module, attribute = ragen_jax.EXPORTS[name]
    return (
        f"## {name}\n\n"
        f"``````{{py:function}} ragen_jax.{name}{arguments}\n\n"
        f"{docstring_markdown(inspect.getdoc(function))}\n\n"
        f"Defined as `{module}.{attribute}`.\n``````"
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


if __name__ == "__main__":
    print(api_markdown())
