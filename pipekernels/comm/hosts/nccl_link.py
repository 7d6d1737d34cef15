"""A link over NCCL for CUDA tensors: ordered by streams, without waiting on the CPU."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipekernels._torch_private import all_gather_into, set_timeout, shut_down
from pipekernels.comm.hosts.link import GONE, LATE, Link, LinkError
from pipekernels.comm.hosts.memory import MappedWord, as_integers
from pipekernels.device import streams

# Seconds between checks for a stuck operation; must be less than GRACE in hosts/cpu.py.
_SLICE = 0.1


class NcclLink(Link):
    """A link whose operations return at once; a watching thread aborts those that time out.

    An operation's time starts when the device reaches it, however much work is queued before it.
    The thread calls CUDA only to abort: another thread may be capturing a graph.

    Args:
        group: a ``ProcessGroupNCCL`` of one rank per host, without torch's own watchdog, see
            :func:`connect_nccl`; owned.
        device: of the tensors.
        timeout: seconds from the beginning to the end of an operation on the device.
    """

    def __init__(self, group: Any, device: torch.device, timeout: float) -> None:
        self._group: Any = group
        self._size = group.size()
        self._timeout = timeout
        self._begun = MappedWord(device)  # Number of operations that the device has begun,
        self._ended = MappedWord(device)  # and ended.
        self._cut = MappedWord(device)  # GONE or LATE once operations have been aborted.
        self._lock = threading.Lock()  # Held to cut, or to close.
        self._closed = threading.Event()
        arguments = (weakref.ref(self), self._closed, timeout)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def sum(self, tensor: Tensor) -> None:
        self._run(lambda group: group.allreduce([tensor]), tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty((self._size, *tensor.shape))
        self._run(lambda group: all_gather_into(group, gathered, tensor), gathered)
        return gathered

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._run(lambda group: group.broadcast(tensor, root), tensor)

    def check(self) -> None:
        code = self._cut.read()
        if code:
            reason = "NCCL was not done in time" if code == LATE else "NCCL has failed"
            raise LinkError(reason, late=code == LATE)

    def close(self) -> None:
        group = self._take_group()
        if group is not None and self._cut.read() == 0:
            # Not abort(): data that this device has sent may still be on the way to other hosts.
            ending = threading.Thread(
                target=_quietly, args=(partial(shut_down, group),), daemon=True
            )
            ending.start()
            ending.join(self._timeout)
            if ending.is_alive():
                _quietly(group.abort)
        for word in (self._begun, self._ended, self._cut):
            word.release()

    def abort(self) -> None:
        group = self._take_group()
        if group is not None:
            self._give_up(group, GONE)

    def is_at(self) -> tuple[int, int]:
        """The numbers of operations begun and ended."""
        ended = self._ended.read()  # Read first, so that it is never greater than the other.
        return self._begun.read(), ended

    def cut(self) -> None:
        """Abort the current and all later operations, as timed out."""
        with self._lock:
            if self._group is not None:
                self._give_up(self._group, LATE)

    def _run(self, start: Callable[[Any], Any], filled: Tensor) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("this communicator has been closed; make a new one")
        self._begun.on_device.add_(1)
        try:
            # NCCL uses a stream of its own. synchronize() makes the current stream wait for it;
            # wait() would make the calling thread wait.
            start(group).synchronize()
        except RuntimeError as error:
            self.check()  # Report a timeout, if the link has been cut meanwhile.
            raise LinkError(str(error), late=False) from None
        self._ended.on_device.add_(1)
        as_integers(filled).masked_fill_(self._cut.on_device != 0, -1)

    def _give_up(self, group: Any, code: int) -> None:
        # First the code: after an aborted operation the device reads it in _run().
        self._cut.write(code)
        _quietly(group.abort)

    def _take_group(self) -> Any:
        self._closed.set()
        with self._lock:
            group, self._group = self._group, None
        return group


def _watch(link: weakref.ref[NcclLink], closed: threading.Event, timeout: float) -> None:
    """Cut the link if an operation takes longer than ``timeout``, until it is closed or gone."""
    since, before = time.monotonic(), 0
    while not closed.wait(_SLICE):
        watched = link()
        if watched is None:
            return
        begun, ended = watched.is_at()
        now = time.monotonic()
        if begun == ended or begun != before:
            since, before = now, begun
        elif now - since > timeout:
            watched.cut()
            return
        del watched


def _quietly(call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # The group is discarded anyway.
        call()


def connect_nccl(
    store: dist.Store, host: int, hosts: int, device: torch.device, timeout: float
) -> NcclLink:
    """A link over NCCL, with rank ``host`` of ``hosts``; a collective over these.

    Raises:
        RuntimeError: there is no NCCL, or it cannot connect these devices in time.
    """
    if not dist.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} was built without NCCL")
    with _blocking_wait():
        options = dist.ProcessGroupNCCL.Options()
        set_timeout(options, datetime.timedelta(seconds=timeout))  # Limits abort().
        group = dist.ProcessGroupNCCL(store, host, hosts, options)
    return connect(group, device, timeout)


def connect(group: Any, device: torch.device, timeout: float) -> NcclLink:
    """A link over ``group``, connected by a first collective.

    Raises:
        RuntimeError: that fails, or takes most of ``timeout``.
    """
    problems: list[str] = []

    def meet() -> None:
        try:
            with streams.using(streams.new(device)):
                group.allreduce([torch.zeros(1, device=device)]).synchronize()
                streams.current(device).record_event().synchronize()
            problems.append("")
        except Exception as error:  # noqa: BLE001
            problems.append(f"NCCL cannot connect {device}: {error}")

    # In a thread, as this has no timeout and cannot be interrupted. For less than the timeout, so
    # that ranks with other links still wait for the report of a failure.
    limit = 0.75 * timeout
    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        raise RuntimeError(f"NCCL has not connected the hosts within {limit:g} s")
    if problems[0]:
        _quietly(group.abort)
        raise RuntimeError(problems[0])
    return NcclLink(group, device, timeout)


@contextlib.contextmanager
def _blocking_wait() -> Iterator[None]:
    """Make torch create groups without its watchdog.

    The watchdog kills the process when an operation fails or times out, and it counts the time
    before the device reaches the operation.
    """
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
