"""Rollout formats of trainers: convert a record of a file to a `Row`.

A format is recognised by a record's fields. To add a format, write a file with a `Format`, whose
docstring names the code that writes it, and add a line to FORMATS in `registry`. `rows` has the
types, and `replies` the functions that several formats use.
"""

from ragen_jax.score.formats.registry import FORMATS, find_format, read_row, shows_images
from ragen_jax.score.formats.rows import Format, ParsedReply, Prompt, Response, Row

__all__ = [
    "FORMATS",
    "Format",
    "ParsedReply",
    "Prompt",
    "Response",
    "Row",
    "find_format",
    "read_row",
    "shows_images",
]
