"""The command line shared by all commands: the config, other processes, and errors of the user's
input."""

import contextlib
import contextvars
import datetime
import importlib.util
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
from ragen_jax.config.messages import describe_input_error
from ragen_jax.config.renamed import refuse_renamed
from ragen_jax.config.trust import require_trust
from ragen_jax.core.clean_text import shorten
from ragen_jax.core.memory import collect_garbage_less_often, keep_freed_memory
from ragen_jax.core.sharding import from_main_process
from ragen_jax.core.suggest import did_you_mean
from ragen_jax.storage.atomic_io import (
    PATH_ERRORS,
    DiskRefused,
    disk_error_message,
    remove_leftovers,
)
from ragen_jax.storage.cache import cache_directory
from ragen_jax.storage.compilation_cache import refuse_shared_cache
from ragen_jax.storage.console_streams import set_up_console, show_line
from ragen_jax.storage.heartbeat import heartbeat

BAD_INPUT = 2  # exit code
DISK = 4  # exit code if a disk is full or cannot be written
SHOWN = 200  # maximum characters of a path in a message
DEFAULT_CONFIG = "sokoban"
DATA_FILES = (".yaml", ".yml", ".json", ".toml", ".ini")  # suffixes of other tools' configs
CONFIGS = Path(configs.__file__).parent
RUN_CONFIG = Path(__file__).with_name("run_config.py")


def define_config(
    default: str = DEFAULT_CONFIG, *, reads_run: bool = False
) -> flags.FlagHolder[ConfigDict]:
    """Define the flags --config, --distributed and --trust; return the holder of the config.

    --config is a file with get_config(), or the name of a config that comes with ragen_jax; after a
    colon, the argument of get_config().

    Args:
      default: the config without --config, in words for --help.
      reads_run: whether the command reads the run in --workdir; only then there is --trust.
    """
    flags.DEFINE_bool(
        "distributed",
        False,
        "Join the run's other processes. JAX finds them on TPU pods, GKE, Slurm and Open MPI; "
        "elsewhere set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.",
    )
    if reads_run:
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
        f"default: {default}.",
        lock_config=True,
    )


def config_given() -> bool:
    """Return whether the command line names a config file."""
    return _value(sys.argv, "config") is not None


def config_files() -> list[str]:
    """Return the Python file that --config names, if it is given."""
    value = _value(sys.argv, "config")
    return [] if value is None else [config_file(value).partition(":")[0]]


def _value(argv: Sequence[str], name: str) -> str | None:
    """Return the value of a flag on an unparsed command line; None if it is missing."""
    words = argv[1:]
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in (f"-{name}", f"--{name}"):
            return value if equals else "".join(words[index + 1 : index + 2])
    return None


