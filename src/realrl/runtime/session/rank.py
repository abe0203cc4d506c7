"""One rank of a session: its models, and the calls that all ranks make together."""

import atexit
import gc
import os
import shutil
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from realrl.algorithms.base.method import GenerateMethod, Method, Metrics, StatelessAlgorithm
from realrl.checkpoint.contents import CheckpointContents
from realrl.checkpoint.manifest import CheckpointError, is_checkpoint, read_manifest
from realrl.checkpoint.retention import commit
from realrl.checkpoint.storage import check_tensors, read_state, write_state
from realrl.config.errors import RunError, UserError
from realrl.config.files import as_os_error, partial_path, reason_of
from realrl.data.batch import KEY_DTYPES, Batch, Ragged
from realrl.dataflow.call import Call, Key, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.optional_kernels import use_kernels
from realrl.plan.communicators import list_rank_sets, reallocates
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.plan.presets import SEARCH
from realrl.program.instructions import Program
from realrl.program.lower import WRITER, home_placements, lower, offloaded
from realrl.program.validate import validate
from realrl.recipe.generation import GenerationConfig
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.inputs import (
    check_length,
    check_top_k,
    load_shared_tokenizer,
    load_stop_token_ids,
)
from realrl.runtime.prepare.job import Job, make_written_plan, open_models
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import connect, resolve_cluster
from realrl.runtime.processes.startup import find_least_device
from realrl.runtime.session.losses import (
    PROMPT_LENGTH,
    RESULT,
    Aggregate,
    LossFunction,
    SequenceInference,
    UserLoss,
    name_part,
)
from realrl.runtime.session.recipe import SEQUENCES, SessionModels
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.trace import Trace
from realrl.runtime.worker.worker import StepInput, Worker

Columns = Mapping[str, Ragged]
"""Rows of all items, by name. A column has one number per item, or rows as long as its `sequences`."""
_Packed = dict[str, tuple[str, bytes, tuple[int, ...]]]
"""Type, bytes and lengths of columns, by name."""
_GENERATED = ("logprobs", PROMPT_LENGTH, "finished")


@dataclass(frozen=True)
class _Result:
    """Results of a call, equal on all ranks."""

    columns: dict[str, Ragged]
    metrics: dict[str, float]


