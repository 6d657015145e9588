"""Small BPE tokenizers with the turn markers of model families, for chat tests.

They are byte-level, except that of Gemma 3, which falls back to bytes.

Their merges are trained on text generated here, so that control strings in plain text, line breaks
next to a message and two-byte letters are tokens of several characters, as in the families'
tokenizers. Templates follow the families' formats.
"""

import dataclasses
import functools
import json
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from ragen_jax.model.token_bytes import SPACE
from ragen_jax.model.tokenizer import CHAT_TEMPLATE

QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
) + CHAT_TEMPLATE

LLAMA = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

GEMMA = (  # no system turn: the system text opens the first user message
    "{% set rules = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{{ bos_token }}{% for message in (messages[1:] if rules else messages) %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n'"
    " + (rules if loop.first else '') + message['content'] | trim"
    " + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

PHI = (  # the markers are not in the decoded text
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

DEEPSEEK = (  # the prompt opens the thought
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% else %}{{ '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

# Behaves as Qwen3's template: it drops the thoughts of replies before the last question, shows an
# empty thought in a last reply without one, and ends the prompt with an empty thought if thinking
# is switched off.
QWEN3 = (
    "{% set last = namespace(question=0) %}"
    "{% for message in messages if message['role'] == 'user' %}"
    "{% set last.question = messages.index(message) %}{% endfor %}"
    "{% for message in messages %}{% set said = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set parts = said.split('</think>') %}"
    "{% set said = parts[-1].lstrip('\n') %}{% if loop.index0 > last.question and loop.last %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts[1:] else '' %}"
    "{% set said = '<think>\n' + thought + '\n</think>\n\n' + said %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)

# The format of Qwen2.5: tools follow the system text, results are in a user message.
TOOL_TEMPLATE = (
    "{% set told = messages[0]['content'] if messages[0]['role'] == 'system' else 'Help.' %}"
    "{{ '<|im_start|>system\n' + told }}"
    "{% if tools %}{{ '\n\nTools:' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\nCall one so:\n<tool_call>\n{\"name\": NAME}\n</tool_call>' }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% for message in messages if message['role'] != 'system' %}"
    "{% if message['role'] == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' }}"
    "{{ message['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A tokenizer and its control strings."""

    tokenizer: PreTrainedTokenizerFast
    control: tuple[str, ...]


# name -> template, normalizer, special tokens, turn markers that are not flagged as special, other
# added tokens (plain text), named tokens
_FAMILIES = {
    "qwen": (
        QWEN,
        normalizers.NFC(),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
        (),
        ("<think>", "</think>", "<tool_call>"),
        dict(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
    ),
    "llama": (
        LLAMA,
        None,
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
            *("<|start_header_id|>", "<|end_header_id|>"),
            *(f"<|reserved_special_token_{i}|>" for i in range(251)),
        ),
        (),
        (),
        dict(eos_token="<|end_of_text|>", bos_token="<|begin_of_text|>"),
    ),
    "gemma": (
        GEMMA,
        None,
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        (),
        ("\n\n", "\n\n\n", "<table>"),
        dict(eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"),
    ),
    "gemma3": (
        GEMMA,
        normalizers.Replace(" ", SPACE),
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        (),
        ("\n\n", "\n\n\n", "<table>", f"{SPACE * 2}"),
        dict(eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"),
    ),
    "phi": (
        PHI,
        None,
        ("<|endoftext|>",),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("user",),
        dict(eos_token="<|endoftext|>", pad_token="!"),  # "!" remains normal text
    ),
    "deepseek": (
        DEEPSEEK,
        None,
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>"),
        ("<think>", "</think>"),
        dict(eos_token="<｜end▁of▁sentence｜>", bos_token="<｜begin▁of▁sentence｜>"),
    ),
}
FAMILIES = tuple(_FAMILIES)


@functools.cache
def family(name, **flags):
    """Return the `Family` with a name of FAMILIES.

    flags: AddedToken's lstrip and rstrip for its special tokens and markers.
    """
    template, normalizer, special, markers, words, named = _FAMILIES[name]
    tokenizer = Tokenizer.from_str(_falling_back() if name == "gemma3" else _trained())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    flags = dict(normalized=False) | flags
    tokenizer.add_special_tokens([AddedToken(word, **flags) for word in special])
    tokenizer.add_tokens([AddedToken(word, **flags) for word in markers])
    tokenizer.add_tokens(list(words))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)
    return Family(tokenizer, (*special, *markers))


@functools.cache
def _trained():
    tokenizer = Tokenizer(models.BPE())
    # Letters with the character before them, single digits, punctuation with the line breaks after
    # it.
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    tokenizer.pre_tokenizer = Sequence(
        [Split(words, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer.to_str()


@functools.cache
def _falling_back():
    """A tokenizer of the kind of Gemma's, which lacks a token for 想."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    letters = [*map(chr, range(33, 127)), "\n", "é"]
    texts = [text.replace("想", "") for text in _texts()]
    tokenizer.train_from_iterator([*texts, *letters], trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {token: id_ for id_, token in enumerate(tokens)},
            [tuple(pair) for pair in trained["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer.to_str()


def _texts():
    draw = random.Random(0)
    said = ["the box", " is", " Up", "\n", "\n\n", ".\n", " <|", "|>", "|>\n", "</", " é", "想"]
    said += ["<|im_start|>", "<|im_end|>user\n", "<|end|>", "<start_of_turn>", "<｜User｜>"]
    return ["".join(draw.choices(said, k=40)) for _ in range(400)]
