"""Config fields left open until the other fields, the model and the devices are known.

configs/presets.py holds the values of preset llm. Commands call `fill_auto_fields` before they
check a config, and the config.json of a run holds the filled values.
"""

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from ragen_jax.config.check import check_domains
from ragen_jax.config.fields import field
from ragen_jax.config.per_task import minibatch_rows
from ragen_jax.config.stored import stored_date
from ragen_jax.configs.base import Config, Model
from ragen_jax.configs.presets import OPEN_FIELDS, ROWS_PER_DEVICE, SIZE_FIELDS
from ragen_jax.core.domains import freeze
from ragen_jax.core.sharding import data_shards, make_mesh, split_devices
from ragen_jax.model import families, hf, weights
from ragen_jax.model.dates import AUTO

# algorithm.mismatch_cap where the sampler is not the policy: with rollout.ahead or an int8 cache.
# As in Yao et al. 2025 (objectives.py).
STALE_CAP = 2.0


def has_open_fields(config: ConfigDict) -> bool:
    """Return whether the config leaves a field open."""
    return any(field(config, name) is None for name in OPEN_FIELDS)


def need_path(config: ConfigDict) -> None:
    """Raise ValueError if preset llm was given no model."""
    if config.model.path is None:
        raise ValueError(
            "config.model.path is None; preset llm needs --config.model.path=DIR_OR_HUB_ID, a "
            "Qwen2.5, Qwen3, Qwen3.5, Llama 3 or Gemma 3 model in Hugging Face format"
        )


def fill_auto_fields(config: ConfigDict, devices: Sequence[jax.Device]) -> None:
    """Fill in the open fields of a config, in place; fields that are set stay unchanged.

    Args:
      devices: devices of the run, or of the topology that it is planned for.

    Raises:
      ValueError: model.path is missing, the model does not exist, or no run could use the values.
    """
    need_path(config)
    differs = config.rollout.ahead or config.rollout.cache_dtype != "model"
    if differs and config.algorithm.mismatch_cap == 0:
        config.algorithm.mismatch_cap = STALE_CAP
    left = [name for name in OPEN_FIELDS if field(config, name) is None]
    if not left:
        return

    def fill(values):
        config.update_from_flattened_dict({name: values[name] for name in left if name in values})

    dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    # The values of any model size, so that the other fields can be checked before the model is
    # looked up.
    fill({"model.dtype": dtype, "optimizer.micro_batch": 1, **SIZE_FIELDS[math.inf]})
    check_domains(config)
    path = config.model.path
    known = None if Path(path).expanduser().exists() else families.known_shape(path)
    parameters = sum(math.prod(leaf.shape) for leaf in weights.plan(known or hf.model_config(path)))
    size = next(most for most in SIZE_FIELDS if parameters <= most)
    fill(SIZE_FIELDS[size])
    training, _ = split_devices(devices, config.sampling_mesh.devices)
    shards = data_shards(make_mesh(**config.mesh, devices=training))
    rows = min(ROWS_PER_DEVICE[size], minibatch_rows(freeze(Config, config)) // shards)
    fill({"optimizer.micro_batch": shards * max(1, rows)})


def run_date(model: Model, workdir: Path | None, today: datetime.date) -> str:
    """Return model.date; if it is open, the date of the run in `workdir`, else `today`.

    The date of a tiny agent stays open: its template writes no date.

    Args:
      workdir: folder of a run, possibly a new run; None: there is no run.

    Raises:
      ValueError: the config.json in `workdir` is damaged.
    """
    if model.path == "tiny" or model.date != AUTO:
        return model.date
    stored = None if workdir is None else stored_date(workdir, today.isoformat())
    return stored or today.isoformat()
