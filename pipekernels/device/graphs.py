"""Capture and replay of CUDA graphs.

A graph repeats its kernels on the addresses they had during the capture. Memory allocated then is
in a pool, and torch reuses the parts that no tensor refers to. So the owner of a graph must keep
all tensors that a replay is to fill; the temporary memory of a replay may belong to tensors of a
later capture from the same pool. Graphs may share a pool if no result of a later one is needed
when an earlier one is replayed.

All graphs of a device share the workspaces that its libraries keep for the capture stream, so their
replays must not overlap (:meth:`Recorder.turn`): the order of issue ensures that on one stream,
events ensure it between streams.
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
        """Launch the work on its device's current stream."""


class Recorder:
    """Captures and replays on one device. A thread never waits for its turn: a caller that does not
    get one runs the work without a graph.

    Args:
        device: a device that has graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # All captures of a device use one stream: cuBLAS has one workspace per stream, and graphs
        # captured on one stream share it.
        self._stream = streams.new(device)
        self._turns = _TryLock()
        self._last: Stream | None = None
        self._alone = threading.RLock()  # Reentrant: a stage may contain a pipe with graphs.

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Yields whether the body may use graphs of the device, on the current stream, which has
        then been made to wait for the work of earlier turns."""
        with self._turns.one() as ours:
            if ours:
                stream = streams.current(self._device)
                if self._last is not None and self._last != stream:
                    stream.wait_event(self._last.record_event())
                self._last = stream
            yield ours

    def capture(self, work: Callable[[], T], pool: Any) -> tuple[Graph, T] | None:
        """Capture ``work`` without executing it. Call it in a turn.

        Args:
            work: issues work on the device's current stream only; called once, now.
            pool: memory pool for its allocations, from :func:`new_pool`.

        Returns:
            The graph and the result of ``work``; or None while another capture is in progress in
            this process, as torch supports only one at a time.

        Raises:
            Exception: ``work`` raised, or torch cannot capture it. The capture is then undone.
        """
        with _one_at_a_time.one() as ours:
            if not ours:
                return None
            graph, result = self.alone(lambda: _record(work, self._stream, pool))
            # The capture stream has been given work that sets up the graph's random numbers.
            streams.current(self._device).wait_event(self._stream.record_event())
            return graph, result

    def alone(self, work: Callable[[], T]) -> T:
        """Run ``work`` while no other thread captures on the device; wait for a capture to end.

        Needed for an eager backward through an autograd graph that was made in a capture: autograd
        issues it on the capture stream, where it would become part of a capture in progress.
        """
        # Keep the backward on this thread: autograd's thread for the device may be waiting here.
        before = torch.autograd.is_multithreading_enabled()
        put_back = partial(torch.autograd.set_multithreading_enabled, before)
        with holding(self._alone), restoring(put_back):
            torch.autograd.set_multithreading_enabled(False)
            return work()


class _TryLock:
    """A lock without waiting. It records its holder, so Ctrl-C at any point leaves it correct."""

    def __init__(self) -> None:
        self._holder: dict[None, object] = {}

    @contextmanager
    def one(self) -> Iterator[bool]:
        """Yields whether the body has the lock."""
        token = object()

        def release() -> None:
            if self._holder.get(None) is token:
                self._holder.clear()

        with restoring(release):
            yield self._holder.setdefault(None, token) is token


_one_at_a_time = _TryLock()
_recorders: dict[torch.device, Recorder] = {}
_recorders_lock = threading.RLock()


def recorder(device: torch.device) -> Recorder:
    """The process's recorder for ``device``. There is one, as the device's random generator and its
    libraries' workspaces also belong to the process."""
    with holding(_recorders_lock):
        if device not in _recorders:
            _recorders[device] = Recorder(device)
        return _recorders[device]


def has_graphs(device: torch.device) -> bool:
    """Whether work on ``device`` can be captured."""
    return device.type == "cuda"


def input_like(tensor: torch.Tensor) -> torch.Tensor:
    """An empty input of a capture, to be written before each replay. With deterministic algorithms
    torch would fill empty tensors, and the graph would repeat that and overwrite the input."""
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    with restoring(partial(setattr, deterministic, "fill_uninitialized_memory", fills)):
        deterministic.fill_uninitialized_memory = False
        return torch.empty_like(tensor)


def new_pool() -> Any:
    """A new memory pool. It is freed with the last of its graphs and tensors."""
    return torch.cuda.graph_pool_handle()


def _record(work: Callable[[], T], stream: Any, pool: Any) -> tuple[Graph, T]:
    graph = torch.cuda.CUDAGraph()
    try:
        # After a failure torch.cuda.graph does not restore the stream; the outer context does.
        with torch.cuda.stream(stream), _capturing(graph, stream, pool):
            result = work()
    except BaseException:
        if not _has_ended(graph):
            _end(graph, stream, pool)
        raise
    return graph, result


def _capturing(graph: torch.cuda.CUDAGraph, stream: Any, pool: Any = None) -> torch.cuda.graph:
    """Meanwhile other threads may use CUDA (a data loader may pin memory), but must not synchronise
    the whole device or draw from its generator."""
    return torch.cuda.graph(graph, pool, stream=stream, capture_error_mode="thread_local")


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


# Kept alive: torch's allocators keep asking failed captures whether a stream belongs to them.
_failed: list[torch.cuda.CUDAGraph] = []


def _end(graph: torch.cuda.CUDAGraph, stream: Any, pool: Any) -> None:
    """End a capture that CUDA declared invalid: take the allocator and the generator out of it,
    which torch does for valid captures only."""
    _failed.append(graph)
    # Raises if the capture failed before it began to allocate.
    with contextlib.suppress(RuntimeError):
        end_capture_allocations(stream.device.index, pool)
    # The generator stays in capture mode until a capture ends without error.
    cell = torch.zeros((), device=stream.device)
    valid_graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), _capturing(valid_graph, stream):
        cell.add_(1)
