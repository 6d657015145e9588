"""checksums.py: every change in a folder since it was written is found and named."""

import json

import numpy as np
import pytest

from ragen_jax.storage.checksums import CHECKSUMS, damage, write_checksums

pytestmark = pytest.mark.fast

SIZES = {"a.safetensors": 300_001, "d/b": 1 << 20, "d/e/c": 1, "empty": 0}


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(rng.bytes(size))
    write_checksums(tmp_path)
    return tmp_path


def test_what_is_as_it_was_written_has_no_damage(folder):
    assert damage(folder) is None
    assert set(json.loads((folder / CHECKSUMS).read_text())["crc32"]) == set(SIZES)
    (folder / "d" / "README.md").write_text("added since")
    assert damage(folder) is None


@pytest.mark.medium
def test_every_bit_that_flips_is_found(folder):
    rng = np.random.default_rng(1)
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    for _ in range(200):
        path = files[rng.integers(len(files))]
        plain = path.read_bytes()
        flipped = bytearray(plain)
        place = int(rng.integers(len(flipped)))
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        found = damage(folder)
        assert found and str(path) in found or path.name == CHECKSUMS and found, (path, place)
        path.write_bytes(plain)
    assert damage(folder) is None


def name_in(folder, name):
    (folder / CHECKSUMS).write_text(json.dumps({"crc32": {name: 0}}))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda folder: (folder / "d/b").unlink(), "d/b is missing"),
        (lambda folder: (folder / "d/b").write_bytes(b""), "d/b has changed since it was written"),
        (lambda folder: (folder / CHECKSUMS).write_text('{"crc'), "checksums.json is damaged"),
        (lambda folder: (folder / CHECKSUMS).write_text("[]"), "checksums.json is damaged"),
        (lambda folder: (folder / CHECKSUMS).write_bytes(b"\xff"), "checksums.json is damaged"),
        (lambda folder: (folder / CHECKSUMS).write_text("[" * 99_999), "checksums.json is damaged"),
        (lambda folder: name_in(folder, "../other/d"), "checksums.json is damaged"),
        (lambda folder: name_in(folder, "/dev/zero"), "checksums.json is damaged"),  # never ends
    ],
    ids=["gone", "cut short", "half", "another value", "no text", "too deep", "above", "absolute"],
)
def test_damage_is_named(folder, change, message):
    change(folder)
    assert message in damage(folder)


def test_a_folder_without_checksums_has_none_that_could_be_known(tmp_path):
    (tmp_path / "a").write_text("older")
    assert damage(tmp_path) is None
