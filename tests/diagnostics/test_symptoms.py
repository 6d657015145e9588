"""Planted symptoms are measured and named; texts without them are not."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from ragen_jax.core.types import Episode, Turn
from ragen_jax.diagnostics.level_rules import RULES, find_levels
from ragen_jax.diagnostics.repetition import copied_ngrams, longest_repeats, repeated_ngrams
from ragen_jax.diagnostics.rules import Records
from ragen_jax.diagnostics.symptom_rules import CHANGE_RULES, REASONING_RULES, TEXT_RULES
from ragen_jax.diagnostics.symptoms import find_script, symptom_metrics

pytestmark = pytest.mark.fast
SYMPTOMS = (*TEXT_RULES, *REASONING_RULES, *CHANGE_RULES)
ROOMS, MEMBERS = 6, 5
PROMPT = (
    "You move a box in a room of six rows and six columns. Say where you are, think, and answer "
    "with moves. The player is in row {0} and column {1}, the box in row {2}.\n<think>"
)
PLACES = [(1, 4, 2), (3, 2, 5), (5, 1, 3), (2, 6, 1), (4, 3, 6), (6, 5, 4)]
MOVES = ("Up Left", "Left Left Down", "Right", "Down Right Up", "Up")


def encode(text):
    """Return a token for each byte."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(ids):
    return bytes(np.asarray(ids, np.uint8)).decode("utf-8", "replace")


def spans(reply):
    """Return the token spans of the reasoning and of the answer."""
    size = [len(part.encode()) for part in re.split("(</think>|<answer>|</answer>)", reply)]
    if "</think>" not in reply:
        return (0, 0), (0, 0)
    if "</answer>" not in reply:
        return (0, size[0]), (0, 0)
    first = sum(size[:4])
    return (0, size[0]), (first, first + size[4])


def healthy(room, member):
    row, column, box = PLACES[room]
    return (
        f"I stand in row {row}, column {column}; box {box} is {abs(row - box)} rows away. "
        f"From {column}{row} I go {MOVES[member]}.</think><answer>{MOVES[member]}</answer>"
    )


def play(write, prompt=PROMPT, logp=-0.01):
    """Return the episodes of rooms with the replies write(room, member); even members solve."""
    episodes = []
    for room in range(ROOMS):
        for member in range(MEMBERS):
            reply = write(room, member)
            ids = encode(reply)
            asked = encode(prompt.format(*PLACES[room]))
            logps = np.full(len(ids), logp, np.float32)
            turn = Turn(asked, "", ids, logps, *spans(reply), (), True, 0.0, {})
            episodes.append(Episode(room, room, member, (turn,), member % 2 == 0))
    return episodes


def named(*steps, **figures):
    """Return the names of the rules about symptoms that hold for steps with these metrics."""
    rows = [{"step": number} | row for number, row in enumerate(steps, 1)]
    records = Records(rows=rows, updates=rows, outcomes={})
    return {rule.name for rule in SYMPTOMS if rule.find(records)}


def text_of(metrics, name):
    (rule,) = (rule for rule in SYMPTOMS if rule.name == name)
    row = {"step": 3} | metrics
    return rule.find(Records(rows=[row], updates=[row], outcomes={}))


def thought(reasoning, answer="Up"):
    return lambda room, member: f"{reasoning(room, member)}</think><answer>{answer}</answer>"


def specific(room, member):
    return healthy(room, member).partition("</think>")[0]


rng = np.random.default_rng(0)
NOISE = ["".join(map(chr, rng.integers(0x4E00, 0x9000, 60))) for _ in range(ROOMS * MEMBERS)]
TEMPLATES = [
    ("First", "Now", "So"),
    ("I must", "we can", "I will"),
    ("think", "look", "plan"),
    ("carefully", "slowly", "calmly"),
    ("and win", "and solve it", "and go on"),
]


def free_words(room, member):
    draw = np.random.default_rng(10 * room + member)
    return " ".join(slot[draw.integers(len(slot))] for slot in TEMPLATES)


