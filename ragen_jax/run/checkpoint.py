"""Checkpoints of a `TrainState` with Orbax: asynchronous, atomic, newest few kept, with checksums.

Importing Orbax takes half a second, so that it is done when a folder is opened.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.types import Params
from ragen_jax.storage import metrics_reader
from ragen_jax.storage.atomic_io import disk_error_message, make_folder, with_retries, writing
from ragen_jax.storage.checksums import damage, write_checksums
from ragen_jax.storage.console import console
from ragen_jax.update.state import TrainState

ITEM = "default"  # Orbax's name of the folder of a step's arrays
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file about a step
ALARM = "regimes"  # the field of a state that holds the alarm
MOST_NAMED = 3  # arrays of an error
FILES = 64  # more than a checkpoint has, which are 20 to 30
SETTLE = 1.0  # seconds from the error of a failed save to the last report of a thread, at most
UNFINISHED = ".orbax-checkpoint-tmp"  # and the end of a step's name while it is written


class Checkpoints:
    """The checkpoints/ folder of a run.

    Raises:
      ValueError: what Orbax says of one of them is damaged, in another way than it puts up with.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = None, read_only: bool = False
    ) -> None:
        import orbax.checkpoint as ocp

        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_of_orbax)
        if getattr(sys.excepthook, "func", None) is not _show_unless_closed:
            sys.excepthook = functools.partial(_show_unless_closed, sys.excepthook)
        self.directory = Path(directory).absolute()
        self._saving = 0  # the step that is being written; 0: none
        # Only the run itself may remove what a killed save left: to a reader it may be a save
        # under way.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._add_checksums),
        )
        # Compressed, numbers as random as these are 8 % smaller, and cost three times the time.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        make = functools.partial(
            ocp.CheckpointManager, self.directory, options=options, item_handlers=handler
        )
        try:
            self.manager = make() if read_only else with_retries(make, self.directory)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"a checkpoint in {self.directory} cannot be opened: {error}; check the files "
                f"{METADATA} there, which only record when and how it was written: a damaged "
                "one may be deleted"
            ) from error

    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None. A save killed half way is not seen."""
        return self.manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are kept, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
        """Starts saving `state`, of which one process alone tries again what a disk refuses.

        Args:
          wait: until it is written. Otherwise this returns while the writing goes on, and what
            comes of that is told by `failed`.

        Raises:
          DiskRefused: the disk would not have it for as long as whole.py's `patient` says.
          RuntimeError: Orbax refused, for instance because the step exists already.
        """
        if jax.process_count() > 1:
            self._save(step, state, wait)
            return

        size = sum(x.nbytes for x in jax.tree.leaves(state))

        def save() -> None:
            # TensorStore's threads print hundreds of tracebacks where they find no room.
            if not _has_room(self.directory, size):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._save(step, state, wait)

        with_retries(save, self.directory / str(step))

    def _save(self, step: int, state: TrainState, wait: bool) -> None:
        import orbax.checkpoint as ocp

        self.manager.wait_until_finished()  # for _saving
        if is_main_process():  # what a failed attempt has left
            shutil.rmtree(self.directory / f"{step}{UNFINISHED}", ignore_errors=True)
        self._saving = step
        with self._abandoned_on_failure():
            saved = self.manager.save(step, args=ocp.args.PyTreeSave(state))
        if not saved:
            raise RuntimeError(
                f"the checkpoint of step {step} was not saved; does it already exist?"
            )
        if wait:
            self._finish()

    def failed(self) -> str | None:
        """What has become of the save that goes on in the background, if it failed; it is told
        once, and nothing is left of it."""
        if not self._saving or self.manager.is_saving_in_progress():
            return None
        try:
            self._finish()
        except Exception as error:
            reason = " ".join((disk_error_message(error) or str(error)).split())
            return f"the checkpoint of step {self._saving} was not saved: {reason}"
        finally:
            self._saving = 0
        return None

    def _finish(self) -> None:
        with self._abandoned_on_failure():
            self.manager.wait_until_finished()

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Generator[None]:
        """Leaves nothing of the save under way if its body raises."""
        try:
            yield
        except Exception:
            # TensorStore's threads report every array, the first of which ends the save: a process
            # that ends meanwhile would print the others' tracebacks.
            time.sleep(SETTLE)
            if is_main_process():  # where the disk is full, the half of it is in the way
                left = self.directory / f"{self._saving}{UNFINISHED}"
                shutil.rmtree(left, ignore_errors=True)
            raise

    def _add_checksums(self) -> None:
        """Of the arrays' files, which are all there, before their folder gets its final name."""
        if is_main_process():
            write_checksums(self.directory / f"{self._saving}{UNFINISHED}" / ITEM)

    def check(self, step: int) -> None:
        """Raises ValueError if the files of `step` are not what was written."""
        found = damage(self.directory / str(step) / ITEM)
        if found:
            others = ", ".join(str(other) for other in self.steps() if other != step)
            others = f"; other checkpoints: {others}" if others else ""
            raise ValueError(f"the checkpoint of step {step} is damaged: {found}{others}")

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step`, with the shapes, dtypes and shardings of `like`.

        If only the alarm's arrays are of another version, the alarm is that of `like`, and a line
        says so.

        Raises:
          ValueError: it holds other arrays than `like`, which are named, or cannot be read.
        """
        import orbax.checkpoint as ocp

        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        try:
            state = self.manager.restore(
                step, args=ocp.args.PyTreeRestore(target, restore_args=arguments)
            )
        except (ValueError, KeyError, TypeError) as error:
            there, asked = _arrays(self.manager.item_metadata(step).tree), _arrays(target)
            if there != asked and all(name.startswith(ALARM) for name in there ^ asked):
                console(
                    f"the checkpoint of step {step} has the alarm state of another version; "
                    "the alarm starts again"
                )
                return self._restore_without_alarm(step, like)
            words = [f"has {name}" for name in sorted(there - asked)[:MOST_NAMED]]
            words += [f"has no {name}" for name in sorted(asked - there)[:MOST_NAMED]]
            reason = f"it {', '.join(words)}" if words else str(error).strip().splitlines()[0]
            raise ValueError(
                f"the checkpoint of step {step} has the state of another version or other "
                f"settings: {reason}"
            ) from error
        return cast(TrainState, state)  # Orbax gives back what it is asked for

    def _restore_without_alarm(self, step: int, like: TrainState) -> TrainState:
        """The state of `step`, with the alarm of `like`, which remembers nothing of the run."""
        import orbax.checkpoint as ocp

        target = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, dataclasses.replace(like, regimes=None)
        )
        restore = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        state = self.manager.restore(step, args=restore)
        return dataclasses.replace(state, regimes=like.regimes)

    def restore_params(self, step: int, like: Params) -> Params:
        """The parameters alone of `step`, with the shapes and shardings of `like`."""
        import orbax.checkpoint as ocp

        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": like})
        restore = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        return self.manager.restore(step, args=restore)["params"]

    def close(self) -> None:
        """Waits for the last save."""
        with writing(self.directory):
            self._finish()
            self.manager.close()


def _has_room(directory: Path, size: int) -> bool:
    """Whether the disk of a folder takes a checkpoint of `size` bytes."""
    stat = os.statvfs(directory)
    # Some file systems (Btrfs) do not count their files, and report 0 of 0.
    takes_files = not stat.f_files or stat.f_favail >= FILES
    return takes_files and shutil.disk_usage(directory).free >= size


def _arrays(tree: Any) -> set[str]:
    """The names of a tree's leaves."""
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named}


def set_damaged_aside(directory: Path) -> list[str]:
    """Moves the newest checkpoints out of a folder, up to one whose files are what was written.

    They go to damaged/ beside it. For a folder that nobody has open.

    Returns:
      a sentence about each that was moved.

    Raises:
      ValueError: every checkpoint is damaged; none is moved.
    """
    steps = _steps(directory)
    bad: dict[int, str] = {}
    while steps and (found := damage(directory / str(steps[-1]) / ITEM)):
        bad[steps.pop()] = found
    if bad and not steps:
        raise ValueError(
            f"every checkpoint in {directory} is damaged ({'; '.join(bad.values())}); restore "
            "one from a backup, or give another --workdir to start again; nothing was changed"
        )
    messages = []
    for step, found in bad.items():
        aside = directory.parent / "damaged"
        make_folder(aside)
        number = sum(path.name.startswith(f"{step}-") for path in aside.iterdir()) + 1
        place = directory / str(step)
        with_retries(functools.partial(place.rename, aside / f"{step}-{number}"), aside)
        messages.append(
            f"the checkpoint of step {step} is damaged ({found}); moved it to {aside}, "
            f"resuming after step {steps[-1]}"
        )
    return messages


def newest(directory: Path) -> int:
    """The step of the newest checkpoint in a folder that nobody has open; 0: there is none."""
    return max(_steps(directory), default=0)


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def not_finite(state: TrainState) -> str | None:
    """The name of the first array of a state's that training changes (parameters, the optimizer's,
    the critic's) and that holds NaN or infinity; None: there is none."""
    found = {"params": state.params, "opt_state": state.opt_state, "critic": state.critic}
    named, _ = jax.tree_util.tree_flatten_with_path(found)
    named = [(path, x) for path, x in named if jnp.issubdtype(x.dtype, jnp.floating)]
    fine = np.asarray(_are_finite([x for _, x in named]))
    if fine.all():
        return None
    path, _ = named[int(fine.argmin())]
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.jit
def _are_finite(arrays: list[Any]) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in arrays])


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Its threads and tasks log a traceback each of an error that is raised to us as well."""
    return "/orbax/" not in f"{record.pathname} {record.getMessage()}"


def _show_unless_closed(
    show: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """TensorStore's threads have a traceback printed for each array of a save that failed, whose
    event loop Orbax has closed: what failed is raised to us, too."""
    began = "" if trace is None else trace.tb_frame.f_code.co_filename
    if kind is not RuntimeError or "/asyncio/" not in began or "loop is closed" not in str(error):
        show(kind, error, trace)


def find_damage(workdir: Path, repair: bool) -> list[str]:
    """What is damaged in a run's folder and can be gone on without, a sentence each.

    Raises:
      ValueError: what cannot, or not without --repair.
    """
    messages = set_damaged_aside(workdir / "checkpoints")
    path = workdir / "metrics.jsonl"
    if repair:
        messages += metrics_reader.repair(path)
    lost = metrics_reader.lost_steps(
        metrics_reader.read_metrics(path), newest(workdir / "checkpoints")
    )
    if lost:
        listed = f"{path} lacks the rows of {len(lost)} steps ({', '.join(map(str, lost[:8]))}"
        listed += ", ...)" if len(lost) > 8 else ")"
        if not repair and not path.with_name(metrics_reader.SET_ASIDE).exists():
            raise ValueError(
                f"{listed} that the checkpoint includes; pass --repair to resume without them"
            )
        aside = path.with_name(metrics_reader.SET_ASIDE)
        with_retries(aside.touch, aside)  # the next start need not be told again
        messages.append(listed)
    return messages
