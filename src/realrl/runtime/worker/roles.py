"""Models of a rank: each role in its home layout, and copies in others while calls need them."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from realrl.checkpoint import huggingface
from realrl.checkpoint.origin import read_origin
from realrl.config.errors import UserError
from realrl.dataflow.call import Average
from realrl.engine.finite import NotFiniteError
from realrl.engine.flat import FlatBuffer
from realrl.engine.model import Model
from realrl.engine.offload import Offloadable
from realrl.engine.parallel import parallel
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import Head, ModelShape
from realrl.families.tensors import TensorSpec, model_tensors
from realrl.layout.layout import Layout, build_layout
from realrl.layout.routing.chunks import group_tensors
from realrl.layout.routing.routes import reallocate
from realrl.model.group import Group
from realrl.model.init import initialise
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import Load, Offload, Reallocate, Release
from realrl.recipe.model import ModelConfig, TrainedModelConfig
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.reallocation import Reallocator, Staging

MIX_BYTES = 64 << 20
"""Maximum bytes of parameters received before they are mixed, unless a single tensor has more."""


def role_shape(config: ModelConfig) -> ModelShape:
    """Find the shape of a role's model, from its recipe or from its directory."""
    if config.shape is not None:
        return config.shape
    assert config.path is not None, "a recipe names a path or a shape"
    return huggingface.read_shape(config.path)


