"""The text of --help, and suggestions for unknown flags."""

import inspect
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from ragen_jax.config.other_names import other_name
from ragen_jax.configs import base, presets, recipes
from ragen_jax.configs.base import Config
from ragen_jax.core.flatten import flatten
from ragen_jax.core.suggest import nearest

ASKING = ("-h", "-help", "--help", "--helpfull", "--helpshort")
SHOWN = 100  # maximum characters of a line


def is_asked(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return any(word in ASKING for word in argv[1:])


def help_text(configs: Sequence[str]) -> str:
    """Return the text of --help: the command's docstring, its flags, and how to set the config.

    Args:
      configs: names of the configs that come with ragen_jax; empty: the command reads no config.
    """
    about = inspect.getdoc(sys.modules["__main__"]) or ""
    parts = [about, "\n".join(["flags:", *_flags()])]
    if configs:
        parts.append(
            "\n".join(
                [
                    "config:",
                    *_filled("  --config=NAME or FILE.py; names: ", configs),
                    *_filled("  presets, after a colon: ", presets.PRESETS),
                    *_filled(
                        f"  presets of {' and '.join(presets.DRAWING_ENVIRONMENTS)}: ",
                        presets.VISION_PRESETS,
                    ),
                    *_filled("  recipes, after a +: ", list(recipes.RECIPES)),
                    f"  {len(_fields())} fields, each set by --config.FIELD=VALUE, for example",
                    "    --config.steps=100 --config.filter.value=0.9 --config.seed=1",
                    f"  All fields with units and meaning: {base.__file__}",
                ]
            )
        )
    return "\n\n".join(parts)


def _flags() -> Iterator[str]:
    """Yield the lines of all flags except those of libraries."""
    defined = flags.FLAGS.flags_by_module_dict()
    ours = [flag for module in defined for flag in defined[module] if "ragen_jax" in module]
    for flag in sorted(ours, key=lambda flag: flag.name):
        default = "" if flag.default in (None, "", False) else f" (default: {flag.default})"
        yield from _filled(f"  --{flag.name}: ", f"{flag.help}{default}".split(), between=" ")


def _filled(begin: str, words: Sequence[str], between: str = ", ") -> Iterator[str]:
    """Yield `begin` and the words in lines of at most SHOWN characters, later lines indented."""
    line = begin
    for number, word in enumerate(words):
        word = word + between if number + 1 < len(words) else word
        if len(line) + len(word.rstrip()) > SHOWN:
            yield line.rstrip()
            line = " " * 6
        line += word
    yield line.rstrip()


def suggestion(flag: str) -> str:
    """Return "; did you mean --config.steps?" for the unknown flag "steps"; "" without a match."""
    flag = flag.lower().replace("-", "_")
    fields = _fields() if "config" in flags.FLAGS else []
    if fields and other_name(flag):
        return other_name(flag)
    ends = [name for name in fields if f".{name}".endswith(f".{flag}")]
    if not ends:
        last = {name.rpartition(".")[2]: name for name in fields}
        own = {name: name for name in flags.FLAGS if "." not in name}
        near = nearest(flag, [*own, *last, *fields])
        if near and near[0] in own:
            return f"; did you mean --{near[0]}?"
        ends = [last.get(name, name) for name in near]
    ends = [f"--config.{name}" for name in sorted(ends, key=lambda name: name.count("."))[:3]]
    return f"; did you mean {' or '.join(ends)}?" if ends else ""


def _fields() -> list[str]:
    """Return the dotted names of all fields of base.py."""
    return list(flatten(Config().to_dict()))
