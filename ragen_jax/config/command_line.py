"""The command line of every command: its config, other processes, what unusable input prints."""

import contextlib
import datetime
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from ragen_jax import configs
from ragen_jax.config import help
from ragen_jax.config.renamed import refuse_renamed
from ragen_jax.config.trust import require_trust
from ragen_jax.core.clean_text import shorten
from ragen_jax.core.memory import keep_freed_memory
from ragen_jax.core.sharding import from_main_process
from ragen_jax.storage.atomic_io import OF_A_PATH, DiskRefused, disk_error_message, remove_leftovers
from ragen_jax.storage.cache import cache_directory
from ragen_jax.storage.compilation_cache import refuse_shared_cache
from ragen_jax.storage.console_streams import set_up_console, show_line
from ragen_jax.storage.heartbeat import heartbeat

BAD_INPUT = 2  # exit code
DISK = 4  # exit code of a disk that is full or cannot be written
SHOWN = 200  # characters of a path in a message, at most
DEFAULT_CONFIG = "sokoban"
CONFIGS = Path(configs.__file__).parent
RUN_CONFIG = Path(__file__).with_name("run_config.py")


def define_config() -> flags.FlagHolder[ConfigDict]:
    """The --config flag: a file with get_config(), or the name of one of ours; after a colon its
    argument."""
    flags.DEFINE_bool(
        "distributed",
        False,
        "Join the run's other processes. JAX finds them on TPU pods, GKE, Slurm and Open MPI; "
        "elsewhere set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
    )
    flags.DEFINE_bool(
        "trust",
        False,
        "Import the code that the run in --workdir names (an environment, functions of its "
        "owner), even if you did not start the run on this machine.",
    )
    return config_flags.DEFINE_config_file(
        "config",
        None,
        "Config file, or the name of a config that comes with ragen_jax, then [:PRESET]; "
        f"default: that of the run in --workdir, or {DEFAULT_CONFIG}.",
        lock_config=True,
    )


def config_given() -> bool:
    """Return whether the command line names a config file."""
    return _value(sys.argv, "config") is not None


def _value(argv: Sequence[str], name: str) -> str | None:
    """The value of a flag on a command line that is not parsed yet; None: it is not there."""
    words = argv[1:]  # of a command without any: none
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in (f"-{name}", f"--{name}"):
            return value if equals else "".join(words[index + 1 : index + 2])
    return None


def config_first(argv: Sequence[str]) -> list[str]:
    """A command line whose --config stands before its overrides, wherever it was given.

    Raises:
      ValueError: it is given twice.
    """
    value = _value(argv, "config")
    if value is None:
        return list(argv)
    others, words = [], iter(argv[1:])
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in ("-config", "--config"):
            others.append(word)
        elif not equals:
            next(words, None)  # its value
    given = sum(word.partition("=")[0] in ("-config", "--config") for word in argv[1:])
    if given > 1:
        raise ValueError(f"--config is given {given} times; give it once and add recipes with +")
    return [argv[0], f"--config={value}", *others]


def _default(argv: Sequence[str]) -> str:
    """Return the default config: that of the run in --workdir, or DEFAULT_CONFIG."""
    workdir = _value(argv, "workdir")
    if workdir and (Path(workdir) / "config.json").exists():
        return f"{RUN_CONFIG}:{workdir}"
    return DEFAULT_CONFIG


def named_configs() -> dict[str, Path]:
    """Return {name: file} of the configs that come with ragen_jax."""
    files = [path for path in sorted(CONFIGS.glob("*.py")) if path.stem != "base"]
    return {path.stem: path for path in files if "def get_config(" in path.read_text()}