class Roles:
    """Parameters by role and layout, on one rank."""

    def __init__(
        self,
        configs: Mapping[str, ModelConfig],
        heads: Mapping[str, Head],
        homes: Mapping[str, Placement],
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        plan: Plan,
        averages: Sequence[Average] = (),
        *,
        temperature: float,
        seed: int,
        max_skipped: int | None = None,
        verify: bool = False,
    ) -> None:
        """Check everything about the roles but their weights; `load_weights` brings those.

        `max_skipped` is for trainers, `verify` for reallocations. UserError when a model whose home includes this
        rank cannot be loaded, or when a role that follows another has other tensors.
        """
        self._configs, self._heads, self._homes, self._groups = configs, heads, homes, groups
        self._process, self._temperature, self._verify = process, temperature, verify
        self._plan, self._cluster, self._seed = plan, plan.cluster, seed
        self._max_skipped = max_skipped
        self.shapes = {role: role_shape(config) for role, config in configs.items()}
        for average in averages:
            if self._specs(average.role) != self._specs(average.source):
                raise UserError(
                    f"models.{average.role} cannot follow models.{average.source}: their sizes differ"
                )
        self._following = {average.role for average in averages}
        self._models: dict[tuple[str, str], Model] = {}
        self._staging = Staging(process.device)
        self._reallocators: dict[tuple[str, ...], Reallocator] = {}
        self.trainers: dict[str, Trainer] = {}
        self.origins = {
            role: None if config.path is None else read_origin(config.path)
            for role, config in configs.items()
            if isinstance(config, TrainedModelConfig)
        }
        """trained role -> the settings of the model that it was opened from; None where it starts from scratch"""
        self.fresh = {role: self._check(role) for role, home in homes.items() if process.rank in home.ranks}
        """role -> tensors that its checkpoint does not have and that are initialised instead"""

    def _check(self, role: str) -> list[str]:
        """List the tensors that a model's files lack, if it has files; UserError if they cannot be loaded."""
        config = self._configs[role]
        if config.path is None:
            return []
        missing = huggingface.check(config.path, self._specs(role))
        if missing and not isinstance(config, TrainedModelConfig):
            raise UserError(
                f"models.{role}.path={config.path} is no sequence classifier: it has no tensor {missing[0]}"
            )
        return missing

    def load_weights(self) -> None:
        """Load or initialise every role whose home includes this rank, and offload what the plan says.

        UserError when weights cannot be used.
        """
        for role, home in self._homes.items():
            if self._process.rank in home.ranks:
                self._build_home(role, home, self._seed)
                if role in self._plan.offload:
                    self._models[role, home.layout].memory.offload()
                if role in self._plan.offload_optimizer:
                    self.trainers[role].memory.offload()

    def _build_home(self, role: str, home: Placement, seed: int) -> None:
        config, model = self._configs[role], self._build(role, home)
        tensors = model.layout.specs
        regions = {local.region.tensor: local.region for local in model.layout.tensors(model.rank)}
        missing = [tensor.name for tensor in tensors]
        if config.path is not None:
            missing = huggingface.load(config.path, tensors, model.parameters, regions)
        absent = [tensor for tensor in tensors if tensor.name in missing and tensor.name in regions]
        initialise(model.parameters, absent, model.shape, seed, regions)
        if isinstance(config, TrainedModelConfig):
            self.trainers[role] = Trainer(model, config.optimizer, max_skipped=self._max_skipped)

    def _build(self, role: str, placement: Placement) -> Model:
        rank = self._process.rank
        model = Model(
            self._layout(role, placement),
            rank,
            parallel(placement, rank, self._groups),
            dtype=self._dtype(role, placement),
            device=self._process.device,
            temperature=self._temperature,
        )
        self._models[role, placement.layout] = model
        return model

    def _layout(self, role: str, placement: Placement) -> Layout:
        return build_layout(self.shapes[role], self._heads[role], placement)

    def _dtype(self, role: str, placement: Placement) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, placement.strategy.dtype or self._configs[role].dtype)
        return dtype

    def _specs(self, role: str) -> tuple[TensorSpec, ...]:
        return model_tensors(self.shapes[role], self._heads[role])

    def model(self, role: str, placement: Placement) -> Model:
        """Find the role's model in the layout of a placement that includes this rank."""
        model = self._models[role, placement.layout]
        assert model.resident, f"{role} has no parameters in device memory"
        return model

    def reallocate(self, instruction: Reallocate) -> None:
        """Reallocate the role's parameters to the target ranks, or mix them into another role's."""
        role, source, target = instruction.role, instruction.source, instruction.target
        into, rank = instruction.into or role, self._process.rank
        key = (role, source.layout, into, target.layout)
        if key not in self._reallocators:
            self._reallocators[key] = self._reallocator(instruction)
        outgoing = self.model(role, source).parameters if rank in source.ranks else None
        if instruction.mix is not None:
            own = self.model(into, target).parameters if rank in target.ranks else None
            self._reallocators[key].mix(outgoing, own, instruction.mix)
        else:
            incoming = self._copy(role, target).parameters if rank in target.ranks else None
            self._reallocators[key].run(outgoing, incoming)

    def _reallocator(self, instruction: Reallocate) -> Reallocator:
        role, into = instruction.role, instruction.into or instruction.role
        source, target = self._layout(role, instruction.source), self._layout(into, instruction.target)
        dtypes = self._dtype(role, instruction.source), self._dtype(into, instruction.target)
        groups = None
        if instruction.mix is not None:
            groups = group_tensors(target, dtypes[1].itemsize, MIX_BYTES)
        name = role if into == role else f"{role} into {into}"
        return self._compile(name, source, target, dtypes, groups)

    def _compile(
        self,
        name: str,
        source: Layout,
        target: Layout,
        dtypes: tuple[torch.dtype, torch.dtype],
        groups: Sequence[Sequence[str]] | None,
    ) -> Reallocator:
        return Reallocator(
            reallocate(source, target, self._cluster),
            self._process,
            label=f"{name}: {source.placement.layout} -> {target.placement.layout}",
            dtypes=dtypes,
            groups=groups,
            staging=self._staging,
            verify=self._verify,
        )

    def _copy(self, role: str, placement: Placement) -> Model:
        """Make a model outside its home, with memory for its parameters."""
        model = self._models.get((role, placement.layout))
        if model is None:
            return self._build(role, placement)
        model.allocate()
        return model

    def release(self, instruction: Release) -> None:
        """Release the memory of a reallocated copy."""
        self.model(instruction.role, instruction.placement).free()

    def offload(self, instruction: Offload) -> None:
        """Offload one kind of state of a role here to host memory."""
        frozen = instruction.role not in self.trainers and instruction.role not in self._following
        self._memory(instruction).offload(changed=not frozen)

    def load(self, instruction: Load) -> None:
        """Load offloaded state back."""
        self._memory(instruction).load()

    def _memory(self, instruction: Offload | Load) -> Offloadable:
        if instruction.what == "optimizer":
            return self.trainers[instruction.role].memory
        return self._models[instruction.role, instruction.placement.layout].memory

    def held(self) -> int:
        """Count the bytes of device memory that parameters, gradients and optimizers take on this rank now."""
        memories = [model.memory for model in self._models.values()]
        memories += [trainer.memory for trainer in self.trainers.values()]
        return sum(memory.nbytes for memory in memories)

    def staged(self) -> int:
        """Count the bytes of device memory that message buffers take while nothing is moved."""
        return self._staging.nbytes

    def save(
        self, role: str, directory: Path, tokenizer: huggingface.Tokenizer, ends: Collection[int]
    ) -> None:
        """Write the role as a Hugging Face directory; all ranks of its home call this, the first one writes.

        `ends` are all tokens that sequences of the run can end with. The parameters of one file at a time are
        brought into its host memory.
        """
        home = self._homes[role]
        dtype = self._dtype(role, home)
        first, model = home.ranks[0], self._models[role, home.layout]
        whole = self._layout(role, Placement(Mesh(first, 1), Strategy(1)))
        files = huggingface.shards(whole.specs, dtype)
        key = (role, home.layout)
        if key not in self._reallocators:
            names = [[spec.name for spec in file] for file in files]
            self._reallocators[key] = self._compile(role, model.layout, whole, (dtype, dtype), names)
        gather, resident = self._reallocators[key], model.memory.resident
        if not resident:
            model.memory.load()

        def fetch(file: int) -> FlatBuffer:
            buffer = FlatBuffer(files[file], dtype, torch.device("cpu"))
            gather.run(model.parameters, buffer, file)
            return buffer

        if self._process.rank == first:
            try:
                huggingface.save(
                    directory,
                    model.shape,
                    model.head,
                    fetch,
                    tokenizer,
                    dtype,
                    origin=self.origins[role],
                    ends=ends,
                )
            except NotFiniteError as error:
                raise NotFiniteError(f"models.{role}: {error}") from None
        else:
            for file in range(len(files)):
                gather.run(model.parameters, None, file)
        if not resident:
            model.memory.offload(changed=False)
