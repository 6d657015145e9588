"""Checkpoints of a `TrainState` with Orbax: asynchronous, atomic, with checksums.

Only the newest checkpoints are kept. Importing Orbax takes a while, so it is imported when a
checkpoint is read or written.
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
from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Params
from ragen_jax.storage import metrics_reader
from ragen_jax.storage.atomic_io import disk_error_message, make_folder, with_retries, writing
from ragen_jax.storage.checksums import damage, write_checksums
from ragen_jax.storage.console import console
from ragen_jax.update.state import TrainState

ITEM = "default"  # Orbax's name of the folder of a step's arrays
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file with the metadata of a step
ALARM = "regimes"  # the field of a state that holds the alarm
MOST_NAMED = 3  # maximum number of arrays that an error names
FILES = 64  # free file entries that a save needs; a checkpoint has 20 to 30 files
SETTLE = 1.0  # maximum seconds from the error of a failed save to the last report of its threads
UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's suffix of a step's folder while it is written


class Checkpoints:
    """The checkpoints/ folder of a run.

    Raises:
      ValueError: the metadata of a checkpoint is damaged, and Orbax cannot read it.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = None, read_only: bool = False
    ) -> None:
        self.directory = Path(directory).absolute()
        self._keep, self._read_only = keep, read_only
        self._saving = 0  # the step that is being written; 0: none
        # Several processes open it at the same time.
        if read_only or newest(self.directory) or jax.process_count() > 1:
            _ = self.manager

    @functools.cached_property
    def manager(self) -> Any:
        """Orbax's manager of the folder, which it makes if it does not exist."""
        import orbax.checkpoint as ocp

        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_from_orbax)
        if getattr(sys.excepthook, "func", None) is not _show_unless_closed:
            sys.excepthook = functools.partial(_show_unless_closed, sys.excepthook)
        # Only the run itself may remove the leftovers of a killed save. A reader cannot distinguish
        # them from a save in progress.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            cleanup_tmp_directories=not self._read_only,
            read_only=self._read_only,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._add_checksums),
        )
        # Parameters are nearly random: compression saves 8 % of the space and triples the time.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        if jax.process_count() > 1:
            # Named processes meet at the coordinator. By default they meet in a program on all
            # devices, some of which may be running a rollout ahead.
            processes = ocp.options.MultiprocessingOptions(
                active_processes=set(range(jax.process_count()))
            )
            options.multiprocessing_options, options.create = processes, False
            handler = ocp.PyTreeCheckpointHandler(
                use_compression=False, multiprocessing_options=processes
            )
            if not self._read_only:
                make_folder(self.directory)
        make = functools.partial(
            ocp.CheckpointManager, self.directory, options=options, item_handlers=handler
        )
        try:
            return make() if self._read_only else with_retries(make, self.directory)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"a checkpoint in {self.directory} cannot be opened: {error}; check the files "
                f"{METADATA} there, which only record when and how it was written: a damaged "
                "one may be deleted"
            ) from error

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return self.manager.latest_step() if self._is_open() else None

    def steps(self) -> list[int]:
        """Return the steps of all kept checkpoints, in order."""
        return sorted(self.manager.all_steps()) if self._is_open() else []

    def _is_open(self) -> bool:
        """Return whether the folder has been opened; if not, it has no checkpoint."""
        return "manager" in vars(self)

    def save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
        """Start saving `state`. Disk errors are retried if the run has a single process.

        Args:
          wait: return when the checkpoint is written. Otherwise return while it is being written;
            `failed` reports an error later.

        Raises:
          DiskRefused: the disk failed for longer than `retry_disk_errors` allows.
          RuntimeError: Orbax refused, for instance because the step exists already.
        """
        if jax.process_count() > 1:
            self._save(step, state, wait)
            return

        _ = self.manager  # makes the folder
        size = sum(x.nbytes for x in jax.tree.leaves(state))

        def save() -> None:
            # On a full disk, TensorStore's threads would print hundreds of tracebacks.
            if not _has_space(self.directory, size):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._save(step, state, wait)

        with_retries(save, self.directory / str(step))

    def _save(self, step: int, state: TrainState, wait: bool) -> None:
        import orbax.checkpoint as ocp

        self.manager.wait_until_finished()  # the previous save still needs _saving
        if is_main_process():  # remove the leftovers of a failed attempt
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
        """Return the error message of the save in the background, or None if it has not failed.

        Each failure is reported once, and the unfinished files are removed.
        """
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
        """Remove the files of the save in progress if the body raises."""
        try:
            yield
        except Exception:
            # TensorStore's threads report an error for every array, and the first error ends the
            # save. If the process ended before the others, their tracebacks would be printed.
            time.sleep(SETTLE)
            if is_main_process():  # on a full disk, free the space of the unfinished files
                left = self.directory / f"{self._saving}{UNFINISHED}"
                shutil.rmtree(left, ignore_errors=True)
            raise

    def _add_checksums(self) -> None:
        """Write the checksums of the arrays' files.

        Orbax calls this when all files are written, before it renames the folder.
        """
        if is_main_process():
            write_checksums(self.directory / f"{self._saving}{UNFINISHED}" / ITEM)

    def check(self, step: int) -> None:
        """Raise ValueError if the files of `step` differ from the files that were written."""
        found = damage(self.directory / str(step) / ITEM)
        if found:
            others = ", ".join(str(other) for other in self.steps() if other != step)
            others = f"; other checkpoints: {others}" if others else ""
            raise ValueError(f"the checkpoint of step {step} is damaged: {found}{others}")

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Return the state of `step`, with the shapes, dtypes and shardings of `like`.

        If only the alarm's arrays are from another version, the alarm of `like` is used, and a line
        reports it.

        Raises:
          ValueError: the checkpoint holds other arrays than `like` (the message names them), or it
            cannot be read.
        """
        import orbax.checkpoint as ocp

        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        try:
            state = self.manager.restore(
                step, args=ocp.args.PyTreeRestore(target, restore_args=arguments)
            )
        except (ValueError, KeyError, TypeError) as error:
            saved_arrays, expected = _arrays(self.manager.item_metadata(step).tree), _arrays(target)
            # Versions differ in optional fields that are empty: the saved tree does not have them.
            if saved_arrays == expected and "structures do not match" in str(error):
                restore = ocp.args.PyTreeRestore(
                    target, restore_args=arguments, partial_restore=True
                )
                return cast(TrainState, self.manager.restore(step, args=restore))
            different = saved_arrays ^ expected
            if different and all(name.startswith(ALARM) for name in different):
                console(
                    f"the checkpoint of step {step} has the alarm state of another version; "
                    "the alarm starts again"
                )
                return self._restore_without_alarm(step, like)
            words = [f"has {name}" for name in sorted(saved_arrays - expected)[:MOST_NAMED]]
            words += [f"has no {name}" for name in sorted(expected - saved_arrays)[:MOST_NAMED]]
            reason = f"it {', '.join(words)}" if words else str(error).strip().splitlines()[0]
            raise ValueError(
                f"the checkpoint of step {step} has the state of another version or other "
                f"settings: {reason}"
            ) from error
        return cast(TrainState, state)  # Orbax returns the type of `target`

    def _restore_without_alarm(self, step: int, like: TrainState) -> TrainState:
        """Return the state of `step` with the new alarm of `like`."""
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
        """Return only the parameters of `step`, with the shapes and shardings of `like`."""
        import orbax.checkpoint as ocp

        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": like})
        restore = ocp.args.PyTreeRestore(
            target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
            partial_restore=True,
        )
        return self.manager.restore(step, args=restore)["params"]

    def close(self) -> None:
        """Wait for the last save, then close Orbax's manager."""
        if not self._is_open():
            return
        with writing(self.directory):
            self._finish()
            self.manager.close()


