"""Collectives and messages that calls are charged for, beside those that a rank of the engine takes part in."""

import pytest

from realrl.dataflow.call import Kind
from realrl.families.shape import Mixture
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.workload import batching
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from tests.planner.lone_rank import LoneRank, Messages, Sequences, nobody_else
from tests.planner.unit_device import SHAPE, cost, make_cluster, place, store

WIRE = make_cluster(link_bytes_per_s=1.0, cpu=True)
LENGTHS, LAYERS, HIDDEN = (32,) * 6, 4, 64
PREDICTED = 31 / 32
"""Of log-probabilities that are charged, those that are computed: no token comes after the last one."""
FLOAT = store(dtype="float32")
NEW, PROMPTS = 12, (9,) * 4


def run(kind: str, placement: Placement, model: StoredModel = FLOAT, stage: int = 0) -> Messages:
    """What the first rank of a stage sends, receives and sums."""
    lone = LoneRank(model, placement, placement.rank(dp=0, pp=stage))
    with nobody_else() as found:
        if kind == "generate":
            lone.generate(Sequences.of(PROMPTS, model), NEW)
        else:
            sequences = Sequences.of(LENGTHS[:: placement.strategy.dp], model)
            lone.train(sequences, updates=True) if kind == "train" else lone.infer(sequences)
    return found


def charge(kind: str, placement: Placement, model: StoredModel = FLOAT) -> dict[str, float]:
    step = Workload(6, LENGTHS) if kind != "generate" else Workload(4, (9,), (NEW,), NEW)
    return dict(cost(Kind(kind), step, placement, WIRE, model=model))


def send(messages: Messages, size: int) -> float:
    """Bytes that a rank of a ring sends for all collectives of some: all parts but one, twice for an all-reduce."""
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    each = {what: n for what, n in messages.items() if what[0] in rounds}
    return sum(rounds[kind] * size * n for (kind, size), n in each.items()) * (size - 1) / size


def select(messages: Messages, *sizes: int) -> Messages:
    return Messages({what: n for what, n in messages.items() if what[1] in sizes})


STATES = 4 * 6 * 32 * HIDDEN


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["inference", "train", "train r", "train s", "train sr"])
def test_tp_ranks_sum_what_they_are_charged_for(kind: str, tp: int) -> None:
    name, _, flags = kind.partition(" ")
    placement = place(tp=tp, sp="s" in flags, recompute="r" in flags)
    found, charged = run(name, placement), charge(name, placement)
    states = send(select(found, STATES), tp)
    logits = send(select(found, 4 * 6 * 31), tp)
    assert states > 0 and logits > 0
    assert charged["tensor"] == pytest.approx(states + logits / PREDICTED)
    # With sequence parallelism, partial gradients of norms; that of the final norm is not charged.
    rest = Messages({what: n for what, n in found.items() if what[1] not in (STATES, 4 * 6 * 31)})
    norms = 4 * (2 * LAYERS + 1) * HIDDEN
    assert rest == ({("all_reduce", norms): 1} if name == "train" and "s" in flags else {})
    assert charged.get("data", 0.0) == pytest.approx(send(rest, tp) * 2 * LAYERS / (2 * LAYERS + 1))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", ["inference", "train", "train r"])
