"""Worker: the interpreter of programs, with one handler per instruction."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from realrl.algorithms.base.method import (
    Algorithm,
    FunctionInput,
    FunctionMethod,
    GenerateMethod,
    InferenceMethod,
    Metrics,
    TrainMethod,
)
from realrl.algorithms.base.rows import AGES, find_ages
from realrl.algorithms.base.scoring import UnscoredError
from realrl.config.errors import UserCodeError
from realrl.config.user_code import name_function
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Kind
from realrl.engine.finite import NotFiniteError, NotFiniteLogitsError
from realrl.engine.generation.generator import Generation, Part, group_samples
from realrl.engine.generation.sampling_noise import SamplingNoise, SamplingSeed
from realrl.engine.model import Model
from realrl.engine.reduced_metrics import DifferentMetricsError
from realrl.engine.training.trainer import TrainOptions
from realrl.program.instructions import (
    Feed,
    Instruction,
    Load,
    Offload,
    OfPortion,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
)
from realrl.program.memory import EarlyLoads
from realrl.program.order import list_batches, producers, transfer_ahead
from realrl.program.text import format_instruction
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.stop_strings import StopStrings
from realrl.runtime.measure.step_timer import StepTimer
from realrl.runtime.measure.work_done import WorkDone, count_generation, read_passes
from realrl.runtime.prepare.environments import Environments
from realrl.runtime.processes.process import Process
from realrl.runtime.supervision.batches import BatchProgress, CallProgress
from realrl.runtime.worker.exchange import Exchange
from realrl.runtime.worker.functions import Functions
from realrl.runtime.worker.leading import TurnSettings
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.trace import Trace
from realrl.runtime.worker.trajectories import Trajectories, begin_trajectories, summarize_trajectories


@dataclass(frozen=True)
class StepInput:
    """Inputs of a step: records, sampling seed, and learning rates by role.

    `evaluation`: whether the step only evaluates.
    """

    records: Batch
    sampling_seed: SamplingSeed
    rates: Mapping[str, float]
    further: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Extra columns of the records by name, with a value per item. Only ranks that call functions have them."""
    origins: Sequence[str] = ()
    """Origin of each item's record, as FILE:LINE."""
    samples: int = 1
    """Number of samples for each prompt."""
    evaluation: bool = False
    accumulates: bool = False
    """Whether train calls only add their gradients to those of earlier calls, without an optimizer step."""
    first: int = 0
    """Step of the first batch that this start of the run samples, counted from 0. No older weights sample."""


class StepWatch(Protocol):
    """Sees the calls of a step on this rank."""

    def begin_call(self, call: Call, model: Model) -> None:
        """See the model of a call before the call runs."""

    def end_call(self, call: Call, store: Store) -> None:
        """See the outputs of a call, which this rank has just put into the store. It may replace them."""


@dataclass(eq=False)
class BatchUnderWay:
    """A batch on this rank, from its records to training."""

    store: Store
    input: StepInput
    metrics: dict[str, Metrics] = field(default_factory=dict)
    """Metrics by call. The rank that writes has the metrics of all calls that have run. Other ranks have those of
    the calls that they run."""
    calls: dict[str, CallProgress] = field(default_factory=dict)
    """How far the calls of this rank are, if sampling runs ahead."""

    @property
    def number(self) -> int:
        """Number of the training step that trains on the batch, counted from 0."""
        return self.input.sampling_seed.step

    def count_call(self, call: Call, rank: int, *, parts: int, going_on: int) -> None:
        """Set how far a call is. `parts`: number of steps in which it has worked on the batch. `going_on`: number
        of the rank's answers that the next step continues."""
        items = list_output_items(self.store, call, rank)
        if items:
            # In a step, calls of later batches come last. A batch passes them first.
            passed = sorted(self.store.graph.order, key=lambda call: -call.ahead)
            self.calls[call.name] = CallProgress(
                order=passed.index(call), parts=parts, span=call.span, rows=len(items), going_on=going_on
            )


