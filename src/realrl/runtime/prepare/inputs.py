"""Load the tokenizer, functions and records of a run, and check what depends on them."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

from realrl.algorithms.base.method import Algorithm, FunctionMethod
from realrl.algorithms.build import build_algorithm
from realrl.algorithms.rewards.scorers import Judge, load_judge
from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.data.chat_template import ChatTemplate
from realrl.data.dataset import Dataset
from realrl.data.records import RecordReader, read_records
from realrl.data.tokenization import check_tokenizer
from realrl.dataflow.call import Kind
from realrl.dataflow.environment import ENVIRONMENT_REWARD
from realrl.dataflow.graph import DataflowGraph
from realrl.families.registry import find_family
from realrl.families.shape import ModelShape
from realrl.huggingface.directory import find_model_shape, read_origin
from realrl.huggingface.tokenizers import list_stop_token_ids, load_tokenizer
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import ModelConfig, TrainedModelConfig
from realrl.recipe.sources import name_sources
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.prepare.job import Phase


def load_shared_tokenizer(experiment: Experiment) -> Any:
    """Load the tokenizer of the run, which all roles must share.

    If the recipe sets `data.chat_template`, the tokenizer gets this template. Raises UserError if roles have
    different vocabularies, or if a vocabulary does not fit its model.
    """
    first: tuple[str, str, Any] | None = None
    loaded: dict[str, Any] = {}
    roles = experiment.spec.roles
    # Roles that take their model from another role come last, so that errors name the other role.
    for role, config in sorted(
        experiment.model_configs.items(), key=lambda item: roles[item[0]].weights_from is not None
    ):
        source = config.tokenizer or config.path
        if source is None:
            raise UserError(f"models.{role}.tokenizer: a model that starts from scratch needs a tokenizer")
        if source not in loaded:
            loaded[source] = load_tokenizer(source)
        tokenizer, vocabulary = loaded[source], find_model_shape(config).vocab_size
        if len(tokenizer) > vocabulary:
            raise UserError(
                f"models.{role}: the tokenizer {source} has {len(tokenizer)} tokens,"
                f" but the model's vocabulary has {vocabulary}; {_advise_growth(role, config, len(tokenizer))}"
            )
        if first is None:
            first = (role, source, tokenizer)
        elif tokenizer.get_vocab() != first[2].get_vocab():
            raise UserError(
                f"models.{role} and models.{first[0]} have different tokenizers ({source}: {len(tokenizer)} tokens,"
                f" {first[1]}: {len(first[2])}); all roles of a run must share one vocabulary"
            )
    assert first is not None, "every recipe has a model"
    if experiment.data.chat_template is not None:
        first[2].chat_template = experiment.data.chat_template
    return first[2]


def list_tokenizer_notes(experiment: Experiment, tokenizer: Any) -> Iterator[str]:
    """Yield a note for each model whose own tokenizer assigns other ids than the tokenizer of the run."""
    told: set[str] = set()
    for role, config in experiment.model_configs.items():
        if config.path is None or config.tokenizer in (None, config.path) or config.path in told:
            continue
        told.add(config.path)
        try:
            own = load_tokenizer(config.path).get_vocab()
        except UserError:
            continue  # the model has no readable tokenizer
        given = tokenizer.get_vocab()
        other = sorted((number, token) for token, number in own.items() if given.get(token) != number)
        if other:
            number, token = other[0]
            here = f"id {given[token]} here" if token in given else "missing here"
            yield (
                f"models.{role}.tokenizer={config.tokenizer} is not the tokenizer of {config.path}: {len(other)} of"
                f" the model's {len(own)} tokens have another id or are missing, such as {brief(token)}"
                f" (id {number} there, {here}); the model has to learn these tokens anew"
            )


def _advise_growth(role: str, config: ModelConfig, tokens: int) -> str:
    if config.path is None:
        return f"set models.{role}.shape.vocab_size to {tokens} or more"
    if isinstance(config, TrainedModelConfig) and config.lora is not None:
        return "grow the model with transformers' resize_token_embeddings first"
    return f"models.{role}.vocab_size={tokens} grows it"


def load_stop_token_ids(experiment: Experiment, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end generation, from the recipe or from the files of the generating role's model.

    If no role generates, the tokens are those of the first language model, or else of the first model. Raises
    UserError if there is no such token, or if one is outside the model's vocabulary.
    """
    configs, heads = experiment.model_configs, experiment.spec.heads
    generating = [call.model_role for call in experiment.graph.calls if call.kind is Kind.GENERATE]
    role = next(iter((*generating, *(role for role in configs if heads[role] == "lm"), *configs)))
    config = configs[role]
    vocabulary, generation = find_model_shape(config).vocab_size, experiment.spec.generation
    own = generation(experiment).stop_token_ids if generation is not None else None
    if own is None:
        options = experiment.data.chat_template_kwargs
        return read_stop_token_ids(tokenizer, config.path, vocabulary, options)
    check_stop_token_ids("generation.stop_token_ids", own, vocabulary)
    return tuple(dict.fromkeys(own))


def read_stop_token_ids(
    tokenizer: Any, path: str | None, vocabulary: int, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, ...]:
    """Return the tokens that end generation of a model, including the end of a turn in the chat template.

    `path` is the model's directory, if there is one. `options` are additional arguments of the chat template.
    Raises UserError if there is no such token, or if one is outside the vocabulary.
    """
    check_tokenizer(tokenizer)
    found = list_stop_token_ids(tokenizer, None if path is None else read_origin(path), vocabulary)
    end = ChatTemplate(tokenizer, options).find_turn_end()
    return found if end is None or end in found or end >= vocabulary else (*found, end)