def config_first(argv: Sequence[str]) -> list[str]:
    """Return the command line with --config moved before its overrides.

    Raises:
      ValueError: --config is given more than once.
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


def find_config(value: str) -> ConfigDict:
    """Return the config that --config=`value` names, such as "sokoban:tiny+ppo".

    Raises:
      ValueError: the value is neither the name of a config nor an existing file, the file has no
        get_config, or its preset is unknown.
    """
    path, _, preset = config_file(value).partition(":")
    spec = importlib.util.spec_from_file_location(f"config_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file with get_config()")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no function get_config()")
    config = module.get_config(preset) if preset else module.get_config()
    return _require_config(config, path)


def _require_config(config: Any, file: str) -> ConfigDict:
    """Return a config; raise ValueError if get_config() of `file` returned something else."""
    # If ml_collections could not read the file, this raises its error.
    if not hasattr(config, "to_dict"):
        kind = type(config).__name__
        raise ValueError(f"get_config() of {file} must return a ConfigDict, got {kind}")
    return config


def named_configs() -> dict[str, Path]:
    """Return {name: file} of the configs that come with ragen_jax."""
    files = [path for path in sorted(CONFIGS.glob("*.py")) if path.stem != "base"]
    return {path.stem: path for path in files if "def get_config(" in path.read_text()}


def config_file(value: str) -> str:
    """Return FILE[:PRESET] for the value of --config, which may be a name such as "sokoban:llm".

    Raises:
      ValueError: the value is neither the name of a config nor an existing file.
    """
    name, colon, preset = value.partition(":")
    ours = named_configs()
    if name not in ours:
        if Path(name).suffix in DATA_FILES:
            raise ValueError(
                f"--config is {value!r}; a config is a Python file with get_config(), or a name "
                "such as sokoban:tiny; set the values of other files with --config.FIELD=VALUE"
            )
        if Path(name).is_file():
            text = Path(name).read_text(encoding="utf-8", errors="replace")
            if not re.search(r"(?<![\w.])get_config\b", text):  # not only base.get_config()
                raise ValueError(
                    f"{name} has no function get_config(); configs/sokoban.py is an example of a "
                    "config"
                )
            return value
        first = name.partition("+")[0]
        if Path(name).suffix == ".py" or "/" in name:
            raise ValueError(
                f"--config is {value!r}, but there is no file {name}"
                f"{did_you_mean(Path(name).stem, ours)}"
            )
        hint = did_you_mean(name, ours)
        if first in ours:
            hint = f"; recipes come after a preset: {first}:tiny{name[len(first) :]}"
        raise ValueError(
            f"--config is {value!r}, which is not a config; accepted: a file such as "
            f"configs/mine.py, or one of {', '.join(ours)}{hint}"
        )
    return f"{ours[name]}{colon}{preset}"


def with_workdir(argv: Sequence[str]) -> list[str]:
    """Return the command line with a run's folder as its first word turned into --workdir."""
    first = argv[1] if len(argv) > 1 else "-"
    if first.startswith("-") or "=" in first:
        return list(argv)
    return [argv[0], f"--workdir={first}", *argv[2:]]


def require_run(argv: Sequence[str]) -> None:
    """Refuse a command line that only names a folder, if the folder holds no run.

    Raises:
      ValueError: --workdir is given without --config and --config.FIELD, and there is no run.
    """
    workdir = _value(argv, "workdir")
    configured = any(re.match(r"--?(no)?config\b", word) for word in argv[1:])
    if not workdir or configured or Path(workdir).is_file():
        return
    if not (Path(workdir) / "config.json").exists():
        raise ValueError(
            f"--workdir is {shorten(workdir, SHOWN)}, which holds no run to resume; to start a new "
            f"run there, add --config={DEFAULT_CONFIG}"
        )


def with_config_file(argv: Sequence[str]) -> list[str]:
    """Return the command line with the file of the given or default config in --config."""
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
    """Return the dotted fields that the command line sets (--config.FIELD=VALUE), in its order."""
    return list(config_flags.get_override_values(flags.FLAGS["config"]))


def _given_fields(words: Sequence[str]) -> list[str]:
    """Return the dotted fields that the words of a command line set, before flags are parsed."""
    found = (re.match(r"--?(?:no)?config\.([^=]+)", word) for word in words)
    return [match[1] for match in found if match]


def today() -> datetime.date:
    """Return the date by the first process's clock, the same in all processes."""
    return datetime.date.fromordinal(from_main_process(datetime.date.today().toordinal()))


def words_of(argv: Sequence[str]) -> list[str]:
    """Parse the flags of a command that reads no config; return the words that are not flags.

    With --help, print the help text and exit.

    Raises:
      flags.Error: the flags are unusable.
    """
    if help.is_asked(argv):
        print(help.help_text(()))
        sys.exit(0)
    return flags.FLAGS(list(argv))[1:]


def define_workdirs() -> None:
    """Define --workdir of a command that reads the folders of runs, for `run_folders`."""
    flags.DEFINE_multi_string("workdir", [], "Folder of a run, the same as naming it.")


def run_folders(argv: Sequence[str]) -> list[str]:
    """Return the folders that are named as words or by --workdir; raises as `words_of` does."""
    return [*words_of(argv), *flags.FLAGS.workdir]


