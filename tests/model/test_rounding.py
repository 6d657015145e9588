"""model/rounding.py: rounded parameters by hand and their largest errors."""

import numpy as np
import pytest

from ragen_jax.model.rounding import EXACT, round_params

pytestmark = pytest.mark.fast


def matrix(seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, (3, 5, 64)).astype(np.float32)


def test_int8_by_hand():
    found = round_params({"w": np.array([[0.1, -1.27, 0.004], [0.0, 0.0, 0.0]], "f4")}, "int8")
    np.testing.assert_allclose(found["w"], [[0.1, -1.27, 0.0], [0, 0, 0]], atol=1e-7)


@pytest.mark.parametrize(
    "precision, least, most",
    [("bfloat16", 1e-4, 2**-8), ("int8", 1e-3, 1 / 254), ("float8", 1e-2, 2**-4)],
)
def test_errors_are_those_of_the_precision(precision, least, most):
    """Largest error of a vector, relative to its largest entry."""
    x = matrix()
    found = np.asarray(round_params({"w": x}, precision)["w"])
    assert found.dtype == np.float32
    error = np.abs(found - x).max(-1) / np.abs(x).max(-1)
    assert error.max() <= most * 1.001 and error.max() > least
    again = np.asarray(round_params({"w": found}, precision)["w"])
    np.testing.assert_allclose(again, found, rtol=1e-5)  # rounded values stay


def test_vectors_and_norms_are_exact():
    params = {"layers": {"norm": {"scale": matrix()}, "q": {"bias": matrix()[0, 0]}}}
    for precision in ("bfloat16", "int8", "float8", EXACT):
        found = round_params(params, precision)
        np.testing.assert_array_equal(found["layers"]["norm"]["scale"], matrix())
        np.testing.assert_array_equal(found["layers"]["q"]["bias"], matrix()[0, 0])


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="int4"):
        round_params({"w": matrix()}, "int4")
