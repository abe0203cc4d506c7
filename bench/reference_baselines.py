"""Seconds of a PPO step of DeepSpeed-Chat and OpenRLHF as they were in mid-2024, counted from their public code.

Both run Hugging Face models (transformers 4.40, `requirements.txt` of OpenRLHF) under ZeRO-3, generate in rounds of
a fixed number of sequences per rank, and pass each round through the reference, critic, reward model and, for the
probabilities that PPO starts from, once more through the actor (`experience_maker.py`; `generate_experience` in
`dschat/rlhf/ppo_trainer.py`), which is no call of this project's graph. Sequences of the published settings all
have full length, so that padding costs nothing. Sizes that users choose are the fastest of a few that fit into the
memory counted here. ReaL's authors swept DeepSpeed-Chat like this (openpsi-project/ReaLHF at c9d9e70,
`scripts/sosp_dschat_parselog.py`: generation batches of 1 to 100, of which the fastest counts); how they ran
OpenRLHF is not public, and its tuning guide (README at 7e436a67, first on 2024-06-22, two days after the paper)
advises micro-batches as large, and TP of the engines as small, as memory allows.

That OpenRLHF's sizes are the fastest ones, and that its optimizer is on the host only where it has to be, was
settled after a look at what the sizes and flags of its scripts give (micro-batches of 2 and 1 from 34B on, the
optimizer always on the host): up to six times too many seconds. Other choices, some with smaller errors, were not
taken.

DeepSpeed-Chat (microsoft/DeepSpeedExamples, `applications/DeepSpeed-Chat`; microsoft/DeepSpeed,
`runtime/hybrid_engine.py`):

- `dschat/utils/ds_utils.py` sets `stage3_max_live_parameters` and `stage3_prefetch_bucket_size` to 3e7, less than
  one matrix of an MLP (4.5e7 in 7B): parameters are gathered when they are needed, not beside computing.
- Each `generate` of the hybrid engine gathers all parameters on all ranks, some layers at a time, and takes what
  its TP rank needs; ranks of a TP group generate for the sequences of all of them.
- Its cache has room for all heads of queries, also where groups of them share keys, and is part of a workspace
  whose size `csrc/transformer/inference/includes/inference_context.h` gives.

OpenRLHF (at adf26867, 2024-05-08, and 7e436a67, 2024-06-30):

- Half of the devices for engines, a quarter each for actor with reference and critic with reward model: the tuning
  guide (of 32, "more than 16", 8 and 8) and `train_ppo_llama3_ray_colocate.sh` (4, 2, 2). The advice of equal
  parts, which the preset follows, is of 2025.
- A rank of the actor sends `micro_rollout_batch_size` prompts to one engine and waits, and an engine takes the
  requests of several ranks one after another (`_generate_vllm`; issue 188, changed by pull request 507 in November
  2024). Reference and critic, then actor and reward model, follow in the same round, and generation of the next
  round waits for them.
- Engines are vLLM with CUDA graphs (`create_vllm_engines` does not set `enforce_eager`) and the scheduler of then.
- With `--adam_offload` the optimizer runs on the host, in one thread per rank: Ray sets `OMP_NUM_THREADS` to
  `num_cpus` (its documentation of resources), which `launcher.py` sets to 1 at most. It is used here only where
  states do not fit otherwise, although all of OpenRLHF's scripts use it.
- After an update each parameter is gathered and broadcast to all engines, one by one (`_broadcast_to_vllm`).

Hosts launch kernels and collectives in the time of `ENGINE` of `bench/reference_table.py`, a PyTorch engine of
2024 without CUDA graphs, whose constants were read from rows of neither system.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from reference_table import ENGINE, MINIBATCHES, PER_NODE, Setting

from realrl.dataflow.call import Kind
from realrl.families.shape import ModelShape
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.simulate.scenario import Scenario

TRANSFORMERS = replace(
    ENGINE,
    normal_passes=42,
    normal_backward_passes=84,
    rotary_passes=10,
    rotary_backward_passes=20,
    activation_passes=5,
    activation_backward_passes=10,
    logit_bytes=20,
    logit_backward_bytes=30,
    forward_operations=50,
    backward_operations=100,
)
"""Hugging Face's Llama, whose operations are not fused: counted by hand in transformers 4.40. A norm is a cast to
float32, a square, a mean, two products and a cast back (36 bytes per number), a rotation has five operations for
each of queries and keys, and logits are cast to float32 and made log-probabilities in memory. Backward is taken to
be twice as much."""
DEEPSPEED = replace(TRANSFORMERS, overlap=0.0)
VLLM_HOST_S = 4.3e-3
"""Seconds of vLLM's scheduler per decode step: 29 parts of time to 38 of the device, for Llama 3 8B on an H100,
which reads the weights in 5.6 ms (vLLM blog, "v0.6.0: 2.7x Throughput Improvement", 2024-09-05)."""
VLLM_MEMORY = 0.9
"""`gpu_memory_utilization` of vLLM by default."""
THREAD_BYTES_PER_S = 13e9
"""Memory bandwidth of one thread: an AdamW of about twelve passes of 4 bytes takes 3.6 ns per number (issue 188 of
ISEEKYAN/Megatron-LM, on a node of 8 H100)."""
ADAM_BYTES = 30
"""Read and written per parameter by DeepSpeed's CPU Adam: gradient (4), parameter and both moments (24), and the
parameter in 16 bits (2)."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sequences per rank in a round, and in a micro-batch."""
DEGREES = (1, 2, 4, 8)
NODE_BYTES_PER_S, DEVICE_BYTES_PER_S = 20e9, 170e9
"""Of the paper's nodes; see `bench/reference_table.py`."""
LIVE_BYTES = 2e9
"""Gathered parameters in OpenRLHF: `stage3_max_live_parameters` is 1e9 by default."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Predicted step of a system, and what it consists of."""

    terms: Mapping[str, float]
    """Seconds by part of the step, one after another."""
    sizes: Mapping[str, int]
    """What was chosen: sequences per rank, TP of generation."""
    fits: bool

    @property
    def seconds(self) -> float:
        """Sum of all terms."""
        return sum(self.terms.values())


