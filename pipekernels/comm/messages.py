"""Messages between ranks: JSON, whose structure the receiver checks.

Not pickles: anyone with access to the store or a connection could make every rank run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

MOST = 16 << 20  # Largest message in bytes.


def encode(item: Any) -> bytes:
    """``item``, a JSON value, as bytes for :func:`decode`."""
    return json.dumps(item).encode()


def decode(data: bytes, sender: str, parse: Callable[[Any], T]) -> T:
    """Decode a message and convert it by ``parse``.

    Args:
        data: the message.
        sender: its sender, for errors.
        parse: converts the JSON value; raises ValueError if its structure is wrong.

    Raises:
        RuntimeError: ``data`` is not JSON, or ``parse`` raises a ValueError.
    """
    try:
        return parse(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise RuntimeError(
            f"{sender} sent {data[:80]!r}, which cannot be read ({error}); all ranks must run the "
            "same version of pipekernels, and nobody else may write to their store"
        ) from None


def fields(record: Any, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return ``record`` if it is a list of values of exactly these types; else ValueError."""
    wanted = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    if (
        type(record) is not list
        or len(record) != len(wanted)
        or any(type(value) not in kind for value, kind in zip(record, wanted, strict=True))
    ):
        names = [" or ".join(each.__name__ for each in kind) for kind in wanted]
        raise ValueError(f"expected a list of {', '.join(names)}")
    return record


def text(record: Any) -> str:
    """``record`` if it is a string; ValueError if not."""
    if type(record) is not str:
        raise ValueError("expected a string")
    return record


def texts(record: Any) -> list[str]:
    """``record`` if it is a list of strings; ValueError if not."""
    if type(record) is not list or any(type(item) is not str for item in record):
        raise ValueError("expected a list of strings")
    return record


def all_gather(
    item: Any, parse: Callable[[Any], T], gather: Callable[[Tensor], Tensor], device: torch.device
) -> list[T]:
    """The items of all ranks, converted by ``parse``, in rank order.

    Args:
        item: this rank's JSON value.
        parse: as for :func:`decode`.
        gather: gathers each rank's ``[n]`` into ``[ranks, n]``, for tensors on ``device``.
        device: see above.
    """
    data = _tensor(item, device)
    sizes = gather(torch.tensor([data.numel()], device=device)).flatten().tolist()
    for rank, size in enumerate(sizes):
        _check_size(size, rank)
    rows = gather(torch.nn.functional.pad(data, (0, max(sizes) - data.numel())))
    return [
        decode(bytes(row[:size].tolist()), f"rank {rank}", parse)
        for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
    ]


def all_gather_in_group(
    item: Any, parse: Callable[[Any], T], group: dist.ProcessGroup | None
) -> list[T]:
    """:func:`all_gather` over the ranks of a group."""
    world_size = dist.get_world_size(group)

    def gather(tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((world_size, *tensor.shape))
        dist.all_gather(list(rows.unbind()), tensor, group)
        return rows

    return all_gather(item, parse, gather, _device_of(group))


def send(item: Any, rank: int, group: dist.ProcessGroup) -> None:
    """Send to ``rank`` of the default group, which must call :func:`receive`."""
    data = _tensor(item, _device_of(group))
    dist.send(torch.tensor([data.numel()], device=data.device), rank, group)
    dist.send(data, rank, group)


def receive(parse: Callable[[Any], T], rank: int, group: dist.ProcessGroup) -> T:
    """Receive an item that ``rank`` sends by :func:`send`, converted by ``parse``."""
    size = torch.empty(1, dtype=torch.int64, device=_device_of(group))
    dist.recv(size, rank, group)
    _check_size(int(size), rank)
    data = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    dist.recv(data, rank, group)
    return decode(bytes(data.tolist()), f"rank {rank}", parse)


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backends of ``group`` by device type."""
    return dict(item.split(":", 1) for item in dist.get_backend_config(group).split(","))


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors ``group`` supports; the CPU if possible."""
    backends = backends_of(group)
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))


def _tensor(item: Any, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(encode(item)), dtype=torch.uint8).to(device)


def _check_size(size: int, rank: int) -> None:
    if not 0 < size <= MOST:
        raise RuntimeError(
            f"rank {rank} announced a message of {size} bytes, of at most {MOST}; all ranks must "
            "run the same version of pipekernels"
        )
