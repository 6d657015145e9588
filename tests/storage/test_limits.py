"""limits.py, confined/: files that would take all memory or never end are refused in one line."""

import gzip
import io
import json
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from cli_commands import call
from pyarrow import parquet
from simulated_runs import write_run

from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.envs.files import json_rows, json_value, open_parquet
from ragen_jax.envs.search_qa.passages import read_corpus
from ragen_jax.model import hf, lora, weights
from ragen_jax.run.log import write_scores
from ragen_jax.score.files import read_files
from ragen_jax.score.values import parse_nested
from ragen_jax.storage import confined, limits

fast = pytest.mark.fast
ROW = json.dumps({"prompt": "1 + 1", "response": "<think>two</think><answer>2</answer>"})


def score(model, path):
    """Return the stderr of a score command that refuses a file in one line."""
    code, _, err = call("ragen_jax.score", f"--model={model}", f"--rollouts={path}")
    assert code == 2 and err.count("\n") == 1, err
    return err


# ------------------------------------------------------------------------------ text, gzip, JSON


@fast
@pytest.mark.parametrize("packed", [True, False], ids=["gzip", "plain"])
def test_a_file_that_unpacks_to_too_much_is_refused(language_model, tmp_path, monkeypatch, packed):
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    content = (ROW + "\n").encode() * 20_000
    path.write_bytes(gzip.compress(content) if packed else content)
    assert packed == (path.stat().st_size < 1 << 14)
    assert "bomb.jsonl.gz holds more than 1,048,576 bytes" in score(language_model, path)


@fast
def test_good_files_are_read_as_before(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(f"{ROW}\n{ROW}\n".encode()) + gzip.compress(ROW.encode()))
    found = read_files([str(path)])
    assert len(found.rows) == 3 and not found.broken


