"""Write a tokenizer_config.json that both transformers 4 and 5 can read."""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ragen_jax.storage.atomic_io import atomic_write, with_retries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FILE = "tokenizer_config.json"
# Classes that transformers 4 and 5 both have and that read tokenizer.json.
SHARED_CLASSES = (
    *("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"),
    *("LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast"),
)
GENERIC = "PreTrainedTokenizerFast"  # used if the source names no class or another class
# Arguments of the call that loaded the tokenizer, which transformers 5 writes to the file.
OF_LOADING = ("backend", "is_local", "local_files_only")


def source_class(directory: Path) -> str:
    """Return the tokenizer class that a model directory names, or `GENERIC`.

    Raises:
      ValueError: tokenizer_config.json is not a JSON object.
    """
    file = directory / FILE
    fields = json.loads(file.read_text()) if file.exists() else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is not a JSON object")
    name = fields.get("tokenizer_class")
    return name if name in SHARED_CLASSES else GENERIC


def save_tokenizer(directory: Path, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Write a tokenizer's files so that transformers 4 and 5 both open them.

    transformers 5 writes a class that 4 does not have (TokenizersBackend), and lists further
    special tokens under a name for which 4 expects a dict.

    Args:
      tokenizer: a tokenizer from `hf.load_tokenizer`, which records the source's class in
        `init_kwargs["tokenizer_class"]`; without that entry, `GENERIC` is written.
    """
    with_retries(functools.partial(tokenizer.save_pretrained, directory), directory)
    file = directory / FILE
    fields = json.loads(file.read_text())
    noted = tokenizer.init_kwargs.get("tokenizer_class")
    names = (noted, type(tokenizer).__name__, GENERIC)
    fields["tokenizer_class"] = next(name for name in names if name in SHARED_CLASSES)
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    fields = {name: value for name, value in fields.items() if name not in OF_LOADING}
    atomic_write(file, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
