"""Chat templates that write the date: rollouts get their recorded day, or today with a warning."""

import collections
import json
from pathlib import Path

import pytest
from cli_commands import call
from test_score_values import rows_of

from ragen_jax.model import hf
from ragen_jax.score import encode

LINE = "the chat template writes the date: prompts are rendered with today's, 2026-11-26; set "


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the command reads, as token ids."""
    found = []
    read = encode.Encoder.encode_prompt

    def prompt(self, *given):
        found.append(read(self, *given))
        return found[-1]

    monkeypatch.setattr(encode.Encoder, "encode_prompt", prompt)
    return found


def test_the_date_of_a_dump(dated_model, language_model, tmp_path, on_day, prompts):
    tokenizer = hf.load_tokenizer(dated_model)

    def score(kind, *words, model=dated_model):
        """(printed, the JSON file, {text before the first message of a prompt})."""
        rows = rows_of(8)
        for row in rows:
            asked = row["prompt"].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
            dated = "Today Date: 25 Nov 2026\n" + row["prompt"]
            row["prompt"] = {
                "messages": [{"role": "user", "content": asked}],
                "control tokens": dated,
                "restored": f"Today Date: 25 Nov 2026\nuser\n{asked}\nassistant\n",
                "token ids": tokenizer.encode(dated, add_special_tokens=False),
            }[kind]
        path, out = tmp_path / "1.jsonl", tmp_path / "score.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts.clear()
        words = (f"--model={model}", f"--rollouts={path}", f"--out={out}", *words)
        code, printed, errors = call("ragen_jax.score", *words)
        assert code == 0, errors
        starts = {tokenizer.decode(ids).partition("<|im_start|>")[0] for ids in prompts}
        return printed, json.loads(out.read_text()), starts

    on_day(26)
    printed, found, starts = score("messages")
    assert starts == {"Today Date: 26 Nov 2026\n"} and found["date"] == "2026-11-26"
    assert printed.count(LINE) == 1
    assert found["dates"] == {"2026-11-26": 8}
    for kind in ("messages", "control tokens", "restored", "token ids"):
        printed, found, starts = score(kind, "--date=2026-11-25")
        assert starts == {"Today Date: 25 Nov 2026\n"} and found["date"] == "2026-11-25"
        assert found["prompts"] == {kind: 8} and LINE not in printed
        said = "date: prompts are rendered with 2026-11-25, from --date" in printed
        assert said == (kind in ("messages", "restored"))
    assert LINE not in score("token ids")[0]
    assert LINE in score("restored")[0]  # its control tokens are not restored: the day differs
    assert LINE not in score("messages", model=language_model)[0]


def test_the_date_that_a_dump_records(dated_model, tmp_path, on_day, prompts, monkeypatch):
    """The row's field comes first, then the run's config.json, then --date, then today."""
    tokenizer = hf.load_tokenizer(dated_model)
    on_day(26)

    def score(path, dates, *words, config=None):
        """(printed, errors, the JSON file, number of prompts rendered with each day)."""
        rows = rows_of(8)
        for row, date in zip(rows, dates, strict=True):
            asked = row["prompt"].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
            row["prompt"] = [{"role": "user", "content": asked}]
            row |= {} if date is None else {"date": date}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if config is not None:
            (path.parents[1] / "config.json").write_text(config)
        prompts.clear()
        out = tmp_path / "score.json"
        words = (f"--model={dated_model}", f"--rollouts={path}", f"--out={out}", *words)
        code, printed, errors = call("ragen_jax.score", *words)
        assert code == 0, errors
        starts = [tokenizer.decode(ids).partition("\n")[0] for ids in prompts]
        return printed, json.loads(out.read_text()), collections.Counter(starts)

    def of(day):
        return f"Today Date: {day} Nov 2026"

    path = tmp_path / "run" / "rollouts" / "1.jsonl"
    run = json.dumps({"model": {"date": "2026-11-24"}})
    for words in ((), ("--date=2026-11-20",)):
        printed, found, starts = score(path, [None] * 8, *words, config=run)
        assert starts == {of(24): 8} and found["date"] == "2026-11-24"
        assert "prompts are rendered with 2026-11-24, from the config.json of their run" in printed
        assert "--date" not in printed
    # The folder of an environment of several uses the run's config.json as well.
    assert score(path.parent / "sokoban" / "1.jsonl", [None] * 8)[2] == {of(24): 8}
    # A relative path that does not name the run finds it as well.
    monkeypatch.chdir(path.parent)
    assert score(Path("1.jsonl"), [None] * 8)[2] == {of(24): 8}

    own = ["2026-11-21", "2026-11-22T23:30:00Z", None, None, "nan", 5, "next week", ""]
    printed, found, starts = score(path, own)
    assert starts == {of(21): 1, of(22): 1, of(24): 6}
    assert found["date"] is None
    assert found["dates"] == {"2026-11-21": 1, "2026-11-22": 1, "2026-11-24": 6}
    assert "the prompts of 1 rows are rendered with 2026-11-22, from their field 'date'" in printed
    assert "the prompts of 6 rows are rendered with 2026-11-24, from the config" in printed
    assert "fields that are not read: date (4 rows)" in printed

    elsewhere = tmp_path / "dumps" / "1.jsonl"
    printed, found, starts = score(elsewhere, own, "--date=2026-11-20", config=run)
    assert starts == {of(21): 1, of(22): 1, of(20): 6}
    assert "the prompts of 6 rows are rendered with 2026-11-20, from --date" in printed
    # A config.json of another kind, of a run without a fixed date, and damaged.
    for config in ('{"model_type": "llama"}', "[]", '{"model": {"date": "auto"}}', "{"):
        printed, found, starts = score(path, [None] * 8, config=config)
        assert starts == {of(26): 8} and LINE in printed
        assert ("config.json, for the day of its run: JSON" in printed) == (config == "{")


def test_what_is_no_day_is_refused(dated_model, tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(4)))
    words = (f"--model={dated_model}", f"--rollouts={path}", "--date=25.11.2026")
    code, _, errors = call("ragen_jax.score", *words)
    assert code == 2 and errors == "error: --date=25.11.2026 is not a date; expected YYYY-MM-DD\n"
