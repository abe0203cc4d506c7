"""Names for writing an algorithm of your own. Importing this module does not import torch; using its names may.

| part | names |
|---|---|
| settings | `Experiment`, `Models`, `ModelConfig`, `TrainedModelConfig`, `GenerationConfig`, `Settings` |
| rewards | `RewardSetting`, `check_models`, `score_sequences`, `list_score_keys`, `make_reward_methods` |
| calls | `Call`, `Kind`, `Key`, `Candidates`, `MovingAverage`, `DataflowGraph` |
| methods | `GenerateMethod`, `InferenceMethod`, `TrainMethod`, `FunctionMethod`; defaults in `PlainTrain` |
| tensors | `Batch`, `Ragged`, `ModelOutput`, `Metrics`, `Responses`, `gather_samples`, `last_of_rows`, `row_sums` |
| description | `AlgorithmSpec`, `RoleSpec`, `SummaryMetric`; `get_algorithm(NAME)` for a built-in algorithm |
"""

from typing import TYPE_CHECKING

from realrl.config.lazy import reexport

if TYPE_CHECKING:
    from realrl.algorithms.base.method import Algorithm as Algorithm
    from realrl.algorithms.base.method import FunctionInput as FunctionInput
    from realrl.algorithms.base.method import FunctionMethod as FunctionMethod
    from realrl.algorithms.base.method import GenerateMethod as GenerateMethod
    from realrl.algorithms.base.method import InferenceMethod as InferenceMethod
    from realrl.algorithms.base.method import Method as Method
    from realrl.algorithms.base.method import Metrics as Metrics
    from realrl.algorithms.base.method import ModelOutput as ModelOutput
    from realrl.algorithms.base.method import PlainInference as PlainInference
    from realrl.algorithms.base.method import PlainTrain as PlainTrain
    from realrl.algorithms.base.method import StatelessAlgorithm as StatelessAlgorithm
    from realrl.algorithms.base.method import Sum as Sum
    from realrl.algorithms.base.method import TrainMethod as TrainMethod
    from realrl.algorithms.base.rows import Responses as Responses
    from realrl.algorithms.base.rows import gather_samples as gather_samples
    from realrl.algorithms.base.rows import last_of_rows as last_of_rows
    from realrl.algorithms.base.rows import row_sums as row_sums
    from realrl.algorithms.policy import OPTIONAL_CALLS as OPTIONAL_CALLS
    from realrl.algorithms.rewards.config import RewardSetting as RewardSetting
    from realrl.algorithms.rewards.config import check_models as check_models
    from realrl.algorithms.rewards.config import list_score_keys as list_score_keys
    from realrl.algorithms.rewards.config import score_sequences as score_sequences
    from realrl.algorithms.rewards.reward_methods import make_reward_methods as make_reward_methods
    from realrl.config.base import Settings as Settings
    from realrl.config.errors import UserError as UserError
    from realrl.data.batch import Batch as Batch
    from realrl.data.batch import Ragged as Ragged
    from realrl.dataflow.call import Call as Call
    from realrl.dataflow.call import Candidates as Candidates
    from realrl.dataflow.call import Key as Key
    from realrl.dataflow.call import Kind as Kind
    from realrl.dataflow.call import MovingAverage as MovingAverage
    from realrl.dataflow.graph import DataflowGraph as DataflowGraph
    from realrl.recipe.algorithm import AlgorithmSpec as AlgorithmSpec
    from realrl.recipe.algorithm import RoleSpec as RoleSpec
    from realrl.recipe.algorithm import SummaryMetric as SummaryMetric
    from realrl.recipe.algorithm import get_eval_generation as get_eval_generation
    from realrl.recipe.experiment import Experiment as Experiment
    from realrl.recipe.experiment import Models as Models
    from realrl.recipe.generation import GenerationConfig as GenerationConfig
    from realrl.recipe.model import ModelConfig as ModelConfig
    from realrl.recipe.model import TrainedModelConfig as TrainedModelConfig
    from realrl.recipe.registry import get_algorithm as get_algorithm

__getattr__, __dir__ = reexport(__name__)
