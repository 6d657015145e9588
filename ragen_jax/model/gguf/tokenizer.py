"""Build a byte-level BPE tokenizer from a GGUF file's keys (`tokenizer.ggml.*`)."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ragen_jax.model.gguf.reader import GGUF

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KEYS = "tokenizer.ggml."
BYTE_LEVEL = "gpt2"  # tokenizer.ggml.model of byte-level BPE
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")  # keys of ids that end a reply
# Name of a token in transformers -> its key.
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
}

# Texts that are tokenized separately. The expressions are those of the models' published
# tokenizer.json files; "smollm" and "gpt-2" use the library's GPT-2 expression.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(expression: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


@dataclasses.dataclass(frozen=True)
class Splitting:
    """The meaning of a value of tokenizer.ggml.pre."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalizes: bool = False  # whether text is first composed (Unicode NFC)
    ignores_merges: bool = False  # whether a text that is a token is never merged differently
    adds_bos: bool = False  # whether a text begins with BOS unless the file says otherwise


SPLITTINGS = {
    "qwen2": Splitting(lambda: _split(_QWEN2), normalizes=True),
    "llama-bpe": Splitting(lambda: _split(_LLAMA3), ignores_merges=True, adds_bos=True),
    "smollm": Splitting(_smollm),
    "gpt-2": Splitting(_gpt2),
}


def build_tokenizer(file: GGUF, rows: int) -> "PreTrainedTokenizerFast":
    """Build the tokenizer that a GGUF file describes.

    Control tokens become special tokens and user-defined tokens (such as `<think>`) added tokens;
    unused ids (llama.cpp fills them as `[PAD...]`) have no token.

    Args:
      rows: number of rows of the embedding.

    Raises:
      ValueError: it is not byte-level BPE, its pre-tokenizer is unknown, keys are missing or
        damaged, or it has more tokens than rows.
    """
    from transformers import PreTrainedTokenizerFast  # imported here because it takes a second

    kind, pre = file.fields.get(KEYS + "model"), file.fields.get(KEYS + "pre")
    if kind != BYTE_LEVEL:
        raise ValueError(
            f"{file.path}: {KEYS}model is {kind!r:.40}; accepted: {BYTE_LEVEL!r}, byte-level BPE "
            "(Qwen2.5, Qwen3, Llama 3, SmolLM2)"
        )
    if not isinstance(pre, str) or pre not in SPLITTINGS:
        raise ValueError(
            f"{file.path}: {KEYS}pre is {pre!r:.40}; accepted: {', '.join(SPLITTINGS)}"
        )
    tokens, types = _list(file, "tokens", str), _list(file, "token_type", int)
    if not len(tokens) == len(types) <= rows:
        raise ValueError(
            f"{file.path}: {len(tokens):,} tokens with {len(types):,} types; expected a type for "
            f"each, and at most {rows:,}, the rows of the embedding"
        )
    named = {
        name: tokens[i] for name, key in NAMED.items() if (i := _token_id(file, key)) is not None
    }
    template = file.fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"{file.path}: tokenizer.chat_template is {template!r:.40}, not a text")
    try:
        return PreTrainedTokenizerFast(
            tokenizer_object=_backend(file, SPLITTINGS[pre], tokens, types),
            clean_up_tokenization_spaces=False,
            **named,
            **({"chat_template": template} if template else {}),
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        reason = " ".join(f"{error}".split())
        raise ValueError(f"{file.path}: its tokenizer cannot be built: {reason:.200}") from error


def stop_ids(file: GGUF) -> tuple[int, ...]:
    """Return the ids that end a reply.

    Raises:
      ValueError: there is no token of that id.
    """
    found = (_token_id(file, key) for key in STOPS)
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _backend(file: GGUF, splitting: Splitting, tokens: list[str], types: list[int]) -> Tokenizer:
    ids = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [_pair(merge) for merge in _list(file, "merges", str)]
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=splitting.ignores_merges))
    if splitting.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting.build()
    backend.decoder = decoders.ByteLevel()
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        add([AddedToken(token, normalized=False) for token in ids if types[ids[token]] == kind])
    first = _token_id(file, "bos_token_id")
    if first is not None and file.fields.get(KEYS + "add_bos_token", splitting.adds_bos):
        bos = tokens[first]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, first)]
        )
    return backend


def _list(file: GGUF, key: str, kind: type) -> list[Any]:
    """Return the value of a key that is a list of values of one type.

    Raises:
      ValueError: it is missing or is no such list.
    """
    value = file.fields.get(KEYS + key)
    if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
        found = "missing" if value is None else f"{value!r:.40}"
        raise ValueError(
            f"{file.path}: {KEYS}{key} is {found}; expected an array of type {kind.__name__}"
        )
    return value


def _token_id(file: GGUF, key: str) -> int | None:
    """Return the value of a key that is the id of a token; None if it is missing.

    Raises:
      ValueError: there is no such token.
    """
    value, types = file.fields.get(KEYS + key), _list(file, "token_type", int)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < len(types) or types[value] == UNUSED:
        raise ValueError(
            f"{file.path}: {KEYS}{key} is {value!r:.40}; expected the id of one of the "
            f"{len(types):,} tokens"
        )
    return value


def _pair(merge: str) -> tuple[str, str]:
    parts = merge.split(" ")
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"merge {merge!r:.40} is not two tokens")
    return parts[0], parts[1]
