"""Make the tiny Qwen3 models with experts in this folder, and their log-probs, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors
    /tmp/torch/bin/python tests/model/reference/make_qwen3_moe.py

Made with torch 2.13.0 and transformers 5.24.0, in the form that make_qwen2.py describes.
"""

from make_qwen2 import make
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

MODELS = {
    "qwen3moe_two": dict(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=20,
        norm_topk_prob=False,
    ),
    # Enough layers to run as a scan.
    "qwen3moe_eight": dict(
        hidden_size=16,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        norm_topk_prob=True,
    ),
}


class PlainExperts(Qwen3MoeForCausalLM):
    """With a loop over the experts: torch's grouped products need aligned sizes."""

    def __init__(self, config):
        config._experts_implementation = "eager"
        super().__init__(config)


PlainExperts.__name__ = "Qwen3MoeForCausalLM"  # the architecture in config.json

if __name__ == "__main__":
    for seed, (name, fields) in enumerate(MODELS.items(), start=40):
        make(name, PlainExperts, Qwen3MoeConfig, {"intermediate_size": 24} | fields, seed)
