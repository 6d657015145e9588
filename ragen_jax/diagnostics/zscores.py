"""z-scores of mutual information, with a moving average of the marginal's std.

Source: RAGEN-2, section 2.3 (MI-ZScore-EMA). The z-scores of one batch are in information.py.
"""

from collections.abc import Iterable

import flax.struct
import numpy as np

from ragen_jax.core.types import Array, Metrics

DECAY = 0.9  # the paper's alpha
STD_EPS = 1e-3  # the paper's epsilon, as in information_metrics
FORMS = ("", "_seq")  # per token, per reasoning


@flax.struct.dataclass
class ZScoreState:
    """State of the moving averages; part of `update.state.TrainState`."""

    std: dict[str, Array]  # scope -> float32 [2], in the order of FORMS; -1: no batch yet


def init_zscores(scopes: Iterable[str]) -> ZScoreState:
    """Return the `ZScoreState` of a new run.

    Args:
      scopes: the parts of metric names between collapse/ and the figure, such as "first_turn" or
        "sokoban/first_turn".
    """
    return ZScoreState(std={scope: np.full(len(FORMS), -1, np.float32) for scope in scopes})


def update_zscores(state: ZScoreState, metrics: Metrics) -> tuple[ZScoreState, Metrics]:
    """Update the averages with a step's std, and divide its information by the averages.

    With sigma_batch the step's marginal_std of a scope (marginal_std_seq for the sequence form):

        sigma_EMA = 0.9 sigma_EMA + 0.1 sigma_batch      (the first batch: sigma_batch)
        mi_zscore_ema = mi / (sigma_EMA + 1e-3);   mi_zscore_seq_ema likewise

    Args:
      state: arrays of any kind, as a checkpoint restores them.
      metrics: the result of `scopes.collapse_metrics`. A missing scope, as in a step without
        diagnostics, keeps its average.

    Returns:
      (ZScoreState, collapse/<scope>/mi_zscore_ema and mi_zscore_seq_ema, Python floats).
    """
    std, figures = {}, {}
    for scope, old in state.std.items():
        prefix = f"collapse/{scope}/"
        old, std[scope] = np.asarray(old), np.array(old, np.float32)
        if prefix + "mi" not in metrics:
            continue
        for i, form in enumerate(FORMS):
            # float32 throughout, so that a resumed run gets the same numbers.
            batch = np.float32(metrics[f"{prefix}marginal_std{form}"])
            if not np.isfinite(batch):  # it would stay in the average forever
                continue
            decay = np.float32(0 if old[i] < 0 else DECAY)
            average = decay * old[i] + (np.float32(1) - decay) * batch
            std[scope][i] = average
            figures[f"{prefix}mi_zscore{form}_ema"] = float(
                metrics[f"{prefix}mi{form}"] / (float(average) + STD_EPS)
            )
    return ZScoreState(std=std), figures
