"""Collapse figures from rollouts in memory and any function that returns log-probabilities."""

import logging
import subprocess
import sys

import jax
import numpy as np
import pytest

import ragen_jax
from ragen_jax.core.padding import pad_rows
from ragen_jax.integrations.monitor import CollapseMonitor, MonitorSettings, Rollout, pair_scorer
from ragen_jax.model import hf

pytestmark = pytest.mark.fast
ROOM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>"
ROOMS = ["##_", "_P#", "#O_", "X__", "#_#"]
MEMBERS = 4


@pytest.fixture(scope="module")
def model(agent, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    hf.save(path, agent.model, agent.params, agent.tokenizer)
    return path


@pytest.fixture(scope="module")
def encode(agent):
    return lambda text: agent.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def logprob(agent):
    """The tiny model's log-probabilities, from a row for each pair."""
    token_logps = jax.jit(ragen_jax.token_logps, static_argnames="model")

    def logprob(prompts, completions):
        pairs = [[*x, *z] for x, z in zip(prompts, completions, strict=True)]
        rows, _ = pad_rows(pairs, max(map(len, pairs)))
        logps = np.asarray(token_logps(agent.model, agent.params, rows))
        return [
            logp[len(x) : len(x) + len(z)]
            for logp, x, z in zip(logps, prompts, completions, strict=True)
        ]

    return logprob


def replies():
    """(number of the room, text of the reply) of each rollout; one has no reasoning."""
    texts = [
        (room, f"player {room} box {member}</think><answer>{word}</answer><|im_end|>")
        for room in range(len(ROOMS))
        for member, word in enumerate(("Left", "Up", "Left", "Down"))
    ]
    return [*texts[:-1], (len(ROOMS) - 1, "player")]


def rewards(count):
    return [float(i % 3 == 0) for i in range(count)]


def score(rows, model):
    return ragen_jax.score(rows, model, first_turn_samples=12, trajectory_samples=8)[0]


def monitor_of(agent, **words):
    return CollapseMonitor(agent.tokenizer, MonitorSettings(**dict(samples=12, prompts=8) | words))


def assert_equal(found, expected):
    """All figures of `score` but flow/, which needs the actions scored, and no other ones."""
    expected = {k: v for k, v in expected.items() if not k.startswith("flow/")}
    assert {k for k in found if not k.startswith("regime/")} == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-4), key


@pytest.mark.medium
def test_the_figures_of_a_step_are_those_of_score(agent, model, encode, logprob):
    rows, rollouts = [], []
    for (room, text), reward in zip(replies(), rewards(20), strict=True):
        prompt, reply = encode(ROOM.format(ROOMS[room])), encode(text)
        rows.append({"prompt": prompt, "response": reply, "group": room, "reward": reward})
        rows[-1] |= {"step": 3, "success": reward > 0}
        rollouts.append(
            Rollout(np.array(prompt), tuple(reply), group=room, reward=reward, success=reward > 0)
        )
    found = monitor_of(agent).update(3, rollouts, logprob)
    expected = score(rows, model)
    assert expected["collapse/first_turn/mi"] != 0 and "anatomy/solved" in expected
    assert_equal(found, expected)


@pytest.mark.medium
def test_texts_and_messages_are_read_as_score_reads_them(agent, model, logprob):
    rows, rollouts = [], []
    for index, (room, text) in enumerate(replies()):
        prompt = ROOM.format(ROOMS[room])
        if index >= MEMBERS:  # the first room's are text, the others' messages
            prompt = [{"role": "user", "content": ROOMS[room]}]
            text = f"<think>{text}".replace("<|im_end|>", "")
        rows.append({"prompt": prompt, "response": text, "step": 3})
        rollouts.append(Rollout(prompt, text))
    found = monitor_of(agent).update(3, rollouts, logprob)
    assert_equal(found, score(rows, model))


