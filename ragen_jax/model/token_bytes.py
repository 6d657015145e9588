"""The bytes of every token of a tokenizer, in the two ways in which tokenizers write them.

Byte-level BPE (Qwen2.5, Qwen3, Llama 3, the tiny models) writes each byte as one printable
character (GPT-2's table): printable Latin-1 bytes are unchanged, the others are numbered from
U+0100 on. BPE with byte fallback (Gemma) writes text, with U+2581 for a space, and has a token
`<0x0A>` for each byte of a text that has no other token. Added tokens are plain text in both.
"""

import functools
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
# The decoder of Gemma's tokenizer.json. One that drops a space at the start of a text is another.
BYTE_FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@functools.lru_cache(maxsize=8)
def token_bytes(tokenizer: "PreTrainedTokenizerFast") -> tuple[bytes, ...]:
    """Return the bytes of every id; those of a text's ids are the text's.

    Raises:
      ValueError: the tokenizer is of another kind.
    """
    decoder = tokenizer.backend_tokenizer.decoder
    is_byte_fallback = decoder is not None and json.loads(decoder.__getstate__()) == BYTE_FALLBACK
    added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
    pieces = []
    for id_, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if id_ in added:
            text = added[id_]
            pieces.append((text.replace(SPACE, " ") if is_byte_fallback else text).encode())
        elif token is None:  # a hole in the vocabulary
            pieces.append(b"")
        elif is_byte_fallback:
            byte = _BYTE.fullmatch(token)
            text = token.replace(SPACE, " ")
            pieces.append(bytes([int(byte[1], 16)]) if byte else text.encode())
        elif all(character in _byte_of() for character in token):
            pieces.append(bytes(_byte_of()[character] for character in token))
        else:
            raise ValueError(
                f"token {id_} ({token!r}) is not byte-level; only byte-level BPE tokenizers "
                "(Qwen2.5, Qwen3, Llama 3) and those with Gemma's decoder are supported"
            )
    return tuple(pieces)


@functools.cache
def _byte_of() -> dict[str, int]:
    """Return the byte of each character of GPT-2's table."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}
