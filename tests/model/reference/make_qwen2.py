"""Make the tiny Qwen2 models in this folder, and their log-probs, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/model/reference/make_qwen2.py

Made with torch 2.13.0 and transformers 5.23.0. test_qwen.py compares our model with them, so the
test suite needs no torch. A rerun reproduces the committed files byte for byte.

logps.npz: tokens_BT int32, right-padded with 0; length_B; logp_BT float32, entry t is log p(token t
| tokens < t), entry 0 is 0; position_T, positions with a jump; jump_logp_BT, the log-probs at these
positions.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

HERE = Path(__file__).parent
MODELS = {
    "qwen2_tied": dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    # heads * head_dim is not the width, and all query heads share one key head.
    "qwen2_untied": dict(
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=6,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    # A key head for every query head.
    "qwen2_full_heads": dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
}
VOCAB, LAYERS, LENGTHS = 64, 2, (16, 1, 9, 13)


def make(name, model_class, config_class, fields, seed, norm=1.0):
    torch.manual_seed(seed)
    common = dict(vocab_size=VOCAB, num_hidden_layers=LAYERS, max_position_embeddings=128)
    config = config_class(**common | fields)
    model = model_class(config).eval()
    with torch.no_grad():
        # transformers initializes biases with 0 and norms with 1, so a test would not notice if
        # they were dropped. Larger matrices make attention and log-probs non-uniform.
        for key, p in model.named_parameters():
            p.normal_(norm if "norm" in key else 0.0, 0.3 if p.ndim == 1 else 0.15)
    model.save_pretrained(HERE / name)

    length_B = np.array(LENGTHS, np.int32)
    tokens_BT = torch.randint(1, VOCAB, (len(LENGTHS), max(LENGTHS)))
    mask_BT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    tokens_BT = tokens_BT * mask_BT
    position_T = torch.arange(max(LENGTHS)) + 7 * (torch.arange(max(LENGTHS)) >= 5)

    def logps(**inputs):
        with torch.no_grad():
            logp = model(tokens_BT, attention_mask=mask_BT.long(), **inputs).logits.log_softmax(-1)
        picked = logp[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0] * mask_BT[:, 1:]
        return torch.nn.functional.pad(picked, (1, 0)).numpy()

    np.savez(
        HERE / name / "logps.npz",
        tokens_BT=tokens_BT.numpy().astype(np.int32),
        length_B=length_B,
        logp_BT=logps(),
        position_T=position_T.numpy().astype(np.int32),
        jump_logp_BT=logps(position_ids=position_T[None].expand(len(LENGTHS), -1)),
    )


if __name__ == "__main__":
    for seed, (name, fields) in enumerate(MODELS.items()):
        make(name, Qwen2ForCausalLM, Qwen2Config, fields, seed)
