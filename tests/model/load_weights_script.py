"""Load a model directory under conditions that need a separate process (see test_weights.py).

    python tests/model/load_weights_script.py COMMAND

COMMAND:
    mesh MODEL_DIR DATA,FSDP,TENSOR [...]  on 8 virtual devices
    process INDEX PORT MODEL_DIR OUT_DIR   in one of two processes of 4 virtual devices each
    memory MODEL_DIR [DATA,FSDP,TENSOR]    for a test that measures memory

Prints one JSON object per mesh. `memory` prints a line, waits for a line on stdin, loads the model,
and prints another line.
"""

import functools
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "32"  # threads of XLA's CPU backend: with fewer threads, its collectives hang

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from ragen_jax.core.memory import keep_freed_memory
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import hf, qwen, weights
from ragen_jax.model.layout import param_shardings
from ragen_jax.model.tokenizer import build_tokenizer


class Counting:
    """An open safetensors file that records all reads: (tensor name, bytes)."""

    def __init__(self, file, reads):
        self.file, self.reads = file, reads

    def get_slice(self, name):
        return _CountingSlice(self.file.get_slice(name), name, self.reads)


class _CountingSlice:
    def __init__(self, tensor, name, reads):
        self.tensor, self.name, self.reads = tensor, name, reads
        self.get_shape, self.get_dtype = tensor.get_shape, tensor.get_dtype

    def __getitem__(self, index):
        found = self.tensor[index]
        self.reads.append((self.name, found.nbytes))
        return found


def counted(tensors, reads):
    """Return `weights.open_tensors`'s dict; every read is appended to the list `reads`."""
    return {name: Counting(file, reads) for name, file in tensors.items()}


def parse_mesh(text):
    data, fsdp, tensor = map(int, text.split(","))
    return make_mesh(data=data, fsdp=fsdp, tensor=tensor)


def read_counted(directory, mesh):
    """Return (model, parameters on the mesh, [(tensor name, bytes)])."""
    reads = []
    model = qwen.Qwen(hf.model_config(directory))
    with weights.open_tensors(directory) as tensors:
        weights.check_tensors(directory, model.config, tensors)
        shardings = param_shardings(model, mesh)
        params = weights.read(counted(tensors, reads), model.config, shardings)
    for x, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert x.sharding == sharding
    return model, params, reads


def same_parts(params, whole):
    """Return whether every device's part of every parameter equals that of `whole` (NumPy)."""
    params, whole = flatten_dict(params), flatten_dict(whole)
    return params.keys() == whole.keys() and all(
        np.array_equal(shard.data, whole[path][shard.index])
        for path, x in params.items()
        for shard in x.addressable_shards
    )


@functools.partial(jax.jit, donate_argnums=0)
def add_one(params):
    return jax.tree.map(lambda x: x + 1, params)


def check_meshes(directory, meshes):
    _, whole = hf.load_weights(directory)
    whole = jax.tree.map(np.array, whole)
    for text in meshes:
        _, params, reads = read_counted(directory, parse_mesh(text))
        found = {"mesh": text, "read": sum(n for _, n in reads), "same": same_parts(params, whole)}
        found["parts"] = {
            "/".join(path): [str(x.sharding.spec), list(x.addressable_shards[0].data.shape)]
            for path, x in flatten_dict(params).items()
        }
        # Devices that hold the same part may share host memory.
        after = jax.block_until_ready(add_one(params))
        found["deleted"] = all(x.is_deleted() for x in jax.tree.leaves(params))
        found["donated"] = same_parts(after, jax.tree.map(lambda x: x + np.float32(1), whole))
        print(json.dumps(found), flush=True)


def check_process(index, port, directory, out):
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
    model, params, reads = read_counted(directory, parse_mesh("1,8,1"))
    assert not any(x.is_fully_addressable for x in jax.tree.leaves(params))
    hf.save(out, model, params, build_tokenizer(()), max_shard_bytes=20_000)
    print(json.dumps({"read": sum(n for _, n in reads), "devices": len(jax.local_devices())}))


def load_when_told(directory, mesh):
    keep_freed_memory(one_arena=True)  # as the commands do
    mesh = parse_mesh(mesh[0]) if mesh else None
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    print("ready", flush=True)
    sys.stdin.readline()
    _, params = hf.load_weights(directory, mesh=mesh)
    print(sum(x.size for x in jax.tree.leaves(params)), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    devices = {"mesh": 8, "process": 4, "memory": 8 if len(arguments) > 1 else 1}[role]
    jax.config.update("jax_num_cpu_devices", devices)
    if role == "mesh":
        check_meshes(arguments[0], arguments[1:])
    elif role == "process":
        check_process(int(arguments[0]), *arguments[1:])
    else:
        load_when_told(arguments[0], arguments[1:])
