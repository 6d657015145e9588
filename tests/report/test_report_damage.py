"""Damaged or missing files of a run: the page is written from the other files and names them."""

import base64
import json
import shutil

import numpy as np
import pytest
from cli_commands import call
from PIL import Image
from simulated_runs import episode, write_run

from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.run.log import write_events, write_gradients, write_scores
from ragen_jax.run.run_files import read_outcomes

pytestmark = pytest.mark.fast

STORED = {  # kind: file whose damage the page reports
    "evaluation": "eval/step_000020.json",
    "episodes": "rollouts/step_000010.jsonl",
    "scores": "diagnostics/step_000010.npz",
    "gradients": "gradients/step_000020.json",
    "events": "events.jsonl",
    "tokenizer": "model/tokenizer.json",
}
DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "NUL": lambda content: b"\0" * len(content),
    "foreign": lambda content: b"\xff" + content,
    "another": lambda content: b'{"step": null, "a": [1, 2]}\n',
    "text": lambda content: b'"text"\n',
    "number": lambda content: b"17\n",
    "list": lambda content: b"[[1, 7], [2, 0]]\n",
    "deep": lambda content: b"[" * 100_000,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tokenizer):
    folder = write_run(
        tmp_path_factory.mktemp("whole") / "run",
        steps=40,
        episodes=[(10, [episode(tokenizer, ["so up</think><answer>Up</answer>"])])],
    )
    tokenizer.save_pretrained(folder / "model")
    scores = Scores(np.zeros((4, 2)), np.full(4, 10), np.arange(4) % 2)
    write_scores(folder / "diagnostics", 10, scores)
    write_gradients(folder, 20, {"gradient/task/q1": 0.25})
    write_events(folder / "events.jsonl", 30, [Fired("regimes", "warn", "MI fell")])
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def reported(run):
    code, out, err = call("ragen_jax.report", str(run))
    return code, out, err, (run / "report.html").read_text() if code == 0 else ""


def test_of_a_whole_run_nothing_is_told(run):
    code, out, _, page = reported(run)
    assert code == 0 and "warning" not in out and "Damaged:" not in page


@pytest.mark.medium
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("kind", STORED)
def test_a_damaged_file_is_named_on_the_page_and_on_the_console(run, kind, how):
    path = run / STORED[kind]
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    code, out, err, page = reported(run)
    assert code == 0, err
    if (how, kind) in {("empty", "events"), ("empty", "episodes")}:
        return  # an empty file means that nothing has happened
    message = f"{path}: line 1 is damaged" if kind == "events" else f"{path} is damaged"
    assert f"warning: {message}" in out and f"Damaged: {message}" in page


@pytest.mark.medium
def test_an_evaluation_that_is_gone_or_another_is_told(run):
    (run / "eval" / "step_000020.json").unlink()
    path = run / "eval" / "step_000040.json"
    content = path.read_text()
    path.write_text(content.replace(", 1]", ", 0]", 1))  # one bit
    _, out, _, page = reported(run)
    for message in (
        f"{run / 'eval' / 'step_000020.json'} is missing; it holds the evaluation of step 20",
        f"{path} does not match the success in metrics.jsonl",
    ):
        assert f"warning: {message}" in out and f"Damaged: {message}" in page
    # An evaluation with other settings is stored in another folder.
    path.write_text(content)
    (run / "eval_until_step_000020").mkdir()
    (run / "eval" / "step_000000.json").rename(run / "eval_until_step_000020" / "step_000000.json")
    assert "warning" not in reported(run)[1]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
@pytest.mark.parametrize("how", DAMAGE)
def test_what_no_page_can_do_without_is_refused_by_name(run, name, how):
    path = run / name
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    code, out, err, _ = reported(run)
    if (name, how) == ("metrics.jsonl", "cut"):
        assert code == 0  # the remaining rows are read
    else:
        assert code == 2 and str(run) in err and len(err.splitlines()) == 1


@pytest.mark.medium
def test_flipped_bits_of_evaluations_change_no_outcome_unnoticed(run):
    folder, rng, messages = run / "eval", np.random.default_rng(0), []
    path = folder / "step_000040.json"
    content, truth = path.read_bytes(), read_outcomes(folder)[40]
    noticed = 0
    for _ in range(200):
        changed = bytearray(content)
        changed[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        messages.clear()
        found = read_outcomes(folder, messages.append).get(40)
        if found is None:
            assert messages == [f"{path} is damaged"]
            noticed += 1
        elif found != truth:  # a 0 became a 1
            assert "does not match the success" in reported(run)[1]
            noticed += 1
    assert noticed > 100  # the other bits are in problem numbers, which nothing uses


@pytest.mark.medium
@pytest.mark.parametrize("known", [True, False])
def test_images_are_on_the_page_and_those_that_are_gone_are_not(run, known):
    """With a tokenizer, and without: then the prompt is the messages' text."""
    if not known:
        shutil.rmtree(run / "model")
    path = run / "rollouts" / "step_000010.jsonl"
    names = [f"step_000010_images/{digit * 16}.png" for digit in "0ab"]
    (path.parent / "step_000010_images").mkdir()
    Image.new("RGB", (28, 28), "red").save(path.parent / names[0])
    (path.parent / names[1]).write_bytes(b"secret")
    record = json.loads(path.read_text())
    (turn,) = record["turns"]
    parts = [{"type": "text", "text": "a < b "}]
    parts += [{"type": "image_url", "image_url": {"url": name}} for name in names]
    turn["messages"][0]["content"] = parts
    turn["images"] = names
    path.write_text(json.dumps(record) + "\n")
    code, out, _, page = reported(run)
    assert code == 0 and "warning" not in out
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    (shown,) = data["episodes"]
    png = base64.b64encode((path.parent / names[0]).read_bytes()).decode()
    assert shown["turns"][0]["images"] == [f"data:image/png;base64,{png}", None, None]
    if not known:
        assert shown["turns"][0]["prompt"] == "a < b " + 3 * "[image]"
