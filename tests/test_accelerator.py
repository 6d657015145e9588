"""The accelerator's table: measurements at toy size, memory, the loop over pieces, and the page."""

import itertools
import json

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks import llm
from benchmarks.accelerator import loop, measures, page, pieces
from benchmarks.accelerator.pieces import Piece
from ragen_jax.config.build_learner import build_optimizer
from ragen_jax.configs.base import Optimizer
from ragen_jax.model.lora import TARGETS, init_adapters

H100 = {"device": "NVIDIA H100 80GB HBM3", "platform": "gpu", "count": 1, "memory": 70 * 2**30}
GIB = 2**30
DECODE = dict(shape="tiny", rows=2, cached=16, steps=4, cache_dtype="model")


def line(piece, kind, *rows, failure="", **device):
    return {
        **(H100 | device),
        **{"piece": piece, "kind": kind, "date": "2026-12-01", "jax": "0.10.2"},
        **{"seconds": 1.0, "failure": failure, "rows": list(rows)},
    }


# ------------------------------------------------------------------------------ measurements


@pytest.mark.medium
@pytest.mark.parametrize("rank", [0, 16])
def test_an_update_trains_the_model_or_its_adapters(rank):
    cases = [dict(shape="tiny", rank=rank, rows=64 // n, length=n) for n in (64, 32)]
    rows = list(measures.update(cases))
    assert [
        {name: row[name] for name in case} for row, case in zip(rows, cases, strict=True)
    ] == cases
    for row, T in zip(rows, (64, 32), strict=True):
        assert row["seconds"] > 0
        assert row["flops"] == 6 * 64 * (llm.weights(llm.TINY) + 6 * 4 * 32 * T)


@pytest.mark.medium
def test_decoding_reads_weights_and_cache():
    row, int8 = measures.decode([DECODE, DECODE | {"cache_dtype": "int8"}])
    assert row["seconds"] > 0
    # 2 keys or values, 6 layers, 2 heads of 32; at the middle of the steps 18 positions are cached.
    # int8 has one byte a number and four a head.
    assert row["bytes"] == 4 * 2 * (llm.weights(llm.TINY) + 2 * 18 * 2 * 6 * 2 * 32)
    saved = 4 * 2 * 18 * 2 * 6 * 2 * (2 * 32 - (32 + 4))
    assert int8["seconds"] > 0 and row["bytes"] - int8["bytes"] == saved


def test_compared_runs_are_paired_by_problem(tmp_path):
    solved = {"here": [[1, 1], [2, 0], [3, 1], [4, 1]], "cpu": [[4, 1], [3, 1], [2, 1], [1, 0]]}
    for name, problems in solved.items():
        (tmp_path / name / "eval").mkdir(parents=True)
        for number in (0, 2):
            file = tmp_path / name / "eval" / f"step_{number:06d}.json"
            file.write_text(json.dumps(problems))
        rows = [{"step": 0}] + [
            {"step": n, "rollout/success": 0.5, "rollout/response_length": 10.0 * n} for n in (1, 2)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    found = measures.compare_runs(tmp_path / "here", tmp_path / "cpu", 2)
    assert found["before"] == found["after"] == [0.75, 0.75]
    assert found["before_difference"] == 0  # +1, -1, 0, 0
    assert found["before_ci95"] == pytest.approx(1.96 * (2 / 3) ** 0.5 / 2)
    assert found["rollout/response_length"] == [15.0, 15.0]


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("rank", [0, 16])
def test_the_memory_of_an_update_is_that_of_its_arrays(rank):
    config = llm.shape("tiny", "bfloat16")
    params = jax.eval_shape(lambda: llm.random_params(config))
    trained, frozen = params, 0
    if rank:
        frozen = sum(2 * x.size for x in jax.tree.leaves(params))
        trained = jax.eval_shape(
            lambda: init_adapters(config, jax.random.key(0), rank=rank, targets=TARGETS)
        )
    moments = jax.eval_shape(build_optimizer(Optimizer()).init, trained)
    arrays = jax.tree.leaves((trained, trained, moments))  # the gradient is like the parameters
    expected = sum(x.size * x.dtype.itemsize for x in arrays) + frozen
    expected += 2 * 6 * 3 * 64 * 128  # bfloat16, layers, rows, positions, width
    found = pieces.needed("update", dict(shape="tiny", rank=rank, rows=3, length=64))
    assert found == pytest.approx(expected, rel=0.01)  # norms and biases are not counted
    assert found <= expected


def test_cases_that_do_not_fit_are_refused_with_their_bytes():
    decoding = pieces.decode("qwen3-4b", 1.0)
    fits, refused = pieces.split(decoding, 70 * GIB)
    assert [(case["rows"], case["cache_dtype"]) for case in fits.cases] == [
        *((8, "model"), (128, "model"), (512, "int8"))
    ]
    # 36 layers, 8 heads of 128, bfloat16; 1,024 + 64 positions; 4.02 billion parameters.
    need = 512 * 1088 * 36 * 2 * 8 * 128 * 2 + 2 * 4.022e9
    assert refused == [
        decoding.cases[2]
        | {"refused": f"needs {need / GIB:.1f} GiB at least; the device has 70.0 GiB"}
    ]
    assert pieces.split(decoding, None) == (decoding, [])


@pytest.mark.medium
def test_a_step_needs_parameters_moments_and_the_cache_of_its_slots():
    (paper,) = [one for one in pieces.PIECES if one.name == "step paper qwen2.5-0.5b"]
    slots, lock_step = (pieces.needed("step", case) / GIB for case in paper.cases)
    parameters = 494e6 / GIB
    assert 16 * parameters < slots < 30 * parameters
    assert lock_step > slots + 64 * 3600 * 24 * 2 * 2 * 64 * 2 / GIB  # 64 rows more


# ------------------------------------------------------------------------------ the loop


def fake_pieces():
    return tuple(Piece(name, "none", ({"n": 1},), 100.0) for name in ("a", "b", "c"))


def run(monkeypatch, tmp_path, outcomes, *, seconds=None, each=1.0):
    """Run the fake pieces; a piece takes `each` seconds. Returns (lines, late, given limits)."""
    clock, limits = itertools.count(step=each), []

    def run_child(given, limit):
        limits.append(limit)
        return outcomes(json.loads(given)["cases"])

    monkeypatch.setattr(loop, "run_child", run_child)
    path = tmp_path / "lines.jsonl"
    todo = loop.order(fake_pieces(), loop.stored(path))
    late = loop.run_pieces(todo, H100, path, seconds=seconds, clock=lambda: next(clock))
    return loop.stored(path), [piece.name for piece in late], limits


def test_a_failure_is_recorded_and_tried_again_last(monkeypatch, tmp_path, capsys):
    results = iter([([], "no room"), ([{"n": 1}], ""), ([{"n": 1}], "")])
    lines, late, limits = run(monkeypatch, tmp_path, lambda cases: next(results))
    assert [one["piece"] for one in lines] == ["a", "b", "c"] and not late
    assert [one["failure"] for one in lines] == ["no room", "", ""] and limits == [330.0] * 3
    printed = capsys.readouterr().err
    assert "2 of 3: b, 33% done, about 3 min left" in printed and "failed: no room" in printed
    again = [piece.name for piece in loop.order((*fake_pieces(), Piece("d", "", (), 1.0)), lines)]
    assert again == ["d", "a"]
    lines, *_ = run(monkeypatch, tmp_path, lambda cases: ([{"n": 1}], ""))
    assert [one["piece"] for one in lines] == ["a", "b", "c", "a"]
    assert loop.order(fake_pieces(), lines) == []


def test_no_piece_starts_that_would_end_too_late(monkeypatch, tmp_path):
    # The clock is read before each piece and around it: 30 s at a time.
    lines, late, limits = run(monkeypatch, tmp_path, lambda cases: ([{}], ""), seconds=210, each=30)
    assert [one["piece"] for one in lines] == ["a"] and late == ["b", "c"]
    assert limits == [180.0]  # what is left, not the piece's own limit


@pytest.mark.medium
def test_a_process_ends_at_its_limit_or_says_why_it_failed():
    assert loop.run_child('{"kind": "none", "cases": []}', 60) == ([], "KeyError: 'none'")
    assert loop.run_child("", 0.1) == ([], "ended after 0 s")


@pytest.mark.parametrize(
    "words, found, message",
    [
        (["--tiny"], None, "--tiny needs --out"),
        (["--only=nothing"], None, "no piece 'nothing'; the pieces are: device, "),
        (["--seconds=0"], None, "--seconds is 0; it must be above 0"),
        (["--out=OUT"], {"platform": "cpu", "count": 1}, "no GPU or TPU"),
        (["--out=OUT"], {"platform": "gpu", "count": 8}, "8 devices: the table is of one"),
    ],
)
def test_bad_calls_are_refused_in_a_line(monkeypatch, tmp_path, capsys, words, found, message):
    monkeypatch.setattr(loop, "run_child", lambda *_: ([found], ""))
    with pytest.raises(SystemExit) as left:
        command.main(["accelerator", *(word.replace("OUT", str(tmp_path)) for word in words)])
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_and_its_time_fit_two_short_calls(capsys):
    command.main(["accelerator", "--list"])
    printed = capsys.readouterr().out
    assert all(piece.name in printed for piece in pieces.PIECES)
    assert sum(piece.seconds for piece in pieces.PIECES) <= 2 * 560
    assert max(piece.limit for piece in pieces.PIECES) < 600


@pytest.mark.slow
def test_the_whole_table_at_toy_size(tmp_path, capsys):
    command.main(["accelerator", "--tiny", f"--out={tmp_path}"])
    lines = loop.stored(tmp_path / loop.FILE)
    assert [one["failure"] for one in lines] == [""] * len(pieces.TINY)
    text = (tmp_path / loop.PAGE).read_text()
    for title in ("Decode", "Update", "A step of RL", "Learning"):
        assert f"### {title}" in text
    slots, lock_step = lines[4]["rows"]
    assert slots["replies"] == lock_step["replies"] and slots["reply"] == lock_step["reply"]
    (learning,) = lines[5]["rows"]  # both runs are of the CPU here
    assert learning["after_difference"] == 0 and learning["after_ci95"] == 0
    assert len(set(learning["rollout/response_length"])) == 1
    command.main(["accelerator", "--tiny", f"--out={tmp_path}"])
    assert loop.stored(tmp_path / loop.FILE) == lines


# ------------------------------------------------------------------------------ the page


def test_a_page_without_figures_says_how_to_fill_it(tmp_path):
    text = page.write([])
    assert "Nothing has been measured on an accelerator yet" in text and "##" not in text
    assert "python -m benchmarks accelerator --seconds=560" in text


def test_the_committed_page_is_that_of_the_stored_lines():
    text = (loop.OUT / loop.PAGE).read_text(encoding="utf-8")
    assert text == page.write(loop.stored(loop.OUT / loop.FILE))


def test_published_figures_are_counted_as_ours():
    """prime-rl states tokens/s and MFU of one row of 16,384 tokens of Qwen3-0.6B."""
    flops = llm.update_flops(llm.shape("qwen3-0.6b", "bfloat16"), rows=1, length=16_384)
    mfu = 11_896 * flops / 16_384 / page.PEAKS[H100["device"]][0]
    assert mfu == pytest.approx(0.1108, abs=0.0005)


def test_figures_of_the_page():
    limits = dict(copy=2e12, product=600e12, dtype="bfloat16")
    paper = dict(shape="qwen2.5-0.5b", rank=0, step=22.0, update=10.0, diagnose=2.0, compile=2.0)
    paper |= dict(devices=1, replies=640.0, reply=120.0, cache_kernel="xla")
    learning = dict(steps=20, before=[0.4, 0.41], before_difference=-0.01, before_ci95=0.02)
    learning |= dict(after=[0.5, 0.42], after_difference=0.08, after_ci95=0.03)
    learning |= {"rollout/success": [0.4, 0.5], "rollout/response_length": [20.0, 19.0]}
    update = dict(shape="qwen3-0.6b", rank=0, rows=1, length=16_384)
    decoded = dict(shape="x", steps=64, cache_dtype="model")
    lines = [
        line("device", "device", limits),
        line("decode x", "decode", failure="an earlier failure"),
        line(
            "decode x",
            "decode",
            decoded | dict(rows=8, seconds=0.128, bytes=0.128e12),
            decoded | dict(rows=512, refused="needs 84.0 GiB at least; the device has 70.0 GiB"),
        ),
        line("update y", "update", update | dict(seconds=0.5, flops=98.94e12)),
        line(
            "step paper qwen2.5-0.5b",
            "step",
            paper | dict(slots=64, rollout=5.0),
            paper | dict(slots=0, rollout=8.0),
            paper | dict(slots=64, rollout=4.0, cache_kernel="pages"),
        ),
        line("learning", "learning", learning),
        line("step speedrun qwen3-4b", "step", failure="out of memory"),
        line("device", "device", limits, device="TPU v6 lite"),
    ]
    text = page.write(lines)
    for expected in (
        "Copying moves 2,000 GB/s, read plus written",
        "a bfloat16 matrix product runs at 600 TFLOP/s",
        "| x | 8 | 4,000 | 2.00 | 50% |",
        "| x | 512 | needs 84.0 GiB at least; the device has 70.0 GiB |",
        "| qwen3-0.6b | full | 1 x 16,384 | 32,768 | 0.5 | 20% | 33% | prime-rl's trainer on",
        "| paper qwen2.5-0.5b | 64 slots, 1.60 x lock step's rollout | 20.0 | 5.0 | 10.0 | 2.0 |",
        "| 5.0 | 10.0 | 2.0 | 10% | 20 | 640 | 120 | - |",
        "| paper qwen2.5-0.5b | lock step | 20.0 | 8.0 |",
        "| 64 slots, kernel for pages, 2.00 x lock step's rollout | 20.0 | 4.0 |",
        "after the warm start | 0.400 | 0.410 | -0.010 ± 0.020: equal |",
        "after 20 steps | 0.500 | 0.420 | +0.080 ± 0.030: **different** |",
        "- step speedrun qwen3-4b: out of memory",
        "## TPU v6 lite",
    ):
        assert expected in text, expected
    assert "an earlier failure" not in text
    assert text.index("## NVIDIA") < text.index("### Decode") < text.index("## TPU")