@dataclass
class _Step:
    """A step in progress, as the calls of one batch see it."""

    store: Store
    input: StepInput
    timer: StepTimer | None
    watch: StepWatch | None
    metrics: dict[str, Metrics]
    """Metrics by call."""
    advance: Callable[[], None]
    """Function that reports progress to the watchdog."""
    last: bool = True
    """Whether these are all items that the step still has to train on, so that the optimizer step follows."""
    going_on: int = 0
    """Number of this rank's answers that the next step continues."""

    @property
    def number(self) -> int:
        """Number of the training step that trains on the batch, counted from 0."""
        return self.input.sampling_seed.step

    def add_metrics(self, call: Call, metrics: Metrics) -> None:
        """Add the metrics of a call to those of earlier portions."""
        self.metrics.setdefault(call.name, Metrics()).update(metrics)

    def after_pass(self) -> None:
        """Record that a decode step, or a micro-batch's forward or backward pass, has finished."""
        self.advance()
        if self.timer is not None:
            self.timer.fold_allocations()

    def worked(self, read_work: Callable[[], WorkDone]) -> None:
        """Pass to the timer how to read the work of a call after the device has finished."""
        if self.timer is not None:
            self.timer.worked(read_work)


@dataclass(frozen=True, eq=False)
class _Sampling:
    """A generate call in progress on this rank."""

    generation: Generation
    prompts: str
    """Key of the prompts."""
    samples: int
    rows: Mapping[int, int]
    """Item -> number of its row in the call."""
    turns: Trajectories | None


