"""envs/styles.py: the reasoning styles that an environment offers, and how they differ."""

import collections
import itertools
import math

import numpy as np
import pytest
from env_names import OURS

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.styles import TEMPLATE, UNGROUNDED
from ragen_jax.envs.types import StyledEnvironment
from ragen_jax.model.tokenizer import build_tokenizer

pytestmark = pytest.mark.fast

STYLED = ("sokoban", "frozen_lake")


@pytest.fixture(params=STYLED)
def environment(request):
    return ENVS[request.param](split="imitation")


def test_environments_with_styles():
    found = [n for n in OURS if isinstance(ENVS[n](split="train"), StyledEnvironment)]
    assert sorted(found) == sorted(STYLED)


def test_the_first_style_is_what_explain_writes_and_no_other_reads_as_it(environment):
    styles, rng = environment.styles, np.random.default_rng(0)
    assert list(styles) == ["grounded", *UNGROUNDED]
    for seed in range(100):
        state = environment.reset(seed)
        plan = environment.solve(state)[: seed % 5]
        texts = {name: style.write(state, plan, rng) for name, style in styles.items()}
        assert texts["grounded"] == environment.explain(state, plan)
        for name, text in texts.items():
            assert styles[name].matches(text)
            assert styles["grounded"].matches(text) == (name == "grounded")
            assert styles["template"].matches(text) == name.startswith("template")
            assert styles["silent"].matches(text) == (name == "silent")
            assert not styles[name].matches(text + " Up?")
            assert not styles[name].openings or text.startswith(styles[name].openings)
        # Hybrids that an agent between two styles writes.
        half, other = texts["grounded"].split(" plan")[0], texts["template"]
        for hybrid in (f"{half} and win", f"{other} plan Up", other[:-3], f"Now {half} plan Up"):
            assert not any(style.matches(hybrid) for style in styles.values())


@pytest.mark.parametrize(
    "name, options",
    [
        ("sokoban", {}),
        ("sokoban", {"size": (8, 8), "num_boxes": 3}),
        ("frozen_lake", {"size": (3, 5), "frozen": 0.9}),
        ("countdown", {}),
        ("countdown", {"count": (1, 3), "operators": "+-*/", "targets": (1, 20)}),
        ("bandit", {"arms": 3}),
        ("bandit", {"pulls": 3, "told": False}),
        ("metamathqa", {"operations": (1, 6)}),
        ("search_qa", {}),
    ],
)
def test_the_first_sentence_style_is_what_narrate_writes_and_no_other_reads_as_it(name, options):
    environment, rng = make_env(name, **options, split="imitation"), np.random.default_rng(0)
    styles = environment.sentence_styles
    assert list(styles) == ["grounded", *UNGROUNDED]
    for seed in range(40):
        state = environment.reset(seed)
        plan = environment.solve(state)[: seed % 5]
        texts = {name: style.write(state, plan, rng) for name, style in styles.items()}
        assert texts["grounded"] == environment.narrate(state, plan)
        for style, text in texts.items():
            assert styles[style].matches(text)
            assert styles["grounded"].matches(text) == (style == "grounded")
            assert styles["template"].matches(text) == style.startswith("template")
            assert not styles[style].matches(text + " Up?")
            assert not styles[style].openings or text.startswith(styles[style].openings)
        half, other = texts["grounded"].split(".")[0], texts["template"]
        for hybrid in (f"{half} and win.", f"{other} The plan is Up.", f"Now {texts['grounded']}"):
            assert not any(style.matches(hybrid) for style in styles.values())
    # The first words distinguish the grounded texts from all others.
    assert not set(styles["grounded"].openings) & set(styles["template"].openings)


def test_a_grounded_sentence_of_a_given_question():
    style = make_env("metamathqa").sentence_styles["grounded"]
    assert not style.matches("The answer is 3.")
    file_styles = type("Given", (ENVS["metamathqa"],), {"__init__": lambda self: None})()
    file_styles._file_questions = ()
    style = file_styles.sentence_styles["grounded"]
    assert style.matches("The answer is \\frac{1}{2}.\nPi.") and style.matches(
        "The answer follows."
    )
    assert not style.matches("The answer is 3") and style.openings == ("The",)


@pytest.mark.medium
def test_every_sentence_of_the_template_is_as_likely_as_the_others():
    rng, style, N = np.random.default_rng(0), UNGROUNDED["template_half"], 20_000
    sentences = [style.write(None, (), rng) for _ in range(N)]
    assert math.log2(math.prod(map(len, TEMPLATE))) == 39
    choices = 2**18
    # The expected number of distinct sentences in N draws, within six standard deviations.
    expected = choices * -math.expm1(N * math.log1p(-1 / choices))
    assert abs(len(set(sentences)) - expected) < 6 * math.sqrt(N**2 / (2 * choices))
    firsts = collections.Counter(text.split()[0] for text in sentences)
    assert set(firsts) == set(style.openings) and min(firsts.values()) > 0.9 * N / 8
    for name, bits in (("template_opening", 3), ("template_fixed", 0)):
        fewer = {UNGROUNDED[name].write(None, (), rng) for _ in range(500)}
        assert len(fewer) == 2**bits and all(style.matches(text) for text in fewer)


def test_a_sentence_is_a_token_a_word_and_no_longer_than_what_explain_writes(environment):
    styles = environment.styles
    tokenizer = build_tokenizer((*environment.words, *styles["template"].words))
    rng = np.random.default_rng(0)

    def tokens(text):
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for style in styles.values():
        assert all(tokens(opening) == 1 for opening in style.openings)
    pairs = itertools.pairwise(TEMPLATE)  # no word merges with the start of the next word
    assert {tokens(a + b) for slots in pairs for a, b in itertools.product(*slots)} == {2}
    assert {tokens(styles["template"].write(None, (), rng)) for _ in range(50)} == {13}
    explained = []
    for seed in range(50):
        state = environment.reset(seed)
        explained.append(tokens(environment.explain(state, environment.solve(state)[:4])))
    assert max(explained) >= 13
