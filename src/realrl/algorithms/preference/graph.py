"""Learning from preference pairs: perhaps a reference, then the actor. No torch."""

from realrl.algorithms.policy.reference import list_averages
from realrl.algorithms.preference.config import PreferenceExperiment
from realrl.dataflow.call import Call, Key, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph

SIDES = ("chosen", "rejected")
PAIR = (*SIDES, "chosen_prompt_length", "rejected_prompt_length")
REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
LOGPS = ("chosen_logps", "rejected_logps")

KEYS = (
    Key("chosen", "int64"),
    Key("rejected", "int64"),
    *(Key(name, "int64", "one") for name in (*PAIR[2:], "pairs_of_prompt")),
    *(Key(name, "float32", "one") for name in (*REF_LOGPS, *LOGPS, "chosen_nll")),
)
"""`chosen` and `rejected` are whole sequences; `*_logps` are log-probabilities of answers, summed over tokens."""

REFERENCE = Call("ref.inference", "ref", Kind.INFERENCE, PAIR, REF_LOGPS, work=SIDES)


def _make_inputs(experiment: PreferenceExperiment) -> tuple[str, ...]:
    """List the inputs of the actor's calls."""
    scored = REF_LOGPS if experiment.preference.reference != "none" else ()
    return (*PAIR, "pairs_of_prompt", *scored)


def _make_graph(
    experiment: PreferenceExperiment, call: Call, averages: tuple[MovingAverage, ...] = ()
) -> DataflowGraph:
    calls = (call,) if experiment.models.ref is None else (REFERENCE, call)
    used = {key for each in calls for key in (*each.inputs, *each.outputs)}
    return DataflowGraph(calls, [key for key in KEYS if key.name in used], averages)


def make_preference_graph(experiment: PreferenceExperiment) -> DataflowGraph:
    """Make the calls of one training step; a pair weighs 1 / `pairs_of_prompt`."""
    models = experiment.models
    averages = list_averages(experiment.preference, models.actor, models.ref)
    train = Call("actor.train", "actor", Kind.TRAIN, _make_inputs(experiment), work=SIDES)
    return _make_graph(experiment, train, averages)


def make_preference_eval_graph(experiment: PreferenceExperiment) -> DataflowGraph:
    """Compute log-probabilities of both answers of each pair."""
    outputs = LOGPS if experiment.preference.nll_coef == 0 else (*LOGPS, "chosen_nll")
    inference = Call(
        "actor.inference", "actor", Kind.INFERENCE, _make_inputs(experiment), outputs, work=SIDES
    )
    return _make_graph(experiment, inference)