class SessionRank:
    """This process as one rank of a session. All ranks make the same calls in the same order.

    Every call compiles to a program like a call of a training step: parameters are reallocated to the call's
    placement, items are divided over its data-parallel ranks, and results are collected. The columns of the first
    rank count, so that ranks cannot train on different data.
    """

    def __init__(self, models: SessionModels) -> None:
        """Load the models. Raises UserError for a mistake."""
        experiment = models.make_recipe()
        if experiment.plan == SEARCH:
            raise UserError(
                "plan=search needs a recipe, whose steps it can predict; name a preset or a plan file"
            )
        self.experiment = experiment
        cluster = resolve_cluster(experiment.cluster, experiment.device)
        self._stack = stack = ExitStack()
        atexit.register(_end, weakref.ref(self))
        self.process = process = stack.enter_context(connect(experiment.device, experiment.launch))
        check_kind(experiment, cluster, find_least_device(process))
        with process.together():
            stack.enter_context(use_kernels(experiment.kernels, process.device))
            opened = open_models(experiment, download=True)
            plan = make_written_plan(experiment, cluster, opened)
            plan = _replace_placements(plan, models.placements)
            plan.check(opened.graph, opened.shapes)
            if experiment.exact:
                plan.check_exact(opened.graph)
        homes = home_placements(opened.graph, plan)
        self.job = job = Job(experiment, opened, plan, homes, {}, [], {})
        sets = list(plan.placements.values())
        groups = process.groups(list_rank_sets(sets), moves=reallocates(sets))
        with process.together():
            self.tokenizer = load_shared_tokenizer(experiment)
            self.stop_token_ids = load_stop_token_ids(experiment, self.tokenizer)
            temperature = experiment.spec.generation(experiment).temperature  # type: ignore[misc]
            self.roles = Roles(job, process, groups, temperature=temperature)
            self.roles.load_weights()
            self.roles.offload_homes()
        self._sampled = 0
        self._contents = CheckpointContents(self.roles.learning, self.roles.home_model, self.roles.trainers)
        self._compiled: dict[tuple[Any, ...], tuple[DataflowGraph, Plan, list[Program]]] = {}
        nothing = DataflowGraph((), ())
        algorithm = StatelessAlgorithm(nothing, None, {}, temperature)
        self._worker = Worker(
            process, self.roles, algorithm, self.stop_token_ids, Trace(process.rank), self.tokenizer
        )

    def close(self) -> None:
        """Free the models, and leave the process group together with the other ranks. May be called again."""
        self._stack.close()
        vars(self).clear()
        self._stack = ExitStack()
        # Cycles hold process groups. If their threads live when the interpreter ends, they abort it.
        gc.collect()

    def sample(
        self,
        role: str,
        prompts: Sequence[Sequence[int]],
        sampling: GenerationConfig,
        samples: int,
    ) -> dict[str, Ragged]:
        """Continue each prompt `samples` times. Items i * samples to (i + 1) * samples - 1 have the i-th prompt.

        Sampling noise depends on the number of earlier calls. Returns `sequences`, `logprobs`, `prompt_length` and
        `finished`. Raises UserError for prompts or settings that do not fit the model.
        """
        call = self._find(role, Kind.GENERATE)
        shape = self.job.models.shapes[role]
        with self.process.together():
            check_top_k("top_k", sampling.top_k, shape.vocab_size)
            longest = max(map(len, prompts))
            what = f"a prompt of {longest} tokens with max_new_tokens={sampling.max_new_tokens}"
            check_length(what, longest + sampling.max_new_tokens, shape, f"the model of {role}")
        rows = [row for row in prompts for _ in range(samples)]
        call = replace(
            call,
            prefix="",
            outputs=(SEQUENCES, *_GENERATED),
        )
        keys = (
            Key("prompts", "int64"),
            Key(SEQUENCES, "int64"),
            Key("logprobs", "float32", SEQUENCES),
            Key(PROMPT_LENGTH, "int64", "one"),
            Key("finished", "float32", "one"),
        )
        columns = {"prompts": Ragged.of([list(row) for row in rows], dtype=torch.int64)}
        method = GenerateMethod(sampling, sampling)
        number, self._sampled = self._sampled, self._sampled + 1
        return self._run(call, keys, columns, method, samples=samples, number=number).columns

    def infer(self, role: str, columns: Columns) -> Ragged:
        """Compute log-probabilities of `sequences` (0 at the first token), or the values of a scalar head."""
        call = replace(self._find(role, Kind.INFERENCE), outputs=(RESULT,))
        keys = (Key(SEQUENCES, "int64"), Key(RESULT, "float32", SEQUENCES))
        found = self._run(call, keys, {SEQUENCES: columns[SEQUENCES]}, SequenceInference())
        return found.columns[RESULT]

    def forward_backward(
        self,
        role: str,
        columns: Columns,
        function: LossFunction,
        aggregate: Aggregate,
        *,
        group: int,
        entropy: bool,
    ) -> dict[str, float]:
        """Add the gradient of a loss to those of earlier calls. Returns `loss`, and the metrics of the function.

        `group`: number of consecutive sequences that the function always sees together.
        """
        call = self._find(role, Kind.TRAIN)
        size = len(columns[SEQUENCES])
        if group < 1 or size % group:
            raise UserError(f"group={group} does not divide the {size} sequences of the batch")
        ranks = self.job.plan[call.name].strategy.dp
        if size < ranks * group:
            raise UserError(
                f"a batch of {size} sequences cannot be divided over {ranks} data-parallel ranks; give at least"
                f" {ranks * group}"
            )
        method = UserLoss(function, aggregate, [*columns], group=group, entropy=entropy)
        keys, parts = [], {}
        for name, column in columns.items():
            each = column.lengths == columns[SEQUENCES].lengths
            for place in range(group):
                part = name_part(name, place)
                length = "own" if name == SEQUENCES else name_part(SEQUENCES, place) if each else "one"
                keys.append(Key(part, _name_dtype(column), length))
                parts[part] = column.select(range(place, size, group))
        work = tuple(name_part(SEQUENCES, place) for place in range(group))
        return self._run(
            replace(call, inputs=tuple(parts), work=work), keys, parts, method, accumulates=True
        ).metrics

    def step(self, role: str, lr: float | None) -> dict[str, float]:
        """Apply the accumulated gradients of a role. Returns the metrics of the step, on all ranks."""
        call, trainer = self._find(role, Kind.TRAIN), self.roles.trainers.get(role)
        rate = self.job.models.configs[role].optimizer.lr if lr is None else lr  # type: ignore[attr-defined]
        found: dict[str, float] | None = None
        if trainer is not None:
            metrics = trainer.update(rate, call=call.name, before_update=self.roles.before_change)
            found = metrics.result()
        return next(one for one in self.process.gather(found) if one is not None)

    def save_model(self, role: str, directory: Path) -> None:
        """Write the model of a role as a Hugging Face directory."""
        if role not in self.job.homes:
            raise UserError(f"there is no model {role!r}; the session has {', '.join(self.job.homes)}")
        with self.process.together(), _writing(directory):
            if self.process.rank in self.job.homes[role].ranks:
                self.roles.save(role, directory, self.tokenizer, self.stop_token_ids)

    def save(self, directory: Path) -> None:
        """Write the state of the session as a checkpoint, which replaces an earlier one of that name.

        Raises UserError if gradients wait for a step, and RunError if the checkpoint cannot be written.
        """
        process, partial = self.process, partial_path(directory)
        with process.together():
            waiting = [role for role, trainer in self.roles.trainers.items() if trainer.has_gradients]
            if waiting:
                raise UserError(f"gradients of {waiting[0]} are not saved; call step({waiting[0]!r}) first")
            if process.rank == WRITER:
                with _writing(directory):
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
        trainers: dict[str, Any] = {}
        for states in process.gather({role: of.state_dict() for role, of in self.roles.trainers.items()}):
            for role, state in states.items():
                # A rank with no parameters to train counts no steps.
                if role not in trainers or state["steps"] > trainers[role]["steps"]:
                    trainers[role] = state
        state = {"sampled": self._sampled, "trainers": trainers}
        with process.together(), _writing(directory):
            tensors = self._contents.list_saved()
            write_state(
                partial, tensors, state, rank=process.rank, group=process.control, copied=lambda: None
            )
            if process.rank == WRITER:
                commit(directory)

    def load(self, directory: Path) -> None:
        """Load the state that `save` has written, under any plan. Raises UserError if it cannot be read."""
        process = self.process
        with process.together():
            if not is_checkpoint(directory):
                raise UserError(f"{directory} is not a saved session")
        with self._contents.in_device_memory():
            with process.together():
                try:
                    manifest, tensors = read_manifest(directory), self._contents.list_loaded()
                    check_tensors(directory, manifest, tensors)
                    if "sampled" not in manifest.state:
                        raise CheckpointError(f"{directory} is a checkpoint of a run, not of a session")
                    read_state(directory, manifest, tensors, group=process.control)
                except CheckpointError as error:
                    raise UserError(str(error)) from None
            self._contents.spread()
        self._sampled = manifest.state["sampled"]
        for role, trainer in self.roles.trainers.items():
            trainer.load_state_dict(manifest.state["trainers"][role])

    def _find(self, role: str, kind: Kind) -> Call:
        """Find a call. Raises UserError if the session has no such role, or if the role cannot make such a call."""
        graph = self.job.models.graph
        if role not in graph.roles:
            raise UserError(f"there is no model {role!r}; the session has {', '.join(graph.roles)}")
        found = next((call for call in graph.role_calls(role) if call.kind is kind), None)
        if found is None and kind is Kind.TRAIN:
            raise UserError(f"{role} is not trained; name it in train=[...] of the session")
        if found is None:
            raise UserError(f"{role} has a scalar head, so it cannot sample")
        return found

    def _run(
        self,
        call: Call,
        keys: Sequence[Key],
        columns: Columns,
        method: Method,
        *,
        samples: int = 1,
        number: int = 0,
        accumulates: bool = False,
    ) -> _Result:
        """Execute a call on all ranks, and collect its results."""
        mine = _pack(columns) if self.process.rank == WRITER else None
        agreed = _unpack(self.process.gather(mine)[WRITER])
        graph, plan, programs = self._compile(call, keys)
        store = Store(graph, plan, self.job.models.attention_costs, samples)
        size = len(next(iter(agreed.values())))
        step = StepInput(
            Batch(tuple(range(size)), agreed),
            SamplingSeed(self.experiment.seed, number),
            {},
            samples=samples,
            accumulates=accumulates,
        )
        self._worker.use(StatelessAlgorithm(graph, None, {call.name: method}))
        metrics = self._worker.run(programs[self.process.rank], store, step)
        return _Result(self._collect(call, store), self._share(metrics.get(call.name)))

    def _compile(self, call: Call, keys: Sequence[Key]) -> tuple[DataflowGraph, Plan, list[Program]]:
        """Compile a call alone: a graph, a plan, and a program for each rank."""
        name = (call, *keys)
        if name not in self._compiled:
            whole, role = self.job.plan, call.model_role
            graph = DataflowGraph((call,), keys)
            chosen = [
                tuple(of for of in (role,) if of in roles)
                for roles in (whole.offload, whole.offload_optimizer)
            ]
            plan = Plan(whole.cluster, {call.name: whole[call.name]}, *chosen)
            homes = {role: self.job.homes[role]}
            parts = self.job.models.parts
            programs = lower(graph, plan, homes, {}, parts)
            validate(programs, graph, homes, offloaded(plan), {}, parts)
            self._compiled[name] = graph, plan, programs
        return self._compiled[name]

    def _collect(self, call: Call, store: Store) -> dict[str, Ragged]:
        """Collect the outputs of a call from its output ranks, on all ranks, in the order of items."""
        if not call.outputs:
            return {}
        rank, placement = self.process.rank, store.plan[call.name]
        mine: tuple[list[int], _Packed] | None = None
        if rank in placement.output_ranks:
            ids = store.items(call, placement.item_index(rank))
            mine = ids, _pack({key: store.rows(key, ids) for key in call.outputs})
        gathered = [part for part in self.process.gather(mine) if part is not None]
        parts = [(ids, _unpack(packed)) for ids, packed in gathered]
        found = {}
        for key in call.outputs:
            rows = dict(row for ids, of in parts for row in zip(ids, of[key].rows(), strict=True))
            dtype = KEY_DTYPES[store.graph.keys[key].dtype]
            found[key] = Ragged.of([rows[item] for item in range(store.size)], dtype=dtype)
        return found

    def _share(self, metrics: Metrics | None) -> dict[str, float]:
        """Return the metrics of the rank that writes, on all ranks."""
        mine = None if metrics is None else metrics.result()
        shared: dict[str, float] | None = self.process.gather(mine)[WRITER]
        return shared or {}


