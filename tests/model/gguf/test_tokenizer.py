"""model/gguf/tokenizer.py: the ids of texts, special tokens, and the chat template's BOS."""

import functools
import random
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_families import LLAMA
from gguf_files import ADDED, SPECIAL, tokenizer_fields
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from ragen_jax.model import hf, tokenizer_config
from ragen_jax.model.gguf.reader import GGUF
from ragen_jax.model.gguf.tokenizer import build_tokenizer, stop_ids
from ragen_jax.model.token_bytes import token_bytes
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[3]
PROSE, CODE = (ROOT / "README.md").read_text(), (ROOT / "ragen_jax/model/hf.py").read_text()
BLOCKS = [  # of Unicode
    *((0x20, 0x7E), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA)),
    *((0x621, 0x64A), (0x660, 0x669), (0x900, 0x97F), (0x2000, 0x206F), (0x2190, 0x22FF)),
    *((0x3041, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF10, 0xFF19), (0x1D7CE, 0x1D7FF)),
    (0x1F300, 0x1F64F),
]
DIGITS = ["1", "22", "333", "1234567", " 7", "  88", "3.14", "x = 10", "x  =  10", "½", "٣٤"]
SPACES = [" ", "  ", "\t", "\n", "\n\n", "\r\n", " \n ", "a", "b c", "!", "'s", "don't", "I'LL"]


@functools.cache
def texts():
    """Return 1,000 texts: prose, code, digits, blanks, and characters of many scripts."""
    rng = random.Random(0)

    def cut(source):
        size = rng.randint(1, 200)
        start = rng.randrange(len(source) - size)
        return source[start : start + size]

    def characters():
        found = []
        for _ in range(rng.randint(1, 12)):
            block = rng.choice(BLOCKS)
            found += [chr(rng.randint(*block)) for _ in range(rng.randint(1, 6))]
            found.append(rng.choice(["", " ", "  ", "\n"]))
        return "".join(c for c in "".join(found) if unicodedata.category(c) != "Cn")

    def joined(parts):
        return "".join(rng.choice(parts) for _ in range(rng.randint(1, 20)))

    control = [*SPECIAL, *ADDED, "<|im_end", "[PAD0]", "word", " ", "\n"]
    kinds = [
        lambda: cut(PROSE),
        lambda: cut(CODE),
        characters,
        lambda: joined(DIGITS + [" ", "\n"]),
        lambda: joined(SPACES + ["\u00a0", "\u3000", "\u200b", "    return x", "__init__"]),
        lambda: joined(control),
    ]
    return [kinds[i % len(kinds)]() for i in range(1000)]


@functools.cache
def fields(pre):
    return tokenizer_fields(pre, PROSE + CODE, 1500)


def build(fields, **changes):
    found = {key: x for key, x in (fields | changes).items() if x is not None}
    return build_tokenizer(GGUF(Path("m.gguf"), found, {}), 10_000)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@functools.cache
def by_transformers(pre):
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in fields(pre).items()}
    given |= {"tokenizer_type": given["model"], "pre_tokenizer_type": given["pre"]}
    return convert_gguf_tokenizer("llama", given)[0]


