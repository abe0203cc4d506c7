"""Bytes that ranks of a group send each other, for what is not a tensor of a known size."""

import json

import torch
import torch.distributed as dist

from realrl.data.batch import KEY_DTYPES, Ragged
from realrl.model.group import Group, all_gather

Outputs = tuple[list[int], dict[str, Ragged]]
"""Outputs of some items, by key, and the positions of these items in a batch."""

_DTYPE_NAMES = {dtype: name for name, dtype in KEY_DTYPES.items()}


def broadcast_bytes(message: bytes, group: Group, source: int, device: torch.device) -> bytes:
    """Return the message of the rank with the index `source` in a group."""
    if group.size == 1:
        return message
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, group.ranks[source], group=group.handle)
    content = torch.empty(int(size), dtype=torch.uint8, device=device)
    if group.index == source:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    dist.broadcast(content, group.ranks[source], group=group.handle)
    return content.cpu().numpy().tobytes()


def gather_bytes(message: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Return the messages of all ranks of a group."""
    if group.size == 1:
        return [message]
    sizes = torch.empty(group.size, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([len(message)], device=device), group)
    counts = sizes.tolist()
    padded = torch.zeros(max(1, *counts), dtype=torch.uint8, device=device)
    if message:
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
    buffer = padded.new_empty(group.size * len(padded))
    all_gather(buffer, padded, group)
    parts = buffer.cpu().view(group.size, -1)
    return [part[:count].numpy().tobytes() for part, count in zip(parts, counts, strict=True)]


def gather_outputs(found: list[Outputs], group: Group, device: torch.device) -> list[Outputs]:
    """Return the outputs of all ranks of a group, in host memory."""
    if group.size == 1:
        return found
    return [of for message in gather_bytes(_encode(found), group, device) for of in _decode(message)]


def _encode(found: list[Outputs]) -> bytes:
    header = [
        [
            items,
            {
                key: [_DTYPE_NAMES[of.values.dtype], of.lengths, of.values.shape[1:]]
                for key, of in fields.items()
            },
        ]
        for items, fields in found
    ]
    text = json.dumps(header).encode()
    values = [of.values.contiguous().numpy().tobytes() for _, fields in found for of in fields.values()]
    return b"".join([len(text).to_bytes(8, "little"), text, *values])


def _decode(message: bytes) -> list[Outputs]:
    start = 8 + int.from_bytes(message[:8], "little")
    found = []
    for items, fields in json.loads(message[8:start]):
        decoded = {}
        for key, (dtype, lengths, width) in fields.items():
            shape = (sum(lengths), *width)
            values = torch.empty(shape, dtype=KEY_DTYPES[dtype])
            if values.numel():
                content = bytearray(message[start : start + values.nbytes])
                values = torch.frombuffer(content, dtype=values.dtype).view(shape)
            start += values.nbytes
            decoded[key] = Ragged(values, tuple(lengths))
        found.append((items, decoded))
    return found