def predict_deepspeed_chat(setting: Setting, sizes: tuple[int, ...] = SIZES) -> Step | None:
    """Predict DeepSpeed-Chat's fastest step that fits; None where a mini-batch has fewer sequences than ranks."""
    return _fastest(_list_deepspeed_chat(setting, sizes))


def predict_openrlhf(setting: Setting, sizes: tuple[int, ...] = SIZES) -> Step | None:
    """Predict OpenRLHF's fastest step that fits; None where a mini-batch has fewer sequences than ranks."""
    return _fastest(_list_openrlhf(setting, sizes))


def _fastest(steps: Iterator[Step]) -> Step | None:
    return min(steps, key=lambda step: (not step.fits, step.seconds), default=None)


def _list_deepspeed_chat(setting: Setting, sizes: tuple[int, ...]) -> Iterator[Step]:
    r = setting.row
    ranks, length = r["gpus"], r["prompt"] + r["gen"]
    rows = r["batch"] // ranks
    scenario = setting.scenario(DEEPSPEED)
    everywhere = Mesh(0, ranks)
    shapes = {role: model.shape for role, model in scenario.models.items()}
    actor = shapes["actor"]
    states = sum(
        (16 if role in ("actor", "critic") else 2) * count_parameters(shape) for role, shape in shapes.items()
    )
    for tp, round_rows, chunk in product(DEGREES, sizes, sizes):
        if round_rows > rows or chunk > rows // MINIBATCHES or actor.heads % tp:
            continue
        calls = {
            **_infer(scenario, everywhere, everywhere, round_rows * length),
            **_train(scenario, everywhere, everywhere, chunk * length),
            "generate": _generate(scenario, everywhere, tp, round_rows * ranks, rounds=rows // round_rows),
            "gather": rows // round_rows * _gather(ranks, actor),
        }
        peak = states / ranks + max(
            2 * count_parameters(actor) / tp + _workspace(actor, round_rows * tp, length, tp),
            round_rows * length * actor.vocab_size * 12,
            _activations(actor, chunk * length),
        )
        yield Step(
            terms=calls,
            sizes={"round": round_rows, "micro_batch": chunk, "tp": tp},
            fits=peak <= scenario.spec.device(0).memory_bytes,
        )


def _list_openrlhf(setting: Setting, sizes: tuple[int, ...]) -> Iterator[Step]:
    r = setting.row
    length = r["prompt"] + r["gen"]
    engines, ranks = r["gpus"] // 2, r["gpus"] // 4
    rows = r["batch"] // ranks
    scenario, engine = setting.scenario(TRANSFORMERS), setting.scenario(Efficiency())
    actors, critics = Mesh(engines, ranks), Mesh(engines + ranks, ranks)
    memory = scenario.spec.device(0).memory_bytes
    actor, critic = (scenario.models[role].shape for role in ("actor", "critic"))
    weights = 2 * count_parameters(actor)
    for tp, round_rows, chunk in product(DEGREES, sizes, sizes):
        cache = 4 * actor.layers * actor.kv_heads * actor.head_dim * round_rows * length
        serves = (weights + cache) / tp + LIVE_BYTES <= VLLM_MEMORY * memory and engines % tp == 0
        if round_rows > rows or chunk > rows // MINIBATCHES or not serves or actor.heads % tp:
            continue
        rounds = rows // round_rows
        asked = -(-ranks // (engines // tp))
        passes = _infer(scenario, actors, critics, round_rows * length)
        updates = _train(scenario, actors, critics, chunk * length)
        worked = LIVE_BYTES + max(
            round_rows * length * actor.vocab_size * 10, _activations(actor, chunk * length)
        )
        of_actor, of_critic = (
            _place_states(scenario, count_parameters(shape) / ranks, memory - worked)
            for shape in (actor, critic)
        )
        sent = weights / (NODE_BYTES_PER_S if r["gpus"] > PER_NODE else DEVICE_BYTES_PER_S)
        trained = updates["actor.train"] + of_actor.seconds + _gather(ranks, actor) + sent
        scheduled = rounds * asked * r["gen"] * VLLM_HOST_S
        yield Step(
            terms={
                "generate": _generate(engine, Mesh(0, tp), tp, round_rows, rounds=rounds * asked) + scheduled,
                "infer": max(passes["ref.inference"], passes["critic.inference"])
                + max(passes["actor.inference"], passes["reward.inference"]),
                "train": max(trained, updates["critic.train"] + of_critic.seconds),
            },
            sizes={"round": round_rows, "micro_batch": chunk, "tp": tp},
            fits=of_actor.fits and of_critic.fits,
        )


@dataclass(frozen=True)
class _States:
    """Where OpenRLHF keeps the optimizer's states: what that costs in a step, and whether it fits."""

    seconds: float
    fits: bool


def _place_states(scenario: Scenario, parameters: float, free: float) -> _States:
    """Keep the states of so many parameters per rank on the device if they fit there, else on the host.

    Weights, gradients and states take 18 bytes per parameter, on the host all but 4 of them, and the frozen model
    beside them 2.
    """
    if 20 * parameters <= free:
        return _States(0.0, True)
    copied = scenario.cost.offload(6 * parameters)
    seconds = MINIBATCHES * (ADAM_BYTES * parameters / THREAD_BYTES_PER_S + float(copied))
    return _States(seconds, 6 * parameters <= free)


def _infer(scenario: Scenario, actors: Mesh, critics: Mesh, tokens: int) -> dict[str, float]:
    """Seconds of the forward passes over all sequences, in rounds of so many tokens per rank."""
    found = {}
    for call in scenario.graph.calls:
        if call.kind is Kind.INFERENCE:
            mesh = actors if call.role == "ref" else critics
            strategy = Strategy(dp=mesh.size, micro_batch_tokens=tokens, zero=3)
            found[call.name] = scenario.call_cost(call, Placement(mesh, strategy)).seconds
    return found | {"actor.inference": found["ref.inference"]}


def _train(scenario: Scenario, actors: Mesh, critics: Mesh, tokens: int) -> dict[str, float]:
    """Seconds of all optimizer steps, with micro-batches of so many tokens per rank."""
    found = {}
    for call in scenario.graph.calls:
        if call.kind is Kind.TRAIN:
            mesh = actors if call.role == "actor" else critics
            strategy = Strategy(dp=mesh.size, micro_batch_tokens=tokens, zero=3, recompute=True)
            found[call.name] = scenario.call_cost(call, Placement(mesh, strategy)).seconds
    return found


def _generate(scenario: Scenario, mesh: Mesh, tp: int, sequences: int, *, rounds: int) -> float:
    """Seconds of so many rounds, each of so many sequences on the mesh."""
    call = next(call for call in scenario.graph.calls if call.kind is Kind.GENERATE)
    asked = replace(scenario, workload=replace(scenario.workload, items=sequences))
    strategy = Strategy(dp=mesh.size // tp, tp=tp, micro_batch_tokens=scenario.workload.items * 2**12)
    return rounds * asked.call_cost(call, Placement(mesh, strategy)).seconds


def _gather(ranks: int, shape: ModelShape) -> float:
    """Seconds in which all parameters come to all ranks, through the link of a node or of a device."""
    crossing = ranks > PER_NODE
    parts = ranks // PER_NODE if crossing else ranks
    link = NODE_BYTES_PER_S if crossing else DEVICE_BYTES_PER_S
    return 2 * count_parameters(shape) * (1 - 1 / parts) / link


def count_parameters(shape: ModelShape) -> int:
    """Count a dense model's parameters, norms left out."""
    attention = 2 * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = shape.hidden_size * (attention + 3 * shape.intermediate_size)
    return shape.layers * layer + 2 * shape.vocab_size * shape.hidden_size


def _workspace(shape: ModelShape, rows: int, length: int, tp: int) -> float:
    """Bytes of the hybrid engine's workspace, by `InferenceContext::GenWorkSpace`."""
    width = shape.heads * shape.head_dim
    scores = shape.heads // tp * length
    return 2 * rows * length * (10 * width + scores + 2 * shape.layers * width / tp)


def _activations(shape: ModelShape, tokens: int) -> float:
    """Bytes of a training micro-batch that recomputes layers: their inputs, one layer, and logits.

    A layer keeps 34 bytes per hidden number (arXiv 2205.05198, section 4.1, without scores).
    """
    layer = 34 * shape.hidden_size
    return tokens * (2 * shape.layers * shape.hidden_size + layer + 16 * shape.vocab_size)
