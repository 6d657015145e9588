"""Play episodes with pictures on a given number of devices, and read them as training does.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 NPROC=32 \
        python tests/model/vision/image_table_script.py 8

Run by test_image_table.py in a separate process, because the number of devices is fixed when JAX
starts. Prints one JSON object.
"""

import json
import sys

import jax
import numpy as np
from test_image_table import play, seeing

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import shard_params
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.vision.image_table import ImageTable


def main(count):
    s = seeing()
    data = min(int(count), 4)
    mesh = make_mesh(data=data, fsdp=int(count) // data, tensor=1)
    s.params = shard_params(s.params, s.model, mesh)
    with jax.set_mesh(mesh):
        image_table = ImageTable(s.tower, s.model.config.vocab_size)
        episodes = play(s, image_table)
        batch = make_batch(episodes)
        size = -(-len(batch.tokens_BT) // 8) * 8
        tokens_BT = np.zeros((size, batch.tokens_BT.shape[1]), np.int32)
        tokens_BT[: len(batch.tokens_BT)] = batch.tokens_BT
        params = image_table.attach(s.params, tokens_BT)
        logp_BT = np.asarray(token_logps(s.model, params, tokens_BT))[: len(batch.tokens_BT)]
    turns = [turn for episode in episodes for turn in episode.turns]
    print(
        json.dumps(
            {
                "devices": jax.device_count(),
                "sampled": [turn.sampled.tolist() for turn in turns],
                "logp": [float(turn.logp.sum()) for turn in turns],
                "trained": (logp_BT * batch.mask_BT).sum(1).tolist(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
