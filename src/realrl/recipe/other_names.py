"""Names that other tools have for settings: Hugging Face Trainer, TRL, PEFT, verl and OpenRLHF.

A recipe may use another tool's name if it means exactly the same (`OtherName.accepted`). All other names are listed
only to improve error messages.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from realrl.config.explain import OtherName

_SAMPLES = ("policy.samples", "expert_iteration.samples", "distillation.samples")
_METHODS = ("policy", "ppo", "expert_iteration", "distillation")
_BATCH = "It counts all devices; `micro_batch_tokens` bounds what one pass holds."
_PASS = "It is in tokens and changes no result: data.batch alone says what a step learns from."
_PLAN = "Plans choose parallelism, for each call."


def _same(*targets: str, **values: Any) -> OtherName:
    """Describe a name that recipes may use. `values` translates the other tool's values that differ from ours."""
    return OtherName(targets, accepted=True, values=values)


def _name(*targets: str, about: str = "") -> OtherName:
    """Describe a name that recipes may not use, because it has another meaning or other values."""
    return OtherName(targets, about)


def _optimizer(field: str, about: str = "") -> OtherName:
    return _of_roles(f"optimizer.{field}", about)


def _lora(field: str) -> OtherName:
    return _of_roles(f"lora.{field}")


def _of_roles(field: str, about: str = "") -> OtherName:
    targets = tuple(f"models.{role}.{field}" for role in ("actor", "reward"))
    return OtherName(targets, about, accepted=not about)


def _method(field: str, about: str = "") -> OtherName:
    return OtherName(tuple(f"{section}.{field}" for section in _METHODS), about, accepted=not about)


_KL = _same("policy.kl.coef", "ppo.kl.coef")
_CLIP = _same("policy.clip", "ppo.clip", "distillation.clip")
_SCHEDULE = OtherName(
    _of_roles("optimizer.schedule").targets, accepted=True, values={"constant_with_warmup": "constant"}
)
_MICRO = _name("micro_batch_tokens", about=_PASS)
_STEP = _name("data.batch", about=_BATCH)
_DEVICES = _name("cluster", about="It is written as nodes x devices per node.")
_RECOMPUTE = _same("recompute")
_MODEL = _of_roles("path")
_VOCABULARY = _name("models.actor.vocab_size", "models.reward.vocab_size", about="It is a number of tokens.")

