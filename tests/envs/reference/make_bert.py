"""Make the tiny BERT in this folder, and its vectors, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/envs/reference/make_bert.py

Made with torch 2.13.0 and transformers 5.23.0. test_search_qa_e5.py compares our encoder with it,
so that the test suite needs no torch. vectors.json: texts, and the mean of the last hidden states
over a text's tokens, normalised to length 1.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

FOLDER = Path(__file__).with_name("bert")
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz:?."]
PIECES += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"] + ["query", "passage", "the"]
TEXTS = ["query: who wrote hamlet?", "query: ", "passage: the the the", "query: 7 \u00e9t\u00e9"]
TEXTS += ["passage: " + "long words of many letters. " * 9]


def make_tokenizer():
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", PIECES.index("[CLS]")), ("[SEP]", PIECES.index("[SEP]"))],
    )
    return tokenizer


def main():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(PIECES),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=96,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(1.0 if "LayerNorm.weight" in key else 0.0, 0.3 if p.ndim == 1 else 0.25)
    model.save_pretrained(FOLDER)
    tokenizer = make_tokenizer()
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    rows = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text).ids[:96]])
        if len(tokenizer.encode(text).ids) > 96:
            ids[0, -1] = PIECES.index("[SEP]")  # truncation keeps the last token
        with torch.no_grad():
            mean = model(ids).last_hidden_state[0].mean(0)
        rows.append({"text": text, "vector": (mean / mean.norm()).tolist()})
    (FOLDER / "vectors.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
