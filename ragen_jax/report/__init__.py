"""A run as one page: what happened, when, and what the agent wrote.

In: folders of runs, as `train` leaves them (`runs`). `verdict` and `causes` find what happened,
`timelines` the curves, `episodes` and `matrices` what is shown of single steps. Out: one HTML file
that needs nothing else (`page`, `assets/`). Nothing here compiles.
"""
