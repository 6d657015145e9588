"""python -m ragen_jax.check_data: its report on files and on generated problems."""

import json
import re
import shlex
import sys

import pytest
from cli_commands import README, ROOT, call

from ragen_jax.envs import ENVS
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.problems import SPLITS, split_by_hash
from ragen_jax.model import hf

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
    assert (code, err) == (0, "")
    bound = "  eval.episodes=1024 is an upper bound: the 6 held-out problems are played"
    left_out, *out = out.splitlines()
    assert left_out == "MetaMathQA-395K.json: 1 row(s) without 'The answer is: ' are left out"
    out.remove(bound)
    # A run that never plays held-out problems requires none.
    code, again, err = call(*words, "--config.eval.every=0", "--config.diagnose.gradients_every=0")
    assert (code, err) == (0, "") and bound not in again
    code, again, err = call(*words, "--config.eval.episodes=6", "--rows=2")
    assert code == 0, err
    shown = [line for line in again.splitlines() if not line.startswith("  played")]
    assert set(shown) <= set(out)  # the first shows a row more
    for split, count in (("imitation", 10), ("train", 17), ("eval", 12)):
        line = f"  played {split} by the expert: {count} of {count} problems to their end; "
        assert any(each.startswith(line) for each in again.splitlines()), again
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
    words = [f"--config.env.options.path={tmp_path}/some.parquet", "--config.eval.every=0"]
    words.append("--config.diagnose.gradients_every=0")
    code, out, err = call("ragen_jax.check_data", "--config=countdown", *words)
    assert code == 0, err
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
    lines = [line for line in out.splitlines() if not line.startswith("  played ")]
    lines = lines[: lines.index("  the first problem as the tiny agent reads it:")]
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
        head, seed, shown, plan, *_, last = out.splitlines()
        assert last == "  prompts: they hold images, whose tokens are not counted here"
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
    place = {"reset": r" \(\S+/test_check_data\.py:\d+, reset\)", "render": ""}
    place["solve"] = place["reset"].replace("reset", "solve")
    message = "error: environment 'countdown' raises for 2 of 4 problems; first error: seed 1: "
    assert re.fullmatch(f"{message}{re.escape(errors[member])}{place[member]}\n", err), err
    assert lines.count(f"    cannot be shown: {errors[member]}") == (1 if member == "reset" else 2)
    # The later problems and the next environment are shown.
    assert "frozen_lake: generated" in lines and lines.count("  seed 3") == 3


# ---- an environment of a user's own -------------------------------------------------------------

PAGE = ROOT / "docs/environments/own.md"


