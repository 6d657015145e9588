"""model/gguf/reader.py: files in parts, damaged files, and limits on a header."""

import shutil
import struct
import sys

import gguf
import numpy as np
import pytest
from gguf_files import MODELS, make_config, write_gguf

from ragen_jax.model import hf
from ragen_jax.model.gguf.reader import list_files, open_gguf
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
CHECK = confined.check_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ragen_jax" / "models"


@pytest.fixture(autouse=True)
def no_child(monkeypatch):
    """Skip the child process that checks a header, which takes a second."""
    monkeypatch.setattr(confined, "check_gguf", lambda *_: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    family, changes = MODELS["llama"]
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", make_config(family, **changes))


def refuse(path, match):
    """Check that the path is refused by one line that names it."""
    with pytest.raises(ValueError, match=match) as raised:
        hf.resolve(path)
    text = str(raised.value)
    assert "\n" not in text and path.name.partition("-0")[0] in text, text
    return text


# ---------------------------------------------------------------- several files


@pytest.fixture
def parts(tmp_path):
    family, changes = MODELS["qwen3-untied"]
    config = make_config(family, **changes)
    written = write_gguf(tmp_path / "big.gguf", config, split_max_tensors=10)
    files = sorted(tmp_path.glob("big-*.gguf"))
    assert [file.name for file in files] == [f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return written, files


def test_any_part_of_a_model_opens_all_of_it(parts):
    written, files = parts
    first, *others = (hf.resolve(file) for file in files)
    assert others == [first, first]
    assert hf.model_config(first) == written.config
    assert open_gguf(files[2]).tensors.keys() == open_gguf(files[0]).tensors.keys()
    assert open_gguf(files[2]).fields["general.architecture"] == "qwen3"


def test_a_missing_part_is_named(parts):
    _, files = parts
    files[1].unlink()
    text = refuse(files[0], "is one of 3 files of a model, but .* lacks big-00002-of-00003.gguf")
    assert str(files[0]) in text
    refuse(files[1], "lacks big-00002-of-00003.gguf")


def test_a_renamed_part_is_refused(parts):
    _, files = parts
    lone = files[0].rename(files[0].with_name("part.gguf"))
    refuse(lone, r"is one of 3 files of a model \(split.count\), but its name says 1; keep the")


def test_names_that_only_look_like_a_part(tmp_path, whole):
    for name in ("m-00004-of-00003.gguf", "m-00000-of-00000.gguf", "m-1-of-3.gguf"):
        file = shutil.copy(whole.path, tmp_path / name)
        assert list_files(file) == [file]
    assert hf.resolve(file) == hf.resolve(whole.path)


# ---------------------------------------------------------------- damaged files


def test_files_that_are_not_gguf(tmp_path):
    file = tmp_path / "m.gguf"
    refuse(file, f"no GGUF file {file}")
    file.write_bytes(b"")
    refuse(file, "is not a GGUF file: it is empty")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refuse(file, r"is not a GGUF file: it begins with b'vers', not b'GGUF'")
    other = tmp_path / "m.bin"
    other.write_bytes(b"GGUF")
    refuse(other, "m.bin is a file; a model is a directory with .*, or a .gguf file")


def test_a_file_truncated_anywhere(tmp_path, whole):
    content, file = whole.path.read_bytes(), tmp_path / "m.gguf"
    reader = gguf.GGUFReader(whole.path)
    rng = np.random.default_rng(0)
    ends = {4, 7, 8, 16, 23, 24, 25, reader.data_offset - 1, reader.data_offset, len(content) - 64}
    ends |= set(rng.integers(24, reader.data_offset, 60).tolist())
    ends |= set(rng.integers(reader.data_offset, len(content) - 64, 20).tolist())
    for end in sorted(ends):
        file.write_bytes(content[:end])
        refuse(file, r"is truncated or damaged, or newer than the package gguf 0\.\d+\.\d+ \(\w+")


def count_refused(file, content, ranges, changes):
    """Open a file after changes of random bytes in each of the ranges; return how many of the
    changed files are refused."""
    rng, refused = np.random.default_rng(0), 0
    for start, stop in ranges:
        for _ in range(changes):
            changed = bytearray(content)
            for place in rng.integers(start, stop, 3):
                changed[place] ^= 1 << rng.integers(8)
            file.write_bytes(changed)
            try:
                open_gguf(file)
            except ValueError as error:
                assert "\n" not in str(error) and str(file) in str(error)
                refused += 1
    return refused


def test_changed_descriptions_of_tensors_are_refused_or_read(tmp_path, whole):
    content, reader = whole.path.read_bytes(), gguf.GGUFReader(whole.path)
    place = reader.tensors[0].field.offset, reader.data_offset
    assert 10 < count_refused(tmp_path / "m.gguf", content, [place], 60) < 60


def header(*parts):
    """Return a GGUF header with one key, of which `parts` are the type and the value."""
    key = b"general.architecture"
    counts = struct.pack("<IQQ", 3, 0, 1)
    return b"GGUF" + counts + struct.pack("<Q", len(key)) + key + b"".join(parts)


ARRAY, UINT32 = 9, 4


def array(kind, count):
    return struct.pack("<IQ", kind, count)


def test_an_array_of_arrays_of_arrays(tmp_path):
    file = tmp_path / "deep.gguf"
    file.write_bytes(header(struct.pack("<I", ARRAY), array(ARRAY, 1) * 5000))
    refuse(file, "deep.gguf is truncated or damaged, .*RecursionError")


@pytest.mark.parametrize("number", [57, 999])
def test_an_unknown_quantisation(tmp_path, whole, number):
    content, name = bytearray(whole.path.read_bytes()), b"blk.1.ffn_up.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", content, place)[0] == gguf.GGMLQuantizationType.Q8_0
    struct.pack_into("<I", content, place, number)
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    refuse(file, rf"newer than the package gguf 0.*{number}\)? is not a valid GGMLQuantizationType")


def test_the_other_byte_order(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refuse(tmp_path / "m.gguf", "has another byte order than this machine")


def test_without_the_package(tmp_path, whole, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    refuse(whole.path, r"which the package gguf reads: pip install 'ragen_jax\[gguf\]'")


def test_a_converted_model_needs_no_package(whole, monkeypatch):
    directory = hf.resolve(whole.path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert hf.resolve(whole.path) == directory


# ---------------------------------------------------------------- the child process


@pytest.fixture
def child(monkeypatch):
    """Check headers in a child process with little memory and time."""
    monkeypatch.setattr(confined, "check_gguf", CHECK)
    monkeypatch.setattr(confined, "MEMORY", 200 << 20)
    monkeypatch.setattr(confined, "SECONDS", 5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "parts",
    [
        (struct.pack("<I", ARRAY), array(UINT32, 2**60)),
        (struct.pack("<I", ARRAY), array(ARRAY, 2**60), array(UINT32, 2**60)),
    ],
    ids=["numbers", "arrays"],
)
def test_a_header_that_claims_2_60_entries(tmp_path, child, parts):
    file = tmp_path / "bomb.gguf"
    file.write_bytes(header(*parts))
    refuse(file, "bomb.gguf: reading its header takes more than 5 s or 0.19.* GiB of memory; use")


@pytest.mark.medium
def test_a_sound_file_passes_the_child(child, whole):
    assert hf.model_config(whole.path) == whole.config


@pytest.mark.medium
def test_changed_keys_are_refused_or_read(tmp_path, child, whole):
    """Without the child, a changed length of an array could take hours."""
    content, reader = whole.path.read_bytes(), gguf.GGUFReader(whole.path)
    tokens = reader.fields["tokenizer.ggml.tokens"].offset
    keys = [(24, tokens), (tokens, reader.tensors[0].field.offset)]
    assert 1 < count_refused(tmp_path / "m.gguf", content, keys, 8) < 16


@pytest.mark.medium
def test_the_size_of_the_tensors_does_not_count(tmp_path, child, whole):
    file = shutil.copy(whole.path, tmp_path / "large.gguf")
    with file.open("r+b") as opened:
        opened.truncate(1 << 30)  # a sparse file
    assert hf.model_config(file) == whole.config


@pytest.mark.medium
def test_a_damaged_file_passes_the_child_to_its_reader(tmp_path, child, whole):
    file = tmp_path / "m.gguf"
    file.write_bytes(whole.path.read_bytes()[:1000])
    refuse(file, "is truncated or damaged")
