"""Commands as a user types them, run in this process, and those of the README."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

from absl import flags

ROOT = Path(__file__).parents[1]


def commands_of_the_readme():
    """Every `python -m ragen_jax.*` of README.md's code blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [found[1] for line in lines if (found := re.search(r"python -m (ragen_jax\..*)", line))]


README = commands_of_the_readme()
OF_A_COMMAND = ("ragen_jax", "absl.flags._flag")  # modules that define its flags; config.*


def call(*words):
    """(exit code, stdout, stderr) of `python -m WORDS`."""
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
            # Libraries that were first imported meanwhile go on reading theirs.
            if flags.FLAGS.find_module_defining_flag(name).startswith(OF_A_COMMAND):
                delattr(flags.FLAGS, name)
        flags.FLAGS.unparse_flags()
    return code, out.getvalue(), err.getvalue()