# ---------------------------------------------------------------- ids of texts


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2"])
def test_ids_are_those_of_transformers(pre):
    ours, theirs = build(fields(pre)), by_transformers(pre)
    for text in texts():
        if pre == "qwen2":  # transformers leaves out the normalisation of Qwen's tokenizer.json
            text = unicodedata.normalize("NFC", text)
        ids = encode(ours, text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == text


def test_qwen_composes_characters():
    tokenizer = build(fields("qwen2"))
    decomposed = [t for t in texts() if unicodedata.normalize("NFC", t) != t]
    assert len(decomposed) > 20
    for text in [*decomposed, "e\u0301"]:
        assert encode(tokenizer, text) == encode(tokenizer, unicodedata.normalize("NFC", text))


def test_smollm_splits_off_single_digits():
    given = fields("smollm")
    tokens = given["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in given["tokenizer.ggml.merges"]]
    plain = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    plain.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    ours, joins = build(given), build(fields("gpt-2"))
    for text in texts():
        assert encode(ours, text) == plain.encode(text).ids, text
    assert len(encode(ours, "7" * 9)) == 9 > len(encode(joins, "1234567"))
    assert sum(encode(ours, text) != encode(joins, text) for text in texts()) > 100


def test_a_text_that_is_a_token_is_not_merged_differently_in_llama_3():
    """No merges make the token "zqj"."""
    given = fields("llama-bpe")
    tokens = [*given["tokenizer.ggml.tokens"], "zqj"]
    types = [*given["tokenizer.ggml.token_type"], 1]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    assert encode(build(given, **changes), "zqj") == [len(tokens) - 1]
    split = build(given, **changes, **{"tokenizer.ggml.pre": "gpt-2"})
    assert len(encode(split, "zqj")) > 1


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm"])
def test_a_saved_tokenizer_is_the_same(tmp_path, monkeypatch, pre):
    monkeypatch.setattr(confined, "check_tokenizer", lambda *_: None)  # a child process
    tokenizer = build(fields(pre))
    tokenizer_config.save_tokenizer(tmp_path, tokenizer)
    again = hf.load_tokenizer(tmp_path)
    for text in texts()[:200]:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.added_tokens_decoder == tokenizer.added_tokens_decoder
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.chat_template == tokenizer.chat_template


# ---------------------------------------------------------------- tokens


def test_control_tokens_are_special_and_user_defined_tokens_are_added():
    tokenizer = build(fields("qwen2"))
    added = tokenizer.added_tokens_decoder
    tokens = fields("qwen2")["tokenizer.ggml.tokens"]
    assert {t.content for t in added.values() if t.special} == set(SPECIAL)
    assert {t.content for t in added.values() if not t.special} == set(ADDED)
    assert all(tokens[i] == token.content for i, token in added.items())
    assert not any(token.normalized or token.lstrip or token.rstrip for token in added.values())
    ids = encode(tokenizer, "a<think><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>"


def test_unused_ids_have_no_token():
    tokenizer, tokens = build(fields("qwen2")), fields("qwen2")["tokenizer.ggml.tokens"]
    assert len(tokenizer) == len(tokens) - 2
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert tokenizer.convert_ids_to_tokens(len(tokens) - 1) is None
    assert token_bytes(tokenizer)[-1] == ADDED[-1].encode()


def test_named_tokens_and_stops():
    given = fields("qwen2")
    tokenizer, first = build(given), given["tokenizer.ggml.tokens"].index(SPECIAL[0])
    assert (tokenizer.bos_token, tokenizer.eos_token) == SPECIAL[:2]
    assert (tokenizer.pad_token_id, tokenizer.unk_token) == (first, None)
    file = GGUF(Path("m.gguf"), given | {"tokenizer.ggml.eot_token_id": first + 3}, {})
    assert stop_ids(file) == (first + 1, first + 3, first + 2)
    named = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "eom", "padding")}
    bare = build(given, **named)
    assert (bare.bos_token, bare.eos_token, bare.pad_token) == (None, None, None)


def test_a_file_without_a_template():
    tokenizer = build(fields("qwen2"), **{"tokenizer.chat_template": None})
    with pytest.raises(ValueError, match="has no chat template"):
        make_chat(tokenizer, GAME, FORMAT)


# ---------------------------------------------------------------- BOS

GAME = SimpleNamespace(actions=("Up", "Down"), instructions="Push the box.")
FORMAT = ChatFormat(context="full", prompt="full", actions_per_turn=2, max_actions=10)
OF_LLAMA = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


@pytest.mark.parametrize(
    ("pre", "key", "adds"),
    [
        ("llama-bpe", None, True),  # llama.cpp's default for this pre-tokenizer
        ("llama-bpe", True, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_a_prompt_begins_with_bos_once(make_turn, pre, key, adds):
    """The template writes BOS, whether the tokenizer adds it to plain texts or not."""
    given = tokenizer_fields(pre, special=OF_LLAMA, template=LLAMA)
    tokenizer = build(given, **{"tokenizer.ggml.add_bos_token": key})
    bos = tokenizer.bos_token_id
    assert tokenizer.bos_token == "<|begin_of_text|>"
    assert (tokenizer("Up")["input_ids"][0] == bos) == adds
    chat = make_chat(tokenizer, GAME, FORMAT)
    first = chat.prompt_ids([], "The box is here.")
    reply = [*chat.reply_ids("up</think><answer>Up</answer>"), chat.close_id]
    later = chat.prompt_ids([make_turn(first, reply)], "It is there.")
    for ids in (first, later):
        assert ids[0] == bos and ids.tolist().count(bos) == 1
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Up"}], add_generation_prompt=True, return_dict=False
    )
    assert shown.count(bos) == 1
