"""Scoring while the files grow, the gate, and the sample that comes with the package."""

import gzip
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from cli_commands import call

from ragen_jax.score import follow
from ragen_jax.score.run import SAMPLE_FILES, ScoreSettings, is_bad, score_files

pytestmark = pytest.mark.medium
MODEL = str(SAMPLE_FILES / "model")


@pytest.fixture(scope="module")
def steps():
    """{step: lines of JSON} of the sample."""
    found = {}
    for line in gzip.open(SAMPLE_FILES / "rollouts.jsonl.gz", "rt"):
        found.setdefault(json.loads(line)["step"], []).append(line)
    return found


def write(folder, number, lines):
    (folder / f"step_{number:06d}.jsonl").write_text("".join(lines))


class Script:
    """Changes of a folder between two looks, one after the other, then the end."""

    def __init__(self, *changes):
        self.changes = list(changes)

    def __call__(self):
        if not self.changes:
            return False
        self.changes.pop(0)()
        return True


def nothing():
    pass


def test_steps_are_scored_as_they_come(steps, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "rollouts"
    first, second, third = list(steps)[:3]
    scored = []
    score = follow.Scorer.score

    def count(self, step):
        scored.append((step.number, len(step.episodes)))
        return score(self, step)

    monkeypatch.setattr(follow.Scorer, "score", count)
    script = Script(
        folder.mkdir,
        lambda: write(folder, first, steps[first]),
        nothing,
        nothing,  # nothing has changed
        # Half a line, which is not read while the file grows, and what follows it.
        lambda: write(folder, second, [*steps[second][:8], steps[second][8][:50]]),
        lambda: write(folder, second, steps[second]),
        lambda: write(folder, third, steps[third][:16]),
        nothing,
        lambda: write(folder, third, steps[third]),
        nothing,
    )
    settings = ScoreSettings(MODEL, (str(folder),), out=tmp_path / "score.json")
    found = follow.follow_files(settings, gate=False, wait=script)
    assert scored == [(first, 32), (second, 32), (third, 16), (third, 32)]
    printed, errors = capsys.readouterr()
    assert printed.count("waiting: ") == 2  # for the folder, then for a file in it
    assert not errors
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("step ")] == [
        str(n) for n in (first, second, third, third)
    ]
    monkeypatch.undo()
    again = score_files(ScoreSettings(MODEL, (str(folder),), out=tmp_path / "again.json"))
    assert list(found.rows) == list(again.rows)
    names = "rollouts", "steps", "prompts", "rows"
    documents = [json.loads((tmp_path / f"{n}.json").read_text()) for n in ("score", "again")]
    for name in names:
        assert documents[0][name] == documents[1][name]
    assert (tmp_path / "score.html").read_text()


def test_files_that_are_torn_or_vanish_do_not_end_it(steps, tmp_path, capsys):
    first, second = list(steps)[:2]
    write(tmp_path, first, steps[first])
    torn = gzip.compress("".join(steps[second]).encode())[:400]
    script = Script(
        nothing,
        lambda: (tmp_path / f"step_{second}.jsonl.gz").write_bytes(torn),
        nothing,
        lambda: (tmp_path / f"step_{second}.jsonl.gz").unlink(),
        lambda: write(tmp_path, second, [*steps[second][:-1], '{"turns": 3}\n', "junk\n"]),
        nothing,
    )
    found = follow.follow_files(ScoreSettings(MODEL, (str(tmp_path),)), gate=False, wait=script)
    assert [step.number for step in found.steps] == [first, second]
    assert [len(step.episodes) for step in found.steps] == [32, 31]
    printed = "".join(capsys.readouterr())
    assert printed.count(".jsonl.gz cannot be read: ") == 1
    assert printed.count(":32 ") == printed.count(":33 is not JSON") == 1


def test_content_that_is_not_read_is_named_once_and_counted_at_the_end(steps, tmp_path, capsys):
    first, second, third = list(steps)[:3]

    def more(number, rows, **fields):
        lines = [json.dumps(json.loads(line) | fields) + "\n" for line in steps[number][:rows]]
        write(tmp_path, number, lines)

    script = Script(
        nothing,
        lambda: more(second, 32, mood="good"),
        nothing,
        lambda: more(third, 16, mood="bad", age=3),
        nothing,
        lambda: more(third, 32, mood="bad", age=3),  # scored again, counted once
        nothing,
    )
    more(first, 32, mood="good")
    found = follow.follow_files(ScoreSettings(MODEL, (str(tmp_path),)), gate=False, wait=script)
    assert [len(step.episodes) for step in found.steps] == [32, 32, 32]
    printed = capsys.readouterr().out.splitlines()
    score_files(ScoreSettings(MODEL, (str(tmp_path),)))
    whole = capsys.readouterr().out.splitlines()
    for start in ("fields that are not read: ", "prompts: "):
        lines, (last,) = ([x for x in y if x.startswith(start)] for y in (printed, whole))
        assert lines[-1] == last
        # Once when first seen, again when a further field is, and at the end.
        assert len(lines) == 2 + (start[0] == "f"), lines


def test_one_file_in_which_steps_are_added(steps, tmp_path):
    """Only the steps that change are scored."""
    path, scored = tmp_path / "log.jsonl", []
    first, second = list(steps)[:2]
    script = Script(
        lambda: path.write_text("".join(steps[first])),
        nothing,
        lambda: path.write_text("".join(steps[first] + steps[second])),
        nothing,
    )
    score = follow.Scorer.score
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            follow.Scorer, "score", lambda s, step: scored.append(step.number) or score(s, step)
        )
        follow.follow_files(ScoreSettings(MODEL, (str(path),)), gate=False, wait=script)
    assert scored == [first, second]


def test_the_gate_ends_following_as_soon_as_the_page_is_red(steps, tmp_path):
    last = list(steps)[-1]
    script = Script(lambda: write(tmp_path, last, steps[last]), *[nothing] * 9)
    settings = ScoreSettings(MODEL, (str(tmp_path),))
    found = follow.follow_files(settings, gate=True, wait=script)
    assert is_bad(found) and len(script.changes) == 8


def test_the_sample_is_red(tmp_path):
    out = f"--out={tmp_path / 'score.json'}"
    code, printed, errors = call("ragen_jax.score", "--sample", "--gate", out)
    assert code == 3, errors
    assert "reasoning that fits any prompt" in printed and "--gate: the page is red" in printed
    code, _, errors = call("ragen_jax.score", "--sample", out)
    assert code == 0, errors
    code, _, errors = call("ragen_jax.score", "--sample", "--model=x", out)
    assert code == 2 and "--sample has its own model" in errors


def test_ctrl_c_ends_following_with_a_verdict(steps, tmp_path):
    """By the command's own wait, which a signal interrupts."""
    write(tmp_path, 1, steps[1])
    words = f"--model={MODEL}", f"--rollouts={tmp_path}", f"--out={tmp_path / 's.json'}"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "ragen_jax.score", *words, "--follow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
    end = time.monotonic() + 300
    while not any(line.startswith("step 1") for line in lines) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    time.sleep(0.5)
    assert any("The reasoning" in line for line in lines), lines
