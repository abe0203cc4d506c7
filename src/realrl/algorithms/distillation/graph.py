"""On-policy distillation: the actor samples, the teacher says how likely that was, the actor trains. No torch."""

from realrl.algorithms.distillation.config import DistillationExperiment
from realrl.algorithms.policy.graph import GENERATE, KEYS, infer_on_sequences, make_graph
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph

TEACHER = Key("teacher_logprobs", "float32", "sequences")


def make_distillation_graph(experiment: DistillationExperiment) -> DataflowGraph:
    """Make the calls of one training step."""
    train = Call(
        "actor.train",
        "actor",
        Kind.TRAIN,
        ("sequences", "prompt_length", "finished", "logprobs", TEACHER.name),
        work=("sequences",),
        minibatches=experiment.distillation.minibatches,
    )
    teacher = infer_on_sequences("teacher.inference", TEACHER.name)
    return make_graph((GENERATE, teacher, train), (*KEYS, TEACHER))


def make_distillation_eval_graph(experiment: DistillationExperiment) -> DataflowGraph:
    """Sample, and compare with the teacher."""
    teacher = infer_on_sequences("teacher.inference", TEACHER.name, ("prompt_length", "logprobs", "finished"))
    return make_graph((GENERATE, teacher), (*KEYS, TEACHER))
