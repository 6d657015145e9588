"""Lines on the console, from the main process only."""

from ragen_jax.core.heartbeat import spoke
from ragen_jax.core.sharding import is_first
from ragen_jax.storage.console_streams import show


def console(line: str) -> None:
    """Prints a line above any progress bar; the first process's alone."""
    if is_first():
        show(line)
        spoke()
