"""model/gguf/tokenizer.py: the tokenizers of GGUF files against transformers' own conversion."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from gguf_files import ADDED, SPECIAL, make_config, tokenizer_fields, write_gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model import hf
from ragen_jax.model.gguf.reader import GGUF, open_gguf
from ragen_jax.model.gguf.tokenizer import build_tokenizer, stop_ids
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
TRAINED = (Path(__file__).parents[3] / "README.md").read_text()


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(confined, "check_gguf", lambda *_: None)  # test_reader.py


def texts(count=1000):
    """Texts of words, digits, spaces, code, accents, several scripts, symbols and tokens."""
    rng = np.random.default_rng(0)
    parts = [
        *(
            "the",
            "model",
            "Training",
            "don't",
            "WE'LL",
            "it's",
            "\u00e9t\u00e9",
            "e\u0301",
            "\ufb01",
        ),
        *("12", "2024", "3.14", "\u0661\u0662", "\u00b2", "\u2167", "x1y22"),
        *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\n\n   "),
        *("def f(x):", "a[0]==b", "//", "->", "#", "!!!", "<tag>", "</p>", "{}", "$x_1$"),
        *(
            "\u6f22\u5b57",
            "\u043c\u0438\u0440",
            "\u0634\u0643\u0631",
            "\U0001f600",
            "\u0000",
            "\x7f",
        ),
        *SPECIAL,
        *ADDED,
        *TRAINED.split()[:200],
    ]
    for _ in range(count):
        words = rng.choice(len(parts), rng.integers(1, 12))
        yield "".join(parts[i] + " " * int(rng.integers(2)) for i in words)


def gguf_of(fields):
    return GGUF(Path("model.gguf"), fields, {})


def build(fields):
    return build_tokenizer(gguf_of(fields), len(fields["tokenizer.ggml.tokens"]))


def used(fields):
    """The fields without the tokens that no id uses, which transformers would add."""
    types = fields["tokenizer.ggml.token_type"]
    count = len(types) - sum(kind == 5 for kind in types)
    short = {k: v[:count] for k, v in fields.items() if k.endswith((".tokens", ".token_type"))}
    return fields | short


@pytest.mark.parametrize(
    "pre, architecture", [("qwen2", "qwen2"), ("llama-bpe", "llama"), ("gpt-2", "llama")]
)
def test_ids_are_those_of_transformers(pre, architecture):
    fields = used(tokenizer_fields(pre, TRAINED, 600))
    ours = build(fields)
    theirs, _ = convert_gguf_tokenizer(
        architecture,
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": fields["tokenizer.ggml.tokens"],
            "token_type": fields["tokenizer.ggml.token_type"],
            "merges": fields["tokenizer.ggml.merges"],
        },
    )
    kinds = set()
    for text in texts():
        if (
            pre == "qwen2"
        ):  # the published tokenizers compose first; transformers' conversion may not
            text = ours.backend_tokenizer.normalizer.normalize_str(text)
        found = ours(text, add_special_tokens=False)["input_ids"]
        assert found == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        kinds |= set(found)
    assert len(kinds) > 150  # of 600: the texts use much of the vocabulary


def test_smollm_splits_digits_and_then_as_gpt_2():
    fields = tokenizer_fields("smollm", TRAINED, 600)
    ours = build(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    other = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    other.decoder = decoders.ByteLevel()
    for text in texts():
        for mark in (*SPECIAL, *ADDED):
            text = text.replace(mark, "")
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ids == other.encode(text).ids, repr(text)
        assert ours.decode(ids) == text
    one_each = [ours.convert_ids_to_tokens(i) for i in ours("2024")["input_ids"]]
    assert one_each == ["2", "0", "2", "4"]


def test_kinds_of_tokens():
    fields = tokenizer_fields()
    tokenizer = build(fields)
    ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    added = tokenizer.added_tokens_decoder
    assert all(added[ids[token]].special for token in SPECIAL)
    assert not any(added[ids[token]].special for token in ADDED)
    assert len(tokenizer) == len(ids) - 2  # unused tokens have no id
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert stop_ids(gguf_of(fields)) == (ids["<|im_end|>"], ids["<|eom|>"])


def test_the_beginning_of_a_text_is_marked_once(tmp_path):
    template = "{{ '<|endoftext|>' }}" + tokenizer_fields()["tokenizer.chat_template"]
    fields = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template}
    write_gguf(tmp_path / "model.gguf", make_config("llama"), fields=fields)
    tokenizer = hf.load_tokenizer(hf.resolve(tmp_path / "model.gguf"))
    bos = tokenizer.bos_token_id
    assert tokenizer("hello")["input_ids"].count(bos) == 1
    format = ChatFormat("full", "full", actions_per_turn=2, max_actions=10)
    chat = make_chat(tokenizer, Sokoban(), format)
    assert chat.prompt_ids([], "##").tolist().count(bos) == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"tokenizer.ggml.model": "llama"},
            "ggml.model is 'llama'; accepted: 'gpt2', byte-level BPE",
        ),
        (
            {"tokenizer.ggml.pre": "tekken"},
            "ggml.pre is 'tekken'; accepted: qwen2, llama-bpe, smol",
        ),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999"),
        ({"tokenizer.ggml.merges": ["a"]}, "tokenizer"),
        ({"tokenizer.ggml.merges": None}, "tokenizer"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "tokenizer|token"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path, fields, message):
    write_gguf(tmp_path / "model.gguf", make_config("qwen2"), fields=fields)
    with pytest.raises(ValueError, match=message):
        hf.resolve(tmp_path / "model.gguf")
    assert not list(itertools.chain(tmp_path.glob("cache/ragen_jax/models/gguf_*[!k]")))


def test_the_shape_of_an_open_file(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_config("qwen3"))
    assert build(open_gguf(tmp_path / "model.gguf").fields).chat_template
