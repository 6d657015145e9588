"""model/weights.py: only the needed bytes are read, once, with little additional memory."""

import dataclasses
import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from load_weights_script import counted
from safetensors.numpy import save_file

from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model import config_json, hf, qwen, weights
from ragen_jax.model.families import MODELS, SHAPES
from ragen_jax.model.tokenizer import build_tokenizer

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(Path(__file__).with_name("load_weights_script.py"))]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
# All axes are divisible by 8 devices, except for the key-value heads.
CONFIG = qwen.ModelConfig(
    vocab_size=8 * math.ceil(len(build_tokenizer(Sokoban.words)) / 8),
    width=16,
    layers=3,
    heads=8,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    tied=False,
)


def write(directory, config, *, seed=0, max_shard_bytes=10**10):
    """Write a model directory without a tokenizer; every parameter is random."""
    rng = np.random.default_rng(seed)
    fields = config_json.from_config(config, "float32")
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    zeros = {leaf.path: np.broadcast_to(0, leaf.shape) for leaf in weights.plan(config)}
    shards = weights._shards(weights.to_tensors(config, unflatten_dict(zeros)), 4, max_shard_bytes)
    for file, entries in shards.items():
        made = {tensor.name: rng.standard_normal(tensor.shape, np.float32) for tensor in entries}
        save_file(made, directory / file)
    if len(shards) > 1:
        weight_map = {tensor.name: file for file in shards for tensor in shards[file]}
        (directory / weights.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def size(config):
    """Return the size of a model in float32, in bytes."""
    return 4 * sum(math.prod(leaf.shape) for leaf in weights.plan(config))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"), CONFIG)


# ---------------------------------------------------------------- parts of a parameter


def some_bounds(leaf, heads_whole):
    """Return parts of a leaf: every axis whole, halved or reduced to one index in the middle."""
    choices = []
    for n in leaf.shape:
        ways = {(0, n), (0, n // 2), (n // 2, n), (n // 3, n // 3 + 1)}
        # The head_dim axis is part of an axis in the file.
        inner = leaf.path[1:2] in (("q",), ("k",), ("v",), ("o",)) and n == CONFIG.head_dim
        choices.append(
            [(0, n)] if inner and heads_whole else sorted(w for w in ways if w[0] < w[1])
        )
    return itertools.product(*choices)


@pytest.mark.medium
@pytest.mark.parametrize("piece_bytes", [weights.PIECE_BYTES, 100])
def test_a_part_is_all_that_is_read(directory, monkeypatch, piece_bytes):
    monkeypatch.setattr(weights, "PIECE_BYTES", piece_bytes)
    parts = 0
    with weights.open_tensors(directory) as tensors:
        for leaf in weights.plan(CONFIG):
            whole = weights.read_part(tensors, *leaf[1:])
            assert whole.shape == leaf.shape
            for bounds in some_bounds(leaf, heads_whole=True):
                reads = []
                part = weights.read_part(counted(tensors, reads), *leaf[1:], bounds)
                np.testing.assert_array_equal(part, whole[tuple(slice(*b) for b in bounds)])
                assert part.dtype == np.float32
                assert sum(n for _, n in reads) == part.nbytes
                one_head = 4 * CONFIG.head_dim * CONFIG.width  # a head is read as one piece
                assert max(n for _, n in reads) <= max(piece_bytes, one_head)
                if leaf.path[0] == "layers":
                    assert {name for name, _ in reads} == set(leaf.names[slice(*bounds[0])])
                parts += 1
    assert parts > 500


def test_a_head_may_be_cut(directory):
    with weights.open_tensors(directory) as tensors:
        for leaf in weights.plan(CONFIG):
            whole = weights.read_part(tensors, *leaf[1:])
            for bounds in some_bounds(leaf, heads_whole=False):
                part = weights.read_part(tensors, *leaf[1:], bounds)
                np.testing.assert_array_equal(part, whole[tuple(slice(*b) for b in bounds)])


def test_whole_parameters_by_hand(directory):
    """Compare each layout with the tensors themselves."""
    with weights.open_tensors(directory) as tensors:

        def tensor(name):
            return tensors[name].get_tensor(name)

        params = weights.read(tensors, CONFIG)
        layer = params["layers"]
        q = tensor("model.layers.2.self_attn.q_proj.weight")
        np.testing.assert_array_equal(layer["q"]["kernel"][2, :, 5, 3], q[5 * 4 + 3])
        bias = tensor("model.layers.1.self_attn.q_proj.bias")
        np.testing.assert_array_equal(layer["q"]["bias"][1, 5], bias[20:24])
        o = tensor("model.layers.0.self_attn.o_proj.weight")
        np.testing.assert_array_equal(layer["o"]["kernel"][0, 5, 3], o[:, 5 * 4 + 3])
        down = tensor("model.layers.0.mlp.down_proj.weight")
        np.testing.assert_array_equal(layer["down"]["kernel"][0], down.T)
        np.testing.assert_array_equal(params["head"], tensor("lm_head.weight"))


def test_each_tensor_is_read_once_without_a_mesh(directory):
    reads = []
    with weights.open_tensors(directory) as tensors:
        params = weights.read(counted(tensors, reads), CONFIG)
    assert sum(n for _, n in reads) == size(CONFIG)
    # No other array may share the memory of the donated parameters.
    step = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)
    want = jax.tree.map(lambda x: np.array(x) + np.float32(1), params)
    jax.tree.map(np.testing.assert_array_equal, step(params), want)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))