class Worker:
    """Executes this rank's program, step after step."""

    def __init__(
        self,
        process: Process,
        roles: Roles,
        algorithm: Algorithm,
        stop_token_ids: tuple[int, ...],
        trace: Trace,
        tokenizer: Any = None,
        early_loads: Sequence[tuple[Program, EarlyLoads]] = (),
        environments: Environments | None = None,
    ) -> None:
        """`stop_token_ids` end generation. `tokenizer` is passed to functions.

        `early_loads`: loads that begin early, by program. `environments`: the environment of generate calls, if the
        recipe has one.
        """
        self._process, self._roles, self._algorithm = process, roles, algorithm
        self._stop_token_ids, self._trace, self._tokenizer = stop_token_ids, trace, tokenizer
        self._exchange = Exchange(process)
        self._activity = process.activity
        self._functions = Functions(trace, process.activity)
        self._early_loads, self._environments = early_loads, environments
        self._sampling: _Sampling | None = None
        """The generate call that hands on portions, from its first to its last portion."""
        self._movers: dict[type[Instruction], Callable[..., None]] = {
            Reallocate: roles.reallocate,
            Release: roles.release,
            Offload: roles.offload,
            Load: roles.load,
        }

    def use(self, algorithm: Algorithm) -> None:
        """From now on, use another object of the same algorithm."""
        self._algorithm = algorithm

    def start(self, program: Program) -> None:
        """Execute a program that only moves parameters, before the first step."""
        for position, instruction in enumerate(program.instructions):
            text = format_instruction(instruction)
            self._activity.begin(text, None, 0, position)
            with self._trace.slice(text, step=0):
                self._movers[type(instruction)](instruction)
            self._activity.advance()

    def run(
        self,
        program: Program,
        store: Store,
        step: StepInput,
        timer: StepTimer | None = None,
        watch: StepWatch | None = None,
    ) -> dict[str, Metrics]:
        """Execute a step that works on one batch, and put its results into the empty `store`.

        Returns the metrics of the batch. The other arguments and errors are those of `run_batches`.
        """
        batch = BatchUnderWay(store, step)
        self.run_batches(program, {0: batch}, timer, watch)
        return batch.metrics

    def run_batches(
        self,
        program: Program,
        batches: Mapping[int, BatchUnderWay],
        timer: StepTimer | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        """Execute one step. `batches`: the batches that it works on, by the number of steps until they are trained
        on. Results are added to the batches. `timer` measures the step, and `watch` sees its calls.

        If a function has failed, its error is raised when its outputs or metrics are needed, or at the end of the
        step.
        """
        steps = {
            ahead: _Step(batch.store, batch.input, timer, watch, batch.metrics, self._activity.advance)
            for ahead, batch in batches.items()
        }
        graph = next(iter(batches.values())).store.graph
        sent = {
            (producer.name, call.name): transfer_ahead(graph, producer, call)
            for call in graph.calls
            for producer in producers(graph, call)
        }

        def find_batches(instruction: Instruction) -> list[int]:
            """List the batches that an instruction works on. Parameters belong to no batch."""
            match instruction:
                case Feed():
                    return [graph.ahead]
                case Send(producer=producer, consumer=call) | Receive(producer=producer, consumer=call):
                    return [sent[producer, call]]
                case Run(call=call):
                    return list_batches(graph.call(call), steps)
                case ShareLengths(call=call) | Report(call=call):
                    return [graph.call(call).ahead]
            return []

        portions: dict[int, _Step] = {}
        """Portions that have been handed on, by number."""
        streaming = graph.streaming

        def now(instruction: Instruction) -> _Step:
            """Find the first batch that an instruction works on, or its portion of that batch."""
            # Parameters move for the batch that is trained on.
            whole = steps[min(find_batches(instruction), default=min(steps))]
            return portions.get(instruction.portion, whole) if isinstance(instruction, OfPortion) else whole

        def share_lengths(share: ShareLengths) -> None:
            step = now(share)
            self._exchange.share_lengths(share, step.store)
            if streaming is not None and share.call == streaming.name and share.portion not in portions:
                last = share.portion == streaming.portions
                portions[share.portion] = replace(step, store=step.store.hand_on(share.key), last=last)

        present = steps[min(steps)].number - min(steps)

        def describe(numbers: Sequence[int]) -> dict[str, Any]:
            """Describe the step and the batches of a slice in the trace."""
            return {"step": present, "batches": [*numbers]} if numbers else {"step": present}

        def report(call: str | None = None) -> None:
            """Publish how far the batches under way are. `call` has just finished its part of this step."""
            if graph.ahead:
                self._report_batches(batches, steps, None if call is None else graph.call(call))

        handlers: dict[type[Instruction], Callable[..., None]] = {
            Feed: lambda i: now(i).store.feed(now(i).input.records),
            Run: lambda i: self._run_call(i, steps, now(i)),
            Send: lambda i: self._exchange.send(i, now(i).store),
            Receive: lambda i: self._exchange.receive(i, now(i).store),
            ShareLengths: share_lengths,
            Report: lambda i: self._exchange.report(i, now(i).metrics),
            **self._movers,
        }
        orders = {call.name: i for i, call in enumerate(graph.order)}
        running: dict[str, _Step] = {}
        """Function -> the batch, or its portion, for which it was started last."""
        reached = 0
        early = next((loads for of, loads in self._early_loads if of is program), {})
        report()
        for position, instruction in enumerate(program.instructions):
            text, of = format_instruction(instruction), _call_of(instruction)
            reached = max(reached, orders.get(of or "", 0))
            numbers = [steps[ahead].number for ahead in find_batches(instruction)] if graph.ahead else []
            self._activity.begin(text, of, reached, position, [number + 1 for number in numbers])
            if isinstance(instruction, Run) and instruction.role is None:
                if instruction.call in self._functions.running:  # for an earlier portion
                    self._collect(instruction.call, running[instruction.call])
                self._start(instruction, now(instruction), describe(numbers))
                running[instruction.call] = now(instruction)
                continue
            measured = nullcontext() if timer is None else timer.instruction(instruction)
            with self._trace.slice(text, **describe(numbers)) as details, measured:
                function = self._needed(instruction)
                if function is not None:
                    details["waiting"] = self._collect(function, running[function])
                    report(function)
                for load in early.get(position, ()):
                    self._roles.prefetch(load)
                handlers[type(instruction)](instruction)
            self._activity.advance()
            if isinstance(instruction, Run):
                report(instruction.call)
        for function in self._functions.running:
            batch = running[function]
            numbers = [batch.number] if graph.ahead else []
            with self._trace.slice(f"wait for {function}", **describe(numbers)):
                self._collect(function, batch)
            report(function)
        self._exchange.finish()

    def _report_batches(
        self, batches: Mapping[int, BatchUnderWay], steps: Mapping[int, _Step], finished: Call | None
    ) -> None:
        """Publish how far the batches under way are, in the next heartbeat.

        `finished`: a call that has just finished its part of this step.
        """
        graph = next(iter(batches.values())).store.graph
        if finished is not None:
            for ahead in list_batches(finished, steps):
                parts, going_on = finished.begins_ahead - ahead + 1, steps[ahead].going_on
                batches[ahead].count_call(finished, self._process.rank, parts=parts, going_on=going_on)
        self._activity.batches = [
            BatchProgress(
                step=batch.number + 1,
                weights=max(batch.number - graph.ahead, batch.input.first),
                size=len(batch.input.records),
                calls=batch.calls,
            ).to_json()
            for batch in batches.values()
        ]

    def _start(self, run: Run, now: _Step, details: Mapping[str, object]) -> None:
        """Start a function in the background, unless this rank has no items for it. `details`: those of its slice
        in the trace."""
        call, method = now.store.graph.call(run.call), self._algorithm.method(run.call)
        batch = now.store.batch(call, run.placement.item_index(self._process.rank))
        if not len(batch):
            now.metrics.setdefault(call.name, Metrics())
            return
        further = now.input.further if call.record_fields else {}
        fields = {name: [values[item] for item in batch.ids] for name, values in further.items()}
        origins = [now.input.origins[item] for item in batch.ids] if now.input.origins else []
        inputs = FunctionInput(
            batch, fields, self._tokenizer, origins, now.input.samples, self._find_stop(now)
        )
        assert call.function is not None, "a call without a role is a function"
        self._functions.start(run, call.function, cast(FunctionMethod, method), inputs, details)

    def _find_stop(self, now: _Step) -> StopStrings | None:
        """Return the stop strings of a step's answers, which are the same for all of its calls."""
        for call in now.store.graph.calls:
            if call.kind is Kind.GENERATE:
                method = cast(GenerateMethod, self._algorithm.method(call.name))
                return StopStrings.of(self._tokenizer, method.sampling_of(evaluation=now.input.evaluation))
        return None

    def _find_stop_token_ids(self, sampling: GenerationConfig) -> tuple[int, ...]:
        """Return the tokens that end an answer: those of the settings, or else the model's own."""
        if sampling.ignore_eos:
            return ()
        return self._stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids

    def _needed(self, instruction: Instruction) -> str | None:
        """Return the call whose outputs or metrics an instruction needs, if the call's function still runs here.

        Otherwise, return None.
        """
        match instruction:
            case Send(producer=call) | ShareLengths(call=call):
                return call if call in self._functions.running else None
            case Report(call, senders, _) if self._process.rank in senders:
                return call if call in self._functions.running else None
        return None

    def _collect(self, function: str, now: _Step) -> float:
        """Wait for a function, and store its outputs. Returns how many seconds it has waited."""
        before = time.monotonic()
        returned = self._functions.collect(function)
        after = time.monotonic()
        call, store = now.store.graph.call(function), now.store
        ids = store.items(call, store.plan[function].item_index(self._process.rank))
        for key in call.outputs:
            store.put(key, ids, returned.outputs[key])
        if now.watch is not None and ids:
            now.watch.end_call(call, store)
        # Metrics of other ranks may have arrived already.
        now.metrics.setdefault(function, Metrics()).update(returned.metrics)
        if now.timer is not None:
            now.timer.function(function, returned.start, returned.end, waited=(before, after))
        return after - before

    def _run_call(self, run: Run, steps: Mapping[int, _Step], now: _Step) -> None:
        """Execute a call of a model.

        Raises UserCodeError if its ranks have different metrics, or if no answer of the step has a score.
        """
        call = now.store.graph.call(run.call)
        if call.span > 1:
            self._run_parts(run, call, {batch: steps[batch] for batch in list_batches(call, steps)})
            return
        if call.portions > 1:
            self._run_portion(run, call, now)
            return
        try:
            self._run(run, now)
        except DifferentMetricsError as error:
            # Only ranks of this call see the error.
            raise UserCodeError(f"{run.call}: {error}", alone=True) from None
        except UnscoredError:
            graph, step = now.store.graph, now.input.sampling_seed.step + 1
            scorers = [
                f"{call.name} ({name_function(call.function)})"
                for call in graph.functions
                if call.record_fields and call.function
            ]
            raise UnscoredError(scorers, now.store.size, step) from None

    def _run(self, run: Run, now: _Step) -> None:
        """Execute a call of a model."""
        assert run.role is not None, "functions are started"
        store = now.store
        call = store.graph.call(run.call)
        dp = run.placement.item_index(self._process.rank)
        batch = store.batch(call, dp)
        model = self._roles.model(run.role, run.placement)
        if now.watch is not None:
            now.watch.begin_call(call, model)
        model.counts.reset()
        max_tokens = run.placement.strategy.micro_batch_tokens
        method = self._algorithm.method(call.name)
        idle = not len(batch) if call.kind is Kind.GENERATE else store.portion == []
        if idle and call.kind is Kind.GENERATE and model.decodes_together:
            # The rank only takes part in the turns of others, and has no answers to take.
            self._begin_sampling(run, call, batch, now).generation.run(now.after_pass)
        if idle and call.kind is not Kind.TRAIN:  # nobody works on an empty portion
            if call.has_metrics:
                now.add_metrics(call, Metrics())
            return
        if call.kind is Kind.GENERATE:
            sampling = self._begin_sampling(run, call, batch, now)
            sampling.generation.run(now.after_pass)
            batch = self._take_samples(run, call, sampling, now)
        elif call.kind is Kind.INFERENCE:
            metrics: Metrics
            batch, metrics = model.infer(
                batch,
                cast(InferenceMethod, method),
                max_tokens,
                now.after_pass,
                call.candidates,
                call.replays,
            )
            now.add_metrics(call, metrics)
        else:
            assert call.kind is Kind.TRAIN, f"{call.name} is a function"
            now.add_metrics(call, self._train(run, call, batch, now))
        if call.kind is not Kind.GENERATE:
            now.worked(lambda: read_passes(model.counts))
        for key in call.outputs if len(batch) and self._process.rank in run.placement.output_ranks else ():
            store.put(key, batch.ids, batch[key.removeprefix(call.prefix)])
        if now.watch is not None and len(batch) and self._process.rank in run.placement.output_ranks:
            now.watch.end_call(call, store)

    def _run_parts(self, run: Run, call: Call, steps: Mapping[int, _Step]) -> None:
        """Execute a generate call that spreads each batch over several steps. `steps`: its batches in this step.

        Answers that are not complete yet continue, each by the same number of tokens. All ranks of the call keep
        them in the stores of their batches.
        """
        assert run.role is not None, "generate calls have a model"
        first, dp = next(iter(steps.values())), run.placement.item_index(self._process.rank)
        model = self._roles.model(run.role, run.placement)
        model.counts.reset()
        method = cast(GenerateMethod, self._algorithm.method(call.name))
        sampling = method.sampling_of(evaluation=False)
        number = [other for other in first.store.graph.calls if other.kind is Kind.GENERATE].index(call)
        places: list[tuple[_Step, int]] = []
        keys: list[int] = []
        begun: list[tuple[Sequence[int], Sequence[float]]] = []
        for now in steps.values():
            now.going_on = 0
            items = now.store.items(call, dp)
            noise = SamplingNoise(replace(now.input.sampling_seed, call=number))
            of_items = noise.make_keys(torch.tensor(items, dtype=torch.int64)).tolist()
            answers = _read_begun(now.store, call, items)
            for item, key, (tokens, logprobs, complete) in zip(items, of_items, answers, strict=True):
                if not complete and len(tokens) < sampling.max_new_tokens:
                    places.append((now, item))
                    keys.append(key)
                    begun.append((tokens, logprobs))
        if places or model.decodes_together:
            numbers = {id(now): index for index, now in enumerate(steps.values())}
            # The samples of a prompt stay neighbours, as in `group_samples`.
            ids = tuple(numbers[id(now)] * now.store.size + item for now, item in places)
            prompts = [now.store.rows(method.prompts, [item]).values for now, item in places]
            given = Ragged.of(prompts, dtype=torch.int64)
            try:
                generation = Generation(
                    model,
                    Batch(ids, {method.prompts: given}),
                    method.prompts,
                    sampling=sampling,
                    stop_token_ids=self._find_stop_token_ids(sampling),
                    stop=StopStrings.of(self._tokenizer, sampling),
                    seed=replace(first.input.sampling_seed, call=number),
                    kv_capacity=run.placement.strategy.micro_batch_tokens,
                    samples=first.store.samples,
                    kept=self._roles.kept_decoding(call.name),
                    part=Part(keys, begun, call.count_part(sampling.max_new_tokens)),
                )
                generation.run(first.after_pass)
                batch = generation.take()
            except NotFiniteLogitsError as error:
                batch_number, item = divmod(error.item, first.store.size)
                of_batch = [*steps.values()][batch_number].input
                found = NotFiniteLogitsError(error.token, item)
                raise NotFiniteError(f"{call.name}: {_describe_logits(found, of_batch, call)}") from None
            for key in call.outputs:
                for (now, item), row in zip(places, batch[key.removeprefix(call.prefix)].rows(), strict=True):
                    now.store.put_row(key, item, row)
            sampled, finished = batch["sequences"].lengths, batch["finished"].values.tolist()
            for (now, _), prompt, length, ended in zip(places, given.lengths, sampled, finished, strict=True):
                now.going_on += not ended and length - prompt < sampling.max_new_tokens
            if model.shard.last and places:
                groups = group_samples(ids, given, first.store.samples)
                known = [len(tokens) for tokens, _ in begun]
                lengths = given.lengths, batch["sequences"].lengths
                first.worked(lambda: count_generation(model.counts, groups, *lengths, known))

    def _run_portion(self, run: Run, call: Call, now: _Step) -> None:
        """Sample until one more portion of this rank's prompts have all their answers, and store these answers.

        The other answers go on in the next portion.
        """
        assert run.role is not None, "generate calls have a model"
        self._roles.model(run.role, run.placement).counts.reset()
        if run.portion == 1:
            batch = now.store.batch(call, run.placement.item_index(self._process.rank))
            self._sampling = self._begin_sampling(run, call, batch, now) if len(batch) else None
        sampling = self._sampling
        if sampling is None:
            if call.has_metrics:
                now.add_metrics(call, Metrics())
            return
        left, generation = call.portions - run.portion, sampling.generation
        later = generation.groups * left // call.portions
        generation.run(now.after_pass, most_open=later)
        batch = self._take_samples(run, call, sampling, now, left=later)
        if not left:
            self._sampling = None
        for key in call.outputs if len(batch) and self._process.rank in run.placement.output_ranks else ():
            now.store.put(key, batch.ids, batch[key.removeprefix(call.prefix)])

    def _begin_sampling(self, run: Run, call: Call, batch: Batch, now: _Step) -> _Sampling:
        """Begin a generate call. `batch`: the call's inputs on this rank."""
        assert run.role is not None, "generate calls have a model"
        store, step = now.store, now.input
        model = self._roles.model(run.role, run.placement)
        method = cast(GenerateMethod, self._algorithm.method(call.name))
        number = [other for other in store.graph.calls if other.kind is Kind.GENERATE].index(call)
        sampling = method.sampling_of(evaluation=step.evaluation)
        turns = None
        if call.record_fields and len(batch):
            turns = self._begin_trajectories(run, batch, sampling, now)
        samples = store.samples
        if turns is not None and turns.replaces_prompts:
            # Agents write prompts of their own, which may differ.
            blank = Ragged.scalars(torch.zeros(len(batch), dtype=torch.int64))
            batch, samples = batch.with_fields(**{method.prompts: blank}), 1
        generation = Generation(
            model,
            batch,
            method.prompts,
            sampling=sampling,
            stop_token_ids=self._find_stop_token_ids(sampling),
            stop=StopStrings.of(self._tokenizer, sampling),
            seed=replace(step.sampling_seed, call=number),
            kv_capacity=run.placement.strategy.micro_batch_tokens,
            samples=samples,
            record_experts=call.records_experts,
            kept=None if step.evaluation else self._roles.kept_decoding(call.name),
            turns=turns,
            together=store.samples,
        )
        rows = {item: row for row, item in enumerate(batch.ids)}
        return _Sampling(generation, method.prompts, samples, rows, turns)

    def _take_samples(self, run: Run, call: Call, sampling: _Sampling, now: _Step, *, left: int = 0) -> Batch:
        """Take the answers to prompts that have ended, but leave `left` prompts for later.

        Only some ranks get them, see `Generation.take`.
        """
        assert run.role is not None, "generate calls have a model"
        model = self._roles.model(run.role, run.placement)
        try:
            batch = sampling.generation.take(left=left)
        except NotFiniteLogitsError as error:
            raise NotFiniteError(f"{call.name}: {_describe_logits(error, now.input, call)}") from None
        turns = sampling.turns
        if turns is not None and self._process.rank in run.placement.output_ranks:
            batch = batch.with_fields(**turns.outputs(batch, [sampling.rows[item] for item in batch.ids]))
            now.add_metrics(call, summarize_trajectories(batch))
        if model.shard.last:
            given = batch[sampling.prompts]
            groups = group_samples(batch.ids, given, sampling.samples)
            lengths = given.lengths, batch["sequences"].lengths
            now.worked(lambda: count_generation(model.counts, groups, *lengths))
        return batch

    def _begin_trajectories(
        self, run: Run, batch: Batch, sampling: GenerationConfig, now: _Step
    ) -> Trajectories:
        """Begin the trajectories of a generate call in the recipe's environment."""
        assert self._environments is not None, "the recipe has an environment"
        step, samples = now.input, now.store.samples
        records = []
        for item in batch.ids:
            # All samples of a prompt get the same seed.
            seed = step.sampling_seed
            prompt = (seed.first_sequence + item) // samples
            fields = {name: values[item] for name, values in step.further.items()}
            records.append(self._environments.make_record(fields, (seed.seed, seed.step, prompt)))
        return begin_trajectories(
            self._environments,
            run.placement,
            self._process,
            records=records,
            origins=[step.origins[item] if step.origins else "" for item in batch.ids],
            settings=TurnSettings(
                sampling, self._find_stop_token_ids(sampling), StopStrings.of(self._tokenizer, sampling)
            ),
            advance=now.advance,
        )

    def _train(self, run: Run, call: Call, batch: Batch, now: _Step) -> Metrics:
        batch = self._add_ages(call, batch, now)
        portion = now.store.portion
        minibatches = now.store.assignment(call)[run.placement.item_index(self._process.rank)]
        position = {item: i for i, item in enumerate(batch.ids)}
        trainer = self._roles.trainers[call.model_role]
        method = cast(TrainMethod, self._algorithm.method(call.name))
        options = TrainOptions(
            max_tokens=run.placement.strategy.micro_batch_tokens,
            recompute=run.placement.strategy.recompute,
            zero_bubble=run.placement.strategy.zero_bubble,
            after_pass=now.after_pass,
            before_update=self._roles.before_change,
            call=call.name,
            candidates=call.candidates,
        )
        if now.input.accumulates:
            return trainer.accumulate(batch, method, options)
        if portion is not None:
            metrics = Metrics()
            if portion:
                # A train method sees a portion as a whole batch of fewer items.
                numbers = {item: number for number, item in enumerate(portion)}
                items = Batch(tuple(numbers[item] for item in batch.ids), batch.fields)
                # Ranks without items have no backward pass in which they could reduce gradients.
                last = now.last and len(portion) >= run.placement.strategy.dp
                metrics.update(trainer.accumulate(items, method, options, averages=False, last=last))
            if now.last:
                done = trainer.update(
                    now.input.rates[call.model_role],
                    call=call.name,
                    before_update=self._roles.before_change,
                    head_scale=method.head_scale,
                )
                metrics.update(done)
            return metrics
        return trainer.train(
            batch,
            method,
            [[position[item] for item in minibatch] for minibatch in minibatches],
            options,
            lr=now.input.rates[call.model_role],
            replays=call.replays,
        )

    def _add_ages(self, call: Call, batch: Batch, now: _Step) -> Batch:
        """Add the ages of tokens, if a call trains a policy on samples that it may have drawn in earlier steps."""
        sampler = now.store.graph.producer("sequences")
        readable = {"sequences", "prompt_length"} <= batch.fields.keys()
        if sampler is None or sampler.role != call.role or not sampler.begins_ahead or not readable:
            return batch
        method = cast(GenerateMethod, self._algorithm.method(sampler.name))
        tokens = method.sampling_of(evaluation=False).max_new_tokens
        limit = now.input.sampling_seed.step - now.input.first
        part = sampler.count_part(tokens)
        ages = find_ages(batch, oldest=sampler.begins_ahead, part=part, limit=limit)
        return batch.with_fields(**{AGES: ages})


def list_output_items(store: Store, call: Call, rank: int) -> list[int]:
    """List the items whose outputs a rank has after a call."""
    placement = store.plan[call.name]
    return store.items(call, placement.item_index(rank)) if rank in placement.output_ranks else []


def count_going_on(store: Store, call: Call, items: list[int], new_tokens: int) -> int:
    """Count the items whose answers the next step continues, if a generate call spreads answers over steps.
    `new_tokens`: maximum number of tokens of an answer."""
    answers = _read_begun(store, call, items)
    return sum(not complete and len(tokens) < new_tokens for tokens, _, complete in answers)


def _read_begun(store: Store, call: Call, items: list[int]) -> list[tuple[list[int], list[float], bool]]:
    """Read what earlier steps have sampled of some items: tokens and log-probabilities, and whether the answer has
    ended. Log-probabilities are 0 if the call does not output them."""
    if not items or store.row(f"{call.prefix}sequences", items[0]) is None:
        return [([], [], False) for _ in items]

    def read(key: str) -> list[list[Any]]:
        return [row.tolist() for row in store.rows(f"{call.prefix}{key}", items).rows()]

    sequences = read("sequences")
    known = f"{call.prefix}logprobs" in call.outputs
    logprobs = read("logprobs") if known else [[0.0] * len(sequence) for sequence in sequences]
    rows = zip(sequences, logprobs, read("prompt_length"), read("finished"), strict=True)
    return [(sequence[cut:], of_tokens[cut:], bool(ended)) for sequence, of_tokens, (cut,), (ended,) in rows]


def _call_of(instruction: Instruction) -> str | None:
    """Return the name of an instruction's call; None if it has none."""
    match instruction:
        case Run(call=call) | ShareLengths(call=call) | Report(call=call) | Send(producer=call):
            return call
        case Receive(consumer=call):
            return call
    return None


def _describe_logits(error: NotFiniteLogitsError, step: StepInput, call: Call) -> str:
    """Describe an error about logits that are not finite. In an evaluation, name the record of the prompt."""
    if step.evaluation and step.origins:
        return error.describe(step.origins[error.item - step.sampling_seed.first_sequence])
    if call.begins_ahead:
        number = step.sampling_seed.step + 1
        return error.describe(f"the prompt of item {error.item + 1} of the batch of step {number}")
    return str(error)