def config_file(value: str) -> str:
    """FILE[:PRESET] of a --config that may be a name: "sokoban:llm" of configs/sokoban.py.

    Raises:
      ValueError: neither a name of ours nor a file that is there.
    """
    name, colon, preset = value.partition(":")
    ours = named_configs()
    if name not in ours:
        if Path(name).is_file():
            return value
        first = name.partition("+")[0]
        hint = f"; recipes come after a preset: {first}:tiny{name[len(first) :]}"
        raise ValueError(
            f"--config is {value!r}, which is not a config; accepted: a file such as "
            f"configs/mine.py, or one of {', '.join(ours)}{hint if first in ours else ''}"
        )
    return f"{ours[name]}{colon}{preset}"


def with_config_file(argv: Sequence[str]) -> list[str]:
    """A command line whose --config is a file: what was given, or the default."""
    if _value(argv, "config") is None:
        argv = [argv[0], f"--config={_default(argv)}", *argv[1:]]
    words = list(argv)
    for index, word in enumerate(words[1:], start=1):
        flag, equals, value = word.partition("=")
        if flag in ("-config", "--config"):
            if equals:
                words[index] = f"{flag}={config_file(value)}"
            elif index + 1 < len(words):
                words[index + 1] = config_file(words[index + 1])
    return words


def overrides() -> list[str]:
    """The fields that the command line sets (--config.FIELD=VALUE), dotted, in its order."""
    return list(config_flags.get_override_values(flags.FLAGS["config"]))


def _given_fields(words: Sequence[str]) -> list[str]:
    """The fields that words of a command line set, dotted, before any flag is parsed."""
    found = (re.match(r"--?(?:no)?config\.([^=]+)", word) for word in words)
    return [match[1] for match in found if match]


def today() -> datetime.date:
    """The day by the first process's clock, the same in all processes."""
    return datetime.date.fromordinal(from_main_process(datetime.date.today().toordinal()))


def words_of(argv: Sequence[str]) -> list[str]:
    """The words that are no flags, of a command that reads no config; --help ends it.

    Raises:
      flags.Error: unusable flags.
    """
    if help.is_asked(argv):
        print(help.help_text(()))
        sys.exit(0)
    return flags.FLAGS(list(argv))[1:]


def run_command(main: Callable[[list[str]], None], *, words: int = 0) -> None:
    """Runs `main(argv)` behind absl's flags; unusable flags print one line and exit with 2.

    Args:
      words: how many that are no flags the command takes.
    """

    def parse(argv):
        if help.is_asked(argv):
            print(help.help_text(list(named_configs())))
            sys.exit(0)
        # ml_collections reports an unknown field as AttributeError or KeyError, a wrong type as
        # TypeError, and a file that it cannot read as OSError when the config is first looked at.
        # A file of the user's may also be no Python, or not find what it imports or names.
        with bad_input(
            *(AttributeError, KeyError, TypeError, OSError, flags.Error),
            *(SyntaxError, ImportError, NameError),
        ):
            # No default of the flag's own: absl would read it outside of this function.
            sys.argv[:] = config_first(argv)  # where ml_collections looks for overrides
            given_words = with_config_file(sys.argv)
            refuse_renamed(_given_fields(given_words))
            rest = flags.FLAGS(given_words)
            if len(rest) > 1 + words:
                raise ValueError(
                    f"unexpected argument {rest[1 + words]!r}; overrides are --config.FIELD=VALUE"
                )
            config = flags.FLAGS.config
            sections = (config.env, *(part.env for _, part in config.also.items()))
            keep_freed_memory(
                one_arena=config.model.path != "tiny"
                or any(env.context == "full" for env in sections)
            )
            if flags.FLAGS.distributed:
                join_processes(os.environ)
            source, _, workdir = (_value(given_words, "config") or "").partition(":")
            if source == str(RUN_CONFIG):
                trust = flags.FLAGS.trust
                require_trust(Path(workdir), config, overrides(), trust=trust)
            return rest

    def run(argv):
        try:
            with disk_errors(), heartbeat():
                refuse_shared_cache()
                remove_leftovers(cache_directory())
                main(argv)
        except BaseException as error:
            code = 1
            if isinstance(error, KeyboardInterrupt):  # where there is nothing yet to be saved
                code = getattr(error, "exit_code", 130)
            elif isinstance(error, SystemExit):
                code = error.code
            if jax.process_count() == 1 or not code:
                if isinstance(error, KeyboardInterrupt):
                    sys.exit(code)
                raise
            # JAX would first wait for the other processes, which wait for this one.
            if not isinstance(error, (SystemExit, KeyboardInterrupt)):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    run_parsed(run, parse)


