"""Scalars of any library as Python's own numbers: what a reward function may return."""

import math
import numbers
from decimal import Decimal
from typing import Any

import numpy as np


def plain_scalar(value: Any) -> Any:
    """The Python value of a scalar of NumPy, JAX or another array library; others unchanged.

    A scalar has shape () and a method `item`: `np.float32(1)`, `np.bool_(True)`, a 0-d array of
    NumPy, JAX or PyTorch. An array with a dimension is no scalar, whatever its size, and neither is
    a date or a duration.
    """
    if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
        return value
    if getattr(getattr(value, "dtype", None), "kind", "") in "mM":
        return value
    return value.item()


def real_number(value: Any) -> float | None:
    """A real scalar as a float; None if it is not one.

    Accepts bool, int, float, Fraction, Decimal and scalars of array libraries. NaN, infinities and
    numbers beyond the range of a float come back as NaN or an infinity: the caller checks the
    range. Complex numbers and texts are no real scalars.
    """
    value = plain_scalar(value)
    # NumPy calls a duration an integer.
    if not isinstance(value, (numbers.Real, Decimal)) or isinstance(value, np.timedelta64):
        return None
    try:
        return float(value)
    except OverflowError:  # an int or a Fraction beyond 1e308
        return math.inf if value > 0 else -math.inf
    except ValueError:  # a signalling NaN of `decimal`
        return math.nan