def test_cp_ranks_gather_what_they_are_charged_for(
    kind: str, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank divides all sequences with its peers, although these are short."""
    monkeypatch.setattr(batching, "_find_division", lambda *_: batching.Division(1.0, 1.0))
    name, _, flags = kind.partition(" ")
    placement = place(cp=cp, recompute="r" in flags)
    found, charged = run(name, placement), charge(name, placement)
    keys, results = 4 * 6 * 32 * 2 * 64, 4 * 6 * 32
    forward, backward = {"inference": (1, 0), "train": (1, 1), "train r": (2, 1)}[kind]
    assert found["all_gather", keys] == forward * LAYERS
    assert found["reduce_scatter", keys] == backward * LAYERS
    assert found["all_reduce", results] == 1
    assert charged["context"] == pytest.approx(send(select(found, keys, results), cp))


def test_shared_heads_and_tied_tables_are_summed_as_charged() -> None:
    heads = run("train", place(tp=8))
    shared = select(heads, 4 * 64 * HIDDEN)
    assert shared == {("all_reduce", 4 * 64 * HIDDEN): 2 * LAYERS}
    assert charge("train", place(tp=8))["data"] == pytest.approx(send(shared, 8))
    tied = store(SHAPE.model_copy(update={"tied_embeddings": True}), dtype="float32")
    table = select(run("train", place(pp=2), tied), 4 * 960 * HIDDEN)
    assert table == {("all_reduce", 4 * 960 * HIDDEN): 1}
    assert charge("train", place(pp=2), tied)["data"] == pytest.approx(send(table, 2))


@pytest.mark.parametrize("dp", [2, 3])
def test_dp_ranks_scatter_gradients_and_gather_parameters(dp: int) -> None:
    elements = LAYERS * (256 * 64 + 64 * 128 + 320 * 64 + 64 * 160 + 2 * 64) + 64 + 2 * 960 * 64
    found = run("train", place(dp))
    large = select(found, 4 * elements)
    assert large == {("reduce_scatter", 4 * elements): 1, ("all_gather", 4 * elements): 1}
    small = Messages({what: n for what, n in found.items() if what not in large})
    # Totals, metrics and weights of losses, and the norm, which mesh groups are charged for: some numbers each.
    assert sum(small.values()) == 4 and all(kind == "all_reduce" and size <= 64 for kind, size in small)
    assert charge("train", place(dp))["data"] == pytest.approx(send(large, dp) + 3 * 2 * 64 * (dp - 1) / dp)


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_exchange_messages_of_the_charged_size(stage: int) -> None:
    """Three chunks of two sequences: each goes forward, and its gradient back."""
    placement = place(pp=2, tokens=64)
    states = 4 * 2 * 32 * HIDDEN
    assert run("train", placement, stage=stage) == {("send", states): 3, ("receive", states): 3}
    # In 1F1B, as many as there are chunks and one stage more are waited for, each both ways.
    assert charge("train", placement)["pipeline"] == 2 * (3 + 1) * states + 2 * 64
    assert run("inference", placement, stage=stage) == {("receive" if stage else "send", states): 3}
    assert charge("inference", placement)["pipeline"] == states


def test_sequence_parallel_stages_send_their_part() -> None:
    placement = place(1, 2, 2, tokens=64, sp=True)
    found = select(run("inference", placement), 4 * 2 * 32 * HIDDEN // 2)
    assert found == {("send", 4 * 2 * 32 * HIDDEN // 2): 3}
    assert charge("inference", placement)["pipeline"] == 4 * 2 * 32 * HIDDEN // 2


def test_generation_sums_and_gathers_what_it_is_charged_for() -> None:
    """A prefill ends with the last layer's keys and values, and so sums twice less than a decode step."""
    found = run("generate", place(tp=2))
    prefilled, decoded, logits = 4 * 4 * 8 * HIDDEN, 4 * 4 * HIDDEN, 4 * 4 * 960
    assert found == {
        ("all_reduce", prefilled): 2 * LAYERS - 1,
        ("all_reduce", decoded): NEW * (2 * LAYERS + 1),
        ("all_gather", logits): NEW,
    }
    assert charge("generate", place(tp=2))["tensor"] == pytest.approx(send(found, 2))


def test_stages_pass_hidden_states_of_every_decode_batch() -> None:
    """Two batches of two rows; sampled tokens go back, which takes a latency and hardly any bytes."""
    prefilled, decoded = 4 * 2 * 8 * HIDDEN, 4 * 2 * HIDDEN
    first = run("generate", place(pp=2))
    assert first == {("send", prefilled): 2, ("send", decoded): 2 * NEW, ("receive", 2 * 8): 2 * NEW}
    assert charge("generate", place(pp=2))["pipeline"] == prefilled + 2 * NEW * decoded


def test_ranks_that_divide_experts_gather_tokens_in_decode_steps() -> None:
    """Each of two ranks decodes two rows. A prefill sends tokens to the experts of all layers but the last."""
    mixture = Mixture(experts=4, per_token=2)
    model = store(SHAPE.model_copy(update={"family": "mixtral", "mixture": mixture}), dtype="float32")
    placement = Placement(Mesh(0, 2), Strategy(dp=2, ep=2, micro_batch_tokens=1 << 20))
    lone = LoneRank(model, placement, 0)
    with nobody_else() as found:
        lone.generate(Sequences.of(PROMPTS[:2], model), NEW)
    states, choices = 4 * 4 * HIDDEN, 4 * 2 * (4 + 4)
    decoded = select(found, states, states + choices)
    assert decoded == {
        ("all_gather", states + choices): NEW * LAYERS,
        ("reduce_scatter", states): NEW * LAYERS,
    }
    sent = sum(n * size / 2 for (kind, size), n in found.items() if kind == "all_to_all")
    charged = cost(
        Kind.GENERATE, Workload(4, (9,), (NEW,), NEW), placement, WIRE, model=model, expert_spread=0.0
    )
    assert charged["experts"] == pytest.approx(send(decoded, 2) + sent)
