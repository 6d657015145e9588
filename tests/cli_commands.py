"""Commands as a user types them, run in this process, and the commands of README.md and docs/."""

import contextlib
import dataclasses
import io
import re
import runpy
import shlex
import sys
from pathlib import Path

from absl import flags

ROOT = Path(__file__).parents[1]


FRONT_PAGES = ("README.md", "docs/cli.md")


def front_commands():
    """Return the distinct `python -m ragen_jax.*` commands in the code blocks of the front pages.

    A command on both pages is taken from the first page. Comments in code blocks are ignored.
    """
    found = {}
    for page in FRONT_PAGES:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.S):
            for command in re.findall(r"python -m (ragen_jax\..*)", block):
                found.setdefault(shlex.join(shlex.split(command, comments=True)), command)
    return list(found.values())


README = front_commands()


@dataclasses.dataclass(frozen=True)
class Written:
    """A command in a code block of a page."""

    page: str  # path below docs/
    text: str  # ragen_jax.NAME and its arguments
    needs: str  # content of <!-- needs: ... --> above the block, or ""

    def __str__(self):
        return f"{self.page}: {self.text}"


BLOCK = re.compile(r"(?:<!-- needs: ([^\n]+?) -->\n+)?^```bash\n(.*?)^```", re.M | re.S)


def commands_of(page, text):
    """Return the `Written` commands of a page. A loop gives the command of its first iteration;
    redirections and optional words in brackets are dropped."""
    found = []
    for needs, block in BLOCK.findall(text):
        block = block.replace("\\\n", " ")
        for name, first in re.findall(r"\bfor (\w+) in ([^\s;]+)", block):
            block = block.replace(f"${name}", first)
        for line in block.splitlines():
            if command := re.search(r"python -m (ragen_jax\..*?)(; done.*)?$", line):
                words = re.sub(r" \[--[^]]*\]| > \S+", "", command[1])
                found.append(Written(page, " ".join(words.split()), needs))
    return found


DOCS = [
    command
    for path in sorted((ROOT / "docs").rglob("*.md"))
    for command in commands_of(str(path.relative_to(ROOT / "docs")), path.read_text())
]
OF_A_COMMAND = ("ragen_jax", "absl.flags._flag")  # modules that define a command's flags


def call(*words):
    """Run `python -m WORDS` in this process; return (exit code, stdout, stderr)."""
    module, *arguments = words
    before = set(flags.FLAGS)
    out, err = io.StringIO(), io.StringIO()
    kept, sys.argv = sys.argv, [module, *arguments]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    finally:
        sys.argv = kept
        for name in set(flags.FLAGS) - before:
            # Flags of libraries imported in the meantime stay, because they still read them.
            if flags.FLAGS.find_module_defining_flag(name).startswith(OF_A_COMMAND):
                delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
    return code, out.getvalue(), err.getvalue()
