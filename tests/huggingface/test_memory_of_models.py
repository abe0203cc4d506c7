"""Reading and saving of models in parts: every element once, and little memory besides the parameters."""

import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.huggingface import (
    headers,
    model_files,
    shards,
)
from realrl.huggingface.tensor_conversion import Weights, read_parts
from realrl.layout.layout import build_layout
from realrl.plan.placement import Mesh, Placement, Strategy
from tests.model.small_models import SHAPES

FAMILIES = ("plain", "grouped-tied", "gpt2", "gpt_neox", "phi3", "smollm3")
"""Separate tensors, tied embeddings, transposed ones, heads one by one in a larger tensor, halves of one."""
CUTS = ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
"""tp, pp; three ranks cut all of these models unevenly."""


def fill(shape: ModelShape) -> FlatBuffer:
    """All weights of a model, each of which has a value of its own."""
    buffer = FlatBuffer(model_tensors(shape, "lm"), torch.float32, "cpu")
    buffer.data.copy_(torch.arange(1, len(buffer.data) + 1))
    return buffer


class CountedReader:
    """Safetensors file of which it is counted how often each element is asked for."""

    def __init__(
        self, file: Path, reader: Any, counts: dict[str, torch.Tensor], opened: Counter[str]
    ) -> None:
        self._file, self._reader, self._counts, self._opened = file, reader, counts, opened
        self._asked = False

    def __enter__(self) -> "CountedReader":
        self._reader.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened[self._file.name] += self._asked
        self._reader.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._reader.keys())

    def get_slice(self, name: str) -> "CountedReader.Slice":
        return CountedReader.Slice(self, name, self._reader.get_slice(name))

    class Slice:
        """One of its tensors."""

        def __init__(self, owner: "CountedReader", name: str, values: Any) -> None:
            self._owner, self._name, self._values = owner, name, values
            self.get_shape, self.get_dtype = values.get_shape, values.get_dtype

        def __getitem__(self, index: Any) -> torch.Tensor:
            counts = self._owner._counts
            counts.setdefault(self._name, torch.zeros(self.get_shape(), dtype=torch.int))[index] += 1
            self._owner._asked = True
            values: torch.Tensor = self._values[index]
            return values


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_asks_for_each_element_of_its_regions_once_and_for_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, whole = SHAPES[name], fill(SHAPES[name])
    model_files.save(tmp_path, shape, "lm", whole, None, torch.float32, 6000)
    files = [file.name for file in tmp_path.glob("*.safetensors")]
    assert len(files) > 3
    open_file = headers.open_file
    monkeypatch.setattr("realrl.huggingface.tensor_conversion.PART_ELEMENTS", 200)
    for tp, pp in CUTS:
        layout = build_layout(shape, "lm", Placement(Mesh(0, tp * pp), Strategy(tp=tp, pp=pp)))
        for rank in range(tp * pp):
            counts: dict[str, torch.Tensor] = {}
            opened: Counter[str] = Counter()
            monkeypatch.setattr(
                headers,
                "open_file",
                lambda file, c=counts, o=opened: CountedReader(file, open_file(file), c, o),
            )
            tensors = layout.tensors(rank)
            regions = {local.spec.name: local.region for local in tensors}
            own = FlatBuffer([local.stored for local in tensors], torch.float32, "cpu")
            model_files.load(tmp_path, shape, layout.specs, own, regions)
            for local in tensors:
                held = own[local.spec.name][: local.region.size[0]]
                assert torch.equal(held, whole[local.spec.name][local.region.slices])
            asked = sum(int(count.sum()) for count in counts.values())
            assert asked == sum(region.numel for region in regions.values())
            assert all(int(count.max()) <= 1 for count in counts.values())
            assert set(opened.values()) <= {0, 1}


class Allocations(TorchDispatchMode):
    """Bytes of the largest tensor with memory of its own that operations have made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", FAMILIES)
def test_reading_takes_no_memory_beside_the_target_but_for_one_head(name: str) -> None:
    shape = SHAPES[name]
    for spec in model_tensors(shape, "lm"):
        stored, own = torch.ones(spec.file_shape), torch.zeros(spec.shape)
        with Allocations() as made:
            for index, values in read_parts(stored, spec):
                own[index].copy_(values)
        reordered = spec.stored is not None and spec.stored.order is not None
        rows = shape.head_dim if reordered else 0
        assert made.largest <= rows * max(8, own[0].nbytes), spec.name  # numbers of rows have 8 bytes each
        assert bool(own.all())


class Memory(bytearray):
    """Memory of which it is known when it is given back."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_saved_portion_by_portion_as_it_would_be_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, whole = SHAPES[name], fill(SHAPES[name])
    specs = model_tensors(shape, "lm")
    model_files.save(tmp_path / "at-once", shape, "lm", whole, None, torch.float32)
    monkeypatch.setattr(shards, "PORTION_BYTES", 1000)
    listed = shards.list_portions(specs, torch.float32)
    least = max(count_least(group) * 4 for group in group_joined(specs))
    alive: set[int] = set()
    sizes = []

    def fetch(number: int) -> Weights:
        assert not alive, "the portion before is still in memory"
        made = {}
        for part in listed[number]:
            values = whole[part.spec.name][part.region.slices]
            memory = Memory(values.nbytes)
            weakref.finalize(memory, alive.discard, id(memory))
            alive.add(id(memory))
            made[part.spec.name] = torch.frombuffer(memory, dtype=torch.float32).view(values.shape)
            made[part.spec.name].copy_(values)
        sizes.append(sum(values.nbytes for values in made.values()))
        return made

    model_files.save(tmp_path / "m", shape, "lm", fetch, None, torch.float32, 6000)
    assert sum(sizes) == whole.data.nbytes and len(sizes) > 10
    assert max(sizes) <= max(1000, least)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 3
    parts = [load_file(file) for file in files]
    assert all(sum(values.nbytes for values in part.values()) <= 6000 or len(part) == 1 for part in parts)
    saved = {key: values for part in parts for key, values in part.items()}
    expected = load_file(tmp_path / "at-once" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(values, saved[key]) for key, values in expected.items())
    reopened, other = (AutoModelForCausalLM.from_pretrained(tmp_path / d) for d in ("m", "at-once"))
    for parameter, again in zip(reopened.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, again)


def count_least(group: list[Any]) -> int:
    """Elements that become rows of a tensor of a file only together: a block of each that takes turns."""
    if any(spec.stored.transposed for spec in group):
        return sum(spec.numel for spec in group)
    return sum(
        spec.numel // spec.shape[0] * spec.stored.block for spec in group if spec.stored.block < spec.shape[0]
    )


def group_joined(specs: Any) -> Iterator[list[Any]]:
    """Tensors that are parts of one tensor of a file, or another arrangement of it."""
    groups: dict[str, list[Any]] = {}
    for spec in specs:
        if spec.stored is not None:
            groups.setdefault(spec.file_name, []).append(spec)
    yield []
    yield from groups.values()
