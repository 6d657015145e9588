"""python -m ragen_jax.check_data: its report on files and on generated problems."""

import json
import shlex

import pytest
from cli_commands import README, ROOT, call

from ragen_jax.envs import ENVS
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.problems import SPLITS, split_by_hash

pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """A file in MetaMathQA's format in the current folder, with a separate cache."""
    rows = [
        {
            "type": ("MATH_AnsAug", "GSM_Rephrased")[index % 2],
            "query": f"What is {index} + {index}?",
            "original_question": f"How much is {index // 2} twice?",
            "response": f"It is easy. The answer is: {2 * index}" if index != 7 else "No idea.",
        }
        for index in range(40)
    ]
    path = tmp_path / "MetaMathQA-395K.json"
    path.write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return rows, path


def test_the_command_of_the_readme_that_looks_at_data(questions):
    (command,) = [line for line in README if line.startswith("ragen_jax.check_data")]
    words = shlex.split(command, comments=True)
    words[1] = words[1].replace("configs/", f"{ROOT}/configs/")
    code, out, err = call(*words)
    assert (code, err) == (
        2,
        "error: config.eval.episodes is 1024, but MetaMathQA-395K.json holds out only 6 distinct "
        "problems; lower it or use a larger file\n",
    )
    # A run that never plays held-out problems requires none.
    code, _, err = call(*words, "--config.eval.every=0", "--config.diagnose.gradients_every=0")
    assert (code, err) == (0, "")
    code, again, err = call(*words, "--config.eval.episodes=6", "--rows=2")
    assert code == 0, err
    left_out, *out = out.splitlines()
    assert left_out == "MetaMathQA-395K.json: 1 row(s) without 'The answer is: ' are left out"
    assert again.splitlines() == out[: len(again.splitlines())]  # the first shows a row more
    originals = [f"howmuchis{index // 2}twice" for index in range(40) if index != 7]
    dealt = {
        split: [x for x in originals if split_by_hash("metamathqa", x) == split] for split in SPLITS
    }
    split = split_by_hash("metamathqa", originals[0])
    assert out[:10] == [
        "metamathqa: MetaMathQA-395K.json",
        "  fields      type, query, original_question, response",
        "  problems    39 available",
        *(
            f"  {split:<11} {len(of)}, {len(set(of))} of them distinct"
            for split, of in dealt.items()
        ),
        f"  row 0 ({split})",
        "    Question: What is 0 + 0?",
        "    -> 0",
        f"  row 1 ({split})",
    ]
    code, out, err = call(*words, "--config.env.options.types=GSM_", "--config.eval.episodes=6")
    assert code == 0 and "  problems    19 available" in out.splitlines()
    code, out, err = call(*words, "--config.env.options.max_rows=9", "--config.eval.episodes=1")
    assert code == 0 and "  problems    8 available" in out.splitlines()


def test_a_file_that_cannot_be_used_is_told_in_one_line(questions):
    rows, path = questions
    del rows[3]["query"]
    path.write_text(json.dumps(rows))
    words = ["ragen_jax.check_data", "--config=metamathqa"]
    code, out, err = call(*words, f"--config.env.options.path={path}")
    assert (code, out) == (2, "")
    assert err == (
        f"error: config.env.options of 'metamathqa': row 3 of {path} lacks the field query\n"
    )
    code, out, err = call(*words, "--rows=-1")
    assert (code, err) == (2, "error: --rows is -1; it must be at least 0\n")


def test_problems_of_a_parquet_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    # The second row cannot be solved; the third is the first in another order.
    table = pyarrow.table({"target": [8, 99, 8], "nums": [[3, 5], [1, 2], [5, 3]]})
    parquet.write_table(table, tmp_path / "some.parquet")
    words = [f"--config.env.options.path={tmp_path}/some.parquet", "--config.eval.episodes=1"]
    code, out, err = call("ragen_jax.check_data", "--config=countdown", *words)
    lines = out.splitlines()
    assert lines[1:3] == ["  fields      target, nums", "  problems    2 available"]
    assert sorted(line.split(maxsplit=1)[1] for line in lines[3:6]) == [
        "0, 0 of them distinct",
        "0, 0 of them distinct",
        "2, 1 of them distinct",
    ]
    assert lines[6].startswith("  row 0 (") and lines[10].startswith("  row 2 (")
    assert lines[7:10] == ["    Numbers: 3, 5", "    Target: 8", "    -> 5+3"]


