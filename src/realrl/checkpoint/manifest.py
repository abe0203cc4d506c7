"""Manifest of a checkpoint: where each box of each tensor is stored, and all state other than tensors.

Does not import torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from realrl.config.files import reason_of, write_whole

MANIFEST = "manifest.json"
"""Name of the manifest file. It is written last, so a directory that contains it is a complete checkpoint."""
FORMAT = 2
"""Version of the format. Checkpoints of any other version are refused."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2}
"""Bytes per element of each dtype that a checkpoint may contain."""
LARGEST_MANIFEST = 2**31
"""Maximum bytes of a manifest. Larger files are refused."""


class CheckpointError(Exception):
    """A checkpoint is damaged, incomplete, or from another model. The message gives the reason."""


@dataclass(frozen=True)
class Chunk:
    """One box (rectangular part) of a tensor, stored in row-major order.

    `start`: position of the box's first byte in the file. `checksum`: 64-bit XXH3 hash of the box's bytes, in
    hexadecimal.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    checksum: str


@dataclass(frozen=True)
class StoredState:
    """A tensor in a checkpoint: its dtype (torch's name), its shape, and its boxes (`chunks`)."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    `tensors`: all tensors, by their names: ROLE/KIND/NAME, or those of `checkpoint.rows`.
    `files`: size of each file in bytes, by file name.
    `state`: all other state from which a run resumes.
    """

    tensors: Mapping[str, StoredState]
    files: Mapping[str, int]
    state: Mapping[str, Any]

    def save(self, directory: Path) -> None:
        """Write the manifest into the directory of a checkpoint. Raises OSError."""
        contents = _to_text(self._to_json())
        checked = {"format": FORMAT, "checksum": xxh3_64_hexdigest(contents.encode())}
        write_whole(directory / MANIFEST, f'{_to_text(checked)[:-1]},"contents":{contents}}}\n')

    def _to_json(self) -> dict[str, Any]:
        # `asdict` would copy every number, which takes longer than the other steps of writing the manifest.
        tensors = {
            name: {**vars(of), "chunks": [vars(c) for c in of.chunks]} for name, of in self.tensors.items()
        }
        return {"tensors": tensors, "files": dict(self.files), "state": dict(self.state)}

    def find_incomplete(self) -> str | None:
        """Return the name of a tensor whose boxes do not have as many elements as the tensor, or None."""
        for name, tensor in self.tensors.items():
            if sum(prod(chunk.size) for chunk in tensor.chunks) != prod(tensor.shape):
                return name
        return None


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint and check that its files exist and have their full length.

    Raises CheckpointError for a missing or damaged file.
    """
    file = directory / MANIFEST
    try:
        if file.stat().st_size > LARGEST_MANIFEST:
            raise CheckpointError(f"{file} is too large to be a manifest")
        read = json.loads(file.read_text(encoding="utf-8"))
        if read["format"] != FORMAT:
            raise CheckpointError(f"{file} has format {read['format']!r}; this version reads {FORMAT}")
        contents = read["contents"]
        if xxh3_64_hexdigest(_to_text(contents).encode()) != read["checksum"]:
            raise CheckpointError(f"{file} is damaged: its checksum does not match")
        manifest = Manifest(
            tensors={name: _read_tensor(tensor) for name, tensor in contents["tensors"].items()},
            files=contents["files"],
            state=contents["state"],
        )
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {reason_of(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file} is damaged: it is not a manifest") from None
    for name, size in manifest.files.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{directory / name} cannot be read: {reason_of(error)}") from None
        if found != size:
            raise CheckpointError(f"{directory / name} is damaged: it has {found} bytes instead of {size}")
    _check_chunks(file, manifest)
    return manifest


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory is a complete checkpoint."""
    return (directory / MANIFEST).is_file()


def _check_chunks(file: Path, manifest: Manifest) -> None:
    """Check that all boxes lie inside their tensors and the checkpoint's files. Raises CheckpointError if not.

    Without this check, a damaged manifest could make a reader allocate memory for data that no file has, or read
    files outside the checkpoint.
    """
    if any(not isinstance(size, int) or Path(name).name != name for name, size in manifest.files.items()):
        raise CheckpointError(f"{file} is damaged: it names files outside the checkpoint")
    for name, tensor in manifest.tensors.items():
        width = DTYPE_BYTES.get(tensor.dtype)
        if width is None or not _are_sizes(tensor.shape):
            raise CheckpointError(f"{file} is damaged: {name} has an unknown type or no shape")
        for chunk in tensor.chunks:
            inside = (
                _are_sizes((*chunk.offset, *chunk.size, chunk.start))
                and len(chunk.offset) == len(chunk.size) == len(tensor.shape)
                and all(
                    offset + size <= whole
                    for offset, size, whole in zip(chunk.offset, chunk.size, tensor.shape, strict=True)
                )
            )
            if not inside or chunk.start + prod(chunk.size) * width > manifest.files.get(chunk.file, -1):
                raise CheckpointError(f"{file} is damaged: it names parts of {name} that do not exist")


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)


def _to_text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _read_tensor(read: Mapping[str, Any]) -> StoredState:
    chunks = tuple(
        Chunk(
            offset=tuple(chunk["offset"]),
            size=tuple(chunk["size"]),
            file=chunk["file"],
            start=chunk["start"],
            checksum=chunk["checksum"],
        )
        for chunk in read["chunks"]
    )
    return StoredState(read["dtype"], tuple(read["shape"]), chunks)
