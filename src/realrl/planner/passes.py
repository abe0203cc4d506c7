"""Seconds of training and inference: whole sequences, once or several times through the model."""

from collections.abc import Mapping
from dataclasses import dataclass

from realrl.layout.ranges import stage_layers
from realrl.plan.placement import Strategy
from realrl.planner.batching import Chunks, pass_chunks
from realrl.planner.network import Network
from realrl.planner.sizes import buckets
from realrl.planner.timing import Part, Timing
from realrl.planner.workload import CallWork


@dataclass(frozen=True)
class Setting:
    """All that the time of a call depends on."""

    timing: Timing
    network: Network
    strategy: Strategy
    work: CallWork

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(len(part) for part in stage_layers(self.timing.sizes.shape.layers, self.strategy.pp))

    def exchanges(self, tokens: float) -> Part:
        """What tensor ranks tell each other in a layer, in one direction: twice the sum of the hidden states.

        With sequence parallelism, a gather and a scatter each, which take as long.
        """
        if self.strategy.tp == 1:
            return Part(0.0)
        number_bytes = tokens * self.timing.sizes.shape.hidden_size * self.timing.element_bytes
        host = 2 * self.timing.efficiency.collective_host_s
        return Part(2 * self.network.tensor.all_reduce(number_bytes), host)

    def hop(self, tokens: float) -> float:
        """Hidden states, or their gradient, from stage to stage; the receiving host cannot go on before."""
        if self.strategy.pp == 1:
            return 0.0
        rows = tokens / (self.strategy.tp if self.strategy.sequence_parallel else 1)
        number_bytes = rows * self.timing.sizes.shape.hidden_size * self.timing.element_bytes
        return self.network.hop(number_bytes) + self.timing.efficiency.collective_host_s


def training(setting: Setting) -> Mapping[str, float]:
    """Terms of all optimizer steps of a train call, under the 1F1B schedule."""
    timing, strategy, work = setting.timing, setting.strategy, setting.work
    chunks = pass_chunks(work, strategy, timing.efficiency.pass_chunks_per_stage)
    forward = timing.forward(chunks.tokens, chunks.squares)
    backward = timing.backward(chunks.tokens, chunks.squares)
    exchanges = setting.exchanges(chunks.tokens)
    rounds = 3 if setting.strategy.recompute else 2
    device = backward.device + forward.device * (rounds - 1)
    host = backward.host + forward.host * (rounds - 1)
    layer = Part(device, host + rounds * exchanges.host)
    head = timing.head(chunks.tokens) + timing.head_backward(chunks.tokens)
    terms = _pipelined(setting, chunks, layer, rounds * exchanges.device, head)
    if strategy.pp > 1:
        # Forward waits for backward of the next stage and the other way round, so that nothing hides transfers.
        terms["pipeline"] = 2 * (chunks.count + strategy.pp - 1) * setting.hop(chunks.tokens)
    steps = work.minibatches * work.passes
    elements = max(timing.sizes.stage_elements(strategy.pp))
    terms["optimizer"] = timing.update(elements, strategy.dp)
    last_pass = setting.layers[-1] * backward.device
    terms["data"] = _gradients(setting, elements, last_pass) + _parameters(
        setting, elements, terms["optimizer"]
    )
    return {name: seconds * steps for name, seconds in terms.items()}


def _gradients(setting: Setting, elements: int, last_pass: float) -> float:
    """Adding float32 gradients up: while the last micro-batch goes backward, but for the last bucket.

    Parameters of which tensor ranks or stages each have a part of the gradient must be completed before.
    """
    seconds = setting.network.data.reduce_scatter(4 * elements)
    sizes, strategy = setting.timing.sizes, setting.strategy
    tied = sizes.shape.tied_embeddings and sizes.head == "lm" and strategy.pp > 1
    if tied or sizes.shares_keys or (strategy.tp > 1 and strategy.sequence_parallel):
        return seconds
    hidden = last_pass * setting.timing.efficiency.overlap
    return max(seconds - hidden, seconds / buckets(elements))


def _parameters(setting: Setting, elements: int, update: float) -> float:
    """Collecting parameters: while the next bucket is updated."""
    seconds = setting.network.data.all_gather(setting.timing.element_bytes * elements)
    return max(seconds - update * setting.timing.efficiency.overlap, seconds / buckets(elements))


def inference(setting: Setting) -> Mapping[str, float]:
    """Terms of an inference call."""
    timing, strategy = setting.timing, setting.strategy
    chunks = pass_chunks(setting.work, strategy, timing.efficiency.pass_chunks_per_stage)
    return forward_pass(setting, chunks, timing.head(chunks.tokens))


def forward_pass(setting: Setting, chunks: Chunks, head: float) -> dict[str, float]:
    """Terms of chunks that go through all stages once; head: seconds of a chunk after the last layer."""
    forward = setting.timing.forward(chunks.tokens, chunks.squares)
    exchanges = setting.exchanges(chunks.tokens)
    layer = Part(forward.device, forward.host + exchanges.host)
    terms = _pipelined(setting, chunks, layer, exchanges.device, head)
    # Sends do not wait, and a stage works on the next chunk meanwhile.
    terms["pipeline"] = (setting.strategy.pp - 1) * setting.hop(chunks.tokens)
    return terms


def _pipelined(
    setting: Setting, chunks: Chunks, layer: Part, exchanges: float, head: float
) -> dict[str, float]:
    """Terms of the busiest stage, and how long it waits while others start or end alone.

    A pipeline takes one chunk through all stages and all other chunks through the slowest one.
    """
    wait = max(0.0, layer.host - layer.device - exchanges)
    each = layer.device + exchanges + wait
    stages = [layers * each for layers in setting.layers]
    stages[-1] += head
    slowest = max(stages)
    busy = setting.layers[stages.index(slowest)] * chunks.count
    return {
        "compute": busy * layer.device + (head * chunks.count if slowest == stages[-1] else 0.0),
        "tensor": busy * exchanges,
        "launch": busy * wait,
        "bubble": sum(stages) - slowest,
    }
