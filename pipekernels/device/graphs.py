"""CUDA graphs: a device's work recorded once, and from then on launched as a whole.

A graph repeats its kernels on the addresses that they had when it was captured. What it allocated
then lies in a pool, of which torch gives away again what no tensor refers to. So whoever keeps a
graph keeps all tensors that its work is to leave behind; and what a replay only uses meanwhile may
be memory that a later capture from the same pool keeps for good. Graphs may share a pool if nothing
that the later ones have left behind is needed when an earlier one is replayed.

All graphs of a device share what its libraries keep for the stream of captures, so their replays
take turns (:meth:`Recorder.turn`): on one stream by the order of issue, between streams by events.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from pipekernels._torch_private import end_capture_allocations
from pipekernels.device import streams
from pipekernels.device.restoring import holding, restoring
from pipekernels.device.streams import Stream

T = TypeVar("T")


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it on its device's current stream."""


class Recorder:
    """Captures and replays on one device. Nobody waits for another thread's turn here: who does not
    get one does the work without a graph.

    Args:
        device: a device that has graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All captures of a device are on one stream: cuBLAS has one workspace per stream, which the
        # graphs captured there share.
        self._stream = streams.new(device)
        self._turns = _Turns()
        self._last: Stream | None = None
        self._alone = threading.RLock()  # A stage may have a pipe with graphs inside.

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Yields whether the body may use graphs of the device, on the current stream. All that it
        issues is ordered behind the turns before."""
        with self._turns.one() as ours:
            if ours:
                stream = streams.current(self._device)
                if self._last is not None and self._last != stream:
                    stream.wait_event(self._last.record_event())
                self._last = stream
            yield ours

    def capture(self, work: Callable[[], T], pool: Any) -> tuple[Graph, T] | None:
        """Record ``work``, which is not done yet then. To be called in a turn.

        Args:
            work: issues work on the current stream of the device alone; run once, now.
            pool: what it allocates from, of :func:`new_pool`.

        Returns:
            The graph and what ``work`` returned, or None while another capture goes on in this
            process: torch knows only one at a time.

        Raises:
            Exception: what ``work`` raised, or torch because the work cannot be captured. Nothing
                remains of the capture then.
        """
        with _one_at_a_time.one() as ours:
            if not ours:
                return None
            graph, result = self.alone(lambda: _record(work, self._stream, pool))
            # Until now the capture's stream has been given what sets up its random numbers.
            streams.current(self._device).wait_event(self._stream.record_event())
            return graph, result

    def alone(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. While it runs no other thread captures on the device; a capture
        that goes on is waited for.

        To go through an autograd graph of a capture without a graph of its own: autograd issues
        that on the stream of captures, and it would become part of one.
        """
        # Autograd stays on this thread: its own thread for the device may be waiting here.
        before = torch.autograd.is_multithreading_enabled()
        put_back = partial(torch.autograd.set_multithreading_enabled, before)
        with holding(self._alone), restoring(put_back):
            torch.autograd.set_multithreading_enabled(False)
            return work()


class _Turns:
    """A lock that nobody waits for. It knows who holds it, so Ctrl-C can come at any point of
    it."""

    def __init__(self) -> None:
        self._holder: dict[None, object] = {}

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Yields whether the body has the lock."""
        me = object()

        def leave() -> None:
            if self._holder.get(None) is me:
                self._holder.clear()

        with restoring(leave):
            yield self._holder.setdefault(None, me) is me


_one_at_a_time = _Turns()
_recorders: dict[torch.device, Recorder] = {}
_recorders_lock = threading.RLock()


def recorder(device: torch.device) -> Recorder:
    """The process's recorder for ``device``: the device's generator, and what its libraries keep
    per stream, are the process's too."""
    with holding(_recorders_lock):
        if device not in _recorders:
            _recorders[device] = Recorder(device)
        return _recorders[device]


def has_graphs(device: torch.device) -> bool:
    """Whether work on ``device`` can be captured."""
    return device.type == "cuda"


def input_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of a capture that is to be written before each replay. So not by a fill in the graph,
    which is what torch does to empty tensors where algorithms are to be deterministic."""
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    with restoring(partial(setattr, deterministic, "fill_uninitialized_memory", fills)):
        deterministic.fill_uninitialized_memory = False
        return torch.empty_like(tensor)


def new_pool() -> Any:
    """A pool that nobody shares yet. Its memory is free when all graphs that were captured with it
    are gone, and all tensors in it."""
    return torch.cuda.graph_pool_handle()


def _record(work: Callable[[], T], stream: Any, pool: Any) -> tuple[Graph, T]:
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer context brings the stream back where torch.cuda.graph leaves it after a failure.
        with torch.cuda.stream(stream), _capturing(graph, stream, pool):
            result = work()
    except BaseException:
        if not _has_ended(graph):
            _end(graph, stream, pool)
        raise
    return graph, result


def _capturing(graph: torch.cuda.CUDAGraph, stream: Any, pool: Any = None) -> torch.cuda.graph:
    """Other threads may go on meanwhile, such as a data loader's that pins memory, but with nothing
    that waits for the whole device or draws from its generator."""
    return torch.cuda.graph(graph, pool, stream=stream, capture_error_mode="thread_local")


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


# torch's allocators go on asking a capture that failed whether a stream is its own.
_failed: list[torch.cuda.CUDAGraph] = []


def _end(graph: torch.cuda.CUDAGraph, stream: Any, pool: Any) -> None:
    """Do for a capture that CUDA declared invalid what torch does at the end of others only: have
    the allocator and the generator leave it."""
    _failed.append(graph)
    # It may have failed before it had begun to allocate.
    with contextlib.suppress(RuntimeError):
        end_capture_allocations(stream.device.index, pool)
    # The generator believes that it is being captured until a capture ends well.
    cell = torch.zeros((), device=stream.device)
    again = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), _capturing(again, stream):
        cell.add_(1)
