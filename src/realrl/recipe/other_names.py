"""Names that other tools have for settings: Hugging Face Trainer, TRL, PEFT, verl and OpenRLHF."""

from collections.abc import Mapping
from types import MappingProxyType

from realrl.config.explain import OtherName

_SAMPLES = ("policy.samples", "expert_iteration.samples", "distillation.samples", "evaluation.samples")
_METHODS = ("policy", "ppo", "expert_iteration", "distillation")
_BATCH = "It counts all devices; `micro_batch_tokens` bounds what one pass holds."
_PASS = "It is in tokens and changes no result: data.batch alone says what a step learns from."
_PLAN = "Plans choose parallelism, for each call."


def _name(*targets: str, about: str = "") -> OtherName:
    return OtherName(targets, about)


def _optimizer(field: str, about: str = "") -> OtherName:
    return OtherName(tuple(f"models.{role}.optimizer.{field}" for role in ("actor", "reward")), about)


def _lora(field: str, about: str = "") -> OtherName:
    return OtherName(tuple(f"models.{role}.lora.{field}" for role in ("actor", "reward")), about)


def _method(field: str, about: str = "") -> OtherName:
    return OtherName(tuple(f"{section}.{field}" for section in _METHODS), about)


_KL = _name("policy.kl.coef", "ppo.kl.coef")
_CLIP = _name("policy.clip", "ppo.clip", "distillation.clip")
_MICRO = _name("micro_batch_tokens", about=_PASS)
_STEP = _name("data.batch", about=_BATCH)
_DEVICES = _name("cluster", about="It is written as nodes x devices per node.")
_RECOMPUTE = _name("recompute")
_DTYPE = _name("models.actor.dtype", "models.reward.dtype")
_MODEL = _name("models.actor.path", "models.reward.path")
_VOCABULARY = _name("models.actor.vocab_size", "models.reward.vocab_size", about="It is a number of tokens.")

