"""The calls of one training step, the edges between them, and their text form."""

from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import combinations
from math import lcm

from realrl.config.errors import DescriptionError
from realrl.dataflow.call import Call, Key, Kind, MovingAverage


class DataflowGraph:
    """Calls, the keys that they exchange, and an order that respects dependencies.

    Data edges follow from keys: a call depends on the calls that produce its inputs. Parameter edges follow from
    roles: a role is trained after every other use of it in the step, so that all of them see the same parameters.
    Functions have no role, hence no parameter edges. Inputs that no call produces are `sources`: they come from
    the data set.

    If a call runs ahead (`Call.ahead`), a step works on several batches. A call then waits only for calls that run
    equally far ahead, because its other inputs were produced in earlier steps.
    """

    def __init__(
        self, calls: Iterable[Call], keys: Iterable[Key], averages: Iterable[MovingAverage] = ()
    ) -> None:
        """Raises DescriptionError for duplicate names, unknown keys, a key with two producers, or a cycle. It also
        raises DescriptionError for a moving average whose own role is trained, or whose source is not trained."""
        self.calls = tuple(calls)
        self.averages = tuple(averages)
        for average in self.averages:
            if average.role not in self.roles or self.trained(average.role):
                raise DescriptionError(
                    f"{average.role} cannot follow {average.source}: it is trained or not used"
                )
            if not self.trained(average.source):
                raise DescriptionError(f"{average.role} cannot follow {average.source}, which is not trained")
        self.keys = {key.name: key for key in keys}
        self._by_name = {call.name: call for call in self.calls}
        if len(self._by_name) < len(self.calls):
            raise DescriptionError("two calls have the same name")
        self._producer: dict[str, Call] = {}
        for call in self.calls:
            for key in (*call.inputs, *call.outputs):
                if key not in self.keys:
                    raise DescriptionError(f"call {call.name} uses key {key!r}, which is not declared")
            for key in call.outputs:
                if key in self._producer:
                    raise DescriptionError(
                        f"key {key!r} is produced by {self._producer[key].name} and {call.name}"
                    )
                self._producer[key] = call
        for declared in self.keys.values():
            if declared.length not in ("own", "one") and declared.length not in self.keys:
                raise DescriptionError(
                    f"key {declared.name!r} has the length of unknown key {declared.length!r}"
                )
            if declared.width is not None and (
                declared.width < 1 or self._producer.get(declared.name) is None
            ):
                raise DescriptionError(
                    f"key {declared.name!r}: width={declared.width} is below 1, or it is not of a call's output"
                )
        for call in self.calls:
            self._check_candidates(call)
            for producer in (self._producer[key] for key in call.inputs if key in self._producer):
                if producer.ahead < call.begins_ahead:
                    raise DescriptionError(
                        f"call {call.name} runs {count_steps(call.begins_ahead)} ahead, but {producer.name}, whose"
                        f" outputs it reads, runs {count_steps(producer.ahead)} ahead"
                    )
        # Computing the order raises DescriptionError if there is a cycle.
        _ = self.order

    @classmethod
    def using(
        cls, calls: Iterable[Call], keys: Iterable[Key], averages: Iterable[MovingAverage] = ()
    ) -> "DataflowGraph":
        """Make a graph of `calls`, leaving out the `keys` that no call uses."""
        calls = tuple(calls)
        used = {key for call in calls for key in (*call.inputs, *call.outputs)}
        return cls(calls, [key for key in keys if key.name in used], averages)

    def _check_candidates(self, call: Call) -> None:
        """Check that the key of candidate ids has `count` whole numbers at each position of the call's tokens."""
        if call.candidates is None or call.candidates.ids is None:
            return
        key, (tokens,) = self.keys[call.candidates.ids], call.work
        if not key.dtype.startswith("int") or key.width != call.candidates.count:
            raise DescriptionError(
                f"call {call.name}: key {key.name!r} must have {call.candidates.count} whole numbers at each"
                " position"
            )
        if self.length_key(key.name) != self.length_key(tokens):
            raise DescriptionError(f"call {call.name}: {key.name!r} has other lengths than {tokens!r}")

    def call(self, name: str) -> Call:
        """Find the call of that name. Raises KeyError if there is none."""
        return self._by_name[name]

    def producer(self, key: str) -> Call | None:
        """Find the call that produces `key`; None for a source."""
        return self._producer.get(key)

    def length_key(self, key: str) -> str | None:
        """Find the key that determines the row lengths of `key`; None if every row is one number."""
        length = self.keys[key].length
        if length == "one":
            return None
        return key if length == "own" else self.length_key(length)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Keys that come from the data set, in order of first use."""
        used = dict.fromkeys(key for call in self.calls for key in call.inputs)
        return tuple(key for key in used if key not in self._producer)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Roles in order of first use."""
        return tuple(dict.fromkeys(call.role for call in self.calls if call.role is not None))

    @cached_property
    def functions(self) -> tuple[Call, ...]:
        """Functions, in the order they run."""
        return tuple(call for call in self.order if call.is_function)

    def role_calls(self, role: str) -> tuple[Call, ...]:
        """List the calls of a role, in the order they run."""
        return tuple(call for call in self.order if call.role == role)

    def home(self, role: str) -> Call:
        """Find the call whose placement holds a role's parameters between steps: its training call, otherwise its
        first call."""
        return max(self.role_calls(role), key=lambda call: call.kind is Kind.TRAIN)

    def trained(self, role: str) -> bool:
        """Check whether a step updates the role's parameters."""
        return any(call.kind is Kind.TRAIN for call in self.calls if call.role == role)

    @cached_property
    def ahead(self) -> int:
        """Largest number of steps by which a call begins a batch before training. Records are taken that early."""
        return max((call.begins_ahead for call in self.calls), default=0)

    @cached_property
    def streaming(self) -> Call | None:
        """The generate call that hands on its batch in portions; None if there is none."""
        return next((call for call in self.calls if call.portions > 1), None)

    @cached_property
    def periods(self) -> frozenset[int]:
        """Periods of the moving averages, in steps."""
        return frozenset(average.period for average in self.averages)

    def due(self, step: int) -> frozenset[int]:
        """Find the periods of the moving averages that are due in a training step; steps count from 1."""
        return frozenset(period for period in self.periods if step % period == 0)

    def with_due(self, periods: Collection[int]) -> "DataflowGraph":
        """Copy the graph with only the moving averages of these periods."""
        averages = [average for average in self.averages if average.period in periods]
        return DataflowGraph(self.calls, self.keys.values(), averages)

    def dependencies(self, call: Call) -> tuple[Call, ...]:
        """List the calls that must end before `call` starts in the same step, by data and by parameters."""
        producers = (self._producer[key] for key in call.inputs if key in self._producer)
        before = dict.fromkeys(producer for producer in producers if producer.ahead == call.ahead)
        if call.kind is Kind.TRAIN:
            for other in self.calls:
                if other.role == call.role and other.kind is not Kind.TRAIN:
                    before[other] = None
        return tuple(before)

    def upstream(self, key: str) -> "DataflowGraph":
        """Select the calls that must run to produce `key`, its producer included."""
        needed: set[str] = set()
        wanted = [key]
        while wanted:
            call = self.producer(wanted.pop())
            if call is not None and call.name not in needed:
                needed.add(call.name)
                wanted += call.inputs
        calls = [call for call in self.calls if call.name in needed]
        used = {name for call in calls for name in (*call.inputs, *call.outputs)}
        return DataflowGraph(calls, [declared for declared in self.keys.values() if declared.name in used])

    @cached_property
    def order(self) -> tuple[Call, ...]:
        """Calls in topological order. Calls that become ready at the same time keep the order of declaration.

        If calls run ahead, training comes last, because it changes parameters. Calls of the batch that is trained
        on precede calls that run ahead, so that training on other devices need not wait for sampling.
        """

        def rank(call: Call) -> tuple[bool, int]:
            return (call.kind is Kind.TRAIN, call.ahead) if self.ahead else (False, 0)

        done: list[Call] = []
        waiting = list(self.calls)
        while waiting:
            candidates = [c for c in waiting if set(self.dependencies(c)) <= set(done)]
            if not candidates:
                names = ", ".join(c.name for c in waiting)
                raise DescriptionError(f"the calls {names} depend on each other in a circle")
            ready = min(candidates, key=rank)
            waiting.remove(ready)
            done.append(ready)
        return tuple(done)