def _end(found: "weakref.ref[SessionRank]") -> None:
    """Close a session at the end of the script. After an error, leave at once: other ranks may wait elsewhere."""
    session = found()
    if session is None:
        return
    if hasattr(sys, "last_value") and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        leave(1)
    session.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise RunError if the block cannot write to `path`."""
    try:
        yield
    except Exception as error:
        refusal = as_os_error(error)
        if refusal is None:
            raise
        raise RunError(f"{path} cannot be written: {reason_of(refusal)}") from error


def _pack(columns: Columns) -> _Packed:
    """Convert columns to values that messages between ranks may hold."""
    return {
        name: (_name_dtype(column), column.values.numpy().tobytes(), column.lengths)
        for name, column in columns.items()
    }


def _unpack(packed: _Packed) -> dict[str, Ragged]:
    return {
        name: Ragged(torch.frombuffer(bytearray(content), dtype=KEY_DTYPES[dtype]), lengths)
        if content
        else Ragged(torch.zeros(0, dtype=KEY_DTYPES[dtype]), lengths)
        for name, (dtype, content, lengths) in packed.items()
    }


def _name_dtype(column: Ragged) -> Any:
    return next(name for name, dtype in KEY_DTYPES.items() if dtype == column.values.dtype)


def _replace_placements(plan: Plan, placements: Mapping[str, str]) -> Plan:
    """Copy a plan with other placements of some calls. Raises UserError for a text that is not a placement."""
    found = {name: Placement.parse(text) for name, text in placements.items()}
    return replace(plan, placements={**plan.placements, **found})