def run_parsed(main: Callable[[Any], None], parse: Callable[[Sequence[str]], Any]) -> None:
    """Run `main(parse(argv))` on a console that cannot end it (console_streams.py).

    What a file system refuses is one line and an exit code.
    """

    def run(parsed: Any) -> None:
        with disk_errors():
            main(parsed)

    set_up_console()
    logging.set_verbosity(logging.ERROR)  # of the libraries; our own lines go to the console
    logging.get_absl_handler().python_handler.setStream(sys.stderr)
    app.run(run, flags_parser=parse)


def join_processes(environ: Mapping[str, str]) -> None:
    """jax.distributed.initialize, with what JAX does not find by itself from `environ`.

    Raises:
      ValueError: only some of the variables are set, or a number is none.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: environ[name] for name in names if name in environ}
    if not given:
        jax.distributed.initialize()
        return
    if len(given) < len(names):
        raise ValueError(
            f"--distributed needs all of {', '.join(names)}, or none of them; got {given}"
        )
    address, *numbers = given.values()
    if not all(number.isdigit() for number in numbers):
        raise ValueError(f"JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers, got {numbers}")
    processes, process = map(int, numbers)
    jax.distributed.initialize(address, num_processes=processes, process_id=process)


@contextlib.contextmanager
def bad_input(*further: type[Exception]) -> Generator[None]:
    """Turns a ValueError (and the exceptions named) into one line on stderr and exit code 2, and so
    the errors of `unusable_paths`."""
    try:
        with unusable_paths():
            yield
    except DiskRefused:  # which no input is to blame for, also where OSError is named
        raise
    except (ValueError, *further) as error:
        show_line("error", _message(error))
        raise SystemExit(BAD_INPUT) from None


@contextlib.contextmanager
def disk_errors() -> Generator[None]:
    """`full_disk` and `unusable_paths`: what a file system refuses is one line and an exit code."""
    with unusable_paths(), full_disk():
        yield


@contextlib.contextmanager
def full_disk() -> Generator[None]:
    """Report a disk's refusal to write as one line on stderr and exit with code 4."""
    try:
        yield
    except Exception as error:
        reason = disk_error_message(error)
        if reason is None:
            raise
        show_line("error", reason)
        raise SystemExit(DISK) from None


@contextlib.contextmanager
def unusable_paths() -> Generator[None]:
    """Turns what can only be the fault of a path that was given into one line on stderr and exit
    code 2: too long a name, a folder where a file is written, a file where a folder is expected,
    links that lead to each other."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_A_PATH:
            raise
        path = shorten(str(error.filename2 or error.filename), SHOWN)
        show_line("error", f"{path}: {os.strerror(error.errno)}")
        raise SystemExit(BAD_INPUT) from None


def _message(error: Exception) -> str:
    # ml_collections hands on what a config file raised as the text of its traceback.
    text = str(error).rsplit("ValueError: ", 1)[-1]
    if isinstance(error, flags.UnrecognizedFlagError):
        text = f"there is no flag --{error.flagname}{help.suggestion(error.flagname)}"
    if isinstance(error, (AttributeError, KeyError)):
        # Their text is a repr of a repr: the name, and sometimes a suggestion.
        name = re.search(r"\w+", text)
        suggestion = re.search(r'Did you mean "\w+"', text)
        text = f"the config has no field {name[0] if name else text!r}"
        text += f"; did you mean {suggestion[0][13:]}?" if suggestion else ""
        text += " (configs/base.py lists every field; env.options belong to the environment)"
    return text if text.strip() else type(error).__name__
