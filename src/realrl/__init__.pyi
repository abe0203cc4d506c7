"""ReaL-RL: RLHF training that plans itself. Written by tools/python_stubs.py."""

from collections.abc import Mapping
from typing import Any, Literal

from realrl.api.algorithm import Algorithm as Algorithm
from realrl.api.algorithm import make_class as algorithm
from realrl.api.batch import Batch as Batch
from realrl.api.llm import LLM as LLM
from realrl.api.run_results import Run as Run
from realrl.api.sampling import Sampling as Sampling
from realrl.api.session import Session as Session
from realrl.config.errors import RunError as RunError
from realrl.config.errors import UserError as UserError
from realrl.runtime.callbacks import Step as Step

__version__: str


class SFT(Algorithm):
    """Supervised fine-tuning on `{prompt, answer}` records or conversations."""

    def __init__(
        self,
        model: Any = ...,
        *,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class Reward(Algorithm):
    """Reward modelling on preference pairs (Bradley-Terry)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        margins: bool = ...,
        center_rewards_coefficient: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the reward, or its section
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        margins: Whether each record has a number `margin`, the target difference of the scores of its answers (Touvron et al
        center_rewards_coefficient: Weight of the squared sum of both scores, which pulls their mean towards 0 (Eisenstein et al
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class RankedReward(Algorithm):
    """Reward modelling on several ranked answers per prompt (Plackett-Luce)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        answers: int = ...,
        center_rewards_coefficient: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the reward, or its section
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        answers: Number of answers in each record, which lists the best answer first
        center_rewards_coefficient: Weight of the squared sum of the scores of a record, which pulls their mean towards 0
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class ProcessReward(Algorithm):
    """Process reward modelling: a score for each step of an answer, right or wrong (Lightman et al. 2023)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the reward, or its section
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class PPO(Algorithm):
    """RLHF with PPO: actor, critic, reference, and a reward model or another reward."""

    def __init__(
        self,
        model: Any = ...,
        *,
        critic: Any = ...,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        kl: Mapping[str, Any] = ...,
        gamma: float = ...,
        lam: float = ...,
        clip: float = ...,
        value_clip: float | None = ...,
        minibatches: int = ...,
        epochs: int = ...,
        advantage_norm: bool = ...,
        value_norm: Literal['none', 'running', 'exponential'] = ...,
        value_norm_beta: float = ...,
        reward_scale: float = ...,
        reward_bias: float = ...,
        reward_clip: float | None = ...,
        early_stop_ratio: float | None = ...,
        truncated: Literal['score', 'bootstrap'] = ...,
        missing_eos_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        critic: the model of this role
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        gamma: Discount per token
        lam: Lambda of generalised advantage estimation (Schulman et al
        clip: Clip the probability ratio to [1 - clip, 1 + clip]
        value_clip: How far values may move from the old values before the loss is clipped
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        advantage_norm: Normalise advantages to mean 0 and deviation 1 over the whole batch
        value_norm: Divide the critic's errors by the standard deviation of the returns
        value_norm_beta: Decay of the exponential average
        reward_scale: Factor of rewards
        reward_bias: Number that is subtracted from each score
        reward_clip: Limit of the absolute reward; null for no limit
        early_stop_ratio: Skip the remaining mini-batches of a step when the mean probability ratio of a mini-batch exceeds this number
        truncated: Treatment of answers without end of sequence
        missing_eos_penalty: Number that is subtracted from the reward of an answer without end of sequence
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class GRPO(Algorithm):
    """GRPO: rewards relative to those of a group of answers to the same prompt (Shao et al. 2024, arXiv 2402.03300)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class DrGRPO(Algorithm):
    """Dr. GRPO: GRPO without its biases towards long wrong answers and towards prompts of little variance (Liu et al. 2025, arXiv 2503.20783)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class DAPO(Algorithm):
    """DAPO: GRPO with dynamic sampling, a higher upper clip bound, token-level loss, and no reference (Yu et al. 2025, arXiv 2503.14476)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class GSPO(Algorithm):
    """GSPO: GRPO with one importance ratio per answer (Zheng et al. 2025, arXiv 2507.18071)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class RLOO(Algorithm):
    """RLOO: REINFORCE with the mean reward of the other answers to the prompt as baseline (Ahmadian et al. 2024, arXiv 2402.14740)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class ReinforcePP(Algorithm):
    """REINFORCE++: one answer per prompt, advantages normalised over the batch (Hu 2025, arXiv 2501.03262)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class ReinforcePPBaseline(Algorithm):
    """REINFORCE++ with the mean reward of the group as baseline (Hu 2025, arXiv 2501.03262)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class ReMax(Algorithm):
    """ReMax: REINFORCE with the reward of the greedy answer as baseline (Li et al. 2023, arXiv 2310.10505)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        recompute_logprobs: bool = ...,
        sampler_correction: Literal['none', 'truncate', 'mask', 'sequence_truncate', 'sequence_mask'] = ...,
        sampler_cap: float = ...,
        samples: int = ...,
        sampling_rounds: int = ...,
        baseline: Literal['group_mean', 'leave_one_out', 'greedy', 'none'] = ...,
        scale: Literal['group_std', 'batch_std', 'batch_norm', 'none'] = ...,
        aggregate: Literal['sequence_mean', 'token_mean', 'sequence_sum', 'constant'] = ...,
        ratio: Literal['token', 'sequence_mean', 'sequence'] = ...,
        clip: float = ...,
        clip_high: float | None = ...,
        dual_clip: float | None = ...,
        kl: Mapping[str, Any] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        mask_truncated: bool = ...,
        overlong_buffer: int | None = ...,
        overlong_penalty: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        recompute_logprobs: Recompute the old log-probabilities with the trained model at the start of each training step, in a separate call
        sampler_correction: Multiply the loss of each token by its recomputed probability divided by its recorded probability
        sampler_cap: Limit of `sampler_correction`
        samples: Answers sampled for each prompt
        sampling_rounds: Maximum sampling rounds per step (dynamic sampling)
        baseline: Baseline that is subtracted from each reward
        scale: Divide advantages by the standard deviation of rewards in the group or in the batch
        aggregate: Loss of a mini-batch: the mean over all tokens (`token_mean`), or a mean over answers
        ratio: Importance ratio
        clip: Clip the ratio from below at 1 - clip
        clip_high: Clip the ratio from above at 1 + clip_high
        dual_clip: Maximum ratio if the advantage is negative
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        mask_truncated: Exclude answers without end of sequence from the loss
        overlong_buffer: Soft overlong punishment
        overlong_penalty: Maximum overlong punishment
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class DPO(Algorithm):
    """DPO: preference pairs without a reward model or samples; IPO, hinge and robust losses (Rafailov et al. 2023, arXiv 2305.18290)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        loss: Literal['sigmoid', 'robust', 'hinge', 'ipo', 'odds_ratio'] = ...,
        beta: float = ...,
        gamma: float = ...,
        label_smoothing: float = ...,
        length_normalization: bool | None = ...,
        reference: Literal['model', 'records', 'none'] = ...,
        nll_coef: float = ...,
        nll_prompts: bool = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        loss: Loss of a pair; d is the score of the chosen answer minus the score of the rejected answer
        beta: Scale of rewards
        gamma: Target margin between the rewards of the chosen and the rejected answer
        label_smoothing: Probability that the label of a pair is wrong
        length_normalization: Divide each answer's score by its number of tokens
        reference: Source of the reference's log-probabilities
        nll_coef: Weight, in the loss, of the mean negative log-likelihood per token of chosen answers
        nll_prompts: Include the tokens of prompts in the likelihood of `nll_coef`
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class ORPO(Algorithm):
    """ORPO: fine-tuning on chosen answers with a penalty on the odds of rejected ones, without a reference (Hong et al. 2024, arXiv 2403.07691)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        loss: Literal['sigmoid', 'robust', 'hinge', 'ipo', 'odds_ratio'] = ...,
        beta: float = ...,
        gamma: float = ...,
        label_smoothing: float = ...,
        length_normalization: bool | None = ...,
        reference: Literal['model', 'records', 'none'] = ...,
        nll_coef: float = ...,
        nll_prompts: bool = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        loss: Loss of a pair; d is the score of the chosen answer minus the score of the rejected answer
        beta: Scale of rewards
        gamma: Target margin between the rewards of the chosen and the rejected answer
        label_smoothing: Probability that the label of a pair is wrong
        length_normalization: Divide each answer's score by its number of tokens
        reference: Source of the reference's log-probabilities
        nll_coef: Weight, in the loss, of the mean negative log-likelihood per token of chosen answers
        nll_prompts: Include the tokens of prompts in the likelihood of `nll_coef`
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class SimPO(Algorithm):
    """SimPO: preference pairs by mean log-probabilities and a margin, without a reference (Meng et al. 2024, arXiv 2405.14734)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        ref_ema: float | None = ...,
        ref_every: int | None = ...,
        loss: Literal['sigmoid', 'robust', 'hinge', 'ipo', 'odds_ratio'] = ...,
        beta: float = ...,
        gamma: float = ...,
        label_smoothing: float = ...,
        length_normalization: bool | None = ...,
        reference: Literal['model', 'records', 'none'] = ...,
        nll_coef: float = ...,
        nll_prompts: bool = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        ref_ema: After each step, move the reference this fraction of the way to the actor
        ref_every: Move the reference only once in this many steps
        loss: Loss of a pair; d is the score of the chosen answer minus the score of the rejected answer
        beta: Scale of rewards
        gamma: Target margin between the rewards of the chosen and the rejected answer
        label_smoothing: Probability that the label of a pair is wrong
        length_normalization: Divide each answer's score by its number of tokens
        reference: Source of the reference's log-probabilities
        nll_coef: Weight, in the loss, of the mean negative log-likelihood per token of chosen answers
        nll_prompts: Include the tokens of prompts in the likelihood of `nll_coef`
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class Distillation(Algorithm):
    """On-policy distillation: an actor learns a teacher's distributions at each token of the actor's own answers (Agarwal et al. 2023, arXiv 2306.13649)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        teacher: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        divergence: Literal['reverse_kl', 'forward_kl', 'jsd'] = ...,
        jsd_beta: float = ...,
        top_k: int | None = ...,
        clip: float = ...,
        max_ratio: float = ...,
        samples: int = ...,
        minibatches: int = ...,
        epochs: int = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        teacher: the model of this role
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        divergence: `reverse_kl`
        jsd_beta: Share of the teacher in the mixture of `jsd`
        top_k: Number of tokens whose log-probabilities the teacher sends at each position, 8 bytes for each token
        clip: With top_k=null, after the first update of a batch, clip probability ratios to [1 - clip, 1 + clip]
        max_ratio: With top_k=null and `forward_kl`, maximum ratio of the teacher's probability of a token to the actor's
        samples: Answers sampled for each prompt
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class OfflineDistillation(Algorithm):
    """Off-policy distillation: an actor learns a teacher's distributions at each token of the answers of records (Hinton et al. 2015, arXiv 1503.02531)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        teacher: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        divergence: Literal['reverse_kl', 'forward_kl', 'jsd'] = ...,
        jsd_beta: float = ...,
        top_k: int = ...,
        temperature: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        teacher: the model of this role
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        divergence: `reverse_kl`
        jsd_beta: Share of the teacher in the mixture of `jsd`
        top_k: Number of tokens whose log-probabilities the teacher sends at each position, 8 bytes for each token
        temperature: Divisor of both models' logits
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """


class ExpertIteration(Algorithm):
    """Expert iteration: fine-tuning on the best of the actor's own answers. Also known as rejection sampling, best-of-n, RAFT (Dong et al. 2023, arXiv 2304.06767) and ReST-EM (Singh et al. 2023, arXiv 2312.06585)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        reward_model: Any = ...,
        reward: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        factory: str = ...,
        options: Any = ...,
        max_turns: int | None = ...,
        max_turn_tokens: int | None = ...,
        max_observation_tokens: int = ...,
        tool_format: Literal['auto', 'hermes', 'llama3', 'mistral', 'gpt_oss'] = ...,
        earlier_turns: Literal['refuse', 'keep'] = ...,
        workers: int = ...,
        threads: int | None = ...,
        timeout: float = ...,
        retries: int = ...,
        on_error: Literal['fail', 'skip'] = ...,
        samples: int = ...,
        keep: int | None = ...,
        threshold: float | None = ...,
        aggregate: Literal['token_mean', 'sequence_mean'] = ...,
        minibatches: int = ...,
        epochs: int = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        max_new_tokens: int = ...,
        temperature: float = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        reward_model: a reward model
        reward: a function, a list or mapping of functions, or the section of a recipe
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        factory: `FILE.py:CLASS` or `package.module:CLASS`: a class, or a function that returns an object
        options: Keyword arguments of `factory`
        max_turns: Maximum turns of the model in a trajectory; null for no limit
        max_turn_tokens: Maximum tokens of one turn of the model
        max_observation_tokens: Maximum tokens of the text that the environment adds after a turn
        tool_format: How the model writes tool calls
        earlier_turns: What to do if the chat template writes earlier turns differently once others follow, for example without their reasoning
        workers: Processes that hold the objects, for each data-parallel rank that generates
        threads: Maximum calls of objects that run at the same time in one of these processes
        timeout: Maximum seconds of one call of an object
        retries: How often a failed trajectory starts again from its beginning
        on_error: If a trajectory still fails
        samples: Answers sampled for each prompt
        keep: Learn at most this many answers of each group: the answers with the highest scores
        threshold: Learn only answers with at least this score; null for no limit
        aggregate: Loss of a mini-batch
        minibatches: Optimizer steps per pass over a batch; must divide `data.batch`
        epochs: Passes over each batch
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        max_new_tokens: Maximum tokens of an answer
        temperature: Number that logits are divided by
        """


class KTO(Algorithm):
    """KTO: answers that are each good or bad, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    def __init__(
        self,
        model: Any = ...,
        *,
        ref: Any = ...,
        data: Any = ...,
        eval_data: Any = ...,
        callbacks: Any = ...,
        loss: Literal['kto', 'apo_zero_unpaired'] = ...,
        beta: float = ...,
        desirable_weight: float = ...,
        undesirable_weight: float = ...,
        run_dir: str = ...,
        cluster: str = ...,
        plan: str = ...,
        device: Literal['auto', 'cpu', 'cuda'] = ...,
        seed: int = ...,
        resume: Literal['auto', 'changed', 'never'] = ...,
        overwrite: bool = ...,
        micro_batch_tokens: int = ...,
        batch: int = ...,
        steps: int | None = ...,
        epochs: float = ...,
        lr: float = ...,
        lora: Mapping[str, Any] | None = ...,
        max_tokens: int = ...,
        max_prompt_tokens: int = ...,
        **settings: Any,
    ) -> None:
        """
        model: path, hub name or object of the actor, or its section
        ref: the model of this role
        data: records: files, a name of a data set, a Dataset, a data frame or a list of records
        eval_data: records for evaluations, likewise
        callbacks: functions of a Step, or objects with on_step or on_evaluation
        loss: `kto`
        beta: Scale of rewards
        desirable_weight: Weight of good answers
        undesirable_weight: Weight of bad answers
        run_dir: Directory for everything that the run writes
        cluster: Devices as `nodes x devices per node`, for example `1x2`, or with their kind, for example `h100:2x8`, or as a cluster file (.yaml)
        plan: A plan preset, a plan file, or `search`
        device: Where to compute
        seed: Random seed for data order, initialisation and sampling
        resume: What to do with an earlier run in `run_dir`
        overwrite: Delete an earlier run in `run_dir`, and start from the beginning
        micro_batch_tokens: Maximum tokens in one forward pass, or in the KV cache during generation, unless the plan sets another number
        batch: Number of sequences (or preference pairs, or prompts) per training step, over all devices
        steps: Number of training steps
        epochs: Passes over the training data
        lr: Peak learning rate
        lora: Freeze the model, and train low-rank adapters of its matrices (LoRA), and the scalar head if there is one
        max_tokens: Maximum length of prompt and answer together, in tokens
        max_prompt_tokens: Maximum length of a prompt in tokens
        """
