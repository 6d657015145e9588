"""Make the tiny Qwen3 models in this folder, and their log-probs, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/model/reference/make_qwen3.py

Made with torch 2.13.0 and transformers 5.23.0, in the form that make_qwen2.py describes.
"""

from make_qwen2 import make
from transformers import Qwen3Config, Qwen3ForCausalLM

MODELS = {
    # head_dim is twice width / heads.
    "qwen3_tied": dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    # Enough layers to run as a scan; all query heads share one key head.
    "qwen3_deep": dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}

if __name__ == "__main__":
    for seed, (name, fields) in enumerate(MODELS.items(), start=20):
        make(name, Qwen3ForCausalLM, Qwen3Config, fields, seed)