@pytest.mark.medium
def test_runs_of_sampled_tokens_are_turns(agent, model, encode, logprob):
    rows, rollouts = [], []
    for room, text in replies():
        prompt = encode(ROOM.format(ROOMS[room]))
        between = encode(
            f"\n<|im_start|>user\nnow {room}<|im_end|>\n<|im_start|>assistant\n<think>"
        )
        first, last = encode(text), encode(f"box {room}</think><answer>Up</answer>")
        turns = [
            {"prompt_ids": prompt, "sampled_ids": first},
            {"prompt_ids": [*prompt, *first, *between], "sampled_ids": last},
        ]
        rows.append({"turns": turns, "step": 3, "group": room})
        mask = [1] * len(first) + [0] * len(between) + [1] * len(last)
        rollouts.append(Rollout(prompt, [*first, *between, *last], mask, room))
    found = monitor_of(agent).update(3, rollouts, logprob)
    expected = score(rows, model)
    assert found["rollout/turns"] == 2 and "collapse/trajectory_within_depth/mi" in found
    # A row of ours records its actions; here they are the answers.
    drop = [k for k in found if k.startswith("action/")] + ["anatomy/mixed", "anatomy/mixed_count"]
    for key in drop:
        found.pop(key, None), expected.pop(key, None)
    assert_equal(found, {k: v for k, v in expected.items() if not k.startswith("action/")})


def test_a_step_scores_some_reasonings_under_some_prompts_each_pair_once(agent, encode):
    asked = []

    def logprob(prompts, completions):
        asked.append(list(zip(map(tuple, prompts), map(tuple, completions), strict=True)))
        return [np.full(len(z), -1.0) for z in completions]

    rollouts = [
        Rollout(encode(ROOM.format(g)), encode(f"player {k % 2}</think>"), group=g)
        for g in range(9)
        for k in range(MEMBERS)
    ]
    monitor = monitor_of(agent, samples=6, prompts=3)
    found = monitor.update(1, rollouts, logprob)
    (pairs,) = asked
    prompts, thoughts = ({pair[i] for pair in pairs} for i in range(2))
    assert len(pairs) == len(set(pairs)) == 6 and len(prompts) == 3 and len(thoughts) == 2
    assert {agent.tokenizer.decode(x).split("user\n")[1][0] for x in prompts} == {"0", "4", "8"}
    assert found["collapse/first_turn/retrieval_acc"] == pytest.approx(1 / 3)
    assert found["rollout/replies"] == 36
    assert not monitor._encoder._read  # a long run would keep every prompt
    assert not any(name.startswith("collapse/") for name in monitor.update(2, rollouts))


def template_after(step, steps, agent, encode):
    """Yield the rollouts of steps whose reasoning is about the room, until `step`."""
    for now in range(1, steps + 1):
        rng = np.random.default_rng(now)
        yield [
            Rollout(
                encode(ROOM.format(g)),
                encode(f"room {g if now <= step else 0} {rng.integers(9)}</think>"),
                group=g,
            )
            for g in range(8)
            for _ in range(2)
        ]


@pytest.mark.medium
def test_an_alarm_and_its_levels_after_a_resumption(agent, encode, caplog):
    def logprob(prompts, completions):
        """Reasoning that names its room is likely under that room's prompt alone."""
        values = []
        for x, z in zip(prompts, completions, strict=True):
            room = agent.tokenizer.decode(x).split("user\n")[1][0]
            named = agent.tokenizer.decode(z).split()[1]
            low = -0.5 if collapsed or room == named else -2.0
            values.append([low] * len(z))
        return values

    monitor, rows = monitor_of(agent), []
    for step, rollouts in enumerate(template_after(12, 20, agent, encode), start=1):
        collapsed = step > 12
        rows.append({"step": step, "text": "x"} | monitor.update(step, rollouts, logprob))
    alarms = [row["step"] for row in rows if row["regime/alarm"]]
    assert alarms and 12 < alarms[0] <= 17
    lines = [record.getMessage() for record in caplog.records if "collapse" in record.getMessage()]
    assert len(lines) == 1 and lines[0].startswith(f"step {alarms[0]}: signs of collapse")

    resumed = monitor_of(agent)
    resumed.replay([{"train_runtime": 3.0}, *rows[:14], {"eval_loss": 1.0}])
    rollouts = list(template_after(12, 20, agent, encode))
    for row in rows[14:]:
        again = resumed.update(row["step"], rollouts[row["step"] - 1], logprob)
        assert again == {k: v for k, v in row.items() if k not in ("step", "text")}


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records]


