"""Describe what the profiler should measure. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from realrl.config.errors import UserError
from realrl.config.files import check_file
from realrl.config.paths import local_path
from realrl.families.shape import ModelShape, split_kinds
from realrl.families.sizes import find_shape
from realrl.huggingface.directory import find_model_shape
from realrl.plan.placement import DTYPES, Dtype
from realrl.planner.cluster.cluster_spec import ClusterSpec, NodeGroup
from realrl.planner.profile.profile import ShapeKey
from realrl.recipe.experiment import Experiment
from realrl.recipe.generation import GenerationConfig
from realrl.runtime.prepare.cluster import named_cluster
from realrl.runtime.profiler.sizes import Sizes


@dataclass(frozen=True)
class Request:
    """Models, devices and sizes to measure on this machine."""

    models: tuple[tuple[ModelShape, Dtype], ...]
    sizes: Sizes
    sampling: GenerationConfig
    group: NodeGroup | None
    """The devices for which times are measured, if the user names them."""
    device: Literal["auto", "cpu", "cuda"]
    out: Path
    again: bool = False
    """Whether to measure entries again that are already known."""

    def degrees(self, per_node: int, shape: ModelShape) -> tuple[int, ...]:
        """List the degrees of tensor parallelism on nodes of the group, or of `per_node` devices."""
        devices = per_node if self.group is None else self.group.devices_per_node
        return tuple(n for n in range(1, min(devices, shape.heads) + 1) if devices % n == 0)


def make_request(
    experiment: Experiment | None,
    *,
    shapes: Sequence[str],
    dtypes: Sequence[str],
    cluster: str | None,
    out: str,
    quick: bool,
    again: bool,
) -> Request:
    """Create a request from a recipe, names of shapes, or both. Raises UserError for a wrong argument.

    `shapes` are measured in addition to the recipe's models. `dtypes` replace the dtypes of the models.
    """
    if experiment is None and not shapes:
        raise UserError("there is nothing to measure: give a recipe, or --shape NAME, for example llama-2-7b")
    types = [_dtype(name) for name in dtypes]
    found = [] if experiment is None else _models(experiment)
    if types:
        found = [(shape, dtype) for shape, _ in found for dtype in types]
    found += [(_shape(name), dtype) for name in shapes for dtype in types or [DTYPES["bfloat16"]]]
    spec = ClusterSpec.parse(cluster) if cluster else named_cluster(experiment.cluster if experiment else "")
    group = None if spec is None else _group(spec)
    device: Literal["auto", "cpu", "cuda"] = "auto" if experiment is None else experiment.device
    if group is not None:
        device = "cpu" if group.device.cpu else "cuda"
    file = local_path(out)
    check_file(f"--out {out}", file)
    generation = None if experiment is None else experiment.spec.generation
    sampling = GenerationConfig() if generation is None else generation(experiment)
    # Each kind of layer is measured in a model of its own.
    found = [(kind.shape, dtype) for shape, dtype in found for kind in split_kinds(shape)]
    # Of shapes with the same key, keep the one with most layers. All else that affects times is part of the key.
    deepest = {(ShapeKey.of(shape), dtype): shape for shape, dtype in sorted(found, key=_layers)}
    return Request(
        models=tuple((shape, dtype) for (_, dtype), shape in deepest.items()),
        sizes=Sizes.usual(thin=quick) if experiment is None else Sizes.of(experiment, thin=quick),
        sampling=sampling,
        group=group,
        device=device,
        out=file,
        again=again,
    )


def _layers(model: tuple[ModelShape, Dtype]) -> int:
    return model[0].layers


def _models(experiment: Experiment) -> list[tuple[ModelShape, Dtype]]:
    found = []
    for role, config in experiment.model_configs.items():
        try:
            shape = find_model_shape(config)
        except UserError as error:
            raise UserError(
                f"models.{role}: {error}; or set models.{role}.path=null and models.{role}.shape to a size, for"
                " example llama-2-7b"
            ) from None
        # Measure without quantisation; the widening of quantised matrices is not measured.
        found.append((shape.model_copy(update={"quantised": None}), DTYPES[config.compute_dtype]))
    return found


def _group(spec: ClusterSpec) -> NodeGroup:
    """Return the devices of a cluster. Raises UserError if its nodes differ."""
    if len({group.device.name for group in spec.groups}) > 1:
        raise UserError(f"cluster {spec.name} has several kinds of devices; name one, for example h100:1x8")
    if not spec.cluster.even:
        raise UserError(
            f"cluster {spec.name} has nodes of different sizes; name one size, for example h100:1x8"
        )
    return spec.groups[0]


def _shape(name: str) -> ModelShape:
    try:
        return find_shape(name)
    except UserError as error:
        raise UserError(f"--shape: {error}") from None


def _dtype(name: str) -> Dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype: {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]
