"""Make the tiny Qwen3.5 model in this folder, and its log-probs, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/model/reference/make_qwen3_5.py

Made with torch 2.13.0 and transformers 5.24.0, in the form that make_qwen2.py describes.
"""

from make_qwen2 import make
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

MODELS = {
    # Enough layers to run as a scan over the published pattern.
    "qwen3_5_deep": dict(
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        rms_norm_eps=1e-3,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    ),
}

if __name__ == "__main__":
    for seed, (name, fields) in enumerate(MODELS.items(), start=50):
        # Norms multiply by 1 + their weight.
        make(name, Qwen3_5ForCausalLM, Qwen3_5TextConfig, fields, seed, norm=0.0)
