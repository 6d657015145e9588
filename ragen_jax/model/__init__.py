"""The language model: network, attention, Hugging Face files, tokenizer."""
