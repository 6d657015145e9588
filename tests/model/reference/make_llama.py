"""Make the tiny Llama models in this folder, and their log-probs, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/model/reference/make_llama.py

Made with torch 2.13.0 and transformers 5.23.0, in the form that make_qwen2.py describes. A rerun
reproduces the committed files byte for byte.
"""

from make_qwen2 import make
from transformers import LlamaConfig, LlamaForCausalLM

MODELS = {
    # Llama 3.2's rotary scaling, at a size where it has an effect: of the frequencies of head_dim
    # 16, the first is kept, the second is mixed and the others are divided. heads * head_dim is not
    # the width.
    "llama_scaled": dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    # All query heads share one key head.
    "llama_linear": dict(
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=3,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
}

if __name__ == "__main__":
    for seed, (name, fields) in enumerate(MODELS.items(), start=10):
        make(name, LlamaForCausalLM, LlamaConfig, fields, seed)