def test_what_is_not_read_is_counted_in_a_line(agent, encode, caplog):
    caplog.set_level(logging.WARNING)
    monitor = monitor_of(agent)
    prompt = encode(ROOM.format("##"))
    bare = [Rollout(prompt, encode("player")), Rollout(prompt, [], reward=float("nan"))]
    found = monitor.update(1, [*bare, Rollout("", "x"), Rollout(prompt, [3, 4], [0, 0])], fail)
    assert found["rollout/replies"] == 3 and found["rollout/valid_think_rate"] == 0
    told = "\n".join(lines_of(caplog))
    for part in (
        "step 1: 1 of 4 rollouts cannot be read; the first: rollout 2 has an empty prompt",
        "none of 3 rollouts holds reasoning that ends with </think>; set its tags with",
        "step 1: 1 rewards are not finite",
        "step 1: 1 prompts, of which 1 are scored, allow no comparison",
    ):
        assert part in told
    monitor.update(2, bare, fail)
    assert len(lines_of(caplog)) == 4  # each kind once
    assert monitor.update(3, [Rollout("", "x")], fail)["regime/alarm"] == 0


def fail(prompts, completions):
    raise AssertionError("nothing can be scored")


@pytest.mark.parametrize(
    "rollout,message",
    [
        (Rollout([1], [2, 3], [1]), "rollout 0 has a mask of 1 for a reply of 2 tokens"),
        (Rollout([1], "x", [1]), "rollout 0 has a mask; its reply must be token ids"),
        (Rollout("x", [1], [1]), "rollout 0 has a mask; its prompt must be token ids"),
        (Rollout([1], [-2]), "rollout 0 has .* as its reply; expected token ids"),
        (Rollout([1.5], [2]), "rollout 0 has .* as its prompt; expected token ids"),
    ],
)
def test_unusable_rollouts_are_named(agent, rollout, message):
    with pytest.raises(ValueError, match=message):
        monitor_of(agent).update(1, [rollout])


@pytest.mark.parametrize(
    "rows,message",
    [
        ([[-1.0, -1.0]], "returned 1 rows for 2 completions"),
        ([[-1.0], [-1.0, -1.0]], "returned 1 values for completion 0, of 2 tokens, 1 of them"),
        ([[-1.0, -1.0], [None, -1.0]], "2 values for completion 1, of 2 tokens, 1 of them finite"),
        ([-1.0, -2.0], "returned 1 values for completion 0, of 2 tokens"),
    ],
)
def test_unusable_log_probabilities_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        pair_scorer(lambda prompts, completions: rows)([[1], [2]], [[3, 4]])


@pytest.mark.parametrize("words", [{"samples": 0}, {"prompts": 1}, {"samples": 2.5}])
def test_unusable_settings(words):
    (name,) = words
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a whole number from"):
        MonitorSettings(**words)


@pytest.mark.medium
def test_other_tags(agent, encode, logprob):
    monitor = monitor_of(agent, think=("<t>", "</t>"), answer=())
    rollouts = [
        Rollout(encode(ROOM.format(g)), encode(f"<t>room {g}</t> Up"), group=g) for g in range(3)
    ]
    found = monitor.update(1, rollouts, logprob)
    assert found["rollout/valid_think_rate"] == 1 and "collapse/first_turn/mi" in found
    with pytest.raises(ValueError, match="expected the opening and the closing tag"):
        monitor_of(agent, think=("<t>",))


@pytest.mark.medium
def test_importing_needs_no_torch_no_tensorflow_and_starts_no_device():
    code = (
        "import sys, ragen_jax.integrations.trl\n"
        "heavy = {'torch', 'trl', 'transformers', 'tensorflow', 'tensorflow_datasets', 'orbax'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import jax; jax.config.update('jax_platforms', 'none')\n"
        "try: jax.devices()\n"
        "except RuntimeError: pass\n"
        "else: raise AssertionError('a device was started')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
