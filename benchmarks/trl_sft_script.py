"""Updates of TRL's SFTTrainer, for `small_model.py`, which runs this file with TRL's Python.

    python trl_sft_script.py SETTINGS.json

Writes seconds.json to the output folder: {"step": seconds of each update}.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Steps(TrainerCallback):
    """Note the seconds of each update."""

    def on_step_begin(self, args, state, control, **rest):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **rest):
        SECONDS["step"].append(time.perf_counter() - self.start)


def main(settings):
    config = SFTConfig(
        output_dir=settings["output"],
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["batch"] // settings["micro_batch"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        completion_only_loss=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=torch.float32, trust_remote_code=False
        ),
        args=config,
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], trust_remote_code=False),
        callbacks=[Steps()],
    )
    trainer.train()
    Path(settings["output"], "seconds.json").write_text(json.dumps(SECONDS))


SECONDS = {"step": []}

if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