OTHER_NAMES: Mapping[str, OtherName] = MappingProxyType(
    {
        # Optimizer and schedule.
        "learning_rate": _optimizer("lr"),
        "actor_learning_rate": _optimizer("lr"),
        "optim.lr": _name(*_optimizer("lr").targets),
        "critic.optim.lr": _name("models.critic.optimizer.lr"),
        "critic_learning_rate": _same("models.critic.optimizer.lr"),
        "lr_scheduler_type": _SCHEDULE,
        "lr_scheduler": _SCHEDULE,
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
        "num_train_epochs": _same("training.epochs"),
        "total_epochs": _same("training.epochs"),
        "num_episodes": _same("training.epochs"),
        "max_steps": _same("training.steps"),
        "total_training_steps": _same("training.steps"),
        "num_iterations": _method("epochs"),
        "ppo_epochs": _method("epochs"),
        "num_ppo_epochs": _method("epochs"),
        "eval_steps": _same("evaluation.every"),
        "test_freq": _same("evaluation.every"),
        "save_steps": _same("checkpoint.every"),
        "save_freq": _same("checkpoint.every"),
        "save_total_limit": _same("checkpoint.keep"),
        "load_best_model_at_end": _name("evaluation.best"),
        "metric_for_best_model": _same("evaluation.best.metric"),
        "resume_from_checkpoint": _name("resume"),
        "overwrite_output_dir": _same("overwrite"),
        "output_dir": _same("run_dir"),
        "save_path": _same("run_dir"),
        "default_local_dir": _same("run_dir"),
        "report_to": _name("trackers"),
        "use_wandb": _name("trackers.wandb"),
        "wandb_project": _same("trackers.wandb.project"),
        "wandb_group": _same("trackers.wandb.group"),
        "wandb_run_name": _same("trackers.wandb.name"),
        "project_name": _name("trackers.wandb.project"),
        "experiment_name": _name("trackers.wandb.name"),
        "logging_steps": _name(about="every step is written to RUN_DIR/metrics.jsonl; leave it out"),
        # Data.
        "dataset_name": _same("data.train"),
        "train_files": _same("data.train"),
        "prompt_data": _same("data.train"),
        "eval_dataset": _same("data.eval"),
        "val_files": _same("data.eval"),
        "input_key": _name("data.columns"),
        "prompt_key": _name("data.columns"),
        "label_key": _name("data.columns"),
        "max_length": _same("data.max_tokens"),
        "max_len": _same("data.max_tokens"),
        "max_seq_length": _same("data.max_tokens"),
        "max_prompt_length": _same("data.max_prompt_tokens"),
        "prompt_max_len": _same("data.max_prompt_tokens"),
        "assistant_only_loss": _name("data.train_on"),
        "packing": _name(about="sequences are always packed, without padding; leave it out"),
        "packing_samples": _name(about="sequences are always packed, without padding; leave it out"),
        # Sampling.
        "num_generations": _same(*_SAMPLES),
        "n_samples_per_prompt": _same(*_SAMPLES),
        "rloo_k": _same(*_SAMPLES),
        "rollout.n": _name(*_SAMPLES),
        "max_completion_length": _same("generation.max_new_tokens"),
        "max_response_length": _same("generation.max_new_tokens"),
        "response_length": _same("generation.max_new_tokens"),
        "generate_max_len": _same("generation.max_new_tokens"),
        "do_sample": _name("generation.greedy", about="It is the opposite."),
        "use_vllm": _name(about="models generate by the built-in engine; leave it out"),
        # Losses.
        "beta": _same("preference.beta", "kto.beta", *_KL.targets, "distillation.jsd_beta"),
        "init_kl_coef": _KL,
        "kl_coef": _KL,
        "kl_loss_coef": _KL,
        "kl_target": _same("policy.kl.target", "ppo.kl.target"),
        "kl_horizon": _same("policy.kl.horizon", "ppo.kl.horizon"),
        "kl_estimator": _same("policy.kl.estimator"),
        "kl_loss_type": _same("policy.kl.estimator", kl="k1", mse="k2", low_var_kl="k3"),
        "epsilon": _CLIP,
        "cliprange": _CLIP,
        "clip_ratio": _CLIP,
        "clip_ratio_low": _CLIP,
        "eps_clip": _CLIP,
        "epsilon_high": _same("policy.clip_high"),
        "clip_ratio_high": _same("policy.clip_high"),
        "clip_ratio_c": _same("policy.dual_clip"),
        "delta": _same("policy.dual_clip"),
        "cliprange_value": _same("ppo.value_clip"),
        "lambd": _same("ppo.lam"),
        "whiten_rewards": _name("ppo.advantage_norm", about="It is about advantages."),
        "scale_rewards": OtherName(
            ("policy.scale",),
            accepted=True,
            values={True: "group_std", False: "none", "group": "group_std", "batch": "batch_std"},
        ),
        "norm_adv_by_std_in_grpo": OtherName(
            ("policy.scale",), accepted=True, values={True: "group_std", False: "none"}
        ),
        "adv_estimator": _name("algorithm"),
        "loss_type": _same(
            "preference.loss",
            "kto.loss",
            "policy.aggregate",
            grpo="sequence_mean",
            dapo="token_mean",
            dr_grpo="constant",
        ),
        "loss_agg_mode": OtherName(
            ("policy.aggregate",),
            accepted=True,
            values={
                "token-mean": "token_mean",
                "seq-mean-token-mean": "sequence_mean",
                "seq-mean-token-sum": "sequence_sum",
                "seq-mean-token-sum-norm": "constant",
            },
        ),
        "importance_sampling_level": _same("policy.ratio", sequence="sequence_mean"),
        "mask_truncated_completions": _same("policy.mask_truncated"),
        "ref_model_mixup_alpha": _same("policy.ref_ema", "ppo.ref_ema", "preference.ref_ema"),
        "ref_model_sync_steps": _same("policy.ref_every", "ppo.ref_every", "preference.ref_every"),
        "simpo_gamma": _same("preference.gamma"),
        "rpo_alpha": _same("preference.nll_coef"),
        "reference_free": _name("preference.reference"),
        "precompute_ref_log_probs": _name("preference.reference"),
        # Models.
        "model_name_or_path": _MODEL,
        "pretrain": _MODEL,
        "model.path": _name(*_MODEL.targets),
        "reward_pretrain": _same("models.reward.path"),
        "reward_model_path": _same("models.reward.path"),
        "sft_model_path": _same("models.actor.path"),
        "critic_pretrain": _same("models.critic.path"),
        "teacher_model_name_or_path": _same("models.teacher.path"),
        "reward_funcs": _same("reward"),
        "environment_factory": _same("environment"),
        "reward_function": _same("reward"),
        "custom_reward_function": _name("reward"),
        "reward_weights": _name("reward", about="Each term of a mixture has its own `weight`."),
        "bf16": _name("models.actor.dtype", "models.reward.dtype", about="It is the name of a type."),
        "torch_dtype": _of_roles("dtype"),
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
        "target_parameters": _of_roles(
            "lora.targets", about="It names parameters of experts too, as experts.gate_up_proj."
        ),
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
"""Name of a setting in another tool -> our setting. Of a dotted name, only the last parts are given."""
