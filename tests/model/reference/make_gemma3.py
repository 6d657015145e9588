"""Make the tiny Gemma 3 models in this folder, and their log-probs, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/model/reference/make_gemma3.py

Made with torch 2.13.0 and transformers 5.24.0, in the form that make_qwen2.py describes. The
windows are shorter than most rows.
"""

from make_qwen2 import make
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

FULL, WINDOWED = "full_attention", "sliding_attention"
MODELS = {
    # Queries are not divided by the root of head_dim.
    "gemma3_mixed": dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=[WINDOWED, FULL, WINDOWED],
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 1e6},
            WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # Enough layers to run as a scan; all query heads share one key head; the last layer is windowed
    # as in the published models.
    "gemma3_deep": dict(
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=7,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        rms_norm_eps=1e-5,
        sliding_window=3,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}

if __name__ == "__main__":
    for seed, (name, fields) in enumerate(MODELS.items(), start=30):
        # Norms multiply by 1 + their weight.
        make(name, Gemma3ForCausalLM, Gemma3TextConfig, fields, seed, norm=0.0)
