"""Train with TRL: python trl_script.py OPTIONS.json. It writes result0.json into its folder `out`.

Options: model, a directory; out; prompts, texts or messages; args, of GRPOConfig; monitor,
arguments of `monitor_collapse`, or none; eval, dropout, tools, whether to have them; replies, texts
in place of the policy's; resume, the folder of a checkpoint.
"""

import hashlib
import json
import logging
import os
import sys
from pathlib import Path

import jax
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from ragen_jax.integrations.monitor import MonitorSettings
from ragen_jax.integrations.trl import monitor_collapse

options = json.loads(Path(sys.argv[1]).read_text())
out = Path(options["out"])
RANK = int(os.environ.get("RANK", 0))


def text_of(completion):
    if isinstance(completion, str):
        return completion
    return "".join(message.get("content") or "" for message in completion)


def left_reward(completions, **kwargs):
    """1 for an answer with the word Left."""
    return [float("Left" in text_of(each)) for each in completions]


def short_reward(completions, **kwargs):
    return [-len(text_of(each)) / 1000 for each in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


class Recorded(GRPOTrainer):
    """Keeps the token ids of each generation batch."""

    batches = []

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        rows = []
        for i in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] > 0].tolist()
            kept = batch["completion_mask"][i] > 0
            row = {"prompt": prompt, "response": batch["completion_ids"][i][kept].tolist()}
            if "tool_mask" in batch:
                row["mask"] = batch["tool_mask"][i][kept].tolist()
            rows.append(row)
        self.batches.append({"training": self.model.training, "rows": rows})
        return batch


def rollouts(prompts, trainer):
    """Return the replies of the options, in place of the policy's."""
    tokenizer = trainer.processing_class
    texts = [options["replies"][i % len(options["replies"])] for i in range(len(prompts))]
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    shown, _, _ = trainer._tokenize_prompts(prompts)
    return {"prompt_ids": shown, "completion_ids": found, "logprobs": None}


logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
tokenizer = AutoTokenizer.from_pretrained(options["model"])
model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32)
if options.get("dropout"):
    model.config.attention_dropout = 0.2
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
arguments = dict(
    output_dir=str(out),
    report_to=[],
    use_cpu=True,
    bf16=False,
    seed=1,
    logging_steps=1,
    per_device_train_batch_size=16,
    num_generations=4,
    max_completion_length=48,
    learning_rate=1e-3,
    max_steps=2,
    save_strategy="no",
    log_completions=True,
    num_completions_to_print=0,
    disable_tqdm=True,
    gradient_checkpointing=False,
)
rows = [{"prompt": prompt} for prompt in options["prompts"]]
trainer = Recorded(
    model=model,
    args=GRPOConfig(**arguments | options.get("args", {})),
    train_dataset=Dataset.from_list(rows),
    eval_dataset=Dataset.from_list(rows[:4]) if options.get("eval") else None,
    processing_class=tokenizer,
    reward_funcs=[left_reward, short_reward],
    tools=[add] if options.get("tools") else None,
    rollout_func=rollouts if options.get("replies") else None,
)
if options.get("monitor") is not None:
    words = dict(options["monitor"])
    settings = MonitorSettings(**words.pop("settings", {}))
    monitor_collapse(trainer, settings, **words)
trainer.train(resume_from_checkpoint=options.get("resume"))
digest = hashlib.sha256()
for name, value in sorted(trainer.model.state_dict().items()):
    digest.update(name.encode() + value.numpy().tobytes())
result = {
    "log": trainer.state.log_history,
    "weights": digest.hexdigest(),
    "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    "batches": trainer.batches,
    "training": all(module.training for module in trainer.model.modules()),
    "platforms": jax.config.jax_platforms,
    "gradients": [p.requires_grad for p in trainer.model.parameters()],
}
(out / f"result{RANK}.json").write_text(json.dumps(result))
