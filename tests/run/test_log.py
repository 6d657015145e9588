"""log.py: metrics.jsonl, rollouts/*.jsonl and the lines on the console."""

import dataclasses
import gc
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from vision_chats import pieces, seeing_chat

from ragen_jax.core.memory import memory_metrics
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.diagnostics.scopes import Scores
from ragen_jax.diagnostics.stopping import Fired
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.types import IMAGE
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.run.log import (
    MetricsLog,
    eval_line,
    facts,
    learning_curve,
    live_figures,
    step_line,
    write_events,
    write_outcomes,
    write_rollouts,
    write_scores,
)
from ragen_jax.run.run_files import read_events, read_rollouts, read_scores
from ragen_jax.run.training import Stages
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = pytest.mark.fast


def strict(line):
    """Parse a JSON line that has no NaN or Infinity, which are not JSON."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_an_absent_or_empty_file_has_no_rows(path):
    assert read_metrics(path) == []
    path.write_text("")
    assert read_metrics(path) == []


def test_a_torn_last_line_is_left_out(path):
    path.write_text('{"step": 0}\n{"step": 1, "a": 2.0}\n{"step": 2, "a')
    assert read_metrics(path) == [{"step": 0}, {"step": 1, "a": 2.0}]
    # Cut off just before its newline: it can be parsed, but the write did not finish.
    path.write_text('{"step": 0}\n{"step": 1}')
    assert read_metrics(path) == [{"step": 0}]


def test_rows_behind_the_last_step_are_dropped_from_the_file(path):
    path.write_text('{"step": 0, "a": 0.5}\n{"step": 1, "a": 1.5}\n{"step": 2}\n{"step": 3, "a"')
    log = MetricsLog(path, last_step=1)
    assert path.read_text() == '{"step": 0, "a": 0.5}\n{"step": 1, "a": 1.5}\n'
    log.write(2, {"a": 7})
    log.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(0, 0.5), (1, 1.5), (2, 7)]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_torn_line_does_not_spoil_the_next_row(path):
    path.write_text('{"step": 0}\n{"step": 1, "a"')
    log = MetricsLog(path, last_step=1)
    log.write(1, {"a": 1.0})
    log.close()
    assert read_metrics(path) == [{"step": 0}, {"step": 1, "a": 1.0}]


def test_a_new_run_starts_an_empty_file(path):
    path.write_text('{"step": 0}\n')
    MetricsLog(path, last_step=-1).close()
    assert path.read_text() == ""


def test_undefined_figures_are_left_out(path):
    log = MetricsLog(path, last_step=-1)
    row = log.write(
        np.int32(3),
        {
            "a": np.float32(0.5),
            "nan": float("nan"),
            "inf": np.inf,
            "minus": jnp.float32(-jnp.inf),
            "b": jnp.int32(2),
            "c": True,
        },
    )
    log.close()
    assert row == {"step": 3, "a": 0.5, "b": 2.0, "c": 1.0}
    (line,) = path.read_text().splitlines()
    assert strict(line) == row


def test_rows_can_be_read_while_the_log_is_open(path):
    log = MetricsLog(path, last_step=-1)
    for step in range(3):
        log.write(step, {"a": step})
        assert [row["step"] for row in read_metrics(path)] == list(range(step + 1))
    log.close()


def test_numbers_survive_the_file_to_the_last_bit(path):
    log = MetricsLog(path, last_step=-1)
    value = float(np.float32(0.1)) / 3
    log.write(0, {"a": value})
    log.close()
    assert read_metrics(path)[0]["a"] == value


def test_timers_add_up_by_name(monkeypatch):
    clock = iter([1.0, 1.5, 10.0, 12.0, 20.0, 20.25])
    processors = iter([5.0, 5.5, 6.0, 9.0, 9.0, 9.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("time.process_time", lambda: next(processors))
    timer = Stages()
    for name in ("rollout", "update", "rollout"):
        with timer(name):
            pass
    assert timer.seconds == {"rollout": 0.75, "update": 2.0}
    assert timer.cpu == 0.5 + 3.0 + 0.25


def test_rollouts_by_hand(tmp_path, tokenizer, make_turn, make_episode):
    game = SimpleNamespace(actions=("Up", "Down"), instructions="")
    settings = dict(context="single_turn", prompt="terse", actions_per_turn=2, max_actions=5)
    chat = make_chat(tokenizer, game, ChatFormat(**settings))
    reply = chat.reply_ids("√</think><answer>Up||Down</answer>").tolist()
    logps = [round(-0.1 * (n + 1), 4) for n in range(len(reply))]  # as in make_turn
    asked = [chat.prompt_ids([], message).tolist() for message in ("√", "O")]
    turns = [
        make_turn(asked[0], reply, message="√", actions=["Up", "Down"], reward=0.5),
        make_turn(asked[1], reply[:2], message="O", valid=False, reward=0.0),
    ]
    episodes = [make_episode(0, 1, turns, success=True), make_episode(2, 0, turns[:1])]
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    write_rollouts(path, episodes, chat, lambda turn: turn.reward - (not turn.valid), {(102, 0)})
    lines = path.read_text().splitlines()
    assert "√" in lines[0]  # readable, not escaped
    first, second = (strict(line) for line in lines)
    played = [
        {
            "messages": [
                {"role": "user", "content": "√"},
                {"role": "assistant", "content": "<think>√</think><answer>Up||Down</answer>"},
            ],
            "added": "<think>",
            "prompt_exact": True,
            "reply_exact": True,
            "end": "closed",
            "prompt_ids": asked[0],
            "sampled_ids": reply,
            "logps": logps,
            "actions": ["Up", "Down"],
            "valid": True,
            "reward": 0.5,
        },
        {
            "messages": [
                {"role": "user", "content": "O"},
                {"role": "assistant", "content": "<think>√</think>"},
            ],
            "added": "<think>",
            "prompt_exact": True,
            "reply_exact": True,
            "end": "truncated",
            "prompt_ids": asked[1],
            "sampled_ids": reply[:2],
            "logps": logps[:2],
            "actions": [],
            "valid": False,
            "reward": -1.0,
        },
    ]
    assert first == {
        **{"seed": 100, "group": 0, "member": 1, "success": True, "kept": False},
        "turns": played,
    }
    assert second == {
        **{"seed": 102, "group": 2, "member": 0, "success": False, "kept": True},
        "turns": played[:1],
    }


def test_the_facts_of_an_info_are_numbers_and_texts(tmp_path):
    info = {"success": True, "steps": np.int64(3), "grade": "a\ud800", "share": 0.5, "flag": False}
    other = {"nan": float("nan"), "big": 10**5000, "list": [1], 3: 4, "none": None}
    found = facts(info | other)
    assert found == {"steps": 3, "grade": "a\ufffd", "share": 0.5, "flag": False}
    assert len(facts({"text": "x" * 5000})["text"]) < 1100
    json.dumps(found, allow_nan=False)


@pytest.fixture
def seen(make_turn):
    """seen(image, ...): a chat, and the turns of an episode; each turn shows one more image."""

    def make(*images):
        chat = seeing_chat(SimpleNamespace(actions=("Up", "Down"), instructions=""))
        turns, before = [], []
        for image in images:
            parts = ("<|im_start|>user\n<|vision_start|>", 36, "<|vision_end|><|im_end|>\n")
            asked = pieces(chat, *before, *parts, "<|im_start|>assistant\n<think>")
            turn = make_turn(asked, chat.reply_ids("so</think><answer>Up</answer>"), message=IMAGE)
            turns.append(dataclasses.replace(turn, images=(image,)))
            before += [*parts, "<|im_start|>assistant\n<think>"]
            before += ["so</think><answer>Up</answer><|im_end|>\n"]
        return chat, turns

    return make


def rooms_seen(count):
    game = Sokoban(observation="image")
    return [game.render(game.reset(seed)).images[0] for seed in range(count)]


def test_images_of_rollouts_are_files_beside_them(tmp_path, seen, make_turn, make_episode):
    one, other = rooms_seen(2)
    chat, turns = seen(one, other, one)
    plain = make_turn(
        pieces(chat, "<|im_start|>user\nO<|im_end|>\n<|im_start|>assistant\n<think>"),
        chat.reply_ids("so</think>"),
        message="O",
    )
    path = tmp_path / "rollouts" / "step_000007.jsonl"
    episodes = [
        make_episode(0, 0, turns),
        make_episode(1, 0, turns[1:2]),
        make_episode(2, 0, [plain]),
    ]
    write_rollouts(path, iter(episodes), chat, lambda turn: turn.reward, set())
    records = [strict(line) for line in path.read_text().splitlines()]
    named = [[turn.get("images") for turn in record["turns"]] for record in records]
    (a,), (b,), (again,) = named[0]
    assert again == a != b and named[1:] == [[[b]], [None]]
    files = sorted(tmp_path.rglob("*"))
    assert [file for file in files if file.is_file()] == sorted(
        [path, path.parent / a, path.parent / b]
    )
    assert {file.parent for file in (path.parent / a, path.parent / b)} == {
        path.parent / "step_000007_images"
    }
    for name, image in ((a, one), (b, other)):
        with Image.open(path.parent / name) as file:
            assert file.format == "PNG" and file.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(file), image)
    # Every message with an image shows it, in earlier turns as well; all other messages are text.
    for number, turn in enumerate(records[0]["turns"]):
        users = [m["content"] for m in turn["messages"] if m["role"] == "user"]
        shown = [{"type": "image_url", "image_url": {"url": name}} for name in (a, b, a)]
        assert users == [[part] for part in shown[: number + 1]]
        assert turn["prompt_exact"] and turn["reply_exact"]
    assert set(records[0]["turns"][0]) - set(records[2]["turns"][0]) == {"images"}
    assert records[2]["turns"][0]["messages"][0] == {"role": "user", "content": "O"}
    messages = []
    assert read_rollouts(path.parent, messages.append) == {7: records} and messages == []


def test_a_further_pass_over_a_step_leaves_its_own_images_alone(tmp_path, seen, make_episode):
    images = rooms_seen(3)
    path = tmp_path / "step_000001.jsonl"
    chat, turns = seen(*images[:2])
    write_rollouts(path, [make_episode(0, 0, turns)], chat, lambda turn: 0.0, set())
    before = {file.name: file.stat().st_mtime_ns for file in path.parent.glob("*_images/*")}
    chat, turns = seen(*images[1:])
    write_rollouts(path, [make_episode(0, 0, turns)], chat, lambda turn: 0.0, set())
    after = {file.name: file.stat().st_mtime_ns for file in path.parent.glob("*_images/*")}
    (record,) = (strict(line) for line in path.read_text().splitlines())
    assert {f"step_000001_images/{name}" for name in after} == {
        name for turn in record["turns"] for name in turn["images"]
    }
    (same,) = before.keys() & after.keys()
    assert before[same] == after[same] and len(after) == 2  # written only once


@pytest.mark.parametrize(
    "images",
    [
        *(["../../secret.png"], ["/etc/hosts"], ["step_000001_images/../x.png"], [7], "x.png", 3),
        ["step_000001_images/0123456789abcdef.png\n"],
        ["step_000001_images/0123456789ABCDEF.png"],
    ],
)
def test_images_that_lie_elsewhere_are_not_read(tmp_path, seen, make_episode, images):
    path = tmp_path / "step_000001.jsonl"
    chat, turns = seen(*rooms_seen(1))
    write_rollouts(path, [make_episode(0, 0, turns)], chat, lambda turn: 0.0, set())
    record = json.loads(path.read_text())
    record["turns"][0]["images"] = images
    path.write_text(json.dumps(record) + "\n")
    messages = []
    assert read_rollouts(tmp_path, messages.append) == {} and messages == [f"{path} is damaged"]


def test_events_of_a_step_replace_those_of_an_earlier_pass(tmp_path):
    path = tmp_path / "events.jsonl"
    write_events(path, 1, [])
    assert not path.exists() and read_events(path) == []
    alarm, stop = Fired("regimes", "warn", "MI fell"), Fired("empty", "stop", "nothing was kept")
    write_events(path, 3, [alarm])
    write_events(path, 5, [alarm, stop])
    assert [(e["step"], e["rule"], e["action"]) for e in read_events(path)] == [
        (3, "regimes", "warn"),
        (5, "regimes", "warn"),
        (5, "empty", "stop"),
    ]
    write_events(path, 4, [stop])  # resumed from a checkpoint after step 3
    assert [(e["step"], e["reason"]) for e in read_events(path)] == [
        (3, "MI fell"),
        (4, "nothing was kept"),
    ]


def test_stored_scores_are_bounded_and_stay_each_others(tmp_path):
    own = np.arange(200) % 100  # 100 prompts with two reasonings each
    score = np.arange(200 * 100, dtype=float).reshape(200, 100)
    write_scores(tmp_path, 7, Scores(score, np.arange(200), own))
    found = read_scores(tmp_path)
    assert [*found] == [7] and found[7].score_MN.dtype == np.float32
    np.testing.assert_array_equal(found[7].score_MN, score[:64, :64])
    np.testing.assert_array_equal(found[7].prompt_M, np.arange(64))
    shuffled = own[::-1]  # prompts 99, 98, ...: those from 64 on have no column
    write_scores(tmp_path, 8, Scores(score, np.arange(200), shuffled))
    kept = read_scores(tmp_path)[8]
    np.testing.assert_array_equal(kept.prompt_M, np.arange(63, -1, -1))
    np.testing.assert_array_equal(kept.length_M, np.arange(36, 100))
    assert (tmp_path / "step_000008.npz").stat().st_size < 40_000


def test_step_line_shows_the_metrics_there_are():
    row = {
        "step": 7,
        "rollout/success": 0.256,
        "rollout/return": 1.5,
        "update/entropy": 0.1234,
        "collapse/first_turn/own_margin": 2.0,
        "collapse/first_turn/retrieval_acc": 0.5,
        "collapse/first_turn/retrieval_chance": 0.125,
        "filter/kept_ratio": 1.0,
        "throughput/tokens_per_second": 12345.6,
        "time/step": 1.239,
        "eval/success": 0.5,
    }
    assert step_line(7, 200, row) == (
        "step   7/200  success 0.26  return +1.50  entropy 0.123  information 2.00  "
        "retrieval 0.50 (chance 0.12)  kept 1.00  tokens/s 12,346  s 1.24"
    )
    # A step without diagnosis repeats the last one, and says from when it is.
    assert step_line(8, 200, {"step": 8, "rollout/success": 0.5}, row) == (
        "step   8/200  success 0.50  information 2.00 (step 7)  "
        "retrieval 0.50 (chance 0.12, step 7)"
    )
    # A skipped update has no entropy.
    assert step_line(12, 12, {"step": 12, "rollout/return": -0.5}) == "step 12/12  return -0.50"


def test_eval_line_by_hand():
    row = {
        "eval/success": 0.5,
        "eval/success_ci95": 0.03,
        "eval/return": -1.0,
        "eval/valid_rate": 0.75,
    }
    assert eval_line(20, row) == (
        "  eval at step 20: success 0.500 ± 0.030 (95 % CI)  return -1.00  valid replies 0.750"
    )


def test_eval_line_without_success():
    assert eval_line(20, {"eval/return": -1.0, "eval/valid_rate": 0.75}) == (
        "  eval at step 20: return -1.00  valid replies 0.750"
    )


def test_undefined_success_is_not_written_as_failure(tmp_path, tokenizer, make_turn, make_episode):
    game = SimpleNamespace(actions=("Up", "Down"), instructions="")
    settings = dict(context="single_turn", prompt="terse", actions_per_turn=2, max_actions=5)
    chat = make_chat(tokenizer, game, ChatFormat(**settings))
    turn = make_turn(chat.prompt_ids([], "O").tolist(), [4, 5], message="O")
    turn = dataclasses.replace(turn, info={"success": False, SUCCESS_UNDEFINED: True})
    episodes = [make_episode(0, member, [turn]) for member in range(2)]
    write_outcomes(tmp_path, 0, episodes)
    assert list(tmp_path.iterdir()) == [] and learning_curve(tmp_path) == "held-out success"
    path = tmp_path / "step_000001.jsonl"
    write_rollouts(path, episodes, chat, lambda turn: 0.0, set())
    assert [strict(line)["success"] for line in path.read_text().splitlines()] == [None, None]
    # One episode with a success figure is enough; the other episodes have not ended.
    solved = make_episode(1, 0, [dataclasses.replace(turn, info={"success": True})], success=True)
    write_rollouts(path, [*episodes, solved], chat, lambda turn: 0.0, set())
    lines = path.read_text().splitlines()
    assert [strict(line)["success"] for line in lines] == [False, False, True]


def test_learning_curve_by_hand(tmp_path, make_episode):
    outcomes = {0: [0, 0, 1, 0], 20: [1, 0, 1, 0], 30: [1, 0, 0, 0], 40: [1, 1, 1, 0], 50: [1] * 4}
    log = MetricsLog(tmp_path / "metrics.jsonl", last_step=-1)
    for step, solved in outcomes.items():
        log.write(step, {"eval/success": sum(solved) / 4})
        log.write(step + 1, {"rollout/success": 0.9})
        episodes = [make_episode(g, 0, [], success=bool(s)) for g, s in enumerate(solved)]
        write_outcomes(tmp_path, step, episodes)
    # The last three of each problem: 1, 2/3, 2/3, 1/3; minus 0, 0, 1, 0: mean 5/12. With two
    # further problems: centre 5/18, mean square (15/9 + 1) / 6, so variance 0.367 and error 0.247,
    # times t(5) = 2.571, plus the distance 5/12 - 5/18.
    assert learning_curve(tmp_path).split("\n") == [
        "held-out success",
        "  step     0  0.250  " + "#" * 12,
        "  step    20  0.500  " + "#" * 25,
        "  step    30  0.250  " + "#" * 12,
        "  step    40  0.750  " + "#" * 38,
        "  step    50  1.000  " + "#" * 50,
        "  gained +41.7 ± 77.5 points (95 % CI)",
    ]


def test_learning_curve_without_evaluations(tmp_path):
    assert learning_curve(tmp_path) == "held-out success"


@pytest.mark.parametrize("columns, shown", [(30, 1), (45, 2), (500, 3)])
def test_a_line_fits_its_terminal(columns, shown, monkeypatch):
    row = {"rollout/success": 0.5, "rollout/return": -0.25, "time/step": 2.0}
    whole = ["success 0.50", "return -0.25", "s 2.00"]
    monkeypatch.setenv("COLUMNS", str(columns))
    assert step_line(7, 250, row) == "step   7/250  " + "  ".join(whole)  # in a pipe
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert step_line(7, 250, row) == "step   7/250  " + "  ".join(whole[:shown])
    assert live_figures(row) == "success 0.50, return -0.25"


def test_totals_go_on_behind_the_rows_there_are(path):
    """If a run began before totals existed, its totals are summed from the figures of its rows."""
    old = {"rollout/replies": 40.0, "rollout/turns": 2.5, "rollout/response_length": 20.1}
    old |= {"time/step": 3.0, "time/eval": 0.5}
    rows = [{"step": 0, "time/eval": 2.0}, {"step": 1, **old}, {"step": 2, **old}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    log = MetricsLog(path, last_step=1)  # the third row is dropped
    totals = log.totals.add(tokens=100, episodes=16)
    assert totals == {"throughput/tokens_total": 804 + 100, "rollout/episodes_total": 16 + 16}
    (seconds,) = log.totals.clock().values()
    assert 5.5 <= seconds < 6.5
    log.write(2, {"time/total": 50.0} | totals)
    log.close()
    again = MetricsLog(path, last_step=2)
    assert 50.0 <= again.totals.clock()["time/total"] < 51.0
    again.close()


@pytest.mark.medium
def test_memory_in_use_is_of_this_process(monkeypatch):
    gc.collect()
    before = memory_metrics()["throughput/host_memory_gib"]
    held = np.ones(2**26)  # half a GiB
    # Other objects of the process may be created and freed meanwhile.
    assert 0.3 < memory_metrics()["throughput/host_memory_gib"] - before < 0.7
    del held
    # A CPU has no separate memory; of several devices the fullest counts.
    assert set(memory_metrics()) == {"throughput/host_memory_gib"}
    gib = [dict(bytes_in_use=n << 30, peak_bytes_in_use=(n + 1) << 30) for n in (2, 5)]
    devices = [SimpleNamespace(memory_stats=lambda stats=stats: stats) for stats in gib]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    found = memory_metrics()
    assert found["throughput/device_memory_gib"] == 5
    assert found["throughput/device_memory_peak_gib"] == 6
