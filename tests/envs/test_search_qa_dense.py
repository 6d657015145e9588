"""Dense retrieval: exact search by NumPy, on one device and on several, and vector files."""

import json
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from device_processes import ROOT, on_devices
from nearest_rows_script import exact

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa import dense
from ragen_jax.envs.search_qa.dense import (
    DenseRetriever,
    check_fit,
    load_matrix,
    matrix_struct,
    nearest,
)
from ragen_jax.envs.search_qa.retrieve import MAX_QUERY, Document, Retriever
from ragen_jax.envs.search_qa.vectors import open_vectors

pytestmark = pytest.mark.fast

MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.fixture
def saved(tmp_path):
    """saved(array) -> the path of its file."""

    def save(array, name="vectors.npy"):
        np.save(tmp_path / name, array)
        return tmp_path / name

    return save


def random_matrix(rows, width=24, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32)


@pytest.mark.medium
@pytest.mark.parametrize("rows", [1, 3, 64, 1001])
def test_the_nearest_are_those_of_numpy(saved, rows, monkeypatch):
    monkeypatch.setattr(dense, "BLOCK", 100)  # 1001 rows: 11 blocks of 91
    matrix_ND = random_matrix(rows)
    matrix = load_matrix(open_vectors(saved(matrix_ND)), MESH, "float32")
    query_QD = random_matrix(45, seed=1)  # computed in two products
    for k in (1, 5):
        score_QK, row_QK = matrix.nearest(query_QD, k)
        expected_QK, best_QK = exact(matrix_ND, query_QD, k)
        np.testing.assert_array_equal(row_QK, best_QK)  # all rows if k is larger than their number
        np.testing.assert_allclose(score_QK, expected_QK, rtol=1e-5, atol=1e-5)


def test_more_are_wanted_than_a_block_holds(saved, monkeypatch):
    monkeypatch.setattr(dense, "BLOCK", 4)
    matrix_ND = random_matrix(30)
    matrix = load_matrix(open_vectors(saved(matrix_ND)), MESH, "float32")
    _, row_QK = matrix.nearest(matrix_ND[:3], 10)
    np.testing.assert_array_equal(row_QK, exact(matrix_ND, matrix_ND[:3], 10)[1])


def test_of_equal_ones_the_lower_row(saved, monkeypatch):
    monkeypatch.setattr(dense, "BLOCK", 8)
    matrix_ND = np.tile(np.eye(4, dtype=np.float32), (10, 1))
    matrix = load_matrix(open_vectors(saved(matrix_ND)), MESH, "float32")
    score_QK, row_QK = matrix.nearest(np.eye(4, dtype=np.float32)[[2]], 12)
    assert row_QK[0].tolist() == [*range(2, 40, 4), 0, 1]
    assert score_QK[0].tolist() == [1.0] * 10 + [0.0] * 2


def test_rows_that_only_fill_up_are_never_found(saved, monkeypatch):
    monkeypatch.setattr(dense, "BLOCK", 4)  # two blocks of three rows
    # All products are negative, so a padding row of zeros would win.
    matrix = load_matrix(open_vectors(saved(-np.ones((5, 3), np.float32))), MESH, "float32")
    assert matrix.matrix_SRD.shape == (2, 3, 3)
    score_QK, row_QK = matrix.nearest(np.ones((1, 3)), 9)
    assert row_QK.tolist() == [[0, 1, 2, 3, 4]] and (score_QK == -3).all()


def test_numbers_of_queries_share_a_program(saved):
    matrix = load_matrix(open_vectors(saved(random_matrix(50))), MESH, "float32")
    before = nearest._cache_size()
    alone = matrix.nearest(random_matrix(1, seed=1), 3)
    for count in (0, 2, 31, 33):
        score_QK, row_QK = matrix.nearest(random_matrix(count, seed=1), 3)
        assert score_QK.shape == row_QK.shape == (count, 3)
        if count:  # the result does not depend on the other queries
            assert row_QK[0].tolist() == alone[1][0].tolist()
            assert score_QK[0].tobytes() == alone[0][0].tobytes()
    assert nearest._cache_size() == before + 1


def test_bfloat16(saved):
    matrix_ND = random_matrix(300)
    path = saved(matrix_ND.astype(np.float16))
    matrix = load_matrix(open_vectors(path), MESH, "bfloat16")
    assert matrix.matrix_SRD.dtype == ml_dtypes.bfloat16
    rounded = matrix_ND.astype(np.float16).astype(ml_dtypes.bfloat16).astype(np.float32)
    query_QD = rounded[:7]
    score_QK, row_QK = matrix.nearest(query_QD, 5)
    expected_QK, best_QK = exact(rounded, query_QD, 5)
    np.testing.assert_array_equal(row_QK, best_QK)
    np.testing.assert_allclose(score_QK, expected_QK, rtol=1e-5, atol=1e-5)  # summed in float32


def on_mesh(path, *words, devices):
    script = ROOT / "tests" / "envs" / "nearest_rows_script.py"
    process = on_devices(devices, [script, path, *words])
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


