"""model/gguf: files whose model is not supported are refused by one line that says why."""

import gguf
import numpy as np
import pytest
from gguf_files import MODELS, NORMAL, UNUSED, make_config, tokenizer_fields, write_gguf

from ragen_jax.model import hf
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
FIELDS = tokenizer_fields()
TOKENS, TYPES = FIELDS["tokenizer.ggml.tokens"], FIELDS["tokenizer.ggml.token_type"]
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ragen_jax" / "models"


@pytest.fixture(autouse=True)
def no_child(monkeypatch):
    """Skip the child process that checks a header, which takes a second (test_reader.py)."""
    monkeypatch.setattr(confined, "check_gguf", lambda *_: None)


@pytest.fixture
def refuse(tmp_path, cache):
    """refuse(match, model, ...): write such a file, and check the message with which it is refused
    before anything is written."""

    def check(match, name="llama", **options):
        family, changes = MODELS[name]
        path = tmp_path / "odd.gguf"
        write_gguf(path, make_config(family, **changes), **options)
        with pytest.raises(ValueError, match=match) as raised:
            hf.resolve(path)
        text = str(raised.value)
        assert text.startswith(str(path)) and "\n" not in text, text
        assert not [*cache.glob("gguf_*/*")] and not [*cache.glob(".*")]

    return check


# ---------------------------------------------------------------- shape

WHOLE = "expected a whole number from 1, the same for all layers"
SCALING = "llama.rope.scaling."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "general.architecture",
            "gemma3",
            "architecture 'gemma3'; accepted .* llama, qwen2, qwen3",
        ),
        ("general.architecture", None, "architecture 'None'; accepted"),
        ("llama.block_count", None, f"llama.block_count is missing; {WHOLE}"),
        ("llama.block_count", 0, f"llama.block_count is 0; {WHOLE}"),
        ("llama.block_count", 10**6, "num_hidden_layers is 1000000; accepted"),
        ("llama.embedding_length", "64", f"llama.embedding_length is '64'; {WHOLE}"),
        ("llama.feed_forward_length", [128, 96], rf"feed_forward_length is \[128, 96\]; {WHOLE}"),
        ("llama.attention.head_count", [4, 2], rf"attention.head_count is \[4, 2\]; {WHOLE}"),
        ("llama.attention.head_count_kv", [2, 1], rf"head_count_kv is \[2, 1\]; {WHOLE}"),
        ("llama.attention.head_count_kv", 0, f"head_count_kv is 0; {WHOLE}"),
        ("llama.attention.head_count_kv", 3, "4 attention heads cannot share 3 key heads"),
        ("llama.attention.key_length", 0, f"attention.key_length is 0; {WHOLE}"),
        ("llama.attention.value_length", 8, "value_length is 8; accepted: the width of a head, 16"),
        ("llama.rope.dimension_count", 8, "dimension_count is 8; accepted: the width of a head"),
        ("llama.context_length", None, "llama.context_length is missing"),
        ("llama.attention.layer_norm_rms_epsilon", None, "rms_epsilon is missing; .* above 0"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "rms_epsilon is -1.0; .* above 0"),
        ("llama.rope.freq_base", float("nan"), "rope.freq_base is nan; expected a number above 0"),
        ("llama.rope.freq_base", float("inf"), "rope.freq_base is inf; expected a number above 0"),
        ("llama.rope.freq_base", "10000", "rope.freq_base is '10000'; expected a number"),
        (SCALING + "type", "yarn", "rope.scaling.type is 'yarn'; accepted: none, linear"),
        (SCALING + "type", ["linear"], r"rope.scaling.type is \['linear'\]; accepted"),
        (SCALING + "factor", 0.0, "rope.scaling.factor is 0.0; expected a number above 0"),
        (SCALING + "attn_factor", 2.0, "attn_factor is 2.0, which is not supported"),
        ("llama.expert_count", 8, "llama.expert_count is 8, which is not supported"),
        ("llama.attention.sliding_window", 4096, "sliding_window is 4096, which is not supported"),
        ("llama.logit_scale", 2.0, "llama.logit_scale is 2.0, which is not supported"),
        ("split.count", 3, r"is one of 3 files of a model \(split.count\), but its name says 1"),
        ("split.count", [1], r"is one of \[1\] files"),
    ],
)
def test_keys(refuse, key, value, message):
    refuse(message, fields={key: value})


def test_heads_of_odd_width(refuse):
    fields = {"llama.attention.key_length": 15, "llama.rope.dimension_count": 15}
    refuse("heads have width 15; rotary positions need an even width", fields=fields)


@pytest.mark.parametrize(
    "divisors",
    [
        np.linspace(1, 8, 8, dtype=np.float32),
        np.full(8, 0.5, np.float32),
        np.zeros(8, np.float32),
        np.ones(7, np.float32),
        np.zeros((0,), np.float32),
    ],
    ids=["another curve", "below 1", "0", "too few", "none"],
)
def test_other_divisors_of_frequencies(refuse, divisors):
    refuse("rope_freqs.weight are not those of Llama 3.1", tensors={"rope_freqs.weight": divisors})


def test_divisors_and_linear_scaling(refuse):
    refuse("not those of Llama 3.1", "llama-3.1", fields={"llama.rope.scaling.factor": 2.0})


