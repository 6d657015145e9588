"""One line about an error of the user's input: flags, fields, and errors in the config file."""

import re
import traceback
from collections.abc import Mapping
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from ragen_jax.config import help
from ragen_jax.config.fields import FIELDS
from ragen_jax.config.other_names import other_name
from ragen_jax.config.user_code import frames, is_ours, user_frame

_ILLEGAL = re.compile(r"flag --([\w.]+)=(.*?): (.*)", re.DOTALL)  # of absl: name, value, reason
_EXPECTED = {  # begin of a parser's reason -> the accepted values
    "invalid literal for int": "a whole number",
    "could not convert string to float": "a number",
    "('Non-boolean argument": "True or False",
}


def describe_input_error(error: Exception) -> str:
    """Return the line of an error: what is wrong, and where if it is in the user's code."""
    of_config_file = _of_config_file(error)
    error = of_config_file or error
    text = str(error)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    if isinstance(error, flags.UnrecognizedFlagError):
        return f"there is no flag --{error.flagname}{help.suggestion(error.flagname)}"
    if isinstance(error, flags.IllegalFlagValueError) and (illegal := _ILLEGAL.fullmatch(text)):
        return _of_value(*illegal.groups())
    # Elsewhere, a ValueError is raised on purpose and says itself what is wrong.
    if (of_config_file or not isinstance(error, ValueError)) and (place := _place(error)):
        return f"{place}: {type(error).__name__}: {text}"
    if isinstance(error, (AttributeError, KeyError)):
        return _of_field(text)
    return text if text.strip() else type(error).__name__


def with_overrides(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """Return a copy of a config with other values of dotted fields, as --config.FIELD sets them.

    Raises:
      ValueError: there is no such field, or it has another type.
    """
    config = config.copy_and_resolve_references()
    for name, value in overrides.items():
        field = name.removeprefix("config.")
        try:
            config.update_from_flattened_dict({field: value})
        except TypeError as error:
            what = FIELDS[field].what if field in FIELDS else str(error)
            raise ValueError(f"{field} is {value!r}; it must be {what}") from error
        except (AttributeError, KeyError) as error:
            raise ValueError(_of_field(f"'{field}'")) from error
    return config


def _of_config_file(error: Exception) -> Exception | None:
    """Return the error that a config file raised, if that is what an error reports, or None.

    ml_collections raises another one with the text of the traceback for a TypeError or ValueError,
    in whose place absl raises a third, and an OSError when the config is first read.
    """
    found: BaseException | None = None
    if isinstance(error, flags.IllegalFlagValueError) and error.__context__ is not None:
        found = error.__context__.__context__
    elif isinstance(error, OSError):
        found = error.__cause__
    return found if isinstance(found, Exception) else None


def _place(error: Exception) -> str:
    """Return "FILE:LINE: FUNCTION" of the user's code; "" if ragen_jax raised a ValueError."""
    trace = "".join(traceback.format_tb(error.__traceback__))
    frame = user_frame(trace)
    if frame is None or (isinstance(error, ValueError) and is_ours(frames(trace)[-1].file)):
        return ""
    return f"{frame}" + (f": {frame.function}" if frame.function != "<module>" else "")


def _of_value(name: str, value: str, reason: str) -> str:
    """Return the line of a value that a flag does not accept."""
    expected = next((what for begin, what in _EXPECTED.items() if reason.startswith(begin)), None)
    section, _, field = name.partition(".")
    if section != "config" or not field:
        return f"--{name} is {value!r}; " + (f"it must be {expected}" if expected else reason)
    if "as a ConfigDict" in reason:
        return f"{name} is a section; set its fields: --{name}.NAME=VALUE"
    field = re.sub(r"^also\.\w+\.(?=env\.)", "", field)  # its fields are those of env
    if field in FIELDS:
        expected = FIELDS[field].what
    return f"{name} is {value!r}; " + (f"it must be {expected}" if expected else reason)


def _of_field(text: str) -> str:
    """Return the line of an unknown field, from ml_collections' message."""
    if found := re.search(r"<class '([\w.]+)'>\.(\w+) does not exist", text):
        why = "; does get_config() return the config?" if found[1] == "NoneType" else ""
        return f"a value of type {found[1]} has no field {found[2]!r}{why}"
    # It is a repr of a repr: the name, and sometimes a suggestion.
    name = re.search(r"[\w.]+", text)
    suggestion = re.search(r'Did you mean "\w+"', text)
    field = name[0] if name else text
    near = f"; did you mean {suggestion[0][13:]}?" if suggestion else help.suggestion(field)
    return (
        f"the config has no field {field!r}{other_name(field) or near} (configs/base.py lists "
        "every field; an option of your environment is one once get_config() of your file sets "
        "config.env.options.NAME)"
    )