def own(folder, monkeypatch, *changes):
    """Write the environment of docs/environments/own.md with changed lines; return the line of
    each member."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[:1]
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    (folder / "larger.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "larger", raising=False)
    lines = enumerate(text.splitlines(), start=1)
    return {found[1]: n for n, line in lines if (found := re.match(r"    (?:def )?(\w+)", line))}


def test_an_own_environment_is_played_and_shown_as_the_model_reads_it(
    tmp_path, monkeypatch, language_model
):
    own(tmp_path, monkeypatch)
    words = ["ragen_jax.check_data", "--config=larger.py:llm", "--rows=1"]
    code, out, err = call(*words, f"--config.model.path={language_model}", "--plays=8")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[:3] == ["larger:Larger: generated", "  seed 0", "    18 and 149"]
    assert "  played train by the expert: 8 of 8 problems to their end; success 1.000; " in out
    assert "  played eval with random actions: 8 of 8 problems to their end; success 0." in out
    assert f"  the first problem as {language_model} reads it:" in lines
    assert any("Two numbers are shown. Say where the larger one is" in line for line in lines)
    (prompts,) = [line for line in lines if line.startswith("  prompts ")]
    chat = hf.load_tokenizer(language_model)
    least, most = map(int, re.match(r"  prompts +(\d+) to (\d+) tokens", prompts).groups())
    shown = "\n".join(line[6:] for line in lines if line.startswith("    | "))
    assert least <= len(chat.encode(shown, add_special_tokens=False)) <= most
    assert "0 of 16 leave no room for a reply of 400" in prompts
    # Every prompt too long is said with the limit.
    code, out, err = call(
        *words, f"--config.model.path={language_model}", "--config.env.max_context=420", "--plays=2"
    )
    assert code == 0 and "4 of 4 leave no room" in out and "leaves 20 after" in out


FAULTS = {  # what is wrong: (change, member named, text)
    "a tuple as in Gymnasium": (
        (
            'return Step(state, float(right), True, {"success": right})',
            "return state, float(right), True, False, {}",
        ),
        "step",
        "must return a Step(state, reward, done, info), got a tuple of 5 as in Gymnasium",
    ),
    "a reward that is no number": (
        ("Step(state, float(right), True", "Step(state, 'good', True"),
        "step",
        "Step.reward must be a number from -1e+06 to 1e+06, got 'good'",
    ),
    "bytes in place of text": (
        ('return f"{state[0]} and {state[1]}"', 'return b"numbers"'),
        "render",
        "render must return a str or an Observation, got bytes",
    ),
    "an identity that is no text": (
        ("return str(sorted(state))", "return tuple(sorted(state))"),
        "identity",
        "must return a str, got tuple",
    ),
    "a list of actions": (
        ('actions = ("left", "right")', 'actions = ["left", "right"]'),
        "actions",
        "must be a tuple of str, got list",
    ),
    "words that differ by case": (
        ('actions = ("left", "right")', 'actions = ("left", "right", "Left")'),
        "actions",
        "is there twice; case does not distinguish words",
    ),
    "a plan that is a text": (
        (
            'return ("left" if state[0] > state[1] else "right",)',
            'return "left" if state[0] > state[1] else "right"',
        ),
        "solve",
        "must return a tuple of str or None, got str",
    ),
    "an explanation that is None": (
        ('return f"{self.render(state)} so {plan[0]}"', "pass"),
        "explain",
        "must return a str, got NoneType",
    ),
    "sentences that are None": (
        (
            "    def explain(",
            "    def narrate(self, state, plan):\n        pass\n\n    def explain(",
        ),
        "narrate",
        "must return a str, got NoneType",
    ),
    "brief rules that are a tuple": (
        ('    actions = ("left", "right")', '    brief = ("a",)\n    actions = ("left", "right")'),
        "brief",
        "must be a str, got tuple",
    ),
    "another problem for the same seed": (
        (
            "        for attempt in itertools.count():",
            "        self.n = getattr(self, 'n', 0) + 100\n"
            "        for attempt in itertools.count(self.n):",
        ),
        "reset",
        "gives another problem for the same seed",
    ),
    "a state that cannot be hashed": (
        ("return state\n\n    def render", "return list(state)\n\n    def render"),
        "reset",
        "a state must be frozen and hashable: TypeError: unhashable type: 'list'",
    ),
    "held-out problems in training": (
        ("== self._split", '!= "nothing"'),
        "identity",
        "problems of split='eval' are in 'train' too",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_member_is_named_with_its_file_and_line(fault, tmp_path, monkeypatch):
    (before, after), member, text = FAULTS[fault]
    changes = [(before, after)]
    if fault == "held-out problems in training":
        changes.append(("draws.below(200), draws.below(200)", "draws.below(9), draws.below(9)"))
    lines = own(tmp_path, monkeypatch, *changes)
    code, out, err = call("ragen_jax.check_data", "--config=larger.py", "--rows=0")
    assert code == 2 and err.count("\n") == 1, err
    assert f"/larger.py:{lines[member]}: {member}: " in err and text in err, err


@pytest.mark.parametrize(
    "fault", ["a tuple as in Gymnasium", "a plan that is a text", "an explanation that is None"]
)
def test_a_warm_start_refuses_a_fault_in_the_same_words(fault, tmp_path, monkeypatch):
    change, member, text = FAULTS[fault]
    own(tmp_path, monkeypatch, change)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, _, err = call(
        *("ragen_jax.train", "--config=larger.py", f"--workdir={tmp_path / 'run'}"),
        *("--config.warmstart.rooms=32", "--config.warmstart.batch=8"),
    )
    assert code == 2 and "none of 32 demonstration problems can be used" in err, err
    assert f"TypeError: {text}" in err or f"TypeError: {member} {text}" in err, err
    assert "ragen_jax.check_data names the file and line" in err


def test_an_error_in_a_play_is_named_with_its_line(tmp_path, monkeypatch):
    """Only some problems show it: those whose second number is above 150."""
    raising = "right = 1 / (state[1] < 150) and (action,) == self.solve(state)"
    lines = own(tmp_path, monkeypatch, ("right = (action,) == self.solve(state)", raising))
    code, out, err = call("ragen_jax.check_data", "--config=larger.py", "--rows=1")
    assert code == 2
    place = f"/larger.py:{lines['step'] + 1}: step"
    assert f"{place}: ZeroDivisionError: division by zero (seed " in err
    assert " more)" in err  # and the number of problems


def test_a_fault_of_a_users_function_is_named_with_the_line_of_the_function(tmp_path, monkeypatch):
    """The frames inside installed packages and ragen_jax's own environment are not the fault."""
    (tmp_path / "broken_rewards.py").write_text(
        "import json\n\n\n"
        "def parse(reply):\n    return json.loads('[' + reply)\n\n\n"
        "def score(prompt, reply, row):\n    return parse(reply)\n\n\n"
        "def divide(prompt, reply, row):\n    return 1 / 0\n"
    )
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_rewards", raising=False)
    words = ["ragen_jax.check_data", "--config=dataset", "--rows=0"]
    words += [f"--config.env.options.path={file}"]
    for function, where, error in (
        ("divide", ":13: divide, called by step", "ZeroDivisionError: division by zero"),
        ("score", ":5: parse, called by step", "JSONDecodeError: "),
    ):
        code, out, err = call(*words, f"--config.env.options.reward=broken_rewards:{function}")
        assert code == 2 and f"first: {tmp_path}/broken_rewards.py{where}: {error}" in err, err
        assert f"  {tmp_path}/broken_rewards.py{where}: {error}" in out
