"""Collectives over several hosts, on CUDA tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipekernels import _backend
from pipekernels.comm.cuda import MOST_BLOCKS, CudaEnd
from pipekernels.comm.end import ReadyCounters
from pipekernels.comm.errors import PeerError
from pipekernels.comm.hosts.call import Call, Operation
from pipekernels.comm.hosts.cpu import HostsEnd, SteppedEnd, call_reducing
from pipekernels.comm.hosts.link import Link, LinkError
from pipekernels.comm.hosts.memory import MappedWord, as_integers
from pipekernels.comm.hosts.steps import Steps
from pipekernels.device import streams

_PROBLEM = 1000  # Bytes of the message of a rank that cannot use CUDA.


class HostsCudaEnd(SteppedEnd):
    """A :class:`pipekernels.comm.end.DeviceEnd` over several hosts. Experimental: no GPU has run it
    yet.

    A call waits on the CPU until all ranks have made it, then issues work in the current stream and
    returns (with Gloo between the hosts, it waits for that work). In the last step the devices
    exchange whether an operation on or between them failed. If so, every rank sets all bits of its
    result and raises an error in its next call. A partial result is never delivered.

    Making one is a collective over all ranks.

    Args:
        hosts: the end for CPU tensors; close it after this one.
        device: a CUDA device.
        blocks: as for :class:`pipekernels.comm.cuda.CudaEnd`.

    Raises:
        RuntimeError: a rank cannot use CUDA, or the hosts cannot be connected for it; raised on all
            ranks, and ``hosts`` stays usable. Or a graph is being captured.
    """

    def __init__(self, hosts: HostsEnd, device: torch.device, *, blocks: int = MOST_BLOCKS) -> None:
        _check_not_capturing()
        _backend.require_cuda(device)
        self._hosts = hosts
        self._agreement = hosts.agreement
        self._process = os.getpid()
        with self._agreement.collective(Call(Operation.CUDA_SET_UP)):
            local, problem = self._attempt(lambda: CudaEnd(hosts.local, device, blocks=blocks))
            link = None
            if not problem:
                link, problem = self._attempt(lambda: self._connect(local.device))
        if problem:
            if link is not None:
                link.close()
            if local is not None:
                local.close(abort=False)
            raise RuntimeError(f"the ranks cannot use CUDA over several hosts: {problem}")
        self._local: CudaEnd = local
        self._link: Link | None = link
        self._device: torch.device = local.device
        super().__init__(hosts.host_map, Steps(local, link, hosts.host_map, local.device))
        self._failed = MappedWord(self._device)  # Nonzero after a failure on any device.
        self._last: streams.Event = streams.DONE  # After the last collective.

    def all_reduce_when_ready(
        self, tensor: Tensor, op: str, ready: ReadyCounters, blocks: int
    ) -> None:
        """Reduce ``tensor`` inside each host while it is written, then between the hosts."""

        def inside(flat: Tensor, op: str) -> None:
            self._local.all_reduce_when_ready(tensor, op, ready, blocks)

        call = call_reducing(Operation.ALL_REDUCE_WHEN_READY, tensor, op, blocks=blocks)
        self._all_reduce(call, tensor, op, inside)

    def check_is(self, device: torch.device) -> None:
        self._local.check_is(device)

    def empty(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._local.empty(sizes, dtype)

    def output(self, sizes: torch.Size, dtype: torch.dtype) -> Tensor:
        return self._local.output(sizes, dtype)

    def check(self) -> None:
        self._agreement.check_usable()
        self._check_devices()

    def synchronize(self) -> None:
        self._last.synchronize()
        self.check()

    def close(self, *, abort: bool) -> None:
        if os.getpid() != self._process:  # A forked child has no CUDA work to end.
            self._local.close(abort=abort)
            return
        abort = abort or self._agreement.has_failed
        if not abort:
            self._last.synchronize()
        elif self._link is not None:
            self._link.abort()
        self._local.close(abort=abort)
        self._last.synchronize()
        if self._link is not None:
            self._link.close()
        self._failed.release()

    # ---- set-up ----------------------------------------------------------------------------------

    def _connect(self, device: torch.device) -> Link | None:
        route = self._hosts.route
        return None if route is None else route.connect(device)

    def _attempt(self, make: Callable[[], Any]) -> tuple[Any, str]:
        """Returns ``make()``, and the failures of all ranks as a message, the same on all ranks."""
        made, problem = None, ""
        try:
            made = make()
        except PeerError:
            raise
        except (RuntimeError, ValueError) as error:
            problem = str(error) or repr(error)
        text = torch.zeros(_PROBLEM, dtype=torch.uint8, device="cpu")
        encoded = list(problem.encode()[:_PROBLEM])
        text[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8, device="cpu")
        rows = self._hosts.gathered(text).tolist()
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]
        first = {text: rank for rank, text in reversed(list(enumerate(texts))) if text}
        return made, "; ".join(f"rank {rank}: {text}" for text, rank in first.items())

    # ---- the parts of a collective ---------------------------------------------------------------

    @contextlib.contextmanager
    def _collective(self, call: Call) -> Iterator[None]:
        _check_not_capturing()
        with self._agreement.collective(call._replace(on_cuda=1), self._check_devices):
            # A rank's collectives keep their order even if the caller changes the stream.
            streams.current(self._device).wait_event(self._last)
            yield
            self._last = streams.current(self._device).record_event()

    def _deliver(self, result: Tensor, output: Tensor) -> None:
        # A failing collective on a device or link sets all bits of its result, also that of this
        # gather of zeros: so any nonzero value reports a failure.
        zero = torch.zeros(1, dtype=torch.uint8, device=self._device)
        worst = self._steps.gathered(zero).amax(0)
        failed = self._failed.on_device
        torch.maximum(failed, worst.to(torch.int64), out=failed)
        result, output = as_integers(result), as_integers(output)
        torch.where(failed != 0, torch.full_like(result[:1], -1), result, out=output)

    def _check_devices(self) -> None:
        """Raise failures on the devices, as far as known."""
        with self._agreement.failing(f"an earlier collective on {self._device}"):
            if self._link is not None:  # First, as the device waits for the link.
                self._link.check()
            self._local.check()
            if self._failed.read():
                raise LinkError("as the devices have noticed", late=False)


def _check_not_capturing() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a collective over several hosts cannot be captured in a graph: all ranks agree on "
            "each before it begins, which a replay would not do; call it between two graphs"
        )
