"""A plan: a placement for every call of a dataflow graph, and its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, create_model, field_validator

from realrl.config.base import Settings
from realrl.config.errors import UserError, join
from realrl.config.explain import brief, mistakes_in, nearest
from realrl.config.files import write_whole
from realrl.config.values import check_cluster
from realrl.config.yaml_file import read_yaml
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.families.shape import ModelShape
from realrl.plan import axes as plan_axes
from realrl.plan.axes import Axis, Divided, axes_dividing, axis_names
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Dtype, Mesh, Placement, Strategy, function_placement


class _Entry(Settings):
    """One call in a plan file, without its degrees of parallelism, which `_entry_model` adds."""

    mesh: str
    """Ranks of the call, written as FIRST-LAST, or a single rank."""
    micro_batch_tokens: PositiveInt | None = None
    """Maximum tokens in one forward pass. The default is the number in the recipe."""
    sequence_parallel: bool = False
    """Whether TP ranks also split tokens in the layers that they would otherwise replicate."""
    dtype: Dtype | None = None
    """Data type of the parameters, only for a call that does not train. The default is the data type of the
    role."""
    recompute: bool = False
    """Whether training checkpoints activations: it keeps only the inputs of layers, and recomputes their other
    activations."""
    zero_bubble: bool = False
    """Whether training computes the gradients of weights apart from backward passes, while a pipeline stage would
    wait for other stages."""
    zero: Literal[1, 2, 3] = 1
    """Stage of ZeRO. Ranks with the same parameters shard the optimizer state (stage 1), gradients too (2), or
    parameters too (3)."""

    @field_validator("mesh", mode="before")
    @classmethod
    def _one_rank(cls, value: Any) -> Any:
        if isinstance(value, list | float):
            raise ValueError(
                f"{brief(value)} is not understood; write FIRST-LAST, for example 0-7, or one rank"
            )
        return str(value) if type(value) is int else value


def _entry_model() -> type[_Entry]:
    """Make the model of a call in a plan file, with a field for the degree of each axis."""
    return _make_entry_model(plan_axes.AXES)


@cache
def _make_entry_model(axes: tuple[Axis, ...]) -> type[_Entry]:
    degrees: dict[str, Any] = {
        axis.name: (
            PositiveInt,
            Field(... if axis.divides is Divided.ITEMS else 1, description=f"Degree of {axis.title}."),
        )
        for axis in axes
    }
    return create_model("_Entry", __base__=_Entry, **degrees)


class _File(Settings):
    """A plan file. Entries are validated one by one, so that errors name the call."""

    cluster: str
    """Devices, written as NODESxDEVICES_PER_NODE, such as 2x8. If nodes differ, join several of these by `+`."""
    calls: dict[str, Any]
    """Name of a call -> its placement."""
    offload: tuple[str, ...] = Field(default=(), strict=False)
    """Roles whose parameters are in host memory between their calls."""
    offload_optimizer: tuple[str, ...] = Field(default=(), strict=False)
    """Trained roles whose gradients and optimizer state are in host memory between their training calls."""
    keep: tuple[str, ...] = Field(default=(), strict=False)
    """Roles that keep copies of their parameters in other layouts. The copies are refreshed after each update of
    the role."""

    @field_validator("offload", "offload_optimizer", "keep")
    @classmethod
    def _once(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        twice = next((role for role in roles if roles.count(role) > 1), None)
        if twice is not None:
            raise ValueError(f"{brief(twice)} is named twice")
        return roles

    @field_validator("cluster", mode="before")
    @classmethod
    def _devices(cls, value: Any) -> Any:
        return check_cluster(value)


@dataclass(frozen=True)
class Plan:
    """A placement for each call, and the state that is offloaded or kept. `placements` must not be changed.

    Parameters of roles in `offload` are in host memory while they are not in use. Gradients and optimizer state of
    roles in `offload_optimizer` are also in host memory while they are not in use. Roles in `keep` have shadow
    copies for calls in another layout than the role's home. Such a copy stays, and is refreshed after each update,
    instead of being made anew in each step.
    """

    cluster: Cluster
    placements: Mapping[str, Placement]
    offload: tuple[str, ...] = ()
    offload_optimizer: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        """List the placements, one call per line."""
        width = max(map(len, self.placements), default=0)
        lines = [f"{name:<{width}}  {placement}" for name, placement in self.placements.items()]
        chosen = {"offload": self.offload, "offload_optimizer": self.offload_optimizer, "keep": self.keep}
        lines += [f"{name}: {', '.join(roles)}" for name, roles in chosen.items() if roles]
        return "\n".join([f"cluster {self.cluster}", *lines])

    def __getitem__(self, call: str) -> Placement:
        """Find the placement of a call. Raises KeyError if the plan has none."""
        return self.placements[call]

    def check(self, graph: DataflowGraph, shapes: Mapping[str, ModelShape] | None = None) -> None:
        """Raise UserError unless the plan fits a graph and its models.

        It must place exactly the calls of `graph`, on meshes of its cluster, in layouts that the models support. It
        may offload and keep only state that its roles have. Sizes of a role without a shape are not checked.
        """
        names = [call.name for call in graph.calls]
        for name in self.placements:
            if name not in names:
                hint = nearest(name, names)
                suffix = f"did you mean {hint}?" if hint else f"the calls are {', '.join(names)}"
                raise UserError(f"plan: there is no call {name}; {suffix}")
        for name in names:
            if name not in self.placements:
                raise UserError(f"plan: call {name} has no placement")
            call = graph.call(name)
            shape = None if call.role is None else (shapes or {}).get(call.role)
            self._check_placement(name, self[name], shape)
        for role in graph.roles:
            self._check_layouts(graph.role_calls(role))
        trained = [role for role in graph.roles if graph.trained(role)]
        for key, chosen, roles in (
            ("offload", self.offload, list(graph.roles)),
            ("offload_optimizer", self.offload_optimizer, trained),
            ("keep", self.keep, list(graph.roles)),
        ):
            for role in chosen:
                if role not in roles:
                    raise UserError(f"plan: {key}: {role} is not one of {', '.join(roles)}")

    def check_exact(self, graph: DataflowGraph) -> None:
        """Raise UserError unless calls of a role can agree bit for bit, as `exact` in a recipe demands."""
        generating = {call.name for call in graph.calls if call.kind is Kind.GENERATE}
        for name, placement in self.placements.items():
            strategy = placement.strategy
            if strategy.cp > 1 and name in generating:
                raise UserError(
                    f"plan: {name}: cp={strategy.cp}: exact=true needs cp=1 in calls that generate, because ranks"
                    " that divide the KV cache add sums in another order; set cp=1 in the plan, or exact=false"
                )
            if strategy.tp > 1:
                raise UserError(
                    f"plan: {name}: tp={strategy.tp}: exact=true needs tp=1, because tensor parallelism adds sums"
                    " in another order; set tp=1 in the plan, or exact=false"
                )
            if strategy.dtype is not None:
                raise UserError(
                    f"plan: {name}: dtype={strategy.dtype}: exact=true needs one data type for all calls of a role;"
                    " leave dtype to the model, or set exact=false"
                )

    def _check_placement(self, name: str, placement: Placement, shape: ModelShape | None) -> None:
        try:
            placement.mesh.check(self.cluster)
        except UserError as error:
            raise UserError(f"plan: {name}: {error}") from None
        strategy = placement.strategy
        if shape is not None and strategy.pp * strategy.vpp > shape.layers:
            stages = f"pp={strategy.pp} is more pipeline stages"
            if strategy.vpp > 1:
                stages = f"pp={strategy.pp} with vpp={strategy.vpp} is more virtual pipeline stages"
            raise UserError(f"plan: {name}: {stages} than the model has layers ({shape.layers})")
        if shape is not None and strategy.zero_bubble and shape.lora is not None:
            raise UserError(
                f"plan: {name}: zero_bubble leaves out gradients of matrices, but lora freezes the matrices; leave"
                " it out"
            )
        if shape is not None and strategy.tp > shape.heads:
            raise UserError(
                f"plan: {name}: tp={strategy.tp} is more than the {shape.heads} attention heads of the model"
            )

    def _check_layouts(self, calls: Sequence[Call]) -> None:
        """Check that settings suit the kinds of calls, and that all training of a role has one layout. Calls with
        the same layout must also agree on sequence parallelism."""
        first: dict[str, Call] = {}
        for call in calls:
            other = first.setdefault(self[call.name].layout, call)
            mine = self[call.name].strategy
            theirs = self[other.name].strategy
            if mine.sequence_parallel != theirs.sequence_parallel:
                raise UserError(
                    f"plan: {other.name} and {call.name} share the parameters of {call.role}, so"
                    " sequence_parallel must be the same for both"
                )
        for call in calls:
            strategy = self[call.name].strategy
            if call.kind is Kind.TRAIN and strategy.dtype is not None:
                raise UserError(
                    f"plan: {call.name}: dtype is for calls that do not train; set models.{call.role}.dtype"
                )
            if call.kind is not Kind.TRAIN and strategy.recompute:
                raise UserError(f"plan: {call.name}: recompute is for calls that train")
            if call.kind is not Kind.TRAIN and strategy.zero_bubble:
                raise UserError(f"plan: {call.name}: zero_bubble is for calls that train")
            if call.kind is not Kind.TRAIN and strategy.zero == 2:
                raise UserError(
                    f"plan: {call.name}: zero=2 shards gradients, which only calls that train have; leave it out,"
                    " or set zero=3, which shards parameters"
                )
            if call.kind is Kind.GENERATE and strategy.zero == 3:
                raise UserError(
                    f"plan: {call.name}: zero=3 would gather all parameters for every token that is generated;"
                    f" leave it out: {call.role} is reallocated if its other calls have zero=3"
                )
            if call.kind is Kind.GENERATE and strategy.vpp > 1:
                raise UserError(
                    f"plan: {call.name}: vpp={strategy.vpp} would send every token through the pipeline"
                    f" {strategy.vpp} times; leave vpp out: {call.role} is reallocated if its other calls have it"
                )
            if call.kind is Kind.GENERATE and strategy.decodes_together and strategy.pp > 1:
                raise UserError(
                    f"plan: {call.name}: ep={strategy.ep} divides experts among data-parallel ranks, which then"
                    f" decode in step; that has no pipeline, so leave pp={strategy.pp} out, or set ep to a divisor"
                    f" of cp x tp ({strategy.cp * strategy.tp})"
                )
            if call.kind is Kind.GENERATE and strategy.decodes_together and call.portions > 1:
                raise UserError(
                    f"plan: {call.name}: ep={strategy.ep} divides experts among data-parallel ranks, which then"
                    " decode in step, but they hand on portions at different times; set ep to a divisor of"
                    f" cp x tp ({strategy.cp * strategy.tp}), or leave asynchrony.portions out"
                )
        training = [call.name for call in calls if call.kind is Kind.TRAIN]
        if len({(self[name].layout, self[name].strategy.zero) for name in training}) > 1:
            raise UserError(
                f"plan: {' and '.join(training)} train one role, so they must have one layout and stage of ZeRO"
            )

    def recomputing(self, graph: DataflowGraph) -> "Plan":
        """Copy the plan with activation checkpointing in every call that trains."""
        placements = dict(self.placements)
        for call in graph.calls:
            if call.kind is Kind.TRAIN:
                place = self[call.name]
                placements[call.name] = replace(place, strategy=replace(place.strategy, recompute=True))
        return replace(self, placements=placements)

    def evaluation(self, eval_graph: DataflowGraph, graph: DataflowGraph, *, exact: bool = False) -> "Plan":
        """Derive the plan of an evaluation that uses roles of `graph`, the graph of this plan.

        An evaluation call has the placement of the call with the same name. If there is none, it has the placement
        of another call of its role: a call of the same kind or, failing that, a call that does not generate. A
        function that the training step does not have runs on all devices. `exact`: see `check_exact`.
        """
        placements = {}
        for call in eval_graph.calls:
            if call.role is not None:
                like = min(
                    graph.role_calls(call.role),
                    key=lambda c: (c.name != call.name, c.kind is not call.kind, c.kind is Kind.GENERATE),
                )
                place = self[like.name]
            elif call.name in {function.name for function in graph.functions}:
                place = self[call.name]
            else:
                place = function_placement(Mesh(0, self.cluster.size))
            strategy = place.strategy
            if call.kind is Kind.GENERATE:
                strategy = strategy.for_generation(exact=exact)
            else:
                strategy = replace(
                    strategy, recompute=False, zero_bubble=False, zero=3 if strategy.shards_parameters else 1
                )
            placements[call.name] = replace(place, strategy=strategy)
        offloads = (
            tuple(role for role in chosen if role in eval_graph.roles)
            for chosen in (self.offload, self.offload_optimizer, self.keep)
        )
        return Plan(self.cluster, placements, *offloads)

    def describe(self) -> str:
        """Write the plan in one line: the cluster, and the calls of each placement."""
        places: dict[str, list[str]] = {}
        for name, placement in self.placements.items():
            places.setdefault(str(placement), []).append(name)
        parts = (f"{', '.join(calls)} on {place}" for place, calls in places.items())
        return f"{self.cluster}: {'; '.join(parts)}"

    def to_text(self, graph: DataflowGraph) -> str:
        """Format the plan, which is for `graph`, as the text of its file."""
        functions = {call.name for call in graph.functions}
        calls = {
            name: _write_entry(placement, is_function=name in functions)
            for name, placement in self.placements.items()
        }
        document: dict[str, Any] = {"cluster": str(self.cluster), "calls": calls}
        for key in ("offload", "offload_optimizer", "keep"):
            if getattr(self, key):
                document[key] = list(getattr(self, key))
        return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)

    def save(self, path: str | Path, graph: DataflowGraph) -> None:
        write_whole(Path(path), self.to_text(graph))

    @classmethod
    def load(cls, path: str | Path, graph: DataflowGraph, micro_batch_tokens: int = 8192) -> "Plan":
        """Read a plan file for `graph`. Calls without `micro_batch_tokens` get the given number. Errors name file
        and call; `check` decides whether the plan fits the graph."""
        content = read_yaml(str(path))
        with mistakes_in(f"plan file {path}", _File):
            file = _File.model_validate(content)
            cluster = Cluster.parse(file.cluster)
        placements = {}
        functions = {call.name for call in graph.functions}
        for name, entry in file.calls.items():
            with mistakes_in(f"plan file {path}: {name}", _entry_model()):
                valid = _entry_model().model_validate(entry)
                if name in functions:
                    _check_function_entry(name, valid)
                    placements[name] = _placement(valid)
                else:
                    placements[name] = _placement(valid, micro_batch_tokens)
        return cls(cluster, placements, file.offload, file.offload_optimizer, file.keep)


def _check_function_entry(name: str, entry: _Entry) -> None:
    """Raise UserError if a function has more than a mesh and dp, because it has no parameters to divide and no
    tokens to batch."""
    allowed = ("mesh", *axes_dividing(Divided.ITEMS))
    for field in type(entry).model_fields:
        if field in entry.model_fields_set and field not in allowed:
            raise UserError(
                f"{field} is for calls of models; {name} is a function and has only {join(allowed)}; leave it out"
            )


def _write_entry(placement: Placement, *, is_function: bool) -> dict[str, Any]:
    strategy = placement.strategy
    if is_function:
        return {"mesh": str(placement.mesh), "dp": strategy.dp}
    return {
        "mesh": str(placement.mesh),
        **strategy.all_degrees.named(),
        "micro_batch_tokens": strategy.micro_batch_tokens,
        **({"sequence_parallel": True} if strategy.sequence_parallel else {}),
        **({"dtype": strategy.dtype} if strategy.dtype else {}),
        **({"recompute": True} if strategy.recompute else {}),
        **({"zero_bubble": True} if strategy.zero_bubble else {}),
        **({"zero": strategy.zero} if strategy.zero > 1 else {}),
    }


def _placement(entry: _Entry, micro_batch_tokens: int = 8192) -> Placement:
    strategy = Strategy(
        **{axis: getattr(entry, axis) for axis in axis_names()},
        micro_batch_tokens=entry.micro_batch_tokens or micro_batch_tokens,
        sequence_parallel=entry.sequence_parallel,
        dtype=entry.dtype,
        recompute=entry.recompute,
        zero_bubble=entry.zero_bubble,
        zero=entry.zero,
    )
    return Placement(Mesh.parse(entry.mesh), strategy)
