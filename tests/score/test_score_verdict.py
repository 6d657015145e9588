"""What a score says about the reasoning, on the console and on its page."""

import json
import re

import pytest
from cli_commands import call

from ragen_jax.model import hf

ROOMS = 4


@pytest.fixture(scope="module")
def model(agent, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    hf.save(path, agent.model, agent.params, agent.tokenizer)
    return path


def rows_of_step(environment, step, *, template=False, rooms=ROOMS, members=4):
    """Rows whose reasoning is the expert's for the room, or that of the first room in all rooms."""
    rows = []
    for seed in range(rooms):
        room, shown = (environment.reset(s) for s in (seed, 0 if template else seed))
        plan = environment.solve(shown)
        reply = f"<think>{environment.explain(shown, plan)}</think><answer>{plan[0]}</answer>"
        prompt = [{"role": "user", "content": environment.render(room)}]
        rows += [{"step": step, "prompt": prompt, "response": reply, "group": seed}] * members
    return rows


def score(model, folder, rows, *words):
    """Return (printed lines, the page's HTML)."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = f"--model={model}", f"--rollouts={path}", f"--out={folder / 'score.json'}"
    code, printed, errors = call("ragen_jax.score", *command, *words)
    assert code == 0, errors
    return printed, (folder / "score.html").read_text()


def colour(html):
    (found,) = re.findall(r'class="verdict (\w+)"', html)
    return found


def text_of(html):
    """Return the words of the page's summary."""
    return re.sub(
        r"\s+", " ", re.sub("<[^>]+>", " ", html.split('id="what"')[1].split("</section>")[0])
    )


def test_the_gate_fails_a_collapse_only(model, agent, tmp_path):
    path = tmp_path / "rows.jsonl"
    words = f"--model={model}", f"--rollouts={path}", f"--out={tmp_path / 's.json'}", "--gate"
    for template, expected in ((False, 0), (True, 3)):
        rows = rows_of_step(agent.environment, 1, template=template)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        code, printed, errors = call("ragen_jax.score", *words)
        assert code == expected, printed + errors


def test_a_collapse_in_the_last_of_two_steps_is_red(model, agent, tmp_path):
    rows = rows_of_step(agent.environment, 1) + rows_of_step(agent.environment, 2, template=True)
    printed, html = score(model, tmp_path, rows)
    assert colour(html) == "trouble"
    for text in (printed, text_of(html)):
        assert "The reasoning does not depend on its prompt: 25% (interval 0 to 100%)" in text
        assert "za_swap is 0.00 ± 0.00 nats per action at step 2." in text
        assert "2 steps are too few to judge a change over time" in text
        assert "nan" not in text and "kept" not in text and "There was no alarm" not in text
    assert "no metric could be compared with its level" in html and "not possible" in html
    assert "no dependence on the prompt: at step 2, reasoning was no likelier" in printed


def test_a_collapse_shows_the_shared_reasoning(model, agent, tmp_path):
    rows = rows_of_step(agent.environment, 1) + rows_of_step(agent.environment, 2, template=True)
    printed, html = score(model, tmp_path, rows)
    shown = agent.environment.reset(0)
    reasoning = agent.environment.explain(shown, agent.environment.solve(shown))
    assert "shared by the reasonings of step 2 (100% of them fit any prompt):" in printed
    assert f"  for example: {reasoning}" in printed
    assert f"  sentence, 100% of the prompts: {reasoning}" in printed
    assert (
        "reasoning that fits any prompt: at step 2, 100% of the reasonings have no words" in printed
    )
    assert "`docs/symptoms/same_reasoning.md` says what else to look at" in printed
    table = text_of(html).split("What the reasonings of different prompts share")[1]
    assert "step 1 step 2 reasonings that fit any prompt 0% 100%" in table
    assert (
        f"sentence {reasoning} 25% of the prompts, 25% of the reasonings 100% of the prompts, 100%"
    ) in table


def test_healthy_reasonings_share_nothing(model, agent, tmp_path):
    printed, html = score(model, tmp_path, rows_of_step(agent.environment, 1))
    assert "shared by the reasonings" not in printed and "docs/symptoms" not in printed
    assert "No sentence or opening that fits any prompt is shared" in text_of(html)
    figures = json.loads((tmp_path / "score.json").read_text())["steps"][0]
    assert figures["symptoms/prompt_free"] == figures["symptoms/loop_rate"] == 0
    # A score has no log-probabilities of the sampler, and these rows no outcomes.
    assert not {"symptoms/control_logp", "symptoms/length_success"} & figures.keys()


@pytest.mark.parametrize(
    "reply, words",
    [
        ("<think>" + "!" * 400, "one token without end: at step 3, 25% of the replies repeat one"),
        ("<think></think><answer>Up</answer>", "empty reasoning: at step 3, 25% of the replies"),
        ("<think>" + "walk on, " * 60, "repeated text: at step 3, 25% of the replies are at least"),
        (
            "<think>" + "стена " * 20 + "</think><answer>Up</answer>",
            "letters of another script: at step 3",
        ),
    ],
)
def test_a_symptom_in_one_of_four_prompts_is_printed(model, agent, tmp_path, reply, words):
    rows = rows_of_step(agent.environment, 3)
    rows[:4] = [row | {"response": reply} for row in rows[:4]]
    printed, html = score(model, tmp_path, rows)
    assert words in printed and colour(html) == "trouble"


@pytest.mark.parametrize("step", [0, 7])
def test_a_single_step_cannot_be_judged_over_time(model, agent, tmp_path, step):
    printed, html = score(model, tmp_path, rows_of_step(agent.environment, step))
    assert colour(html) == "unknown"
    for text in (printed, text_of(html)):
        assert "The reasoning depends on its prompt: 100% ± 28 of it" in text
        assert "1 step is too few to judge a change over time" in text
        assert "kept" not in text and "There was no alarm" not in text
    assert "--all prints every figure" in printed


@pytest.mark.long
def test_intervals_of_few_groups_are_said_in_words(model, agent, tmp_path):
    rows = rows_of_step(agent.environment, 1, rooms=2)
    printed, html = score(model, tmp_path, rows)
    for text in (printed, text_of(html)):
        assert "100% (interval unknown) of it is most likely under its own prompt" in text
        assert "nats per action (interval unknown)." in text and "nan" not in text
    # Three groups, two with reasoning: one room's fits its prompt, the other's fits another prompt.
    rows = rows_of_step(agent.environment, 1, rooms=3)
    rows[8:] = [row | {"response": "none"} for row in rows[8:]]
    rows[4:8] = [row | {"response": rows[0]["response"]} for row in rows[4:8]]
    printed, html = score(model, tmp_path, rows, "--all")
    for text in (printed, text_of(html)):
        assert "50% (interval 0 to 100%) of it is most likely under its own prompt" in text
    assert re.search(r"first_turn/retrieval_acc +0\.5 +± 0\.5\n", printed)