@fast
@pytest.mark.parametrize("read", [json_rows, read_corpus, lambda path: read_files([str(path)])])
def test_a_line_that_does_not_end_is_refused(tmp_path, monkeypatch, read):
    monkeypatch.setattr(limits, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "long.jsonl"
    path.write_text('{"contents": "a"}\n{"contents": "' + "a" * 2000 + '"}\n')
    with pytest.raises(ValueError, match="line 2 of .*long.jsonl has more than 1,000 bytes"):
        list(read(path))


@pytest.mark.long
def test_a_line_of_a_packed_corpus_is_not_unpacked_whole(tmp_path):
    """A line of 4 GiB: a process that may take 1 GiB more reads no more than the limit."""
    path = tmp_path / "corpus.jsonl.gz"
    piece = gzip.compress(b"a" * (64 << 20), 9)
    path.write_bytes(piece * 64)
    code = f"""
import resource
from ragen_jax.envs.search_qa.passages import read_corpus
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
list(read_corpus({str(path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert "LimitExceeded: line 1 of" in last and "has more than 268,435,456 bytes" in last


@fast
@pytest.mark.parametrize("text", ["[" + "[]," * 2000 + "[]]", '{"a": [' + "{}," * 2000 + "{}]}"])
def test_a_json_text_of_too_many_values_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", 1000)
    path = tmp_path / "many.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"may hold [\d,]+ values; accepted: 1,000"):
        json_value(path)
    with pytest.raises(ValueError, match=r"may hold [\d,]+ values; accepted: 1,000"):
        hf.read_json(path)
    (broken,) = read_files([str(path)]).broken
    assert "values; accepted: 1,000" in broken.reason


@fast
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 100_000, "[" + "-" * 100_000 + "1]"]
)
def test_deep_json_and_long_numbers_are_refused(tmp_path, text):
    path = tmp_path / "deep.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"deep\.json"):
        hf.read_json(path)
    with pytest.raises(ValueError, match=r"deep\.json"):
        json_value(path)
    assert read_files([str(path)]).rows == []
    assert parse_nested(text) == text


@fast
def test_a_python_expression_of_too_many_values_stays_a_text(monkeypatch):
    text = "['a', " + "(1,)," * 2000 + "]"
    assert isinstance(parse_nested(text), list)
    monkeypatch.setattr("ragen_jax.score.values.MAX_REPR_VALUES", 1000)
    assert parse_nested(text) == text


# ------------------------------------------------------------------------------ Parquet


def dictionary_bomb(path, rows, length, *, stores_type):
    """A file of a few kilobytes whose column decodes to rows * length bytes."""
    column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["a" * length])
    table = pa.table({"prompt": column, "response": column})
    parquet.write_table(table, path, compression="zstd", store_schema=stores_type)
    assert path.stat().st_size < 50_000


@pytest.mark.parametrize("stores_type", [True, False])
def test_a_dictionary_that_is_written_out_is_refused(
    language_model, tmp_path, monkeypatch, stores_type
):
    monkeypatch.setattr(confined, "MAX_BATCH_BYTES", 1 << 20)
    path = tmp_path / "bomb.parquet"
    dictionary_bomb(path, 100, 20_000, stores_type=stores_type)
    assert "100 rows decode to 4," in score(language_model, path)
    with pytest.raises(ValueError, match="100 rows decode to 4,"), open_parquet(path):
        pass


def test_the_child_that_decodes_has_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(confined, "MEMORY", 300 << 20)
    path = tmp_path / "bomb.parquet"
    dictionary_bomb(path, 4000, 1 << 20, stores_type=False)  # 8 GiB
    with pytest.raises(ValueError, match=r"decoding it takes more than 60 s or 0.29\d* GiB"):
        confined.check_parquet(path)


def test_rows_without_content_count(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "nothing.parquet"
    parquet.write_table(pa.table({"prompt": pa.nulls(100_000)}), path)
    with pytest.raises(ValueError, match="it decodes to more than 1,048,576 bytes"):
        read_files([str(path)])


def test_one_child_checks_all_files_and_names_the_refused_one(tmp_path, monkeypatch):
    started = []
    popen = confined.subprocess.Popen
    monkeypatch.setattr(
        confined.subprocess,
        "Popen",
        lambda *words, **more: started.append(1) or popen(*words, **more),
    )
    for number in range(3):
        row = {"prompt": f"1 + {number}", "response": "<think>two</think><answer>2</answer>"}
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
    assert len(read_files([str(tmp_path)]).rows) == 3 and len(started) == 1
    monkeypatch.setattr(limits, "MAX_FILE_BYTES", 1 << 20)
    parquet.write_table(pa.table({"prompt": pa.nulls(100_000)}), tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=r"/1\.parquet: it decodes to more than 1,048,576 bytes"):
        read_files([str(tmp_path)])


def bad_cells():
    """{kind: a column of three values, of which pyarrow cannot convert the second}."""
    halves = pa.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes())
    return {
        "a date after 9999": pa.array([0, 2**30, 0], pa.date32()),
        "nanoseconds": pa.array([0, 1, 0], pa.time64("ns")),
        "bytes that are not UTF-8": pa.Array.from_buffers(
            pa.string(), 3, [None, halves, pa.py_buffer(b"a\xff\xfeb")]
        ),
    }


@pytest.mark.parametrize("kind", bad_cells())
def test_a_cell_that_cannot_be_converted_breaks_its_row_alone(kind, tmp_path):
    path = tmp_path / "rows.parquet"
    texts = {"prompt": ["a", "b", "c"], "response": ["1", "2", "3"]}
    parquet.write_table(pa.table({**texts, "when": bad_cells()[kind]}), path)
    found = read_files([str(path)])
    assert len(found.rows) == 2
    (broken,) = found.broken
    assert broken.place == f"{path}:2" and broken.reason.startswith("field when of type "), broken


@pytest.mark.parametrize("env", ["dataset", "countdown", "search_qa", "deepcoder"])
def test_a_cell_of_a_data_set_that_cannot_be_converted_is_named(env, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fields = {  # the first gets the cell
        "dataset": ("when", "prompt"),
        "countdown": ("target", "nums"),
        "search_qa": ("question", "answer"),
        "deepcoder": ("problem", "tests"),
    }[env]
    (tmp_path / "rewarding.py").write_text("def reward(prompt, reply, row):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "rows.parquet"
    columns = {name: ["[]", "b", "c"] for name in fields}
    column = bad_cells()["nanoseconds" if env == "countdown" else "bytes that are not UTF-8"]
    parquet.write_table(pa.table(columns | {fields[0]: column}), path)
    words = [f"--config={env}", f"--config.env.options.path={path}"]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "two words"}\n')
    words += {
        "dataset": ["--config.env.options.reward=rewarding:reward"],
        "countdown": [],
        "search_qa": [f"--config.env.options.corpus={corpus}"],
        "deepcoder": ["--config.env.options.language=python"],
    }[env]
    code, _, err = call("ragen_jax.check_data", *words)
    assert code == 2 and err.count("\n") == 1, err
    assert f"row 1 of {path}: field {fields[0]} of type {column.type} cannot be converted" in err


# ------------------------------------------------------------------------------ tokenizers


@pytest.fixture
def hostile(language_model, tmp_path):
    """make(changes): the directory of a model with a changed tokenizer or chat template."""

    def make(template=None, **parts):
        directory = tmp_path / "hostile"
        shutil.copytree(language_model, directory)
        (directory / "checksums.json").unlink(missing_ok=True)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        file = directory / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))
        return directory

    return make


@pytest.fixture
def little(monkeypatch):
    """A child process gets little memory and time."""
    monkeypatch.setattr(confined, "MEMORY", 500 << 20)
    monkeypatch.setattr(confined, "SECONDS", 1)


def sequence(kind, patterns):
    parts = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in patterns]
    return {"type": "Sequence", kind: parts}


DOUBLES = (
    "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}"
)
OF_MESSAGES = (
    "{% set n = namespace(t='a') %}"
    "{% for m in messages %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}"
)
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
slow_child = pytest.mark.slow


@pytest.mark.parametrize(
    ("template", "stage"),
    [
        (NESTED, "chat template takes more than 1 s"),
        pytest.param(DOUBLES, "chat template takes more than 1 s", marks=slow_child),
        pytest.param(OF_MESSAGES, "chat template", marks=slow_child),
        pytest.param("{{ 'a' * 10 ** 10 }}", "chat template takes", marks=slow_child),
        pytest.param("{{ 10 ** (10 ** 10) % 7 }}", "chat template takes", marks=slow_child),
        pytest.param("{{ 'a' * 5000000 }}", "makes 5,000,000 characters", marks=slow_child),
    ],
)
def test_a_template_that_grows_or_never_ends_is_refused(hostile, little, template, stage):
    directory = hostile(template)
    (directory / "rows.jsonl").write_text(ROW)
    err = score(directory, directory / "rows.jsonl")
    assert str(directory) in err and stage in err


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence("normalizers", [("e", "ee")] * 40)},
        pytest.param(
            {"normalizer": sequence("normalizers", [("xyzzy", "xyzzyxyzzy")] * 40)},
            marks=slow_child,
        ),
        pytest.param({"normalizer": sequence("normalizers", [("e", "e" * 99)])}, marks=slow_child),
    ],
    ids=["doubles", "doubles a word", "99 for one"],
)
def test_a_normaliser_that_grows_is_refused(hostile, little, parts):
    with pytest.raises(ValueError, match="tokenizer") as error:
        hf.load_tokenizer(hostile(**parts))
    assert "encoding a short text" in str(error.value) or "tokens of" in str(error.value)


def test_a_good_tokenizer_passes_its_child_and_ours_need_none(hostile, language_model, monkeypatch):
    started = []
    monkeypatch.setattr(confined, "_confine", lambda *words: started.append(words))
    hf.load_tokenizer(language_model)
    assert not started
    monkeypatch.undo()
    directory = hostile(normalizer={"type": "NFC"})
    assert hf.load_tokenizer(directory).encode("two words")


@fast
def test_a_tokenizer_file_that_is_too_large_is_refused(hostile, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CONFIG_BYTES", 2000)
    with pytest.raises(ValueError, match=r"tokenizer.json has [\d,]+ bytes; a tok"):
        hf.load_tokenizer(hostile())


# ------------------------------------------------------------------------------ models, arrays


@fast
def test_a_header_of_a_million_tensors_is_refused(hostile, monkeypatch):
    directory = hostile()
    monkeypatch.setattr(weights, "MAX_HEADER_BYTES", 500)
    with pytest.raises(ValueError, match=r"model.safetensors has a header of [\d,]+ bytes"):
        hf.load_weights(directory)
    monkeypatch.undo()
    hf.load_weights(directory)


@fast
@pytest.mark.parametrize("value", [10**10, 10**40, -1, 0, 2.5, "9", [1], True])
@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_sizes_that_are_none_are_refused(hostile, name, value):
    directory = hostile()
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=rf"config.json: {name} is .*; accepted: a whole number"):
        hf.load_weights(directory)


def packed(**members):
    """The bytes of an .npz file whose members have this content."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return data.getvalue()


def array_file(shape, content=b""):
    """A file in NumPy's format whose header promises a shape."""
    data = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(data, header)
    return data.getvalue() + content


@pytest.mark.medium
@fast
@pytest.mark.parametrize("kind", ["zeros", "promise", "overflow"])
def test_an_npz_that_unpacks_to_too_much_is_named_and_left_out(tmp_path, monkeypatch, kind):
    run = write_run(tmp_path / "run", steps=40)
    write_scores(
        run / "diagnostics", 10, Scores(np.zeros((4, 2)), np.full(4, 10), np.arange(4) % 2)
    )
    bad = run / "diagnostics" / "step_000020.npz"
    shape = {"zeros": (1000, 1000), "promise": (2**40,), "overflow": (2**62, 2**62)}[kind]
    arrays = np.zeros((1000, 1000), np.float32).tobytes() if kind == "zeros" else b""
    lengths = array_file((1000,), b"\0" * 4000)
    bad.write_bytes(packed(score_MN=array_file(shape, arrays), length_M=lengths, prompt_M=lengths))
    monkeypatch.setattr(limits, "MAX_ARRAYS_BYTES", 1 << 20)
    code, out, err = call("ragen_jax.report", str(run), f"--out={tmp_path / 'page.html'}")
    assert code == 0 and "step_000020.npz is damaged" in out + err
    assert "step_000010.npz" not in out + err


@pytest.mark.medium
@fast
def test_the_header_of_an_adapter_is_checked(language_model, tmp_path):
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / lora.CONFIG).write_text(json.dumps(fields))
    header = json.dumps({f"tensor {i}": {} for i in range(1_000_000)}).encode()
    size = len(header).to_bytes(8, "little")
    (tmp_path / "adapter_model.safetensors").write_bytes(size + header)
    with pytest.raises(ValueError, match="has a header of [0-9,]+ bytes; accepted: 16,777,216"):
        lora.load_adapter(tmp_path, hf.model_config(language_model))
