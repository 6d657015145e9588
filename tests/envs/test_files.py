"""envs/files.py: every reader of environment files accepts a byte order mark."""

import gzip
import json

import pytest

from ragen_jax.envs.dataset.rows import file_source
from ragen_jax.envs.files import json_rows, json_value
from ragen_jax.envs.search_qa.passages import read_corpus
from ragen_jax.envs.search_qa.questions import load_questions
from ragen_jax.envs.search_qa.retrievers import load_corpus

pytestmark = pytest.mark.fast

MARK = b"\xef\xbb\xbf"
ROWS = [{"prompt": f"\u00e9 {i}", "contents": f"text {i}"} for i in range(3)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("before", [b"", MARK, MARK + b"\n", MARK + b"  \r\n"])
def test_lines_with_a_byte_order_mark(tmp_path, before):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(before + LINES)
    assert list(json_rows(path)) == ROWS
    assert list(file_source(path).read()) == ROWS
    texts = [row["contents"] for row in ROWS]
    assert load_corpus(path) == texts and list(read_corpus(path)) == texts
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(before + LINES))
    assert list(read_corpus(packed)) == texts


@pytest.mark.parametrize("before", [b"", MARK, MARK + b"\n"])
def test_a_list_with_a_byte_order_mark(tmp_path, before):
    path = tmp_path / "rows.json"
    path.write_bytes(before + json.dumps(ROWS).encode())
    assert json_value(path) == ROWS and list(file_source(path).read()) == ROWS
    path.write_bytes(before + json.dumps(["a", "b"]).encode())
    assert load_corpus(path) == ["a", "b"]


def test_questions_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes(MARK + b'{"question": "Which?", "answer": "That."}\n')
    assert [question.text for question in load_questions(path)] == ["Which?"]


def test_a_mark_elsewhere_is_no_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + MARK + LINES)
    with pytest.raises(ValueError, match=r"row 3 of .* cannot be read as JSON"):
        list(json_rows(path))
