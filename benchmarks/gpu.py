"""Published model shapes on an accelerator: decode, updates on long rows, and a paper-sized step.

    python -m benchmarks gpu [--shape=NAME] [--repeats=N] [--json]

Weights are random: nothing is downloaded.
"""

from benchmarks.lengths import length_shape, train_length
from benchmarks.llm import decode_bytes, decode_flops, decoder, random_params
from benchmarks.measure import Row, compare
from benchmarks.paper_step import paper_step
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import Qwen

DTYPE = "bfloat16"
TINY = dict(decode_rows=(8,), cached=64, steps=8)
TINY_LENGTH = dict(tokens=128, lengths=(64,))
TINY_STEP = dict(turns=(2, 2), members=2, limit=16, slots=3, minibatches=1, micro_batch=2)


def gpu(repeats, *, name=None):
    """Qwen2.5 0.5B and 3B in bfloat16: decode, updates at 16k tokens, and a paper-sized step.

    Decode and updates are reported as fractions of the device's limits. The step is compared, with
    slots and rows cut by length, against lock step and padded rows. As in training, parameters are
    float32, products are bfloat16, and sampling uses a bfloat16 copy.
    """
    found = []
    for model_name in [name] if name else ["qwen2.5-0.5b", "qwen2.5-3b"]:
        tiny = model_name == "tiny"
        found += decoding(repeats, model_name, **(TINY if tiny else {}))
        found += train_length(
            repeats, name=model_name, dtype=DTYPE, **(TINY_LENGTH if tiny else {})
        )
        shape = length_shape(model_name, DTYPE)
        found += paper_step(repeats, name=model_name, shape=shape, **(TINY_STEP if tiny else {}))
    return found


def decoding(repeats, name, *, decode_rows=(1, 64, 128, 256), cached=1024, steps=64):
    """Return the table rows of decode steps over a cache of `cached` positions."""
    config = length_shape(name, DTYPE)
    model, mesh = Qwen(config), make_mesh(data=-1, fsdp=1, tensor=1)
    params = random_params(config)
    small = sampling_params(params, model, mesh)
    del params
    found = []
    for rows in decode_rows:
        sizes = dict(rows=rows, cached=cached, steps=steps)
        found.append(
            Row(
                name=f"{name} decode, batch {rows}, {cached} cached",
                work=rows * steps,
                bytes=decode_bytes(config, **sizes, itemsize=2),
                flops=decode_flops(config, **sizes),
                **compare(decoder(model, small, **sizes), repeats=repeats),
            )
        )
    return found
