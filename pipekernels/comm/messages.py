"""Messages between ranks: JSON, which the receiver checks against a type.

Not pickles: anyone with access to the store or a connection could make every rank run code.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

MOST = 16 << 20  # Largest message in bytes.


def encode(item: Any) -> bytes:
    """``item``, a value of a type that :func:`read` knows, as bytes for :func:`decode`."""
    return json.dumps(item, default=lambda value: list(vars(value).values())).encode()


def decode(data: bytes, sender: str, message_type: type[T]) -> T:
    """Decode a message of the type ``message_type``, see :func:`read`.

    Args:
        data: the message.
        sender: its sender, for errors.
        message_type: what :func:`encode` was given.

    Raises:
        RuntimeError: ``data`` is not JSON, or of another type.
    """
    try:
        message: T = read(json.loads(data), message_type)
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"{sender} sent {data[:80]!r}, which cannot be read ({error}); all ranks must run the "
            "same version of pipekernels, and nobody else may write to their store"
        ) from None
    return message


def read(record: Any, message_type: Any) -> Any:
    """A JSON value as the type ``message_type``; ValueError if it is of another type.

    That is ``str``, ``int``, ``bool``, ``None``, ``list[...]``, ``tuple[..., ...]``, a union, or a
    dataclass or NamedTuple of these, in JSON a list of fields.
    """
    of = get_args(message_type)
    if get_origin(message_type) in (Union, UnionType):
        for member in of:
            with contextlib.suppress(ValueError):
                return read(record, member)
    elif type(record) is not list:
        if type(record) is message_type:  # type(), as a bool is also an int.
            return record
    elif of:  # A list or tuple of items.
        return get_origin(message_type)(read(item, of[0]) for item in record)
    elif (fields := get_type_hints(message_type)) and len(fields) == len(record):
        return message_type(*map(read, record, fields.values()))
    raise ValueError(f"expected {message_type}")


def all_gather(
    item: Any, message_type: type[T], gather: Callable[[Tensor], Tensor], device: torch.device
) -> list[T]:
    """One item per rank, in rank order.

    Args:
        item: the item of this rank, of the type ``message_type``.
        message_type: as for :func:`decode`.
        gather: concatenates each rank's ``[1, n]`` to ``[ranks, n]``, for tensors on ``device``.
        device: see above.
    """
    # First the sizes, as a collective takes equal shapes; then the messages, padded.
    data = torch.frombuffer(bytearray(encode(item)), dtype=torch.uint8).to(device)
    sizes = gather(torch.tensor([[data.numel()]], device=device)).flatten().tolist()
    for rank, size in enumerate(sizes):
        if not 0 < size <= MOST:
            raise RuntimeError(
                f"rank {rank} announced a message of {size} bytes, of at most {MOST}; all ranks "
                "must run the same version of pipekernels"
            )
    rows = gather(torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))[None])
    return [
        decode(bytes(row[:size].tolist()), f"rank {rank}", message_type)
        for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
    ]


def all_gather_in_group(
    item: Any, message_type: type[T], group: dist.ProcessGroup | None
) -> list[T]:
    """:func:`all_gather` over the ranks of a group."""
    world_size = dist.get_world_size(group)
    device_types = backends_of(group)
    device = torch.device("cpu" if "cpu" in device_types else next(iter(device_types)))

    def gather(tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((world_size, *tensor.shape[1:]))
        dist.all_gather(list(rows.split(1)), tensor, group)
        return rows

    return all_gather(item, message_type, gather, device)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backends of ``group`` by device type."""
    return dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))
