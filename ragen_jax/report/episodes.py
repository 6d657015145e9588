"""The episodes that a page shows, and how many replies were truncated.

Episodes of training are in rollouts/*.jsonl, those of held-out problems in eval/episodes/*.jsonl.
A page cannot hold all episodes of a run: it shows those of each saved step that fit, first member 0
of all groups, then member 1, and so on.
"""

import base64
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ragen_jax.core.clean_text import one_line, shorten
from ragen_jax.report.runs import RunRecord
from ragen_jax.run.run_files import Say, read_rollouts, text_of
from ragen_jax.run.samples import FEW_VALID, explain_text, summarise_reasons

PNG = b"\x89PNG\r\n\x1a\n"  # first bytes of a PNG file
EXAMPLE = 400  # largest number of characters of a reply on the card
BROKEN = "\N{REPLACEMENT CHARACTER}"  # the text of a token that ends inside a character


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Truncated replies at a step: saved, invalid, and as long as rollout.max_new_tokens."""

    share: float  # fraction of all replies
    of_invalid: float  # fraction of the invalid replies


@dataclasses.dataclass(frozen=True)
class SavedEpisodes:
    """The episodes of an environment that were saved at a step."""

    label: str
    step: int
    records: list[dict[str, Any]]  # lines of rollouts/step_N.jsonl
    folder: Path | None = None  # folder with the files of their images; None: no images
    heldout: bool = False


def read_saved(folder: Path, run: RunRecord, say: Say) -> list[SavedEpisodes]:
    """Read all episodes saved in a run's folder, step by step; report damaged files to `say`."""
    places = [
        place
        for label in run.labels
        for place in (
            (label, folder / "rollouts" / label, False),
            (label, folder / "eval" / label / "episodes", True),
        )
    ]
    found = [
        SavedEpisodes(label, step, records, place, heldout)
        for label, place, heldout in places
        for step, records in read_rollouts(place, say).items()
        if step <= run.last_step
    ]
    return sorted(found, key=lambda saved: saved.step)


def truncations(saved: Sequence[SavedEpisodes], label: str, limit: int) -> dict[int, Truncation]:
    """Return {step: `Truncation`} of an environment; `limit` is rollout.max_new_tokens."""
    found = {}
    for part in saved:
        sound = [record for record in part.records if not record.get("error")]
        turns = [turn for record in sound for turn in record["turns"]]
        if part.label != label or part.heldout or not turns:
            continue
        invalid = [turn for turn in turns if not turn["valid"]]
        cut = sum(len(turn["sampled_ids"]) >= limit for turn in invalid)
        found[part.step] = Truncation(cut / len(turns), cut / len(invalid) if invalid else 0.0)
    return found


def invalid_example(saved: Sequence[SavedEpisodes], label: str) -> str:
    """Return why replies of the last saved training step are invalid, with counts and an example.

    "" if at least half of them are valid, or if none are saved as messages.
    """
    parts = [part for part in saved if part.label == label and not part.heldout]
    if not parts:
        return ""
    turns = [t for record in parts[-1].records if not record.get("error") for t in record["turns"]]
    invalid = [turn for turn in turns if not turn["valid"]]
    if not turns or len(turns) - len(invalid) >= FEW_VALID * len(turns):
        return ""
    if any("messages" not in turn for turn in invalid):  # rollouts of another trainer
        return ""
    texts = [text_of(turn["messages"][-1]["content"]) for turn in invalid]
    reasons = []
    for turn, text in zip(invalid, texts, strict=True):
        after = text.partition("</answer>")[2].strip()
        cut = turn.get("end") == "truncated"
        reasons.append(explain_text(text.removeprefix("<think>"), cut=cut, more=bool(after)))
    counts, example = summarise_reasons(reasons)
    return (
        f"At step {parts[-1].step}, {len(invalid)} of {len(turns)} saved replies are not valid: "
        f"{counts}; for example: {one_line(texts[example], EXAMPLE)}"
    )


def find_tokenizer(folder: Path, run: RunRecord, say: Say) -> Tokenizer | None:
    """Load the tokenizer of a run's model from the run's folder or a directory in its config.

    Returns None if it is not on this machine. A damaged tokenizer is reported to `say`.
    """
    for place in (folder / "model", folder / "policy", Path(run.config["model"]["path"])):
        file = place / "tokenizer.json"
        try:
            if file.is_file():
                return Tokenizer.from_file(str(file))
        except Exception as error:  # any kind, including those of a name that is no path
            say(f"{shorten(str(file), 200)} is damaged: {shorten(str(error), 400)}")
    return None


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character of several tokens belongs to the last of them."""
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    start = 0  # first token whose bytes are not yet a complete character
    for end in range(1, len(ids) + 1):
        if BROKEN not in texts[end - 1]:
            start = end
            continue
        together = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
        if not together.endswith(BROKEN) or end == len(ids):
            texts[start:end] = [""] * (end - start - 1) + [together]
            start = end
    return texts


def select_episodes(
    saved: Sequence[SavedEpisodes], tokenizer: Tokenizer | None, budget: int
) -> Iterator[dict[str, Any]]:
    """Yield episodes for a page as JSON objects, equally many per saved step and environment.

    Args:
      budget: largest total size in bytes.
    """
    left, parts = budget, len(saved)
    for part in saved:
        part_budget, used = left // parts, 0
        order = sorted(part.records, key=lambda record: (record["member"], record["group"]))
        for record in order:
            episode = _episode(part, record, tokenizer)
            size = len(json.dumps(episode, separators=(",", ":"), ensure_ascii=False).encode())
            if used + size > part_budget:
                break
            used += size
            yield episode
        left, parts = left - used, parts - 1


def _episode(
    part: SavedEpisodes, record: dict[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    return {
        "step": part.step,
        "label": part.label,
        "heldout": part.heldout,
        # As text, because JavaScript rounds integers as large as the seeds of held-out problems.
        "seed": None if record["seed"] is None else str(record["seed"]),
        **{name: record[name] for name in ("group", "member", "success")},
        "kept": record.get("kept"),  # older runs did not record it
        "return": _return(record),
        "turns": [_turn(turn, tokenizer, part.folder) for turn in record["turns"]],
    }


def _return(record: dict[str, Any]) -> float | None:
    """Return an episode's return: the sum of its turns' rewards, or the value in the record."""
    if "return" in record:
        return record["return"]
    return sum(turn["reward"] for turn in record["turns"])


def _turn(turn: dict[str, Any], tokenizer: Tokenizer | None, folder: Path | None) -> dict[str, Any]:
    found = {name: turn[name] for name in ("actions", "valid", "reward")}
    if folder and turn.get("images"):
        found["images"] = [_image(folder / name) for name in turn["images"]]
    if tokenizer is None:
        *earlier_messages, reply = turn["messages"]
        prompt = "\n".join(text_of(message["content"]) for message in earlier_messages)
        return {"prompt": prompt, "reply": [text_of(reply["content"])], **found}
    found["prompt"] = tokenizer.decode(turn["prompt_ids"], skip_special_tokens=False)
    found["reply"] = pieces(tokenizer, turn["sampled_ids"])
    if "logps" in turn:
        found["logps"] = [round(logp, 2) for logp in turn["logps"]]
    if "tags" in turn:  # (token after the reasoning, first of the answer); -1: missing
        found["tags"] = turn["tags"]
    return found


def _image(file: Path) -> str | None:
    """Return a PNG file as a data URL for a page; None if it is missing or not a PNG file."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    if not content.startswith(PNG):
        return None
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