@pytest.mark.medium
@pytest.mark.parametrize(
    "rows, sizes", [(1003, "2,2,2"), pytest.param(3, "8,1,1", marks=pytest.mark.long)]
)
def test_on_eight_devices(saved, rows, sizes):
    # 1,003 rows: each device has 126, the last has 121. With three rows, most devices have none.
    found = on_mesh(saved(random_matrix(rows)), "float32", 40, 5, sizes, devices=8)
    assert found["devices"] == found["parts"] == 8 and found["compiled"] == 1
    assert found["same"] == 1.0 and found["apart"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_a_hundred_thousand_of_768(saved, devices):
    path = saved(random_matrix(100_000, 768))
    found = on_mesh(path, "float32", 256, 5, f"{devices},1,1", devices=devices)
    assert found["devices"] == devices and found["same"] == 1.0 and found["apart"] < 1e-3


def test_each_chip_of_a_pod_holds_two_gigabytes():
    class Pod:  # the attributes that the layout reads
        size = 16

    blocks, size = dense.layout(21_015_324, Pod)
    held = blocks * size * 768 * 2
    assert 21_015_324 <= 16 * blocks * size < 21_015_324 * 1.001
    assert 2.0e9 < held < 2.05e9
    assert matrix_struct(10, 4, "float32", MESH).shape == (1, 10, 4)


# ------------------------------------------------------------------------------ files


def test_a_file_of_faiss(tmp_path):
    faiss = pytest.importorskip("faiss")
    matrix_ND = random_matrix(200)
    index = faiss.IndexFlatIP(24)
    index.add(matrix_ND)
    path = tmp_path / "e5_Flat.index"
    faiss.write_index(index, str(path))
    vectors = open_vectors(path)
    assert (vectors.rows, vectors.width) == (200, 24)
    np.testing.assert_array_equal(vectors.read(3, 90), matrix_ND[3:90])
    _, row_QK = load_matrix(vectors, MESH, "float32").nearest(matrix_ND[:9], 5)
    np.testing.assert_array_equal(row_QK, index.search(matrix_ND[:9], 5)[1])


def test_other_indices_of_faiss_are_refused(tmp_path):
    faiss = pytest.importorskip("faiss")
    for name, index in (("l2", faiss.IndexFlatL2(4)), ("graph", faiss.IndexHNSWFlat(4, 8))):
        index.add(random_matrix(5, 4))
        path = tmp_path / f"{name}.index"
        faiss.write_index(index, str(path))
        with pytest.raises(ValueError, match=f"{name}.index must be (a flat|an index of inner)"):
            open_vectors(path)
    path.write_bytes(b"no index")
    with pytest.raises(ValueError, match=r"graph\.index is not an index that faiss can read"):
        open_vectors(path)


def test_without_faiss(tmp_path, monkeypatch):
    (tmp_path / "x.index").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"x\.index needs faiss: pip install 'ragen_jax\[faiss\]'"):
        open_vectors(tmp_path / "x.index")


def test_unusable_files(tmp_path, saved):
    with pytest.raises(ValueError, match="no vectors at .*nowhere.npy"):
        open_vectors(tmp_path / "nowhere.npy")
    for array, reason in (
        (np.zeros(4, np.float32), r"got float32 of shape \[4\]"),
        (np.zeros((4, 2), np.int64), r"float16 or float32, got int64"),
        (np.zeros((0, 2), np.float32), r"holds no vectors: its shape is \[0, 2\]"),
    ):
        with pytest.raises(ValueError, match=f"vectors.npy.*{reason}"):
            open_vectors(saved(array))
    path = saved(np.zeros((4, 2), np.float32))
    for content in (b"", b"not NumPy's", path.read_bytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"vectors\.npy is not a complete \.npy file"):
            open_vectors(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none(saved, bad, monkeypatch):
    monkeypatch.setattr(dense, "PIECE", 10)
    matrix_ND = random_matrix(35)
    matrix_ND[33, 2] = bad
    vectors = open_vectors(saved(matrix_ND))
    with pytest.raises(ValueError, match=r"vectors\.npy, row 33: a vector must be finite"):
        load_matrix(vectors, MESH, "float32")
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got 'int8'"):
        load_matrix(vectors, MESH, "int8")


# ------------------------------------------------------------------------------ texts


class Letters:
    """The vector of a text: how often it has each letter of `abc`."""

    width = 3

    def __init__(self):
        self.longest = 0

    def __call__(self, texts):
        self.longest = max(map(len, texts))
        counts = [[text.count(letter) for letter in "abc"] for text in texts]
        return np.array(counts, np.float32).reshape(-1, 3)


def test_documents_are_found_by_text(saved):
    texts = ["cc", "aaa", "b", "aab"]
    path = saved(Letters()(texts))
    matrix = load_matrix(open_vectors(path), MESH, "float32")
    index = DenseRetriever(matrix, Letters(), texts)
    assert isinstance(index, Retriever)
    assert index.search([], 2) == []
    a, b = index.search(["a", "\ud800b\x00"], 2)
    assert a == [Document("1", "aaa", 3.0), Document("3", "aab", 2.0)]
    assert b == [Document("2", "b", 1.0), Document("3", "aab", 1.0)]
    assert [d.text for d in index.search(["a"], 99)[0]] == ["aaa", "aab", "cc", "b"]


def test_long_queries_are_cut(saved):
    path = saved(np.eye(3, dtype=np.float32))
    letters = Letters()
    index = DenseRetriever(load_matrix(open_vectors(path), MESH, "float32"), letters, "abc")
    index.search(["a" * 10 * MAX_QUERY], 1)
    assert letters.longest == MAX_QUERY


def test_a_corpus_of_other_vectors_is_refused(saved):
    wide = open_vectors(saved(random_matrix(4, 5)))
    with pytest.raises(ValueError, match=r"vectors\.npy: its vectors have 5 numbers, .* encoder 3"):
        check_fit(wide, Letters.width, ["a"] * 4)
    vectors = open_vectors(saved(random_matrix(4, 3)))
    with pytest.raises(ValueError, match=r"vectors\.npy holds 4 vectors, the corpus 3 texts"):
        check_fit(vectors, Letters.width, ["a"] * 3)
    check_fit(vectors, Letters.width, ["a"] * 4)
