"""GRPO steps of TRL, for `grpo_step.py` and `small_model.py`, which run this with TRL's Python.

    python trl_script.py SETTINGS.json

Writes seconds.json to the output folder: {"step": seconds of each step, "rollout": of its
generation and rewards, "update": of the rest, "reply": mean number of tokens}.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **columns):
    return [float(len(text) % 2) for text in completions]


class Timed(GRPOTrainer):
    """The trainer with the seconds of its generation."""

    def _generate_and_score_completions(self, inputs):
        start = time.perf_counter()
        found = super()._generate_and_score_completions(inputs)
        SECONDS["rollout"][-1] += time.perf_counter() - start
        SECONDS["reply"].append(float(found["completion_mask"].sum(1).float().mean()))
        return found


class Steps(TrainerCallback):
    """Note the seconds of each step: of its generation and all updates on it."""

    def __init__(self, updates):
        self.updates = updates

    def on_step_begin(self, args, state, control, **rest):
        if state.global_step % self.updates == 0:
            self.start = time.perf_counter()
            SECONDS["rollout"].append(0.0)

    def on_step_end(self, args, state, control, **rest):
        if state.global_step % self.updates == 0:
            SECONDS["step"].append(time.perf_counter() - self.start)
            SECONDS["update"].append(SECONDS["step"][-1] - SECONDS["rollout"][-1])


def main(settings):
    updates, passes = settings["updates"], settings["batch"] // settings["micro_batch"]
    config = GRPOConfig(
        output_dir=settings["output"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=passes // updates,
        steps_per_generation=passes,
        num_generations=settings["members"],
        max_completion_length=settings["reply"],
        max_steps=settings["steps"] * updates,
        learning_rate=settings["learning_rate"],
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Timed(
        AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32, trust_remote_code=False
        ),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=False),
        callbacks=[Steps(updates)],
    )
    trainer.train()
    Path(settings["output"], "seconds.json").write_text(json.dumps(SECONDS))


SECONDS = {"step": [], "rollout": [], "update": [], "reply": []}

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
