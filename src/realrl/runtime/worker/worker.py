"""Worker: the interpreter of programs, with one handler per instruction."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

from realrl.algorithms.method import Algorithm, GenerateMethod, InferenceMethod, Metrics, TrainMethod
from realrl.data.batch import Batch
from realrl.dataflow.call import Call, Kind
from realrl.engine.finite import NotFiniteError
from realrl.engine.generation.generate import Noise, generate
from realrl.plan.placement import Strategy
from realrl.program.instructions import (
    Feed,
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
)
from realrl.program.text import format_instruction
from realrl.runtime.measure.step_timer import StepTimer
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.exchange import Exchange
from realrl.runtime.worker.roles import Roles
from realrl.runtime.worker.store import Store
from realrl.runtime.worker.trace import Trace


@dataclass(frozen=True)
class StepInput:
    """Inputs of a step besides parameters: records, noise, and learning rates by role.

    `evaluation` is for a step that trains nothing.
    """

    records: Batch
    noise: Noise
    rates: Mapping[str, float]
    evaluation: bool = False


class Worker:
    """Executor of this rank's program, step after step."""

    def __init__(
        self, process: Process, roles: Roles, algorithm: Algorithm, ends: tuple[int, ...], trace: Trace
    ) -> None:
        """`ends` are the tokens that end generation."""
        self._process, self._roles, self._algorithm = process, roles, algorithm
        self._ends, self._trace = ends, trace
        self._exchange = Exchange(process)
        self._movers: dict[type[Instruction], Callable[..., None]] = {
            Reallocate: roles.reallocate,
            Release: roles.release,
            Offload: roles.offload,
            Load: roles.load,
        }

    def start(self, program: Program) -> None:
        """Execute a program that only moves parameters, before the first step."""
        for instruction in program.instructions:
            with self._trace.slice(format_instruction(instruction), step=0):
                self._movers[type(instruction)](instruction)

    def run(
        self, program: Program, store: Store, step: StepInput, timer: StepTimer | None = None
    ) -> dict[str, Metrics]:
        """Execute one step into an empty `store`, measured by `timer`.

        Returns figures by call: all of them on the rank that writes, elsewhere those this rank took part in.
        """
        figures: dict[str, Metrics] = {}
        turn = timer.turn if timer else lambda: None
        handlers: dict[type[Instruction], Callable[..., None]] = {
            Feed: lambda _: store.feed(step.records),
            Run: lambda i: self._run(i, store, step, figures, turn),
            Send: lambda i: self._exchange.send(i, store),
            Receive: lambda i: self._exchange.receive(i, store),
            ShareLengths: lambda i: self._exchange.share_lengths(i, store),
            Report: lambda i: figures.update({i.call: self._exchange.report(i, figures.get(i.call))}),
            **self._movers,
        }
        for instruction in program.instructions:
            text = format_instruction(instruction)
            measured = nullcontext() if timer is None else timer.instruction(instruction)
            with self._trace.slice(text, step=step.noise.step), measured:
                handlers[type(instruction)](instruction)
        self._exchange.finish()
        return figures

    def _run(
        self,
        run: Run,
        store: Store,
        step: StepInput,
        figures: dict[str, Metrics],
        turn: Callable[[], None],
    ) -> None:
        call = store.graph.call(run.call)
        dp = run.placement.dp_index(self._process.rank)
        batch = store.batch(call, dp)
        model = self._roles.model(run.role, run.placement)
        budget = run.placement.strategy.micro_batch_tokens
        method = self._algorithm.method(call.name)
        if call.kind is Kind.GENERATE:
            assert isinstance(method, GenerateMethod)
            try:
                batch = generate(
                    model,
                    batch,
                    method.prompts,
                    sampling=method.eval_sampling if step.evaluation else method.sampling,
                    ends=self._ends,
                    noise=step.noise,
                    budget=budget,
                    turn=turn,
                )
            except NotFiniteError as error:
                raise NotFiniteError(f"{call.name}: {error}") from None
        elif call.kind is Kind.INFERENCE:
            batch, figures[call.name] = model.infer(batch, cast(InferenceMethod, method), budget, turn)
        else:
            minibatches = store.assignment(call)[dp]
            figures[call.name] = self._train(call, batch, minibatches, step, run.placement.strategy, turn)
        for key in call.outputs if self._process.rank in run.placement.heads else ():
            store.put(key, batch.ids, batch[key])

    def _train(
        self,
        call: Call,
        batch: Batch,
        minibatches: list[list[int]],
        step: StepInput,
        strategy: Strategy,
        turn: Callable[[], None],
    ) -> Metrics:
        position = {item: i for i, item in enumerate(batch.ids)}
        return self._roles.trainers[call.role].train(
            batch,
            cast(TrainMethod, self._algorithm.method(call.name)),
            [[position[item] for item in minibatch] for minibatch in minibatches],
            lr=step.rates[call.role],
            budget=strategy.micro_batch_tokens,
            recompute=strategy.recompute,
            turn=turn,
            call=call.name,
        )
