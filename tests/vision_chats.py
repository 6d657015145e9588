"""A tokenizer and a chat of a vision-language model, for tests of turn records.

The template shows images as Qwen2.5-VL's does. Tests build their prompts by hand, piece by piece,
and a prompt shows all turns of its episode.
"""

import dataclasses
import functools

import numpy as np
from chat_families import family
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ragen_jax.model.vision.image_table import ImageTable
from ragen_jax.rollout.chat import Chat, ChatFormat, make_chat

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image_url' in part %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def seeing_tokenizer():
    """Return the tokenizer of family "qwen" with image tokens and the tokens around them."""
    tokenizer = Tokenizer.from_str(family("qwen").tokenizer.backend_tokenizer.to_str())
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False) for word in ("<|vision_end|>", "<|image_pad|>")]
    )
    named = dict(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **named)


class ShowsAll(Chat):
    """A chat whose prompts always show all turns, including prompts built by hand."""

    def first_shown(self, *_):
        return 0


def seeing_chat(game):
    """Return a chat with terse prompts for a vision-language model."""
    tokenizer = seeing_tokenizer()
    settings = dict(context="full", prompt="terse", actions_per_turn=1, max_actions=5)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    images = ImageTable(None, len(tokenizer), pad)
    chat = make_chat(tokenizer, game, ChatFormat(**settings), images=images)
    return ShowsAll(**{f.name: getattr(chat, f.name) for f in dataclasses.fields(chat)})


def pieces(chat, *parts):
    """Return int32 ids of texts, with control strings as control tokens, and of images, given as
    numbers of tokens."""
    ids, beyond = [], len(chat.token_bytes)
    for part in parts:
        if isinstance(part, int):
            ids += range(beyond, beyond + part)
        else:
            ids += chat.template.tokenizer.encode(part, add_special_tokens=False)
    return np.array(ids, np.int32)