def run_command(
    main: Callable[[list[str]], None], *, words: int = 0, starts_run: bool = False
) -> None:
    """Parse absl's flags and run `main(argv)`; unusable flags print one line and exit with code 2.

    A command with a flag --workdir accepts the folder as its first word as well.

    Args:
      words: maximum number of words that the command accepts besides its flags.
      starts_run: whether the command starts a new run if the folder does not hold one.
    """

    def parse(argv):
        if help.is_asked(argv):
            print(help.help_text(list(named_configs())))
            sys.exit(0)
        # ml_collections reports an unknown field as AttributeError or KeyError, a wrong type as
        # TypeError, and a file that it cannot read as OSError when the config is first accessed.
        # A user's file can have syntax errors, failing imports or undefined names.
        with bad_input(
            *(AttributeError, KeyError, TypeError, OSError, flags.Error),
            *(SyntaxError, ImportError, NameError),
        ):
            # The flag itself has no default: absl would read that outside this function.
            if "workdir" in flags.FLAGS and not words:
                argv = with_workdir(argv)
            if starts_run:
                require_run(argv)
            sys.argv[:] = config_first(argv)  # where ml_collections looks for overrides
            given_words = with_config_file(sys.argv)
            refuse_renamed(_given_fields(given_words))
            rest = flags.FLAGS(given_words)
            if len(rest) > 1 + words:
                raise ValueError(
                    f"unexpected argument {rest[1 + words]!r}; overrides are --config.FIELD=VALUE"
                )
            source, _, workdir = (_value(given_words, "config") or "").partition(":")
            config = _require_config(flags.FLAGS.config, source)
            sections = (config.env, *(part.env for _, part in config.also.items()))
            keep_freed_memory(
                one_arena=config.model.path != "tiny"
                or any(env.context == "full" for env in sections)
            )
            if flags.FLAGS.distributed:
                join_processes(os.environ)
            if source == str(RUN_CONFIG):
                trust = "trust" in flags.FLAGS and flags.FLAGS.trust
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
            if isinstance(error, KeyboardInterrupt):  # when there is nothing to save yet
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

    An error of the file system prints one line and exits with an error code.
    """

    def run(parsed: Any) -> None:
        with disk_errors():
            main(parsed)

    collect_garbage_less_often()
    set_up_console()
    logging.set_verbosity(logging.ERROR)  # for libraries; ragen_jax prints to the console
    logging.get_absl_handler().python_handler.setStream(sys.stderr)
    app.run(run, flags_parser=parse)


def join_processes(environ: Mapping[str, str]) -> None:
    """Call jax.distributed.initialize, with the values in `environ` that JAX does not detect.

    Raises:
      ValueError: only some of the variables are set, or a variable is not an integer.
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


_PYTHON_CALLER = contextvars.ContextVar("called from Python, not as a command", default=False)


@contextlib.contextmanager
def python_caller() -> Generator[None]:
    """Within this context, unusable input raises its error instead of ending the process."""
    token = _PYTHON_CALLER.set(True)
    try:
        yield
    finally:
        _PYTHON_CALLER.reset(token)


def called_from_python() -> bool:
    """Return whether a function of ragen_jax.api is running, not a command."""
    return _PYTHON_CALLER.get()


@contextlib.contextmanager
def bad_input(*further: type[Exception]) -> Generator[None]:
    """Report a ValueError or one of the given exceptions as one line and exit with code 2.

    The line goes to stderr. The same applies to the errors of `unusable_paths`. Called from Python
    (`python_caller`), the error is raised as it is.
    """
    if called_from_python():
        yield
        return
    try:
        with unusable_paths():
            yield
    except DiskRefused:  # not an error of the input, even if `further` has OSError
        raise
    except (ValueError, *further) as error:
        show_line("error", describe_input_error(error))
        raise SystemExit(BAD_INPUT) from None


@contextlib.contextmanager
def disk_errors() -> Generator[None]:
    """Apply `full_disk` and `unusable_paths` to the errors of file systems."""
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
    """Report an error that only an unusable path can cause as one line, and exit with code 2.

    The causes are a name that is too long, a folder where a file is expected, a file where a folder
    is expected, and a cycle of links. The line goes to stderr.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in PATH_ERRORS:
            raise
        path = shorten(str(error.filename2 or error.filename), SHOWN)
        show_line("error", f"{path}: {os.strerror(error.errno)}")
        raise SystemExit(BAD_INPUT) from None
