"""schedules.py: learning rates by hand."""

import numpy as np
import pytest

from ragen_jax.algorithm.schedules import learning_rates, rates_at

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
    ],
)
def test_learning_rates_by_hand(schedule, after):
    def rates(warmup_updates, updates):
        settings = dict(learning_rate=1.0, schedule=schedule, warmup_updates=warmup_updates)
        settings["total_updates"] = warmup_updates + 4
        rate = learning_rates(**settings)
        found = [float(rate(update)) for update in range(updates)]
        np.testing.assert_allclose(rates_at(np.arange(updates), **settings), found, rtol=1e-6)
        return found

    close = dict(rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(rates(4, 8), [0.25, 0.5, 0.75, 1.0, *after], **close)
    np.testing.assert_allclose(rates(1, 5), [1.0, *after], **close)
    end = [] if schedule == "constant" else [0.0, 0.0]  # later updates in a longer run
    np.testing.assert_allclose(rates(0, 4 + len(end)), after + end, **close)
