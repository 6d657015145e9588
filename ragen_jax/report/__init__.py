"""A report page of a run: what happened, when, and what the agent wrote.

In: folders of runs written by `train` (`runs`). `verdict` and `causes` find what happened;
`timelines` prepares the curves, `episodes` and `matrices` the data of single steps. Out: a
self-contained HTML file (`page`, `assets/`). Nothing here compiles.
"""

from ragen_jax.core.callable_module import make_callable

make_callable(__name__, "report")
