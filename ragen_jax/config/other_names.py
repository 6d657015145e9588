"""The names that other tools give to our settings."""

_FIELDS = {  # our field -> its names in TRL, verl, OpenRLHF, Transformers and others
    "steps": "max_steps num_train_steps total_training_steps num_train_epochs total_epochs epochs",
    "model.path": "model_name_or_path model_name pretrain model_path base_model",
    "model.dtype": "bf16 fp16 torch_dtype precision",
    "model.remat": "gradient_checkpointing enable_gradient_checkpointing",
    "model.lora.rank": "lora_r lora_rank use_peft use_lora peft",
    "env.name": "task environment env_id",
    "env.max_context": "max_prompt_length max_seq_length max_model_len",
    "env.options": "env_kwargs env_config dataset dataset_name train_files reward_funcs reward_fn",
    "rollout.groups": "batch_size train_batch_size per_device_train_batch_size gen_batch_size "
    "rollout_batch_size",
    "rollout.group_size": "num_generations n n_samples n_samples_per_prompt rollout_n num_rollouts",
    "rollout.max_new_tokens": "max_completion_length max_response_length response_length "
    "max_tokens generate_max_len",
    "optimizer.learning_rate": "lr learning_rate actor_lr policy_lr actor_learning_rate",
    "optimizer.minibatches": "mini_batch_size ppo_mini_batch_size num_mini_batches",
    "optimizer.micro_batch": "micro_batch_size micro_train_batch_size gradient_accumulation_steps "
    "ppo_micro_batch_size_per_gpu",
    "optimizer.warmup_updates": "warmup_steps warmup_ratio lr_warmup_steps",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler",
    "optimizer.b2": "adam_beta2",
    "optimizer.max_grad_norm": "grad_clip clip_grad max_norm",
    "critic.learning_rate": "critic_lr value_lr",
    "algorithm.name": "adv_estimator advantage_estimator algo loss_type",
    "algorithm.kl_reference": "teacher_model_name_or_path teacher_model teacher ref_model",
    "algorithm.kl_coef": "distill_coef beta kl_coeff kl_loss_coef init_kl_coef kl_ctrl",
    "algorithm.entropy_coef": "entropy_coeff ent_coef",
    "algorithm.clip_low": "epsilon cliprange clip_eps clip_ratio clip_range clip_ratio_low",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "eval.every": "eval_steps test_freq eval_strategy eval_interval",
    "checkpoint.every": "save_steps save_freq save_strategy save_interval",
    "checkpoint.keep": "save_total_limit max_ckpt_to_keep",
    "log.trackers": "wandb use_wandb report_to logger tensorboard project_name wandb_project",
    "mesh.expert": "ep expert_parallel_size expert_model_parallel_size",
    "mesh.tensor": "tp tensor_parallel_size tensor_model_parallel_size",
    "mesh.data": "n_gpus_per_node num_gpus nnodes world_size",
}
FIELDS = {name: field for field, names in _FIELDS.items() for name in names.split()}
FLAGS = {  # names of other tools -> a sentence about our flag
    **dict.fromkeys(
        ("output_dir", "save_dir", "logdir", "log_dir", "run_dir", "default_local_dir"),
        "the folder of a run is --workdir=DIR",
    ),
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "resume_mode", "load_checkpoint", "ckpt"),
        "a run is resumed by train --workdir=RUN",
    ),
}


def other_name(name: str) -> str:
    """Return the hint for a name that other tools use for a setting; "" without such a name."""
    last = name.lower().replace("-", "_").rpartition(".")[2]
    if last in FIELDS:
        return f"; here it is called --config.{FIELDS[last]}"
    return f"; {FLAGS[last]}" if last in FLAGS else ""
