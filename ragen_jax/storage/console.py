"""Lines on the console, from the main process only."""

from ragen_jax.core.progress import note_output
from ragen_jax.core.sharding import is_main_process
from ragen_jax.storage.console_streams import show


def console(line: str) -> None:
    """Print a line above any progress bar, from the main process only."""
    if is_main_process():
        show(line)
        note_output()
