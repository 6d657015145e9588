"""Meshes: the layouts in the table, and equal numbers on many devices or processes and on one."""

import json

import jax
import numpy as np
import pytest
from device_processes import in_two_processes, on_devices
from jax.sharding import AbstractMesh, PartitionSpec

from ragen_jax.core.sharding import MESH_AXES, make_mesh, spec
from ragen_jax.model import qwen
from ragen_jax.model.layout import param_shardings, sampling_params
from ragen_jax.storage.metrics_reader import read_metrics


def test_a_mesh_has_an_axis_of_experts_only_if_it_splits_them():
    one = make_mesh(data=1, fsdp=1, tensor=1, expert=-1, devices=jax.devices()[:1])
    assert one.axis_names == MESH_AXES
    mesh = AbstractMesh((2, 4, 1, 2), ("data", "expert", "fsdp", "tensor"))
    assert spec(("rows", "experts", "mlp"), (8, 8, 6), mesh) == PartitionSpec(
        ("data", "expert", "fsdp"), ("expert",), ("tensor",)
    )
    assert spec(("experts",), (6,), mesh) == PartitionSpec(None)  # six over four devices


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [
        "2,2,2",
        pytest.param("8,1,1", marks=pytest.mark.slow),
        pytest.param("1,8,1", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_do_what_one_does(agent, mesh):
    process = on_devices(8, ["tests/core/mesh_equality_script.py", agent.directory, mesh])
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert found["mesh"] == mesh and found["devices"] == 8
    assert found["split"] == (mesh != "8,1,1")  # whether parameters are sharded
    assert found["wrong"] == 0 and found["episodes"] == 126
    assert found["ties"] <= 2
    assert found["score"] < 1e-5  # log-probs per reasoning token (nats) and flow figures of actions
    assert found["gradient"] < 1e-5
    assert found["params"] < 1e-4
    assert found["norms"] < 1e-4  # gradient norms of the loss's parts, in buckets


@pytest.mark.slow
def test_two_devices_of_a_tensor_mesh_do_what_one_does(agent):
    process = on_devices(2, ["tests/core/mesh_equality_script.py", agent.directory, "1,1,2"])
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert found["wrong"] == 0
    assert found["gradient"] < 1e-5 and found["params"] < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(
    "served",
    [
        pytest.param((), id="turn by turn"),
        # Environments with a time limit step while the device works, in each process if they can.
        pytest.param(
            ("--config.rollout.slots=24", "--config.rollout.chunk=7", "--config.env.time_limit=60"),
            id="slots",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_do_what_one_does(agent, tmp_path, served):
    def command(name):
        return [
            *("-m", "ragen_jax.train", f"--workdir={tmp_path / name}", "--config.steps=2"),
            f"--config.model.path={agent.directory}",
            *("--config.eval.episodes=16", "--config.eval.every=2", "--config.env.max_turns=2"),
            *("--config.rollout.groups=4", "--config.rollout.compact=False"),
        ]

    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    one = on_devices(1, command("one"), **cache)
    out, err = one.communicate(timeout=600)
    assert one.returncode == 0, err[-3000:]
    words = [*command("two")[2:], *served]
    two = in_two_processes(words, devices=2, logs=tmp_path / "logs", timeout=600, **cache)
    assert "eval at step 2" in two.stdout  # only the first process prints
    assert "eval at step" not in (tmp_path / "logs" / "process_1.log").read_text()
    expected, found = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert len(found) == 3
    for a, b in zip(expected, found, strict=True):
        a, b = (
            {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}
            for row in (a, b)
        )
        assert a.keys() == b.keys()
        # The first is a rounding difference itself; each device has its own micro-batches.
        apart = {
            "rollout/logp_gap",
            *(f"update/{x}" for x in ("shared", "positions", "real_share")),
        }
        for name in a.keys() - apart:
            assert np.isclose(a[name], b[name], rtol=1e-5, atol=1e-5), (name, a[name], b[name])
        assert b.get("rollout/logp_gap", 0) < 1e-4


def test_spec_leaves_whole_what_does_not_divide():
    mesh = AbstractMesh((2, 3, 4), ("data", "fsdp", "tensor"))
    axes = ("rows", None, "kv_heads", "embed")
    assert spec(axes, (12, 5, 8, 9), mesh) == PartitionSpec(
        ("data", "fsdp"), None, "tensor", "fsdp"
    )
    assert spec(axes, (12, 5, 2, 10), mesh) == PartitionSpec(("data", "fsdp"), None, None, None)
    assert spec(axes, (4, 5, 8, 9), mesh)[0] is None


def test_mesh_sizes():
    (device,) = jax.devices()[:1]
    assert make_mesh(data=-1, fsdp=1, tensor=2, devices=[device] * 6).shape == {
        "data": 3,
        "fsdp": 1,
        "tensor": 2,
    }
    for sizes in ((3, 1, 1), (-1, -1, 1), (0, 1, 1), (-1, 4, 1)):
        with pytest.raises(ValueError, match="mesh.data"):
            make_mesh(
                **dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), devices=[device] * 6
            )


def test_norms_of_heads_are_whole_where_heads_are_split():
    config = qwen.ModelConfig(50, 32, 2, 4, 2, 16, 48, qkv_bias=False, qk_norm=True)
    mesh = AbstractMesh((2, 2, 2), MESH_AXES)
    layers = param_shardings(qwen.Qwen(config), mesh)["layers"]
    for head in ("q", "k"):
        split = PartitionSpec(None, ("fsdp",), ("tensor",), None)
        assert layers[head]["kernel"].spec == split
        assert layers[f"{head}_norm"]["scale"].spec == PartitionSpec(None, None)


@pytest.mark.long
def test_sampling_params_are_what_the_model_multiplies_with():
    """In bfloat16 every matrix is cast when it is used, so a cast copy gives the same numbers."""
    config = qwen.ModelConfig(
        vocab_size=50,
        width=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_width=48,
        dtype="bfloat16",
        tied=False,
    )
    model, params = qwen.Qwen(config), qwen.init_params(config, jax.random.key(0))
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    cast = sampling_params(params, model, mesh)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(cast)}
    assert kinds == {"bfloat16", "float32"}  # norms keep float32
    tokens = np.arange(20).reshape(2, 10)
    hidden, _ = model.apply({"params": params}, tokens)
    hidden_cast, _ = model.apply({"params": cast}, tokens)
    np.testing.assert_array_equal(np.asarray(hidden), np.asarray(hidden_cast))
    logit, logit_cast = qwen.logits(params, hidden), qwen.logits(cast, hidden)
    np.testing.assert_array_equal(np.asarray(logit), np.asarray(logit_cast))
    assert (
        sampling_params(params, qwen.Qwen(qwen.ModelConfig(50, 32, 2, 4, 2, 8, 48)), mesh) is params
    )
