"""Checkpoints of a `TrainState` with Orbax: asynchronous, atomic, newest few kept.

Importing Orbax takes half a second, so that it is done when a folder is opened.
"""

from pathlib import Path
from typing import cast

import jax

from ragen_jax.types import Params, TrainState


class Checkpoints:
    """The checkpoints/ folder of a run."""

    def __init__(
        self, directory: str | Path, *, keep: int | None = None, read_only: bool = False
    ) -> None:
        import orbax.checkpoint as ocp

        # Only the run itself may remove what a killed save left: to a reader it may be a save
        # under way.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=not read_only, read_only=read_only
        )
        self.manager = ocp.CheckpointManager(Path(directory).absolute(), options=options)

    def latest_step(self) -> int | None:
        """The newest checkpoint's step, or None. A save killed half way is not seen."""
        return self.manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are kept, in order."""
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving `state`; returns while the writing goes on.

        Raises:
          RuntimeError: Orbax refused, for instance because the step exists already.
        """
        import orbax.checkpoint as ocp

        if not self.manager.save(step, args=ocp.args.StandardSave(state)):
            raise RuntimeError(f"checkpoint of step {step} was not saved: does it exist already?")

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step`, with the shapes, dtypes and shardings of `like`."""
        import orbax.checkpoint as ocp

        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        state = self.manager.restore(step, args=ocp.args.StandardRestore(target))
        return cast(TrainState, state)  # Orbax gives back what it is asked for

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
        self.manager.wait_until_finished()
        self.manager.close()
