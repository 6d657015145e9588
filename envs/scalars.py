"""Scalars of any library as Python numbers: the values that a reward function may return."""

import math
import numbers
from decimal import Decimal
from typing import Any

import numpy as np


def plain_scalar(value: Any) -> Any:
    """Return a scalar of NumPy, JAX or another array library as a Python value.

    A scalar has shape () and a method `item`: `np.float32(1)`, `np.bool_(True)`, a 0-d array of
    NumPy, JAX or PyTorch. Any other value is returned unchanged, including arrays with a dimension,
    whatever their size, dates and durations.
    """
    if getattr(value, "shape", None) != () or not callable(getattr(value, "item", None)):
        return value
    if getattr(getattr(value, "dtype", None), "kind", "") in "mM":
        return value
    return value.item()


def real_number(value: Any) -> float | None:
    """Return a real scalar as a float; None for any other value.

    Accepts bool, int, float, Fraction, Decimal and scalars of array libraries. NaN, infinities and
    numbers beyond the range of a float become NaN or an infinity: the caller checks the range.
    Complex numbers and texts are not real scalars.
    """
    value = plain_scalar(value)
    # np.timedelta64 counts as an integer.
    if not isinstance(value, (numbers.Real, Decimal)) or isinstance(value, np.timedelta64):
        return None
    try:
        return float(value)
    except OverflowError:  # an int or a Fraction beyond 1e308
        return math.inf if value > 0 else -math.inf
    except ValueError:  # a signalling NaN of `decimal`
        return math.nan
