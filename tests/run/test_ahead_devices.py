"""Rollouts that run ahead: which devices and processes play, and which are refused."""

import dataclasses

import pytest
from device_processes import in_two_processes, on_devices

from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.check import check
from ragen_jax.configs import base
from ragen_jax.storage.metrics_reader import read_metrics


def timeless(rows):
    """Rows without the fields that may differ between identical runs."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in rows
    ]


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a given process."""

    process_index: int = 0
    number: int = 0
    platform: str = "tpu"


def test_what_cannot_run_is_refused_in_one_line():
    def refused(fields, devices):
        config = base.get_config()
        config.optimizer.micro_batch = 8
        config.update_from_flattened_dict(fields)
        check(config)
        with pytest.raises(ValueError) as error:
            build_meshes(config, devices)
        assert "\n" not in str(error.value)
        return str(error.value)

    ahead_, apart = {"rollout.ahead": 1}, {"sampling_mesh.devices": 2}
    four = [Device(0, n) for n in range(4)]
    two_hosts = [Device(n // 2, n) for n in range(4)]
    assert "rollout.ahead is 1, but training and sampling share 4 devices" in refused(ahead_, four)
    assert "sampling_mesh.devices, for example to 2" in refused(ahead_, four)
    assert "rollout.ahead is 2" in refused({"rollout.ahead": 2}, four)
    assert "sampling_mesh.devices, for example to 2" in refused(ahead_, two_hosts)
    alone = refused(ahead_, two_hosts[::2])
    assert "share 2 devices" in alone and "give each process at least 2 devices" in alone
    odd = refused({"sampling_mesh.devices": 1}, two_hosts)
    assert "devices is 1, but each of 2 processes" in odd and "use a multiple of 2" in odd
    many = refused({"sampling_mesh.devices": 4}, two_hosts)
    assert "at least one of 2 device(s) of each of 2 processes must train; use at most 2" in many
    assert "sampling_mesh.devices is 2, but at least one of 2" in refused(apart, four[:2])
    cpus = [dataclasses.replace(device, platform="cpu") for device in two_hosts + two_hosts]
    on_cpus = refused(ahead_ | {"sampling_mesh.devices": 4}, cpus)
    assert "on CPUs" in on_cpus and "sampling_mesh.devices=2 and 2 devices to train" in on_cpus
    uneven = apart | {"mesh.data": 4}
    assert "mesh.data=4, mesh.fsdp=1, mesh.tensor=1 does not fit 2" in refused(uneven, four)
    config = base.get_config()
    config.rollout.ahead, config.diagnose.gradients_every = 1, 5
    config.diagnose.gradients_groups = 0
    with pytest.raises(ValueError, match="config.diagnose.gradients_groups is 0, but with rollout"):
        check(config)


def test_the_last_devices_sample():
    config = base.get_config()
    config.update_from_flattened_dict({"rollout.ahead": 1, "sampling_mesh.devices": 3})
    devices = [Device(0, n) for n in range(5)]
    mesh, sampling = build_meshes(config, devices)
    assert list(mesh.devices.flat) == devices[:2] and list(sampling.devices.flat) == devices[2:]
    assert sampling.shape["data"] == 3
    hosts = [Device(n // 3, n) for n in range(6)]
    config.sampling_mesh.devices = 2
    mesh, sampling = build_meshes(config, hosts)
    assert list(mesh.devices.flat) == [hosts[n] for n in (0, 1, 3, 4)]
    assert list(sampling.devices.flat) == [hosts[n] for n in (2, 5)]
    config.sampling_mesh.devices = 3
    config.sampling_mesh.tensor = config.sampling_mesh.data = 1
    config.sampling_mesh.fsdp = -1
    assert build_meshes(config, devices)[1].shape["fsdp"] == 3


SETTINGS = {
    **{"steps": 3, "env.max_turns": 2, "env.max_actions": 4},
    **{"rollout.groups": 4, "rollout.group_size": 4, "rollout.ahead": 1},
    **{"optimizer.minibatches": 2, "optimizer.micro_batch": 8, "filter.strategy": "none"},
    **{"optimizer.learning_rate": 1e-3, "diagnose.every": 3, "diagnose.micro_batch": 16},
    **{"diagnose.first_turn_samples": 8, "diagnose.trajectory_samples": 4},
    **{"eval.episodes": 8, "eval.every": 3, "checkpoint.export": False, "report.every": 0},
}


def words_of(agent, workdir, **fields):
    settings = {"model.path": agent.directory, **SETTINGS, **fields}
    words = ["-m", "ragen_jax.train", "--config=configs/sokoban.py", f"--workdir={workdir}"]
    return [*words, *(f"--config.{name}={value}" for name, value in settings.items())]


# These count the padding of each device's sequences.
OF_LAYOUT = ("update/positions", "update/shared", "update/real_share")


def assert_same_figures(one_dir, other_dir, *, half=False, without=()):
    """Two runs' rows are equal up to rounding, which with half precision decides on tokens."""
    rows = [timeless(read_metrics(path / "metrics.jsonl")) for path in (one_dir, other_dir)]
    for one, other in zip(*rows, strict=True):
        assert one.keys() == other.keys()
        assert one.get("rollout/staleness") == other.get("rollout/staleness")
        if half:
            continue
        for name in one.keys() - {"rollout/logp_gap", *without}:
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name


HALF = {"model.lora.rank": 4, "model.dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, HALF], ids=str)
def test_two_devices_train_and_two_sample(fields, agent, tmp_path):
    """Up to rounding, the figures equal those of one device that does both."""
    for name, count, further in (("one", 1, {}), ("four", 4, {"sampling_mesh.devices": 2})):
        words = words_of(agent, tmp_path / name, **fields, **further)
        process = on_devices(count, words, XDG_CACHE_HOME=str(agent.home))
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
    half = "model.dtype" in fields
    assert_same_figures(tmp_path / "one", tmp_path / "four", half=half, without=OF_LAYOUT)


SPLIT = {"mesh.data": 1, "mesh.fsdp": -1, "sampling_mesh.devices": 2, "rollout.ahead": 2}
LORA = {"model.lora.rank": 4, "sampling_mesh.devices": 2}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [SPLIT, LORA], ids=str)
def test_two_processes_play_ahead_like_one(fields, agent, tmp_path):
    """Each process trains on its first devices and samples on its last: the figures equal those of
    one process with all devices, also after a stop."""
    cache = {"XDG_CACHE_HOME": str(agent.home)}
    process = on_devices(4, words_of(agent, tmp_path / "one", **fields), **cache)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    for name, stops in (("two", [3]), ("resumed", [1, 3])):
        for steps in stops:
            words = words_of(agent, tmp_path / name, **fields, steps=steps)[2:]
            in_two_processes(words, devices=2, logs=tmp_path / "logs", timeout=600, **cache)
    assert_same_figures(tmp_path / "one", tmp_path / "two")
    rows = [
        timeless(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("two", "resumed")
    ]
    rows[1][1] = {k: v for k, v in rows[1][1].items() if not k.startswith("eval/")}  # a last step
    assert rows[0] == rows[1]