def check_stop_token_ids(option: str, stop_token_ids: Iterable[int], vocabulary: int) -> None:
    """Check that the tokens of a command-line option are in the model's vocabulary. Raises UserError if not."""
    for token in stop_token_ids:
        if token >= vocabulary:
            raise UserError(
                f"{option}={token} is outside the model's vocabulary, which ends with {vocabulary - 1}"
            )


def load_functions(algorithm: Algorithm, phases: Iterable[Phase], rank: int) -> dict[str, FunctionMethod]:
    """Load the functions that a rank calls in any kind of step.

    Raises UserError if one of them cannot be called.
    """
    found: dict[str, FunctionMethod] = {}
    for phase in phases:
        for call in phase.graph.functions:
            if rank in phase.plan[call.name].ranks and call.name not in found:
                found[call.name] = cast(FunctionMethod, algorithm.method(call.name))
                found[call.name].load()
    return found


class RecordLoader:
    """Loads the records of a recipe."""

    def __init__(
        self,
        experiment: Experiment,
        tokenizer: Any,
        stop_token_ids: tuple[int, ...],
        functions: Mapping[str, FunctionMethod],
        read: RecordReader = read_records,
        environments: Environments | None = None,
    ) -> None:
        """`functions`: the functions that this rank calls. `read` reads the records of a source. `environments`:
        the environment of the recipe, if it has one.

        Raises UserError if a role's model supports only shorter sequences.
        """
        _check_positions(experiment)
        self._experiment, self._tokenizer = experiment, tokenizer
        self._stop_token_ids, self._functions, self._read = stop_token_ids, functions, read
        self._environments = environments

    def load_train(self, phase: Phase) -> Dataset:
        """Load and tokenize training records.

        Raises UserError for a wrong record, or if records lack fields that a function needs.
        """
        return self._load(self._experiment.data.train, phase)

    def load_eval(self, phase: Phase, judge: Judge | None) -> Dataset:
        """Load evaluation records like `load_train`. `judge` is set only on the rank that calls the judge."""
        return self._load(self._experiment.data.eval, phase, judge)

    def _load(self, source: Any, phase: Phase, judge: Judge | None = None) -> Dataset:
        experiment = self._experiment
        _check_top_k(experiment, phase.graph)
        names = [call.name for call in phase.graph.functions if call.record_fields]
        functions = [self._functions[name] for name in names if name in self._functions]
        seeing: list[FunctionMethod | Judge | Environments] = [*functions]
        if self._environments is not None:
            seeing.append(self._environments)
        if judge is not None:
            seeing.append(judge)

        present: set[str] = set()

        def wanted(field: str) -> bool:
            present.add(field)
            return any(function.wants(field) for function in seeing)

        records = Dataset.load(
            source,
            experiment.spec.form,
            phase.graph.sources,
            self._tokenizer,
            experiment.data,
            experiment.seed,
            self._stop_token_ids,
            wanted,
            read=self._read,
            turns=None if self._environments is None else self._environments.template,
        )
        numbers = {ENVIRONMENT_REWARD} if self._environments is not None else set()
        for function in seeing:
            known = present | numbers if function in functions else present
            function.check_fields(name_sources(source), known)
        return records


def _check_top_k(experiment: Experiment, graph: DataflowGraph) -> None:
    """Check that top-k is at most the vocabulary size. Raises UserError if not."""
    generation, configs = experiment.spec.generation, experiment.model_configs
    for call in graph.calls:
        if generation is not None and call.kind is Kind.GENERATE:
            vocabulary = find_model_shape(configs[call.model_role]).vocab_size
            check_top_k("generation.top_k", generation(experiment).top_k, vocabulary)


def check_top_k(option: str, top_k: int, vocabulary: int) -> None:
    """Check that top-k of a command-line option is at most the vocabulary size. Raises UserError if not."""
    if top_k > vocabulary:
        raise UserError(
            f"{option}={top_k} is more than the {vocabulary} tokens of the model's vocabulary; 0 takes all"
        )


def _check_positions(experiment: Experiment) -> None:
    """Check that no sequence can be longer than a role's model supports. Raises UserError if one can."""
    longest, what = experiment.longest
    for role, config in experiment.model_configs.items():
        check_length(f"{what}={longest}", longest, find_model_shape(config), f"the model of models.{role}")


def check_length(what: str, tokens: int, shape: ModelShape, model: str) -> None:
    """Check that a model supports `tokens` positions. If not, raises a UserError that begins with `what`."""
    if tokens > shape.max_positions:
        bounds = find_family(shape.family).position_bounds
        raise UserError(
            f"{what} is more than the {shape.max_positions} positions that {model} is declared for"
            + (f", or has within {bounds}" if bounds else "")
        )


def check_functions(experiment: Experiment) -> list[str]:
    """Load the functions and the judge of a run, as its ranks will do. Returns the names of their calls.

    Raises UserError if one is missing or does not work, for example a verifier that misjudges a known pair.
    """
    algorithm = build_algorithm(experiment)
    graphs = [graph for graph in (experiment.graph, experiment.eval_graph) if graph is not None]
    names = list(dict.fromkeys(call.name for graph in graphs for call in graph.functions))
    for name in names:
        cast(FunctionMethod, algorithm.method(name)).load()
    if load_judge(experiment.evaluation.judge) is not None:
        names.append("evaluation.judge")
    return names
