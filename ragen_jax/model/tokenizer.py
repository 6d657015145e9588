"""The tiny agent's tokenizer: byte-level BPE in Hugging Face format.

256 byte tokens, no merges, and whole words for the environment's vocabulary: any text round-trips,
and grid symbols, digits, tags and action words are one token each. Its chat template is ChatML,
the format of Qwen's template.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ragen_jax.model.template import NOTICE, TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OF_IMAGES = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The same template for messages that may mix texts and images.
SEEING_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "{{ '" + "".join(OF_IMAGES) + "' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(words: Iterable[str], *, sees: bool = False) -> "PreTrainedTokenizerFast":
    """Build the tokenizer; `save_pretrained` writes files that AutoTokenizer opens.

    Args:
      words: texts that are one token each, in the order of their ids (the environment's `words`).
      sees: whether messages may have images, whose tokens then come after all others.
    """
    from transformers import PreTrainedTokenizerFast  # imported here because it takes a second

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    words = (*TAGS, *ROLES, NOTICE, *words)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    if sees:
        tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in OF_IMAGES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=SEEING_TEMPLATE if sees else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
