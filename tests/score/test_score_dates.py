"""Rollouts of a model whose chat template writes the date: with theirs, or today's and a line."""

import json

import pytest
from command_line import call
from test_score_values import rows_of

from ragen_jax.model import hf
from ragen_jax.score import encode

LINE = "the chat template writes the date: prompts are rendered with today's, 2026-11-26; --date="


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that the command reads, as token ids."""
    found = []
    read = encode.Encoder.prompt

    def prompt(self, *given):
        found.append(read(self, *given))
        return found[-1]

    monkeypatch.setattr(encode.Encoder, "prompt", prompt)
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
    for kind in ("messages", "control tokens", "restored", "token ids"):
        printed, found, starts = score(kind, "--date=2026-11-25")
        assert starts == {"Today Date: 25 Nov 2026\n"} and found["date"] == "2026-11-25"
        assert found["prompts"] == {kind: 8} and LINE not in printed
    assert LINE not in score("token ids")[0]
    assert LINE in score("restored")[0]  # which is then not taken apart
    assert LINE not in score("messages", model=language_model)[0]


def test_what_is_no_day_is_refused(dated_model, tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(4)))
    words = (f"--model={dated_model}", f"--rollouts={path}", "--date=25.11.2026")
    code, _, errors = call("ragen_jax.score", *words)
    assert code == 2 and errors == "error: --date=25.11.2026 is no day; expected YYYY-MM-DD\n"
