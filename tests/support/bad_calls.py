"""Calls of ``pipekernels._C`` that must raise.

``python -m support.bad_calls GROUP ...`` makes the calls of groups, in a process of its own: a call
that is wrongly accepted may crash. The name of each case is printed first, so the last line names
the crash.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipekernels import _backend

# Name, call, class of the exception, part of its message.
Case = tuple[str, Callable[[], Any], type[Exception], str]

FLOAT32, INT64, UINT8, FLOAT8 = 1, 5, 8, 16
HUGE = 1 << 57  # More than any process can address.


def threads(native: Any, world_size: int) -> list[Any]:
    """A communicator for each rank."""
    fd = native.Segment.create(world_size)
    segment = native.Segment(fd, world_size)
    os.close(fd)
    return [native.Communicator(segment, rank, [], 20.0) for rank in range(world_size)]


def tensors(native: Any) -> list[Case]:
    increment = torch._C._increment_version
    x = torch.zeros(3)
    classes = "the class of tensors, a subclass of it, and a function"
    fit = native.are_plain_and_fit
    return [
        ("no subclass", lambda: native.use_tensors(Tensor, int, increment), TypeError, classes),
        ("no function", lambda: native.use_tensors(Tensor, Tensor, 5), TypeError, classes),
        ("memory of None", lambda: native.check_memory(None), TypeError, "a tensor, got NoneType"),
        ("change of None", lambda: native.mark_changed(None), TypeError, "a tensor, got NoneType"),
        ("fit: dim -1", lambda: fit(-1, 1, [x]), ValueError, "dim must be in 0..9"),
        ("fit: 0 tensors", lambda: fit(0, 0, [x]), ValueError, "tensors must be in 1..1, got 0"),
    ]


def micro_batches(native: Any) -> list[Case]:
    def copy(split: Any, wholes: Any, parts: Any, dim: Any = 0, count: Any = 1) -> Any:
        return lambda: native.copy_micro_batches(split, dim, wholes, parts, count)

    x, half = torch.zeros(4, 3), torch.zeros(2, 3)
    endless = torch.zeros(1).expand(1 << 62)
    meta = torch.zeros(0, 3, device="meta")
    make = lambda: native.split_micro_batches([x], [2, 2], 0, -1, 0)
    most = "more than 9223372036854775807"
    one = "all tensors must be on one device"
    cases: list[Case] = [
        ("dim -1", copy(True, [x], [x], -1), ValueError, "dim must be in 0..1, got -1"),
        ("0 threads", copy(True, [x], [x], 0, 0), ValueError, "threads must be in 1..8192, got 0"),
        ("None as a part", copy(True, [x], [half, None]), TypeError, "a tensor, got NoneType"),
        ("no tensor", copy(True, [], []), ValueError, "there are 0 tensors"),
        ("3 parts of 2", copy(True, [x] * 2, [half] * 3), ValueError, "3 microbatch tensors for 2"),
        ("larger", copy(True, [x], [torch.zeros(5, 3)]), ValueError, "5 entries, the tensor has 4"),
        ("entries overflow", copy(False, [x[:0, 0]], [endless] * 4), ValueError, f"{most} entries"),
        ("bytes overflow", copy(True, [endless], [endless]), ValueError, f"{most} bytes"),
        ("0 threads of a new split", make, ValueError, "threads must be in 1..8192, got 0"),
        ("one on no CPU", copy(False, [x], [x, meta]), ValueError, "got one on meta"),
    ]
    if native.build_info()["cuda"]:
        call = native.copy_micro_batches_cuda
        one = "on one CUDA device, got one on cpu"
        cases += [
            ("the CPU", lambda: call(True, 0, [x], [x], 0), ValueError, one),
            ("None on CUDA", lambda: call(True, 0, [None], [x], 0), TypeError, "a tensor, got"),
        ]
    return cases


def communicators(native: Any) -> list[Case]:
    create, Segment = native.Segment.create, native.Segment
    fd = create(3)
    segment = Segment(fd, 3)

    def join(*arguments: Any) -> Any:
        return lambda: native.Communicator(*arguments)

    (alone,) = threads(native, 1)
    getter = native.Communicator.all_reduce_tensor.fget
    cases: list[Case] = [
        ("peer error int", lambda: native.set_peer_error(int), TypeError, "class of exceptions"),
        ("pidfd -1", lambda: native.open_pidfd(-1), RuntimeError, "cannot watch process -1"),
        ("pidfd 0", lambda: native.open_pidfd(0), RuntimeError, "cannot watch process 0"),
        ("map fd -1", lambda: Segment(-1, 2), RuntimeError, "Bad file descriptor"),
        ("map for others", lambda: Segment(fd, 2), RuntimeError, "bytes instead of"),
        ("rank -1", join(segment, -1, [], 1.0), ValueError, "rank must be in 0..2, got -1"),
        ("1 pidfd", join(segment, 0, [-1], 1.0), ValueError, "each of 3 ranks, or none"),
        ("allocate -1", lambda: alone.allocate((2, -1), 1), ValueError, "negative, got -1"),
        ("allocate 2^35", lambda: alone.allocate((1 << 33,), 1), RuntimeError, "no room for"),
        ("allocate bool", lambda: alone.allocate((1,), 9), ValueError, "as bool; allocate"),
        ("allocate no dtype", lambda: alone.allocate((1,), 22), ValueError, "dtype must be in"),
        ("not of a communicator", lambda: getter(5), TypeError, "Communicator"),
    ]
    for size in (0, 1025):
        message = f"world_size must be in 1..1024, got {size}"
        cases += [
            (f"create for {size}", lambda size=size: create(size), ValueError, message),
            (f"map for {size}", lambda size=size: Segment(fd, size), ValueError, message),
        ]
    call = join(segment, 0, [], float("nan"))
    cases.append(("timeout", call, ValueError, "timeout must be above 0"))
    return cases


def collectives(native: Any) -> list[Case]:
    """One rank of two makes the calls. None may communicate, as the other rank takes no part."""
    comm, _ = threads(native, 2)
    address = torch.zeros(1024).data_ptr  # Keeps the tensor.
    data, ranks = address(), "rank 0 needs"
    reduce, announce = functools.partial(comm.reduce, data, 8), comm.announce

    def gather(*arguments: Any) -> Any:
        return lambda: comm.gather(data, *arguments)

    def scatter(*arguments: Any) -> Any:
        return lambda: comm.scatter(*arguments)

    return [
        *cases_of_collectives(comm, address, ()),
        ("reduce: reduction", lambda: reduce(FLOAT32, 11, 0), ValueError, "in 0..10, got 11"),
        ("reduce: float8", lambda: reduce(FLOAT8, 0, 0), ValueError, "has no reduction 'sum'"),
        ("reduce: or", lambda: reduce(FLOAT32, 8, 0), ValueError, "float32 has no reduction 'or'"),
        ("gather: 1 output", gather([data], 8, FLOAT32, 0), ValueError, f"{ranks} 2 tensors"),
        ("gather: outputs", gather([data], 8, FLOAT32, 1), ValueError, f"{ranks} 0 tensors"),
        ("gather: null", gather([data, 0], 8, FLOAT32, 0), ValueError, "bytes, got 0"),
        ("scatter: 3 inputs", scatter([data] * 3, data, 8, FLOAT32, 0), ValueError, "2 tensors"),
        ("scatter: null", scatter([data] * 2, 0, 8, FLOAT32, 0), ValueError, "bytes, got 0"),
        ("announce: call 9", lambda: announce(9, 1, 0, 0, 8), ValueError, "in 0..8, got 9"),
    ]


def cuda_collectives(native: Any) -> list[Case]:
    (core,) = threads(native, 1)
    comm = native.CudaCommunicator(core, torch.cuda.current_device(), 1 << 20)
    data = torch.zeros(1024, device="cuda").data_ptr  # Keeps the tensor.
    stream = torch.cuda.current_stream().cuda_stream
    most = f"symmetric_bytes must be at most {1 << 56}"
    return [
        *cases_of_collectives(comm, data, (stream, True)),
        ("bytes", lambda: native.CudaCommunicator(core, 0, HUGE), ValueError, most),
    ]


def cases_of_collectives(
    comm: Any, address: Callable[[], int], caller: tuple[Any, ...]
) -> list[Case]:
    """Bad arguments for each collective; ``caller`` are the last arguments of every call."""
    data = address()
    shape = (0, *caller)
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": lambda d, n, t: comm.all_reduce(d, n, t, 0, 0, *shape),
        "reduce_scatter": lambda d, n, t: comm.reduce_scatter(d, data, n, t, 0, *shape),
        "reduce_scatter, output": lambda d, n, t: comm.reduce_scatter(data, d, n, t, 0, *shape),
        "all_gather": lambda d, n, t: comm.all_gather(d, data, n, t, *shape),
        "all_gather, output": lambda d, n, t: comm.all_gather(data, d, n, t, *shape),
        "broadcast": lambda d, n, t: comm.broadcast(d, n, t, 0, *shape),
    }
    bad: list[tuple[str, type[Exception], str, tuple[Any, ...]]] = [
        ("a null address", ValueError, "bytes, got 0", (0, 8, FLOAT32)),
        ("the last address", ValueError, "must be the address of", (2**64 - 1, 8, FLOAT32)),
    ]
    for dtype in (-(1 << 31), -256, -1, 22, 255, 256, 2**31 - 1):
        bad.append((f"dtype {dtype}", ValueError, f"in 0..21, got {dtype}", (data, 8, dtype)))
    for count in (HUGE, 1 << 62, 2**63, 2**64 - 1):
        for dtype in (FLOAT32, UINT8):
            arguments = (data, count, dtype)
            bad.append((f"count {count} x {dtype}", ValueError, "count must be at most", arguments))
    cases: list[Case] = [
        (f"{name}: {what}", functools.partial(call, *arguments), error, message)
        for name, call in calls.items()
        for what, error, message, arguments in bad
    ]
    x = (data, 8, FLOAT32)
    for code in (-(1 << 31), -1, 11, 256, 2**31 - 1):
        reduction = f"reduction must be in 0..10, got {code}"
        algorithm = f"algorithm must be in 0..3, got {code}"
        for name, method, arguments, message in (
            ("all_reduce: reduction", comm.all_reduce, (*x, code, 0), reduction),
            ("all_reduce: algorithm", comm.all_reduce, (*x, 0, code), algorithm),
            ("reduce_scatter: reduction", comm.reduce_scatter, (data, *x, code), reduction),
            ("broadcast: root", comm.broadcast, (*x, code), f"got {code}"),
        ):
            call = functools.partial(method, *arguments, *shape)
            cases.append((f"{name} {code}", call, ValueError, message))
    reduce = functools.partial(comm.all_reduce, data, 8)
    return [
        *cases,
        ("bytes", lambda: reduce(FLOAT8, 0, 0, *shape), ValueError, "float8_e4m3fn"),
        ("average of int64", lambda: reduce(INT64, 1, 0, *shape), ValueError, "not an integer"),
    ]


GROUPS = {
    "tensors": tensors,
    "micro_batches": micro_batches,
    "communicators": communicators,
    "collectives": collectives,
    "cuda_collectives": cuda_collectives,
}


def main(groups: Sequence[str]) -> None:
    native = _backend.load()
    wrong = []
    for name, call, error, message in [case for group in groups for case in GROUPS[group](native)]:
        print(name, flush=True)
        try:
            call()
        except Exception as raised:  # noqa: BLE001
            if type(raised) is not error or message not in str(raised):
                wrong.append(f"{name}: {type(raised).__name__}: {raised}")
        else:
            wrong.append(f"{name}: nothing raised")
    print(json.dumps(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
