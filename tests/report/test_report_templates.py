"""The page shows what the reasonings share at the first and the last saved step."""

import re

import numpy as np
import pytest
from simulated_runs import episode, write_run

from ragen_jax.config.build_environment import build_environment
from ragen_jax.configs import organism
from ragen_jax.envs.styles import UNGROUNDED
from ragen_jax.report.page import write_report

pytestmark = pytest.mark.fast
ROOMS, MEMBERS = 6, 8
HEAD = "What the reasonings of different prompts share"


@pytest.fixture(scope="module")
def environment():
    return build_environment(organism.get_config().env, "train")


def records(tokenizer, write):
    """Return a step's records of rollouts/*.jsonl with the reasonings write(room, member)."""
    return [
        episode(
            tokenizer,
            [f"{write(room, member)}</think><answer>Up</answer>"],
            group=room,
            member=member,
        )
        for room in range(ROOMS)
        for member in range(MEMBERS)
    ]


def grounded(environment):
    def write(room, member):
        state = environment.reset(room)
        return environment.explain(state, environment.solve(state))

    return write


def template(environment, name="template"):
    rng = np.random.default_rng(0)
    return lambda room, member: UNGROUNDED[name].write(None, (), rng)


def table(folder):
    """Return the words of the table."""
    html = write_report([folder]).read_text()
    what = html.split('id="what"')[1].split("<noscript>")[0]
    if HEAD not in what:
        return ""
    return re.sub(r"\s+", " ", re.sub("<[^>]+>", " ", what.split(HEAD, 1)[1]))


def test_a_planted_collapse_is_shown_before_and_after(tmp_path, tokenizer, environment):
    steps = [(1, records(tokenizer, grounded(environment)))]
    steps += [(50, records(tokenizer, template(environment)))]
    words = table(write_run(tmp_path / "run", episodes=steps))
    assert "step 1 step 50 reasonings that fit any prompt 0%" in words
    openings = re.findall(r"opening (.+?) 0% of the prompts, 0% of the reasonings \d+%", words)
    assert openings and all(re.match("(I|we) |First|Now|Here|Next", x) or x for x in openings)
    assert not any(opening.startswith("player") for opening in openings)
    (example,) = re.findall(r"For example, at step 50: (.+?) <?$", words.strip() + " ")
    assert UNGROUNDED["template"].matches(example.strip())


def test_a_healthy_run_shares_nothing(tmp_path, tokenizer, environment):
    steps = [(step, records(tokenizer, grounded(environment))) for step in (1, 50)]
    words = table(write_run(tmp_path / "run", episodes=steps))
    assert "reasonings that fit any prompt 0% 0%" in words
    assert "opening" not in words.replace("sentence or opening", "") and "example" not in words
    assert table(write_run(tmp_path / "none")) == ""


def test_shared_texts_of_an_agent_are_escaped(tmp_path, tokenizer):
    attack = "<script>window.owned = 1</script> <b>is</b> \x1b[31m %%DATA%% here"
    steps = [(1, records(tokenizer, lambda room, member: attack))]
    html = write_report([write_run(tmp_path / "run", episodes=steps)]).read_text()
    what = html.split('id="what"')[1].split("<noscript>")[0]
    assert "&lt;script&gt;window.owned = 1" in what and "<script>" not in what
    assert "\x1b" not in what and "%%DATA%%" in what


def test_environments_and_runs_have_tables_of_their_own(tmp_path, tokenizer, environment):
    steps = [(1, records(tokenizer, template(environment, "template_fixed")))]
    folders = [write_run(tmp_path / name, episodes=steps) for name in ("a", "b")]
    html = write_report(folders, tmp_path / "ab.html").read_text()
    assert f"{HEAD} (a)" in html and f"{HEAD} (b)" in html