def _has_space(directory: Path, size: int) -> bool:
    """Return whether the disk of a folder has room for a checkpoint of `size` bytes."""
    stat = os.statvfs(directory)
    # Some file systems (Btrfs) do not count their files and report a total of 0.
    takes_files = not stat.f_files or stat.f_favail >= FILES
    return takes_files and shutil.disk_usage(directory).free >= size


def _arrays(tree: Any) -> set[str]:
    """Return the names of a tree's leaves."""
    named, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named}


def set_damaged_aside(directory: Path) -> list[str]:
    """Move damaged checkpoints that are newer than the newest intact checkpoint out of a folder.

    They are moved to damaged/ next to it. No process may have the folder open.

    Returns:
      one message per moved checkpoint.

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
    """Return the step of the newest checkpoint in a folder; 0 if it has none.

    It does not open the folder with Orbax.
    """
    return max(_steps(directory), default=0)


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdigit())


def not_finite(state: TrainState) -> str | None:
    """Return the name of the first trained array that holds NaN or infinity, or None.

    The trained arrays are those of the parameters, the optimizer and the critic.
    """
    found = {"params": state.params, "opt_state": state.opt_state, "critic": state.critic}
    named, _ = jax.tree_util.tree_flatten_with_path(found)
    named = [(path, x) for path, x in named if jnp.issubdtype(x.dtype, jnp.floating)]
    fine = np.asarray(_are_finite([x for _, x in named]))
    if fine.all():
        return None
    path, _ = named[int(fine.argmin())]
    return jax.tree_util.keystr(path, simple=True, separator="/")


@stored()
def _are_finite(arrays: list[Any]) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in arrays])


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    """Filter out the tracebacks that Orbax's threads and tasks log.

    Orbax raises the same error to its caller.
    """
    return "/orbax/" not in f"{record.pathname} {record.getMessage()}"


def _show_unless_closed(
    show: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Call the hook `show`, unless the error is that asyncio's event loop is closed.

    After a failed save, Orbax closes the event loop, and TensorStore's threads then cause such an
    error for each array. Orbax raises the original error to its caller.
    """
    source_file = "" if trace is None else trace.tb_frame.f_code.co_filename
    if (
        kind is not RuntimeError
        or "/asyncio/" not in source_file
        or "loop is closed" not in str(error)
    ):
        show(kind, error, trace)


def find_damage(workdir: Path, repair: bool) -> list[str]:
    """Set damaged checkpoints aside and, with `repair`, damaged lines of metrics.jsonl.

    Returns:
      one message for each damaged or missing part that the run can resume without.

    Raises:
      ValueError: the run cannot resume, or only with --repair.
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
        with_retries(aside.touch, aside)  # so that the next start does not need --repair
        messages.append(listed)
    return messages