def share_steps(periods: Collection[int]) -> dict[frozenset[int], float]:
    """Find which sets of periods can be due together, and the share of steps with exactly that set.

    The shares add up to 1. All periods of a set W are due in 1 / lcm(W) of the steps, sometimes together with other
    periods. The inclusion-exclusion principle gives the share of steps in which no other period is due.
    """
    sets = [frozenset(chosen) for n in range(len(periods) + 1) for chosen in combinations(periods, n)]
    shares = {}
    for due in sets:
        if all(lcm(*due) % other for other in periods if other not in due):
            wider = [other for other in sets if other >= due]
            shares[due] = sum((-1) ** (len(other) - len(due)) / lcm(*other) for other in wider)
    return shares


def format_graph(graph: DataflowGraph, trained: Collection[str]) -> str:
    """Format the calls in the order they run, each with its inputs, outputs and dependencies. `trained` names the
    roles that training updates. An evaluation's graph has no train calls, so it cannot show them."""
    lines = [f"data set -> {', '.join(graph.sources)}"]
    for number, call in enumerate(graph.order, 1):
        lines += ["", f"{number}. {call.name}  ({_about(call, trained)})"]
        inputs = _inputs(graph, call)
        labels = ("in", *[""] * (len(inputs) - 1))
        lines += [f"   {label:<6} {line}" for label, line in zip(labels, inputs, strict=True)]
        lines += [f"   out    {', '.join(call.outputs)}"] if call.outputs else []
        for average in graph.averages if call.kind is Kind.TRAIN else ():
            if average.source == call.role:
                moves = f"moves by {average.factor:g} towards" if average.factor < 1 else "becomes"
                every = f" every {average.period} steps" if average.period > 1 else ""
                lines.append(f"   then   {average.role} {moves} {call.role}{every}")
        after = ", ".join(other.name for other in graph.dependencies(call))
        lines += [f"   after  {after}"] if after else []
    return "\n".join(lines) + "\n"