OTHER_NAMES: Mapping[str, OtherName] = MappingProxyType(
    {
        # Optimizer and schedule.
        "learning_rate": _optimizer("lr"),
        "actor_learning_rate": _optimizer("lr"),
        "optim.lr": _optimizer("lr"),
        "critic.optim.lr": _name("models.critic.optimizer.lr"),
        "critic_learning_rate": _name("models.critic.optimizer.lr"),
        "lr_scheduler_type": _optimizer("schedule"),
        "lr_scheduler": _optimizer("schedule"),
        "warmup_ratio": _optimizer("warmup_steps", "It counts steps."),
        "lr_warmup_ratio": _optimizer("warmup_steps", "It counts steps."),
        "lr_warmup_steps": _optimizer("warmup_steps"),
        "lr_warmup_steps_ratio": _optimizer("warmup_steps", "It counts steps."),
        "max_grad_norm": _optimizer("grad_clip"),
        "max_norm": _optimizer("grad_clip"),
        "adam_beta1": _optimizer("betas", "It is a list of both."),
        "adam_beta2": _optimizer("betas", "It is a list of both."),
        "adam_betas": _optimizer("betas"),
        "adam_epsilon": _optimizer("eps"),
        "l2": _optimizer("weight_decay"),
        # Sizes of steps.
        "per_device_train_batch_size": _STEP,
        "train_batch_size": _STEP,
        "rollout_batch_size": _STEP,
        "batch_size": _STEP,
        "generation_batch_size": _STEP,
        "per_device_eval_batch_size": _name("data.eval_batch", about=_BATCH),
        "val_batch_size": _name("data.eval_batch", about=_BATCH),
        "gradient_accumulation_steps": _MICRO,
        "micro_train_batch_size": _MICRO,
        "micro_rollout_batch_size": _MICRO,
        "ppo_micro_batch_size": _MICRO,
        "ppo_micro_batch_size_per_gpu": _MICRO,
        "log_prob_micro_batch_size_per_gpu": _MICRO,
        "ppo_max_token_len_per_gpu": _name("micro_batch_tokens"),
        "ppo_mini_batch_size": _method("minibatches", "It is the number of optimizer steps, not their size."),
        "num_mini_batches": _method("minibatches"),
        # Length of training, logging and saving.
        "num_train_epochs": _name("training.epochs"),
        "total_epochs": _name("training.epochs"),
        "num_episodes": _name("training.epochs"),
        "max_steps": _name("training.steps"),
        "total_training_steps": _name("training.steps"),
        "num_iterations": _method("epochs"),
        "ppo_epochs": _method("epochs"),
        "num_ppo_epochs": _method("epochs"),
        "eval_steps": _name("evaluation.every"),
        "test_freq": _name("evaluation.every"),
        "save_steps": _name("checkpoint.every"),
        "save_freq": _name("checkpoint.every"),
        "save_total_limit": _name("checkpoint.keep"),
        "load_best_model_at_end": _name("evaluation.best"),
        "metric_for_best_model": _name("evaluation.best.metric"),
        "resume_from_checkpoint": _name("resume"),
        "overwrite_output_dir": _name("overwrite"),
        "output_dir": _name("run_dir"),
        "save_path": _name("run_dir"),
        "default_local_dir": _name("run_dir"),
        "report_to": _name("trackers"),
        "use_wandb": _name("trackers.wandb"),
        "wandb_project": _name("trackers.wandb.project"),
        "wandb_group": _name("trackers.wandb.group"),
        "wandb_run_name": _name("trackers.wandb.name"),
        "project_name": _name("trackers.wandb.project"),
        "experiment_name": _name("trackers.wandb.name"),
        "logging_steps": _name(about="every step is written to RUN_DIR/metrics.jsonl; leave it out"),
        # Data.
        "dataset_name": _name("data.train"),
        "train_files": _name("data.train"),
        "prompt_data": _name("data.train"),
        "eval_dataset": _name("data.eval"),
        "val_files": _name("data.eval"),
        "input_key": _name("data.columns"),
        "prompt_key": _name("data.columns"),
        "label_key": _name("data.columns"),
        "max_length": _name("data.max_tokens"),
        "max_len": _name("data.max_tokens"),
        "max_seq_length": _name("data.max_tokens"),
        "max_prompt_length": _name("data.max_prompt_tokens"),
        "prompt_max_len": _name("data.max_prompt_tokens"),
        "assistant_only_loss": _name("data.train_on"),
        "packing": _name(about="sequences are always packed, without padding; leave it out"),
        "packing_samples": _name(about="sequences are always packed, without padding; leave it out"),
        # Sampling.
        "num_generations": _name(*_SAMPLES),
        "n_samples_per_prompt": _name(*_SAMPLES),
        "rloo_k": _name(*_SAMPLES),
        "rollout.n": _name(*_SAMPLES),
        "max_completion_length": _name("generation.max_new_tokens"),
        "max_response_length": _name("generation.max_new_tokens"),
        "response_length": _name("generation.max_new_tokens"),
        "generate_max_len": _name("generation.max_new_tokens"),
        "do_sample": _name("generation.greedy", about="It is the opposite."),
        "use_vllm": _name(about="models generate by the built-in engine; leave it out"),
        # Losses.
        "beta": _name("preference.beta", "kto.beta", *_KL.targets, "distillation.jsd_beta"),
        "init_kl_coef": _KL,
        "kl_coef": _KL,
        "kl_loss_coef": _KL,
        "kl_target": _name("policy.kl.target", "ppo.kl.target"),
        "kl_horizon": _name("policy.kl.horizon", "ppo.kl.horizon"),
        "kl_estimator": _name("policy.kl.estimator"),
        "kl_loss_type": _name("policy.kl.estimator"),
        "epsilon": _CLIP,
        "cliprange": _CLIP,
        "clip_ratio": _CLIP,
        "clip_ratio_low": _CLIP,
        "eps_clip": _CLIP,
        "epsilon_high": _name("policy.clip_high"),
        "clip_ratio_high": _name("policy.clip_high"),
        "clip_ratio_c": _name("policy.dual_clip"),
        "delta": _name("policy.dual_clip"),
        "cliprange_value": _name("ppo.value_clip"),
        "lambd": _name("ppo.lam"),
        "whiten_rewards": _name("ppo.advantage_norm", about="It is about advantages."),
        "scale_rewards": _name("policy.scale"),
        "norm_adv_by_std_in_grpo": _name("policy.scale"),
        "adv_estimator": _name("algorithm"),
        "loss_type": _name("preference.loss", "kto.loss", "policy.aggregate"),
        "loss_agg_mode": _name("policy.aggregate"),
        "importance_sampling_level": _name("policy.ratio"),
        "mask_truncated_completions": _name("policy.mask_truncated"),
        "ref_model_mixup_alpha": _name("policy.ref_ema", "ppo.ref_ema", "preference.ref_ema"),
        "ref_model_sync_steps": _name("policy.ref_every", "ppo.ref_every", "preference.ref_every"),
        "simpo_gamma": _name("preference.gamma"),
        "rpo_alpha": _name("preference.nll_coef"),
        "reference_free": _name("preference.reference"),
        "precompute_ref_log_probs": _name("preference.reference"),
        # Models.
        "model_name_or_path": _MODEL,
        "pretrain": _MODEL,
        "model.path": _MODEL,
        "reward_pretrain": _name("models.reward.path"),
        "reward_model_path": _name("models.reward.path"),
        "sft_model_path": _name("models.actor.path"),
        "critic_pretrain": _name("models.critic.path"),
        "teacher_model_name_or_path": _name("models.teacher.path"),
        "reward_funcs": _name("reward"),
        "reward_function": _name("reward"),
        "custom_reward_function": _name("reward"),
        "bf16": _DTYPE,
        "torch_dtype": _DTYPE,
        "gradient_checkpointing": _RECOMPUTE,
        "enable_gradient_checkpointing": _RECOMPUTE,
        # Adapters.
        "resize_vocab": _VOCABULARY,
        "resize_token_embeddings_to_32x": _VOCABULARY,
        "r": _lora("rank"),
        "lora_r": _lora("rank"),
        "lora_rank": _lora("rank"),
        "lora_alpha": _lora("alpha"),
        "target_modules": _lora("targets"),
        "lora_target_modules": _lora("targets"),
        "use_rslora": _lora("rslora"),
        "use_dora": _lora("dora"),
        "lora_dropout": _name(about="adapters have no dropout; leave it out"),
        # Devices.
        "n_gpus_per_node": _DEVICES,
        "nnodes": _DEVICES,
        "zero_stage": _name("plan", about=_PLAN),
        "deepspeed": _name("plan", about=_PLAN),
        "tensor_model_parallel_size": _name("plan", about=_PLAN),
        "tensor_parallel_size": _name("plan", about=_PLAN),
    }
)
"""Last parts of another tool's name, enough to identify it -> our setting."""
