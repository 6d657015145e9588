"""The language model: network, attention, Hugging Face files, tokenizer."""

import os

# transformers announces on import that PyTorch is missing; here that is as it should be.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
