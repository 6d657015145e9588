"""Modules that are called like functions, so that a command and its Python form share a name.

`ragen_jax.train` is the module of the command `python -m ragen_jax.train`. Importing it anywhere
binds the module to that name, so the name cannot be a function. The module itself is callable.
"""

import importlib
import sys
import types
from typing import Any


class CallableModule(types.ModuleType):
    """A module whose call is that of a function elsewhere."""

    _called: tuple[str, str]  # (module, function)

    def __call__(self, *args: Any, **options: Any) -> Any:
        module, name = self._called
        return getattr(importlib.import_module(module), name)(*args, **options)


def make_callable(module: str, function: str) -> None:
    """Make a module call a function of ragen_jax.api, which is imported at the first call."""
    found: Any = sys.modules[module]
    if module == "__main__":  # a command: nobody calls it
        return
    found.__class__ = CallableModule
    found._called = ("ragen_jax.api", function)