# ---------------------------------------------------------------- tensors

VALUES = np.ones((64, 64), np.float32)
KNOWN = "expected those of a model of architecture 'llama' with 2 layers"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("token_embd.weight", None, "lacks the matrix token_embd.weight"),
        ("token_embd.weight", VALUES[0], "lacks the matrix token_embd.weight"),
        ("blk.1.ffn_up.weight", None, f"lacks tensors: 'blk.1.ffn_up.weight'; {KNOWN}"),
        ("blk.2.ffn_up.weight", VALUES, f"has further tensors: 'blk.2.ffn_up.weight'; {KNOWN}"),
        ("blk.0.attn_q.bias", VALUES[0], f"has further tensors: 'blk.0.attn_q.bias'; {KNOWN}"),
        ("a\nb", VALUES, r"has further tensors: 'a\\nb'; expected"),
        ("blk.0.attn_q.weight", VALUES[:32], r"attn_q.weight has shape \(32, 64\); .* \(64, 64\)"),
        ("blk.0.attn_norm.weight", VALUES, r"attn_norm.weight has shape \(64, 64\); .* \(64,\)"),
        ("blk.0.attn_q.weight", VALUES * np.nan, "blk.0.attn_q.weight holds NaN or infinity"),
        ("blk.0.attn_q.weight", VALUES * np.inf, "blk.0.attn_q.weight holds NaN or infinity"),
        ("output_norm.weight", VALUES[0] * np.nan, "output_norm.weight holds NaN or infinity"),
        ("blk.0.attn_q.weight", VALUES.astype(np.int8), "has quantisation I8, which the package"),
        ("blk.0.attn_q.weight", VALUES.astype(np.float64), "has quantisation F64, which the pack"),
    ],
)
def test_tensors(refuse, name, values, message):
    refuse(message, tensors={name: values})


def test_a_scale_that_is_not_finite(refuse):
    blocks = np.full((64, 2 * 34), 255, np.uint8)  # the float16 of each block is NaN
    refuse("holds NaN or infinity", tensors={"blk.0.attn_q.weight": (blocks, Q8_0)})


def test_a_missing_bias(refuse):
    missing = {f"blk.{layer}.attn_{part}.bias": None for layer in (0, 1) for part in "qkv"}
    refuse("lacks tensors: 'blk.0.attn_k.bias', .*, .*, .*, ...; exp", "qwen2", tensors=missing)


# ---------------------------------------------------------------- tokenizer

GGML = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", "tokenizer.ggml.model is 'llama'; accepted: 'gpt2', byte-level BPE"),
        ("model", None, "tokenizer.ggml.model is None; accepted: 'gpt2'"),
        (
            "pre",
            "tekken",
            "tokenizer.ggml.pre is 'tekken'; accepted: qwen2, llama-bpe, smollm, gpt",
        ),
        ("pre", None, "tokenizer.ggml.pre is None; accepted"),
        ("pre", ["qwen2"], r"tokenizer.ggml.pre is \['qwen2'\]; accepted"),
        ("tokens", None, "tokenizer.ggml.tokens is missing; expected an array of type str"),
        ("tokens", [3], r"tokenizer.ggml.tokens is \[3\]; expected an array of type str"),
        ("token_type", None, "tokenizer.ggml.token_type is missing; expected an array of type int"),
        ("token_type", [1], f"{len(TOKENS)} tokens with 1 types; expected a type for each"),
        ("merges", None, "tokenizer.ggml.merges is missing; expected an array of type str"),
        ("merges", ["ab"], "its tokenizer cannot be built: merge 'ab' is not two tokens"),
        ("merges", ["a b c"], "its tokenizer cannot be built: merge 'a b c' is not two tokens"),
        ("merges", ["unknown b"], "its tokenizer cannot be built: .*unknown"),
        ("eos_token_id", len(TOKENS), f"eos_token_id is {len(TOKENS)}; expected the id of one of"),
        ("eot_token_id", -1, "eot_token_id is -1; expected the id of one of the"),
        ("bos_token_id", [1], r"bos_token_id is \[1\]; expected the id of one of the"),
        ("padding_token_id", TYPES.index(UNUSED), "padding_token_id is .*; expected the id of one"),
    ],
)
def test_tokenizers(refuse, key, value, message):
    refuse(message, fields={GGML + key: value})


def test_a_template_that_is_no_text(refuse):
    refuse("tokenizer.chat_template is 3, not a text", fields={"tokenizer.chat_template": 3})


def test_more_tokens_than_rows(refuse):
    fields = {GGML + "tokens": [*TOKENS, "new"], GGML + "token_type": [*TYPES, NORMAL]}
    rows = len(TOKENS)
    refuse(f"{rows + 1} tokens .* at most {rows}, the rows of the embedding", fields=fields)


def test_the_command_prints_one_line(tmp_path, refuse):
    from cli_commands import call

    refuse("architecture 'bert'", fields={"general.architecture": "bert"})
    words = ("--config=sokoban:llm", f"--config.model.path={tmp_path / 'odd.gguf'}")
    code, _, err = call("ragen_jax.check_data", *words)
    assert code == 2 and err.count("\n") == 1 and "architecture 'bert'; accepted" in err, err