# ---------------------------------------------------------------- many devices, many processes


@pytest.mark.medium
def test_meshes(directory):
    """8 devices: each holds its part, and no tensor is read twice for devices with the same
    part."""
    meshes = ("1,8,1", "1,1,8", "2,2,2", "8,1,1")
    run = subprocess.run(
        [*SCRIPT, "mesh", str(directory), *meshes],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = {}
    for line in run.stdout.splitlines():
        found[json.loads(line)["mesh"]] = json.loads(line)
    assert tuple(found) == meshes
    for result in found.values():
        assert result["same"] and result["donated"] and result["deleted"]
        assert result["read"] == size(CONFIG)
    shapes = {mesh: {k: v[1] for k, v in found[mesh]["parts"].items()} for mesh in meshes}
    assert shapes["1,8,1"]["layers/q/kernel"] == [3, 2, 8, 4]
    assert shapes["1,1,8"]["layers/q/kernel"] == [3, 16, 1, 4]
    assert shapes["1,1,8"]["layers/k/kernel"] == [3, 16, 2, 4]  # 2 heads on 8 devices are not split
    assert shapes["2,2,2"]["layers/q/kernel"] == [3, 8, 4, 4]
    assert shapes["8,1,1"]["layers/q/kernel"] == [3, 16, 8, 4]


@pytest.mark.slow
def test_two_processes(directory, tmp_path):
    """Each process reads the parts of its devices; both contribute their parts to one save."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = tmp_path / "out"
    runs = [
        subprocess.Popen(
            [*SCRIPT, "process", str(index), port, str(directory), str(out)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], outputs
    replicated = 4 * sum(
        math.prod(leaf.shape) for leaf in weights.plan(CONFIG) if "kernel" not in leaf.path[-1]
    )
    replicated -= 2 * 4 * CONFIG.vocab_size * CONFIG.width  # embedding and head are split
    for output, _ in outputs:
        found = json.loads(output.splitlines()[-1])
        assert found["devices"] == 4
        assert found["read"] == (size(CONFIG) - replicated) // 2 + replicated
    assert len(list(out.glob("*.safetensors"))) > 1
    _, want = hf.load_weights(directory)
    _, got, _ = hf.load(out)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---------------------------------------------------------------- memory


def anonymous(pid):
    """Return the anonymous memory of a process in bytes (without the model's mapped files)."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory):
    """Yield a float32 checkpoint with the shape of Qwen2.5-0.5B, in 2 shards."""
    config = SHAPES["qwen2.5-0.5b"]
    directory = write(tmp_path_factory.mktemp("half"), config, max_shard_bytes=1_100_000_000)
    assert len(list(directory.glob("*.safetensors"))) == 2
    yield directory
    for file in directory.glob("*.safetensors"):
        file.unlink()  # pytest keeps the directories of its last runs


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("mesh", [(), ("1,8,1",), ("1,4,2",)], ids=str)
def test_memory_of_loading(half_billion, mesh):
    """The peak, without the memory of the imports, is at most 1.3 times the size on disk."""
    on_disk = sum(file.stat().st_size for file in half_billion.glob("*.safetensors"))
    with subprocess.Popen(
        [*SCRIPT, "memory", str(half_billion), *mesh],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout.readline() == "ready\n"
        baseline = peak = anonymous(run.pid)
        os.set_blocking(run.stdout.fileno(), False)
        start = time.perf_counter()
        run.stdin.write("\n")
        run.stdin.flush()
        answer = ""
        while not answer and run.poll() is None:
            peak = max(peak, anonymous(run.pid))
            answer = run.stdout.readline()
            time.sleep(0.002)
        seconds, after = time.perf_counter() - start, anonymous(run.pid)
        run.stdin.write("\n")
    assert run.returncode == 0 and int(answer) == 494_032_768
    ratio = (peak - baseline) / on_disk
    print(
        f"\n{on_disk / 1e9:.3f} GB on disk, mesh {mesh}: peak {ratio:.3f} times that, "
        f"{(after - baseline) / on_disk:.3f} when loaded, {seconds:.1f} s"
    )
    assert ratio <= 1.3


@pytest.mark.medium
@pytest.mark.parametrize("family", MODELS)
def test_all_tensors_have_a_place(family):
    """Every parameter of a family's models is in its table, and vice versa."""
    shapes = MODELS[family].shapes.values()
    forms = [dataclasses.replace(config, tied=tied) for config in shapes for tied in (0, 1)]
    paths = {leaf.path for config in forms for leaf in weights.plan(config)}
    assert paths == set(MODELS[family].tensors)
    names = [name for leaf in weights.plan(forms[0]) for name in leaf.names]
    assert len(set(names)) == len(names) and not any("{" in name for name in names)


@pytest.mark.medium
def test_parameters_that_a_family_does_not_have_are_refused():
    biases = "layers/k/bias, layers/q/bias, layers/v/bias"
    for family, qkv_bias in (("llama", True), ("qwen2", False)):
        config = dataclasses.replace(CONFIG, family=family, qkv_bias=qkv_bias)
        with pytest.raises(
            ValueError, match=f"family '{family}' .*: {biases} .see its qkv_bias and qk_norm"
        ):
            weights.plan(config)
    config = dataclasses.replace(CONFIG, qk_norm=True)
    with pytest.raises(
        ValueError, match="family 'qwen2' .*: layers/k_norm/scale, layers/q_norm/sc"
    ):
        weights.plan(config)
