"""The models of a rank: each role in its home, and copies in other layouts while calls need them.

The home of a role is the layout in which its parameters stay between steps.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from realrl.config.errors import UserError
from realrl.engine.buffers import FlatBuffer, LocalSet, Parameters
from realrl.engine.dtypes import find_products, find_set_dtype, find_torch_dtype
from realrl.engine.finite import NotFiniteError
from realrl.engine.generation.decode_memory import KeptDecoding
from realrl.engine.model import Model
from realrl.engine.offload import Offloadable
from realrl.engine.optional_kernels import check_heads
from realrl.engine.parallel_groups import select_groups
from realrl.engine.training.trainer import Trainer
from realrl.families.adapter_config import adapter_tensors
from realrl.families.registry import model_tensors
from realrl.families.tensors import Init, TensorSpec
from realrl.huggingface import model_files
from realrl.huggingface.directory import find_base, read_origin
from realrl.huggingface.initial_weights import initialise
from realrl.huggingface.shards import Portion, list_portions, take_whole
from realrl.layout.layout import Layout, build_layout
from realrl.layout.region import Region
from realrl.layout.routing.chunks import group_tensors
from realrl.layout.routing.routes import reallocate
from realrl.layout.sets import BASE, TUNED, build_parameter_sets
from realrl.model.group import Group
from realrl.plan.placement import DTYPES, Dtype, Mesh, Placement, Strategy
from realrl.program.instructions import Load, Offload, Reallocate, Release
from realrl.program.order import following_sets, trained_sets
from realrl.program.text import name_parameters
from realrl.recipe.model import trained_models
from realrl.runtime.prepare.job import Job
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.reallocation import Reallocator, Staging

MIX_BYTES = 64 << 20
"""Maximum bytes of parameters that are received at a time to be mixed into a moving average.