PLANTED = {  # kind -> (reply of a room and member, name of the rule that must hold)
    "exclamation marks": (lambda r, m: "!" * 120, "one token without end"),
    "exclamation marks after a start": (
        lambda r, m: specific(r, m) + "!" * 60,
        "one token without end",
    ),
    "line breaks": (lambda r, m: specific(r, m) + "\n" * 40, "one token without end"),
    "zeros": (thought(lambda r, m: f"{r}{m} is 1." + "0" * 80), "one token without end"),
    "in one of ten replies": (
        lambda r, m: "?" * 99 if (5 * r + m) % 10 == 0 else healthy(r, m),
        "one token without end",
    ),
    "a word": (lambda r, m: f"{specific(r, m)}{' wait' * 40}", "repeated text"),
    "a sentence": (
        thought(lambda r, m: specific(r, m) + " Let me check it once more." * 9),
        "repeated text",
    ),
    "an emoji of four bytes": (lambda r, m: specific(r, m) + "\U0001f600" * 60, "repeated text"),
    "answers without end": (
        lambda r, m: healthy(r, m) + "<answer>Up</answer>" * 20,
        "repeated text",
    ),
    "a paragraph": (
        thought(lambda r, m: (specific(r, m) + " The room is small and I am alone in it. ") * 3),
        "repeated phrases",
    ),
    "phrases in another order": (
        thought(
            lambda r, m: " ".join(
                ("I check the box.", "I look at the wall.", "I move on now.")[(i * i + m) % 3]
                for i in range(40)
            )
        ),
        "repeated phrases",
    ),
    "a long cycle": (
        thought(lambda r, m: " ".join(f"step {i % 29} of row {r}" for i in range(400))),
        "text without content",
    ),
    "Chinese": (lambda r, m: specific(r, m) + NOISE[MEMBERS * r + m], "letters of another script"),
    "several scripts": (
        lambda r, m: specific(r, m) + " стена ящик कमरा غرفة דירה 部屋 방",
        "letters of another script",
    ),
    "bytes that are no text": (
        lambda r, m: specific(r, m) + "\ufffd" * 9,
        "letters of another script",
    ),
    "no text between the tags": (thought(lambda r, m: ""), "empty reasoning"),
    "white space between the tags": (thought(lambda r, m: " \n "), "empty reasoning"),
    "no closing tag": (lambda r, m: specific(r, m), "reasoning that never ends"),
    "a tag twice": (
        lambda r, m: f"{specific(r, m)}</think><answer>Up</answer></answer>",
        "tags out of place",
    ),
    "a call inside a call": (
        lambda r, m: f"{specific(r, m)}</think><tool_call><tool_call>go</tool_call>",
        "tags out of place",
    ),
    "a fixed sentence": (
        thought(lambda r, m: "I think about the room and take the best step."),
        "the same sentences for every prompt",
    ),
    "a fixed sentence and a move": (
        thought(lambda r, m: f"I look at the room and choose the best way to go. {MOVES[m]}."),
        "reasoning that fits any prompt",
    ),
    "a template of free words": (thought(free_words), "reasoning that fits any prompt"),
    "the room of another prompt": (
        thought(lambda r, m: specific((r * 2 + m) % ROOMS, m)),
        "reasoning that fits any prompt",
    ),
    "the prompt": (
        thought(lambda r, m: PROMPT.format(*PLACES[r]).removesuffix("\n<think>")),
        "copies of the prompt",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_symptom_is_named(kind):
    write, rule = PLANTED[kind]
    metrics = symptom_metrics(play(write), decode)
    assert rule in named(metrics)
    assert text_of(metrics, rule).startswith("at step 3, ")


def test_twenty_kinds_are_planted():
    assert len(PLANTED) >= 20 and {rule for _, rule in PLANTED.values()} > {
        rule.name for rule in TEXT_RULES
    }


def test_healthy_replies_have_no_symptom():
    metrics = symptom_metrics(play(healthy), decode)
    assert not named(metrics)
    assert metrics["symptoms/prompt_free"] == metrics["symptoms/empty_rate"] == 0
    assert metrics["symptoms/unclosed_rate"] == metrics["symptoms/foreign_letters"] == 0
    assert metrics["symptoms/control_logp"] == pytest.approx(-0.01)


def test_a_prompt_in_another_script_is_no_symptom():
    prompt = "コンピューターの部屋です。{0}行{1}列、箱は{2}行。<think>"
    metrics = symptom_metrics(
        play(lambda r, m: f"箱は{PLACES[r][2]}行です。カタカナ{m}</think>", prompt), decode
    )
    assert metrics["symptoms/foreign_letters"] == 0
    digits = symptom_metrics(play(healthy, "{0}{1}{2}"), decode)
    assert "symptoms/foreign_letters" not in digits  # the prompts have no letters
    cyrillic = symptom_metrics(play(lambda r, m: "ящик</think>", "Стена. <think>"), decode)
    assert cyrillic["symptoms/foreign_letters"] == 0
    assert find_script("\uff21") == find_script("a") and find_script("ア") == find_script("漢")
    assert find_script("1") == find_script(" ") == ""


def test_agents_that_do_not_write_tags_have_no_metrics_of_them():
    metrics = symptom_metrics(play(lambda r, m: f"go {r} {m}", "Move: {0}{1}{2}"), decode)
    assert not {"symptoms/empty_rate", "symptoms/unclosed_rate"} & metrics.keys()
    # If other replies have tags, one without has no reasoning.
    some = symptom_metrics(
        play(lambda r, m: healthy(r, m) if r else "go", "Move: {0}{1}{2}"), decode
    )
    assert some["symptoms/empty_rate"] == pytest.approx(1 / ROOMS)


def test_an_empty_reply_is_empty_and_not_unclosed():
    metrics = symptom_metrics(play(lambda r, m: "" if m else "I go"), decode)
    assert metrics["symptoms/empty_rate"] == 0.8 and metrics["symptoms/unclosed_rate"] == 0.2


def test_calls_are_counted_where_prompts_offer_them():
    def call(every):
        return lambda r, m: (
            f"{specific(r, m)}</think><tool_call>go</tool_call>" if m < every else healthy(r, m)
        )

    offered = "Call <tool_call>go</tool_call> for {0} {1} {2}. <think>"
    rates = [symptom_metrics(play(call(n), offered), decode) for n in (4, 0)]
    two = "</think><tool_call>a</tool_call><tool_call>b</tool_call>"
    twice = symptom_metrics(play(lambda r, m: specific(r, m) + two, offered), decode)
    assert twice["symptoms/repeated_tags"] == rates[0]["symptoms/repeated_tags"] == 0
    assert [row["symptoms/call_rate"] for row in rates] == [0.8, 0.0]
    assert "symptoms/call_rate" not in symptom_metrics(play(healthy), decode)
    assert "fewer tool calls" in named(*rates[:1] * 6, *rates[1:] * 6)
    assert "fewer tool calls" not in named(*rates[:1] * 12)


def test_unlikely_control_tokens_are_named():
    steps = [symptom_metrics(play(healthy, logp=x), decode) for x in [-0.01] * 6 + [-0.8] * 6]
    assert "unlikely control tokens" in named(*steps)
    assert "unlikely control tokens" not in named(*steps[:6] * 2)
    unknown = symptom_metrics(play(healthy), decode, logps=False)
    assert "symptoms/control_logp" not in unknown


def test_lengths_need_both_outcomes():
    metrics = symptom_metrics(play(lambda r, m: "a" * (10 + m % 2)), decode)
    assert metrics["symptoms/length_success"] == 10 and metrics["symptoms/length_failure"] == 11
    assert "symptoms/length_success" not in symptom_metrics(play(healthy), decode, outcomes=False)


@pytest.mark.parametrize(
    "name, metric, first, last",
    [
        ("reward dropped", "rollout/success", 0.6, 0.1),
        ("replies grew", "rollout/response_length", 100, 250),
        ("replies shrank", "rollout/response_length", 100, 30),
        ("entropy rose", "update/entropy", 0.3, 1.2),
        ("entropy fell", "update/entropy", 0.3, 0.02),
        ("KL rose", "update/kl", 0.01, 0.4),
    ],
)
def test_a_change_is_named_and_its_noise_is_not(name, metric, first, last):
    noise = np.random.default_rng(1)
    flat = [{metric: first * noise.uniform(0.7, 1.3)} for _ in range(40)]
    assert not named(*flat)
    assert named(*flat, *[{metric: last}] * 10) == {name}
    assert not named(*[{metric: first}] * 4, *[{metric: last}] * 4)  # too few steps
    assert not named(*[{metric: 0.0}] * 20) and not named(*[{}] * 20)


def test_training_and_validation_that_differ_are_named():
    rows = [
        {"rollout/success": 0.8} | ({"eval/success": 0.3} if i % 4 == 0 else {}) for i in range(20)
    ]
    assert named(*rows) == {"validation differs from training"}
    assert not named(*[row | {"eval/success": 0.6} for row in rows])


def test_limits_are_about_the_newest_step_with_the_metric():
    bad, good = {"symptoms/flood_rate": 0.5}, {"symptoms/flood_rate": 0.0}
    assert named(good, bad) == named(good, bad, {}) == {"one token without end"}
    assert not named(bad, good) and not named({}, {})


def test_other_metrics_at_their_limits():
    assert named({"anatomy/mixed": 0.05}) == {"groups without a learning signal"}
    assert named({"update/approx_kl": 0.2}) == {"large updates"}
    assert not named({"anatomy/mixed": 0.2, "update/approx_kl": 0.01})


def test_rules_are_among_those_of_reports_and_lead_to_pages():
    assert set(SYMPTOMS) <= set(RULES)
    root = Path(__file__).parents[2]
    for rule in SYMPTOMS:
        (page,) = re.findall(r"`(docs/symptoms/\w+\.md)`", rule.cure)
        assert (root / page).is_file()
    pages = {path.name for path in (root / "docs/symptoms").glob("*.md")}
    listed = (root / "docs/symptoms/index.md").read_text()
    assert all(f"({page})" in listed for page in pages - {"index.md"})
    for page in pages:
        assert "python -m ragen_jax.score --model=" in (root / "docs/symptoms" / page).read_text()
    row = {"step": 1, "symptoms/flood_rate": 1.0}
    found = find_levels(Records(rows=[row], updates=[row], outcomes={}))
    assert found[0].rule.name == "one token without end"


def test_every_metric_is_documented():
    page = (Path(__file__).parents[2] / "docs/diagnostics.md").read_text()
    section = page.split("## `symptoms/`")[1].split("\n## ")[0]
    offered = "Call <tool_call>go</tool_call> for {0} {1} {2}. <think>"

    def write(room, member):
        return f"{specific(room, member)}</think><tool_call><answer>go</answer>"

    names = symptom_metrics(play(write, offered), decode)
    assert len(names) > 15
    for name in names:
        assert f"`{name.removeprefix('symptoms/')}`" in section, name


# ------------------------------------------------------------------------------ the counts


def naive_longest_repeat(ids):
    best = 0
    for start in range(len(ids)):
        for period in range(1, (len(ids) - start) // 2 + 1):
            end = start + period
            while end < len(ids) and ids[end] == ids[end - period]:
                end += 1
            best = max(best, end - start if end - start >= 2 * period else 0)
    return best


def test_repeats_are_those_of_a_direct_search():
    draw = np.random.default_rng(3)
    replies = [draw.integers(3, size=draw.integers(0, 24)) for _ in range(60)]
    replies += [np.tile([4, 5, 6], 5), np.zeros(9, int), np.array([], int), np.array([7])]
    length_R, flood_R = longest_repeats(replies)
    assert length_R.tolist() == [naive_longest_repeat(ids.tolist()) for ids in replies]
    assert flood_R[-4:].tolist() == [1, 9, 0, 1]
    expected = []
    for ids in replies:
        grams = [tuple(ids[i : i + 3]) for i in range(len(ids) - 2)]
        expected.append(1 - len(set(grams)) / len(grams) if grams else 0)
    assert repeated_ngrams(replies, 3) == pytest.approx(expected)
    assert not len(longest_repeats([])[0]) and not len(repeated_ngrams([], 3))


def test_copies_are_of_a_reply_s_own_prompt():
    prompts = [np.arange(10), np.arange(100, 104), np.arange(10)]
    replies = [np.array([2, 3, 4, 9]), np.arange(10), np.array([1, 2])]
    assert copied_ngrams(replies, prompts, 3) == (1, 2 + 8)
    assert copied_ngrams([np.array([], int)], [np.array([], int)], 3) == (0, 0)


@pytest.mark.parametrize("text", ["", "\x00", "\ud800", "a", "\n", "\u202e" * 40])
def test_hostile_replies_are_measured(text):
    content = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    for write in (lambda r, m: content, lambda r, m: content if r else healthy(r, m)):
        metrics = symptom_metrics(play(write), decode)
        assert all(math.isfinite(value) for value in metrics.values())
    assert symptom_metrics([], decode) == {}
