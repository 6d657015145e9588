"""The language model: network, attention, Hugging Face files, tokenizer."""

import os

# Without PyTorch, transformers prints a warning on import. PyTorch is not needed here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
