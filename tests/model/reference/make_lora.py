"""Make PEFT adapters of the tiny Qwen2 models in this folder, and their logits, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors peft
    /tmp/torch/bin/python tests/model/reference/make_lora.py

Made with torch 2.13.0, transformers 5.23.0 and peft 0.21.2, from the models of make_qwen2.py.
test_lora.py compares our adapters with them, so the test suite needs no torch. A rerun reproduces
the committed files byte for byte.

logits.npz: tokens_BT int32; logits_BTV float32, of the adapted model.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM

HERE = Path(__file__).parent
MODELS = ("qwen2_tied", "qwen2_untied")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROWS, TOKENS = 3, 11


def make(name, seed):
    torch.manual_seed(seed)
    base = Qwen2ForCausalLM.from_pretrained(HERE / name).eval()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(MODULES), task_type="CAUSAL_LM")
    model = get_peft_model(base, config).eval()
    with torch.no_grad():
        # PEFT initializes lora_B with 0, which would hide all other errors.
        for key, p in model.named_parameters():
            if "lora_" in key:
                p.normal_(0.0, 0.2)

    directory = HERE / f"lora_{name}"
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "README.md").unlink()  # a model card template
    file = directory / "adapter_config.json"
    written = json.loads(file.read_text())
    written["base_model_name_or_path"] = name  # PEFT writes a local path here
    written["target_modules"] = sorted(written["target_modules"])  # PEFT writes the order of a set
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")

    tokens_BT = torch.randint(1, base.config.vocab_size, (ROWS, TOKENS))
    with torch.no_grad():
        logits_BTV = model(tokens_BT).logits
    np.savez(
        directory / "logits.npz",
        tokens_BT=tokens_BT.numpy().astype(np.int32),
        logits_BTV=logits_BTV.numpy(),
    )


if __name__ == "__main__":
    for seed, name in enumerate(MODELS):
        make(name, seed)