def count_steps(count: int) -> str:
    """Write a number of steps in words, for example `1 step`."""
    return f"{count} step{'' if count == 1 else 's'}"


def _about(call: Call, trained: Collection[str]) -> str:
    spread = f", spread over {count_steps(call.span)}" if call.span > 1 else ""
    spread += f", in {call.portions} portions" if call.portions > 1 else ""
    early = spread + (f", {count_steps(call.ahead)} ahead" if call.ahead else "")
    if call.role is None:
        return f"{call.kind} {call.function} on the host{early}"
    frozen = "" if call.role in trained else " frozen"
    split = f" in {call.minibatches} mini-batches" if call.minibatches > 1 else ""
    candidates = call.candidates
    tokens = ""
    if candidates is not None:
        tokens = (
            f", {candidates.count} {'likeliest ' if candidates.ids is None else ''}tokens at each position"
        )
    return f"{call.kind}{split}{tokens},{frozen} role {call.role}{early}"


def _inputs(graph: DataflowGraph, call: Call) -> list[str]:
    """Format one line for each source of the call's keys: another call, or the data set."""
    places: dict[str, list[str]] = {}
    for key in call.inputs:
        producer = graph.producer(key)
        place = "data set"
        if producer is not None:
            lag = producer.ahead - call.ahead
            before = f", {count_steps(lag)} before" if lag else ""
            place = f"{producer.name}{before}"
        places.setdefault(place, []).append(key)
    lines = [f"{', '.join(keys)}  <- {place}" for place, keys in places.items()]
    return lines + ["other fields of the records  <- data set"] * call.record_fields
