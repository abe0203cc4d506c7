"""KTO: the reference, perhaps the actor on mismatched answers, then training. No torch."""

from realrl.algorithms.kto.config import KTOConfig
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

KEYS = (
    Key("tokens", "int64"),
    Key("prompt_length", "int64", "one"),
    Key("label", "int64", "one"),
    Key("mismatched", "int64"),
    *(
        Key(name, "float32", "one")
        for name in ("logps", "ref_logps", "mismatched_logps", "ref_mismatched_logps")
    ),
)
"""`tokens` are a prompt with its answer, `mismatched` the same prompt with the answer of another item of the step,
`label` 1 for a good answer. `*logps` are log-probabilities of answers, summed over tokens."""

WORK = ("tokens", "mismatched")


def _refer(config: KTOConfig) -> Call:
    """Make the call of the reference: one row per item or, with mismatched answers, two."""
    work = WORK if config.estimates_kl else WORK[:1]
    outputs = ("ref_logps", "ref_mismatched_logps") if config.estimates_kl else ("ref_logps",)
    return Call("ref.inference", "ref", Kind.INFERENCE, (*work, "prompt_length"), outputs, work=work)


def _make_graph(*calls: Call) -> DataflowGraph:
    used = {key for call in calls for key in (*call.inputs, *call.outputs)}
    return DataflowGraph(calls, [key for key in KEYS if key.name in used])


def make_kto_graph(config: KTOConfig) -> DataflowGraph:
    """Make the calls of one training step; the divergence is estimated before it, without gradient."""
    inputs: tuple[str, ...] = ("tokens", "prompt_length", "label", "ref_logps")
    calls = [_refer(config)]
    if config.estimates_kl:
        rows, made = ("mismatched", "prompt_length"), ("mismatched_logps",)
        calls.append(Call("actor.inference", "actor", Kind.INFERENCE, rows, made, work=rows[:1]))
        inputs = (*inputs, *made, "ref_mismatched_logps")
    return _make_graph(*calls, Call("actor.train", "actor", Kind.TRAIN, inputs, work=("tokens",)))


def make_kto_eval_graph(config: KTOConfig) -> DataflowGraph:
    """Compute log-probabilities of answers, and of mismatched ones where the loss takes them."""
    kinds = ("", "mismatched_") if config.estimates_kl else ("",)
    work = WORK if config.estimates_kl else WORK[:1]
    inputs = (*work, "prompt_length", "label", *(f"ref_{kind}logps" for kind in kinds))
    outputs = tuple(f"{kind}logps" for kind in kinds)
    return _make_graph(
        _refer(config), Call("actor.inference", "actor", Kind.INFERENCE, inputs, outputs, work=work)
    )