A single tensor may have more bytes.
"""


class Roles:
    """Holds the models of a rank, by role and layout."""

    def __init__(
        self, job: Job, process: Process, groups: Mapping[tuple[int, ...], Group], *, temperature: float
    ) -> None:
        """Check everything about the roles except weights, which `load_weights` loads.

        `job` must know the size of every model. `groups` are the process groups of its placements. Raises UserError
        if a model whose home includes this rank cannot be loaded, or if a moving average has other tensors than the
        role that it follows.
        """
        experiment, models = job.experiment, job.models
        self._experiment, self._process, self._groups = experiment, process, groups
        self._temperature = temperature
        self._configs, self._parts, self._homes = models.configs, models.parts, job.homes
        self._heads = experiment.spec.heads
        self._plan, self._cluster = job.plan, job.plan.cluster
        self.shapes = models.shapes
        check_heads({role: shape.head_dim for role, shape in self.shapes.items()}, process.device)
        averages = models.graph.averages
        for average in averages:
            if self._specs(average.role) != self._specs(average.source):
                raise UserError(
                    f"models.{average.role} cannot follow models.{average.source}: their sizes differ"
                )
        following = {average.role: following_sets(average, self._parts) for average in averages}
        self._trained = trained_models(self._configs)
        self._holders = job.memory.holders
        self.learning = (*self._trained, *following)
        """Roles whose parameters change: trained roles, and moving averages of trained roles."""
        self.before_change: Callable[[], None] = lambda: None
        """Function that is called before parameters or optimizer state of `learning` roles change or leave device
        memory."""
        changed = {role: trained_sets(role, self._parts) for role in self._trained} | following
        self._changing = {(role, name) for role, names in changed.items() for name in names}
        """Parameter sets that change in training steps."""
        self._models: dict[tuple[str, str], Model] = {}
        self._staging = Staging(process.device)
        self._kept_decoding: dict[str, KeptDecoding] = {}
        self._reallocators: dict[tuple[str, ...], Reallocator] = {}
        self.trainers: dict[str, Trainer] = {}
        self.origins = {
            role: None if config.path is None else read_origin(config.path)
            for role, config in self._trained.items()
        }
        """For each trained role: settings of the model that was loaded; None if it starts from scratch."""
        self.fresh = {
            role: self._check(role) for role, home in job.homes.items() if process.rank in home.ranks
        }
        """For each role: tensors that its files lack, and that are therefore initialised."""

    def _check(self, role: str) -> list[str]:
        """List the tensors that a model's files lack. Raises UserError if the files cannot be loaded."""
        config = self._configs[role]
        if config.path is None:
            if self.shapes[role].lora is not None:
                raise UserError(
                    f"models.{role}.lora needs models.{role}.path: adapters are saved without the weights that they"
                    " are for"
                )
            return []
        missing = model_files.check(config.path, self.shapes[role], self._specs(role))
        if missing and role not in self._trained:
            raise UserError(
                f"models.{role}.path={config.path} is not a sequence classifier: it has no tensor {missing[0]}"
            )
        return missing

    def load_weights(self, restored: Collection[str] = ()) -> None:
        """Load or initialise every role whose home includes this rank.

        Roles in `restored` only get memory, because a checkpoint has their weights. Raises UserError if weights
        cannot be used.
        """
        for role in sorted(self._homes, key=lambda role: self._holders.get(role, role) != role):
            home = self._homes[role]
            if self._process.rank in home.ranks:
                self._build_home(role, home, read=role not in restored)

    def offload_homes(self) -> None:
        """Offload the roles that the plan offloads. Call this after weights have been loaded."""
        for role, home in self._homes.items():
            if self._process.rank in home.ranks:
                for memory in self._list_offloaded(role):
                    memory.offload()

    def _list_offloaded(self, role: str) -> Iterator[Offloadable]:
        """Yield the memory of a role that the plan offloads. The role's home must include this rank."""
        if role in self._plan.offload:
            for held in self._models[role, self._homes[role].layout].sets.values():
                yield held.memory
        if role in self._plan.offload_optimizer:
            yield self.trainers[role].memory

    def _build_home(self, role: str, home: Placement, *, read: bool) -> None:
        holder = self._holders.get(role, role)
        base = self._models[holder, home.layout].sets[BASE] if holder != role else None
        model = self._build(role, home, base)
        if role in self._trained:
            config = self._trained[role]
            self.trainers[role] = Trainer(
                model,
                config.optimizer,
                router_loss=config.router_loss,
                max_skipped=self._experiment.training.max_skipped,
            )
        # Reserving pins host memory, which takes seconds. It continues while weights are read.
        for memory in self._list_offloaded(role):
            memory.reserve()
        if read or self._parts[role].adapters:  # checkpoints do not contain the frozen weights under adapters
            self._read_weights(role, model)
            if role in self._trained:
                self.trainers[role].adopt()

    def _read_weights(self, role: str, model: Model) -> None:
        config, tensors = self._configs[role], model.layout.specs
        regions = {local.region.tensor: local.region for local in model.layout.tensors(model.rank)}
        if self._holders.get(role, role) != role:
            for tensor in model.sets[BASE].layout.specs:  # another role has already read them
                regions.pop(tensor.name, None)
        missing = [tensor.name for tensor in tensors]
        if config.path is not None:
            missing = model_files.load(config.path, model.shape, tensors, model.parameters, regions)
        absent = [tensor for tensor in tensors if tensor.name in missing and tensor.name in regions]
        initialise(model.parameters, absent, model.shape, self._experiment.seed, regions)
        if any(tensor.init is Init.MAGNITUDE for tensor in tensors if tensor.name in missing):
            model.initialise_magnitudes()

    def home_model(self, role: str) -> Model | None:
        """Return the role's model in its home; None if the home does not include this rank."""
        home = self._homes[role]
        return self._models[role, home.layout] if self._process.rank in home.ranks else None

    def _build(self, role: str, placement: Placement, base: LocalSet | None = None) -> Model:
        """Create a model with memory for its parameters. If `base` is given, the model shares this parameter set
        with another model."""
        rank = self._process.rank
        model = Model(
            self._layout(role, placement),
            rank,
            select_groups(placement, rank, self._groups),
            dtype=self._dtype(role, placement),
            device=self._process.device,
            temperature=self._temperature,
            part=self._parts[role],
            base=base,
            products=find_products(
                self._named_dtype(role, placement), self._process.device, exact=self._experiment.exact
            ),
        )
        self._models[role, placement.layout] = model
        return model

    def _layout(self, role: str, placement: Placement, parameter_set: str | None = None) -> Layout:
        """Build the layout of a role, or of one of its parameter sets."""
        shape, head = self.shapes[role], self._heads[role]
        if parameter_set is None:
            return build_layout(shape, head, placement)
        sets = build_parameter_sets(shape, head, self._parts[role], trained=True)
        return build_layout(shape, head, placement, sets[parameter_set].tensors)

    def _dtype(self, role: str, placement: Placement, parameter_set: str = BASE) -> torch.dtype:
        return find_set_dtype(parameter_set, find_torch_dtype(self._named_dtype(role, placement)))

    def _named_dtype(self, role: str, placement: Placement) -> Dtype:
        return placement.strategy.dtype or DTYPES[self._configs[role].compute_dtype]

    def _specs(self, role: str) -> tuple[TensorSpec, ...]:
        return model_tensors(self.shapes[role], self._heads[role])

    def model(self, role: str, placement: Placement) -> Model:
        """Return the role's model in the layout of a placement, which must include this rank."""
        model = self._models[role, placement.layout]
        assert model.resident, f"{role} has no parameters in device memory"
        return model

    def reallocate(self, instruction: Reallocate) -> None:
        """Reallocate a parameter set to the target ranks, or mix it into another role's set."""
        role = instruction.role
        source = instruction.source
        target = instruction.target
        name = instruction.parameter_set
        into = instruction.into or role
        rank = self._process.rank
        key = (role, source.layout, into, target.layout, name)
        if key not in self._reallocators:
            self._reallocators[key] = self._reallocator(instruction)
        outgoing = self._set(role, source, name).buffer if rank in source.ranks else None
        if instruction.mix is not None:
            self.before_change()
            own = self._set(into, target, name).buffer if rank in target.ranks else None
            self._reallocators[key].mix(outgoing, own, instruction.mix)
        else:
            incoming = self._copy(role, target, name).buffer if rank in target.ranks else None
            self._reallocators[key].run(outgoing, incoming)

    def _set(self, role: str, placement: Placement, name: str) -> LocalSet:
        """Return a parameter set, which must be in device memory."""
        held = self._models[role, placement.layout].sets[name]
        assert held.resident, f"{name_parameters(role, name)} has no parameters in device memory"
        return held

    def _reallocator(self, instruction: Reallocate) -> Reallocator:
        role, into = instruction.role, instruction.into or instruction.role
        parameter_set = instruction.parameter_set
        source = self._layout(role, instruction.source, parameter_set)
        target = self._layout(into, instruction.target, parameter_set)
        before = self._dtype(role, instruction.source, parameter_set)
        after = self._dtype(into, instruction.target, parameter_set)
        groups = None
        if instruction.mix is not None:
            groups = group_tensors(target, after.itemsize, MIX_BYTES)
        name = name_parameters(role, parameter_set) + ("" if into == role else f" into {into}")
        return self._compile(name, source, target, (before, after), groups)

    def _compile(
        self,
        name: str,
        source: Layout,
        target: Layout,
        dtypes: tuple[torch.dtype, torch.dtype],
        groups: Sequence[Collection[str] | Mapping[str, Region]] | None,
    ) -> Reallocator:
        return Reallocator(
            reallocate(source, target, self._cluster),
            self._process,
            label=f"{name}: {source.placement.layout} -> {target.placement.layout}",
            dtypes=dtypes,
            groups=groups,
            staging=self._staging,
            verify=self._experiment.debug.verify_reallocation,
        )

    def _copy(self, role: str, placement: Placement, name: str) -> LocalSet:
        """Allocate a parameter set of a copy of a role, outside the role's home."""
        if (role, placement.layout) not in self._models:
            for held in self._build(role, placement).sets.values():
                held.free()
        held = self._models[role, placement.layout].sets[name]
        held.allocate()
        return held

    def release(self, instruction: Release) -> None:
        """Release the memory of a reallocated copy."""
        self._set(instruction.role, instruction.placement, instruction.parameter_set).free()

    def offload(self, instruction: Offload) -> None:
        """Offload a parameter set, or its optimizer state and gradients, to host memory."""
        self.before_change()
        changed = (instruction.role, instruction.parameter_set) in self._changing
        self._memory(instruction).offload(changed=changed)

    def prefetch(self, instruction: Load) -> None:
        """Begin to load offloaded state. `load` completes this."""
        self._memory(instruction).prefetch()

    def load(self, instruction: Load) -> None:
        """Load offloaded state back."""
        self._memory(instruction).load()

    def _memory(self, instruction: Offload | Load) -> Offloadable:
        if instruction.state == "optimizer":
            trainer = self.trainers[instruction.role]
            assert instruction.parameter_set == trainer.parameter_set, (
                f"{instruction.role} trains its set {trainer.parameter_set}, not {instruction.parameter_set}"
            )
            return trainer.memory
        model = self._models[instruction.role, instruction.placement.layout]
        return model.sets[instruction.parameter_set].memory

    def held(self) -> int:
        """Count the bytes of device memory that parameters, gradients and optimizers currently occupy."""
        # Use a set, because models may share memory.
        memories = {held.memory for model in self._models.values() for held in model.sets.values()}
        trained = [trainer.memory for trainer in self.trainers.values()]
        return sum(memory.nbytes for memory in (*memories, *trained))

    def staged(self) -> int:
        """Count the bytes of device memory in idle message buffers."""
        return self._staging.nbytes

    def keep_decoding(self, calls: Iterable[str]) -> None:
        """Let generate calls of training steps keep their memory until the next step."""
        self._kept_decoding |= {call: KeptDecoding() for call in calls}

    def kept_decoding(self, call: str) -> KeptDecoding | None:
        """Return the memory that a generate call keeps between training steps; None if it keeps none."""
        return self._kept_decoding.get(call)

    def kept_beside(self, call: str) -> int:
        """Count the bytes of device memory that generate calls other than `call` keep between steps."""
        return sum(kept.nbytes for name, kept in self._kept_decoding.items() if name != call)

    def save(
        self, role: str, directory: Path, tokenizer: model_files.Tokenizer, stop_token_ids: Collection[int]
    ) -> None:
        """Write the role, or its adapters, as a Hugging Face directory. All ranks of its home call this together.

        The first rank writes. Parameters arrive in its host memory portion by portion. `stop_token_ids` are all
        tokens that can end a sequence.
        """
        home = self._homes[role]
        dtype = self._dtype(role, home)
        first, model = home.ranks[0], self._models[role, home.layout]
        adapters = model.shape.lora is not None
        specs = self._specs(role)
        portions = [take_whole(adapter_tensors(specs))] if adapters else list_portions(specs, dtype)
        written = [TUNED] if adapters else [*model.sets]
        gathers = {name: self._gather(role, name, portions) for name in written}
        offloaded = [memory for name in written if not (memory := model.sets[name].memory).resident]
        for memory in offloaded:
            memory.load()

        def fetch(number: int) -> Parameters:
            buffers = {}
            for name, gather in gathers.items():
                parts = [part for part in portions[number] if part.spec.name in gather.groups[number]]
                if parts:
                    buffers[name] = FlatBuffer([part.stored for part in parts], dtype, torch.device("cpu"))
                    gather.run(model.sets[name].buffer, buffers[name], number)
            return Parameters(buffers)

        if self._process.rank == first:
            path = self._configs[role].path
            try:
                if adapters:
                    assert path is not None, "adapters are for weights of a directory"
                    base = str(find_base(path))
                    model_files.save_adapters(
                        directory, model.shape, model.head, fetch(0), tokenizer, dtype, base
                    )
                else:
                    model_files.save(
                        directory,
                        model.shape,
                        model.head,
                        fetch,
                        tokenizer,
                        dtype,
                        origin=self.origins[role],
                        stop_token_ids=stop_token_ids,
                    )
            except NotFiniteError as error:
                raise NotFiniteError(f"models.{role}: {error}") from None
        else:
            for number in range(len(portions)):
                for name, gather in gathers.items():
                    if gather.groups[number]:
                        gather.run(model.sets[name].buffer, None, number)
        for memory in offloaded:
            memory.offload(changed=False)

    def _gather(self, role: str, name: str, portions: Sequence[Portion]) -> Reallocator:
        """Build the reallocator that moves a parameter set to the first rank of its home, portion by portion."""
        home = self._homes[role]
        key = (role, home.layout, name)
        if key not in self._reallocators:
            source = self._layout(role, home, name)
            whole = self._layout(role, Placement(Mesh(home.ranks[0], 1), Strategy()), name)
            mine = {spec.name for spec in source.specs}
            groups = [
                {part.spec.name: part.region for part in portion if part.spec.name in mine}
                for portion in portions
            ]
            dtype, label = self._dtype(role, home), name_parameters(role, name)
            self._reallocators[key] = self._compile(label, source, whole, (dtype, dtype), groups)
        return self._reallocators[key]
