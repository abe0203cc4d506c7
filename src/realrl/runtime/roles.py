"""The models a rank holds: each role in its home layout, and copies in others while calls need them."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from realrl.checkpoint import huggingface
from realrl.config.model import HEADS, ModelConfig, TrainedModelConfig
from realrl.config.shape import ModelShape
from realrl.engine.model import Model
from realrl.engine.parallel import parallel
from realrl.engine.train import Trainer
from realrl.layout.layout import layout
from realrl.model.group import Group
from realrl.model.init import initialise
from realrl.plan.placement import Placement
from realrl.program.instructions import Reallocate, Release
from realrl.runtime.process import Process


def role_shape(config: ModelConfig) -> ModelShape:
    """The sizes of a role's model, from its recipe or from its directory."""
    if config.shape is not None:
        return config.shape
    assert config.path is not None, "a recipe names a path or a shape"
    return huggingface.read_shape(config.path)


class Roles:
    """Parameters by role and layout, on one rank."""

    def __init__(
        self,
        configs: Mapping[str, ModelConfig],
        homes: Mapping[str, Placement],
        process: Process,
        groups: Mapping[tuple[int, ...], Group],
        *,
        temperature: float,
        seed: int,
    ) -> None:
        """Load or initialise every role whose home includes this rank. UserError when a model cannot be
        loaded."""
        self._configs, self._homes, self._groups = configs, homes, groups
        self._process, self._temperature = process, temperature
        self.shapes = {role: role_shape(config) for role, config in configs.items()}
        self._models: dict[tuple[str, str], Model] = {}
        self.trainers: dict[str, Trainer] = {}
        self.fresh: dict[str, list[str]] = {}
        """role -> tensors that its checkpoint did not have and that were initialised instead"""
        for role, home in homes.items():
            if process.rank in home.ranks:
                self._build_home(role, home, seed)

    def _build_home(self, role: str, home: Placement, seed: int) -> None:
        config, model = self._configs[role], self._build(role, home)
        tensors = model.layout.specs
        regions = {local.region.tensor: local.region for local in model.layout.tensors(model.rank)}
        missing = [tensor.name for tensor in tensors]
        if config.path is not None:
            missing = huggingface.load(config.path, tensors, model.parameters, regions)
            self.fresh[role] = missing
        absent = [tensor for tensor in tensors if tensor.name in missing and tensor.name in regions]
        initialise(model.parameters, absent, model.shape, seed, regions)
        if isinstance(config, TrainedModelConfig):
            self.trainers[role] = Trainer(model, config.optimizer)

    def _build(self, role: str, placement: Placement) -> Model:
        rank = self._process.rank
        model = Model(
            layout(self.shapes[role], HEADS[role], placement),
            rank,
            parallel(placement, rank, self._groups),
            dtype=getattr(torch, self._configs[role].dtype),
            device=self._process.device,
            temperature=self._temperature,
        )
        self._models[role, placement.layout] = model
        return model

    def model(self, role: str, placement: Placement) -> Model:
        """The role's model in the layout of a placement that includes this rank."""
        return self._models[role, placement.layout]

    def home(self, role: str) -> Model | None:
        """The role's model where it lives, or None when that is not on this rank."""
        return self._models.get((role, self._homes[role].layout))

    def reallocate(self, instruction: Reallocate) -> None:
        """Bring the role's parameters from the source ranks to the target ranks.

        With data parallelism alone every rank of a layout holds all parameters: target rank i gets them from
        source rank i modulo their number, so that senders share the load.
        """
        role, source, target = instruction.role, instruction.source, instruction.target
        rank = self._process.rank
        pairs = [(source.ranks[i % len(source.ranks)], to) for i, to in enumerate(target.ranks)]
        sends = []
        if rank in source.ranks:
            data = self._flat(self.model(role, source))
            sends = [dist.isend(data, to) for at, to in pairs if at == rank and to != rank]
        if rank in target.ranks:
            incoming = self._flat(self._build(role, target))
            sender = next(at for at, to in pairs if to == rank)
            if sender == rank:
                incoming.copy_(self._flat(self.model(role, source)))
            else:
                dist.recv(incoming, sender)
        for send in sends:
            assert send is not None, "source ranks are part of the world"
            send.wait()

    def release(self, instruction: Release) -> None:
        """Forget a reallocated copy."""
        del self._models[instruction.role, instruction.placement.layout]

    @staticmethod
    def _flat(model: Model) -> torch.Tensor:
        """The parameters without the padding, which depends on the layout."""
        return model.parameters.data[: sum(t.numel for t in model.parameters.tensors)]
