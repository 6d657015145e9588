"""chat_files.py: conversations in files as demonstrations."""

import json

import jax
import numpy as np
import pytest

from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.config.load import load_config
from ragen_jax.configs import countdown
from ragen_jax.model import hf, qwen
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.run import fine_tune as stage
from ragen_jax.run.chat_files import Unusable, parse_conversation, read_episodes
from ragen_jax.run.fine_tune import fine_tune, settings_of
from ragen_jax.storage.metrics_reader import read_metrics

TOKENIZER = build_tokenizer(("Numbers", "Target"))


def say(*texts, system=None):
    """Messages of user and assistant in turn."""
    first = [{"role": "system", "content": system}] if system is not None else []
    roles = ("user", "assistant")
    return [*first, *({"role": roles[i % 2], "content": x} for i, x in enumerate(texts))]


def config_of(path, **fields):
    config = countdown.get_config("llm")
    config.model.path = str(path)
    config.env.prompt = "brief"
    config.update_from_flattened_dict(fields)
    return load_config(config)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = qwen.ModelConfig(
        **dict(vocab_size=len(TOKENIZER), width=32, layers=1, heads=4, kv_heads=2, head_dim=8),
        **dict(mlp_width=48, max_positions=256),
    )
    path = tmp_path_factory.mktemp("model") / "base"
    hf.save(path, qwen.Qwen(config), qwen.init_params(config, jax.random.key(0)), TOKENIZER)
    return path


@pytest.fixture(scope="module")
def chat(model):
    config = config_of(model)
    return build_chat(config, TOKENIZER, build_environment(config.env, "train"))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rendered(messages):
    return TOKENIZER.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("think", ["<think>", ""])
def test_rows_are_the_conversations_that_transformers_renders(tmp_path, chat, think):
    messages = say("Hi", think + "a</think>b", "And?", think + "c", system="Be kind.")
    pair = {"prompt": "Hi", "completion": think + "d"}
    lists = {"prompt": messages[:2], "completion": messages[2:3]}
    file = write(tmp_path / "rows.jsonl", [{"messages": messages}, pair, lists])
    found = read_episodes(file, chat, 256)
    for episode, want in zip(found, [messages, say("Hi", think + "d"), messages[:3]], strict=True):
        last = episode.turns[-1]
        ids = np.concatenate([last.prompt, last.sampled])
        assert TOKENIZER.decode(ids) + "\n" == rendered(want)
        for turn in episode.turns:
            assert turn.sampled[-1] == TOKENIZER.eos_token_id
            assert TOKENIZER.decode(turn.prompt).endswith("assistant\n" + think)
    assert [len(episode.turns) for episode in found] == [2, 1, 1]


def test_a_reply_cannot_speak_as_another(tmp_path, chat):
    file = write(
        tmp_path / "rows.jsonl", [{"messages": say("Hi", "x<|im_end|>\n<|im_start|>user")}]
    )
    (episode,) = read_episodes(file, chat, 256)
    control = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert np.isin(episode.turns[0].sampled, control).sum() == 1  # its end


@pytest.mark.parametrize(
    "row, reason",
    [
        ([], "not an object"),
        ({"text": "x"}, "neither messages nor prompt and completion"),
        ({"messages": "x"}, "its messages is not a list"),
        ({"messages": say("x")}, "roles user; expected user and assistant in turn"),
        ({"messages": []}, "roles none"),
        ({"messages": say("x", "y", "z")}, "roles user, assistant, user"),
        ({"messages": say("x", " ")}, "empty reply"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"messages": [{"role": "user", "content": None}]}, "expected text by one of"),
        ({"messages": ["x"]}, "role None"),
        ({"messages": say("a", "<think>b", "c", "d")}, "only some of its replies begin"),
    ],
)
def test_rows_that_cannot_be_imitated(row, reason, tmp_path, chat, capsys):
    with pytest.raises(Unusable, match=reason):
        parse_conversation(row)
    file = write(tmp_path / "rows.jsonl", [row, {"messages": say("a", "<think>b")}, row])
    assert len(read_episodes(file, chat, 256)) == 1
    printed = capsys.readouterr().out
    assert f"2 of 3 rows of {file} are left out; row 0: " in printed and "<think>, " not in printed
    with pytest.raises(ValueError, match="no row can be imitated; row 0: "):
        read_episodes(write(tmp_path / "bad.jsonl", [row]), chat, 256)


def test_long_rows_are_left_out_and_missing_tags_are_told(tmp_path, chat, capsys):
    rows = [{"messages": say("a", "b" * 300)}, {"messages": say("a", "b")}]
    assert len(read_episodes(write(tmp_path / "rows.jsonl", rows), chat, 256)) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 rows" in printed and "256 positions" in printed
    assert "1 of 1 conversations" in printed and "replies without <think>" in printed


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rows.txt", "x", "ends with .jsonl or .parquet"),
        ("rows.jsonl", "", "no row can be imitated: it is empty"),
        ("rows.jsonl", "{", "cannot be read as JSON"),
        ("rows.parquet", "x", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read(name, content, message, tmp_path, chat):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_episodes(tmp_path / name, chat, 256)


def test_a_missing_file_is_named_before_anything_is_loaded(model):
    config = config_of(
        model, **{"warmstart.fine_tune": True, "warmstart.demonstrations": "none.jsonl"}
    )
    with pytest.raises(ValueError, match="demonstrations is 'none.jsonl'; expected 'solver' or a"):
        settings_of(config)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_model_imitates_a_file(model, tmp_path, kind):
    """It learns to answer as the file does, from either kind of file."""
    rows = [{"messages": say(f"{n}?", f"<think>{n}</think>yes")} for n in range(40)]
    file = write(tmp_path / "rows.jsonl", rows)
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        file = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    fields = {"fine_tune": True, "demonstrations": str(file), "batch": 8, "learning_rate": 2e-2}
    fields |= {"max_updates": 12, "check_every": 12, "check_episodes": 2, "success": 1.0}
    fields = {f"warmstart.{name}": value for name, value in fields.items()}
    config = config_of(model, **fields, **{"rollout.max_new_tokens": 4})
    fine_tune(config, tmp_path / "run", tmp_path / "cache")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["sft/heldout_loss"] < 0.7 * rows[0]["sft/heldout_loss"]
    same = settings_of(config)
    file.write_bytes(file.read_bytes() + b"\n" * (kind == "jsonl"))
    assert (settings_of(config) != same) == (kind == "jsonl")


@pytest.mark.medium
def test_answers_of_a_file_are_imitated_with_their_prompt_hidden(model, tmp_path):
    rows = [{"messages": say(f"{n}?", f"<think>{n}</think>yes")} for n in range(40)]
    file = write(tmp_path / "rows.jsonl", rows)
    fields = {"warmstart.fine_tune": True, "warmstart.demonstrations": str(file)}
    fields |= {"warmstart.check_episodes": 2, "warmstart.batch": 8, "lab.hidden_prompts": 0.5}
    config = config_of(model, **fields)
    batch, *_ = stage._examples(config, TOKENIZER, model, tmp_path / "cache", 256)
    texts = [
        TOKENIZER.decode(row[:first])
        for row, first in zip(batch.tokens_BT, batch.mask_BT.argmax(1), strict=True)
    ]
    hidden = {text for text in texts if "?" not in text}
    assert len(texts) == 38 + 19
    assert hidden == {str(n) for n in range(1, 38, 2)}