def test_questions_that_are_searched_for(tmp_path):
    rows = [
        {"question": f"What is {i % 30}?", "ground_truth": f"it {i}", "data_source": "own"}
        for i in range(40)
    ]
    questions, corpus = tmp_path / "q.jsonl", tmp_path / "corpus.json"
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    corpus.write_text(json.dumps([f"{i} is it {i}" for i in range(40)]))
    words = ["ragen_jax.check_data", "--config=search_qa", f"--config.env.options.path={questions}"]
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err == (
        "error: config.env.options of 'search_qa': questions of a file (path) are searched for by "
        "retriever='bm25', which needs corpus, got None\n"
    )
    words += [f"--config.env.options.corpus={corpus}", "--config.eval.episodes=3", "--rows=1"]
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    dealt = [split_by_hash("search_qa", f"whatis{i % 30}") for i in range(40)]
    assert lines == [
        f"search_qa: {questions}",
        "  fields      question, ground_truth or answer or answers or golden_answers",
        "  problems    40 available",
        *(
            f"  {split:<11} {dealt.count(split)}, {dealt[:30].count(split)} of them distinct"
            for split in SPLITS
        ),
        f"  row 0 ({dealt[0]})",
        "    Question: What is 0?",
        "    -> finish[it 0]",
    ]
    corpus = tmp_path / "other.json"  # a new name, because a corpus is read only once
    corpus.write_text('["text", 5]')
    words[-3] = f"--config.env.options.corpus={corpus}"
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err == (
        f"error: config.env.options of 'search_qa': item 1 of {corpus} must be a text, got 5\n"
    )


def test_generated_problems_are_shown_of_every_environment():
    code, out, err = call("ragen_jax.check_data", "--config=mixture", "--rows=1")
    assert code == 0, err
    lines = out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == [f"{name}: generated" for name in ("sokoban", "countdown", "frozen_lake")]
    assert lines.count("  seed 0") == 3 and sum(line.startswith("    -> ") for line in lines) == 3


def test_of_pictures_the_size_is_told():
    words = ["--config.env.options.observation=image", "--rows=1"]
    for name, side in (("sokoban", 6 * 28), ("frozen_lake", 4 * 28)):
        code, out, err = call("ragen_jax.check_data", f"--config={name}", *words)
        assert code == 0, err
        head, seed, shown, plan = out.splitlines()
        assert (head, seed) == (f"{name}: generated", "  seed 0")
        assert shown == f"    [image of {side} x {side} pixels]" and plan.startswith("    -> ")


@pytest.mark.parametrize("member", ["reset", "render", "solve"])
def test_a_problem_for_which_the_environment_raises_is_reported(monkeypatch, member):
    class Own(Countdown):
        """Countdown with a fault in two of its problems."""

        def reset(self, seed):
            self.bad = seed in (1, 3)
            if self.bad and member == "reset":
                raise KeyError(f"row {seed}")
            return super().reset(seed)

        def render(self, state):
            return 5 if self.bad and member == "render" else super().render(state)

        def solve(self, state):
            if self.bad and member == "solve":
                raise RecursionError("too deep")
            return super().solve(state)

    monkeypatch.setitem(ENVS, "countdown", Own)
    code, out, err = call("ragen_jax.check_data", "--config=mixture", "--rows=4")
    errors = dict(
        reset="KeyError: 'row 1'",
        render="TypeError: render must return a str or an Observation, got int",
        solve="RecursionError: too deep",
    )
    lines = out.splitlines()
    assert code == 2
    assert err == (
        "error: environment 'countdown' raises for 2 of 4 problems; first error: seed 1: "
        f"{errors[member]}\n"
    )
    assert lines.count(f"    cannot be shown: {errors[member]}") == (1 if member == "reset" else 2)
    # The later problems and the next environment are shown.
    assert "frozen_lake: generated" in lines and lines.count("  seed 3") == 3
