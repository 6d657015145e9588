"""The shared texts of a model organism's reasonings are its planted template."""

import itertools
import math

import numpy as np
import pytest

from ragen_jax.config.build_environment import build_environment
from ragen_jax.configs import organism
from ragen_jax.diagnostics.shared_texts import (
    SHOWN,
    find_template,
    measure_text,
    split_sentences,
    template_figures,
)
from ragen_jax.envs.styles import TEMPLATE, UNGROUNDED

pytestmark = pytest.mark.fast
ROOMS, MEMBERS = 8, 16


@pytest.fixture(scope="module")
def environment():
    return build_environment(organism.get_config().env, "train")


def step(environment, style, fraction, seed=0):
    """Return a step's reasonings: this fraction in a style without ground, the rest grounded."""
    rng = np.random.default_rng(seed)
    found = []
    for room in range(ROOMS):
        state = environment.reset(100 * seed + room)
        plan = environment.solve(state)
        for _ in range(MEMBERS):
            # Members differ in their plans, as those of a policy do.
            moves = [str(rng.choice(["Up", "Down", "Left", "Right"])) for _ in plan]
            text = environment.explain(state, moves if rng.random() < 0.5 else plan)
            if rng.random() < fraction:
                text = UNGROUNDED[style].write(state, plan, rng)
            found.append((room, text))
    return found


def begins_template(text):
    """Whether a text is the beginning of a template up to the end of a word."""
    rests = {text}
    for slot in TEMPLATE:
        rests = {
            rest.removeprefix(part) for rest in rests for part in slot if rest.startswith(part)
        }
        if "" in rests:
            return True
    return False


@pytest.mark.parametrize("style", ["template", "template_half", "template_opening"])
@pytest.mark.parametrize("fraction", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_planted_template_is_shown(environment, style, fraction, seed):
    reasonings = step(environment, style, fraction, seed)
    found = find_template(reasonings)
    assert found.free == pytest.approx(fraction, abs=0.3) and found.free <= fraction + 0.1
    assert UNGROUNDED["template"].matches(found.example)
    assert 0 < len(found.texts) <= 2 * SHOWN
    for shared in found.texts:
        whole = UNGROUNDED["template"].matches(shared.text)
        assert whole if shared.kind == "sentence" else begins_template(shared.text), shared
        assert shared == measure_text(shared, reasonings)


def test_a_fixed_template_is_a_sentence_of_all_prompts(environment):
    reasonings = step(environment, "template_fixed", 1.0)
    (opening, sentence) = find_template(reasonings).texts
    assert opening.text == sentence.text == reasonings[0][1]
    assert (sentence.prompts, sentence.reasonings) == (1.0, 1.0)
    assert template_figures(reasonings) == {
        "shared_sentence": 1.0,
        "shared_words": 1.0,
        "prompt_free": 1.0,
    }


@pytest.mark.parametrize("seed", range(10))
def test_grounded_reasoning_is_not_shared(environment, seed):
    found = find_template(step(environment, "template", 0.0, seed))
    assert (found.example, found.texts) == ("", []) and found.free < 0.05


def test_a_template_before_a_specific_part_is_shown(environment):
    begin = "Let me look at the room step by step."
    reasonings = [(r, f"{begin} {text}") for r, text in step(environment, "template", 0.0)]
    found = find_template(reasonings)
    assert {shared.text for shared in found.texts} == {begin} and not found.example
    figures = template_figures(reasonings)
    assert figures["shared_sentence"] == 1 and 0.3 < figures["shared_words"] < 0.6


def test_prompts_with_one_reasoning_show_repeated_sentences_only(environment):
    alone = [(i, text) for i, (_, text) in enumerate(step(environment, "template", 0.0))]
    assert math.isnan(find_template(alone).free) and not find_template(alone).example
    assert "prompt_free" not in template_figures(alone)
    same = [(i, "I think about it and then I go.") for i in range(6)]
    assert find_template(same).texts[0].prompts == template_figures(same)["shared_words"] == 1


def test_a_text_of_one_of_three_prompts_is_not_shared(environment):
    three = [(room, text) for room, text in step(environment, "template", 1.0) if room < 3]
    texts = find_template(three).texts
    assert texts and all(shared.prompts > 0.5 for shared in texts)


def test_a_text_is_measured_in_other_reasonings(environment):
    before, after = (step(environment, "template_opening", x) for x in (0.0, 1.0))
    for shared in find_template(after).texts:
        there = measure_text(shared, before)
        assert (there.prompts, there.reasonings) == (0.0, 0.0)
    assert measure_text(shared, []).prompts == 0


@pytest.mark.parametrize(
    "reasonings",
    [
        [],
        [(0, "a b c")] * 9,
        [(room, text) for room, text in itertools.product(range(4), ["", " ", "\n", "."])],
        [(room, "\ud800 " * 9) for room in range(4)],
        [(room, "x" * 10_000) for room in range(4)],
    ],
)
def test_hostile_reasonings_are_measured(reasonings):
    assert all(0 <= value <= 1 for value in template_figures(reasonings).values())
    found = find_template(reasonings)
    assert all(0 <= shared.prompts <= 1 for shared in found.texts)


def test_sentences_end_at_marks_and_lines():
    text = "The plan is Up. Then: go\nOn and on! 好。再见"
    assert split_sentences(text) == ["The plan is Up.", "Then:", "go", "On and on!", "好。", "再见"]
    assert split_sentences("The numbers are 1.5 and 2") == ["The numbers are 1.5 and 2"]
