"""A fake of CUDA graphs: it records operations on CPU tensors and repeats them on the same memory.

The fake follows CUDA's documentation of captures and replays; only tests on a GPU can verify it.

As with real graphs:

* a capture changes no memory that existed before, and leaves what it allocates without values;
* a replay reads and writes the memory of the capture, whatever that holds by then;
* after a replay, memory of the graph that no tensor refers to is scratch, also for other graphs of
  the same pool: it is spoilt. Graphs captured later may keep results in memory that was scratch
  before, so a replay spoils all of their memory.

Spoilt memory is NaN, or integers that are invalid as indices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pipekernels.device import graphs
from pipekernels.pipeline.engine import stages
from support.cuda.recorded_streams import Agent, Machine

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def has_memory(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor with a storage; a sparse one consists of other tensors."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if has_memory(leaf)]


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def referred(own: list[torch.Tensor]) -> bool:
    """Whether any tensor besides ``own`` refers to their memory."""
    storage = own[0].untyped_storage()  # This variable is one reference more.
    return torch._C._storage_Use_Count(storage._cdata) > len(own) + 1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of the tensor's storage: ``[elements]``."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def spoil(tensor: torch.Tensor) -> None:
    data = tensor.data
    data.fill_(float("nan") if data.is_floating_point() or data.is_complex() else 101)


class RecordedGraph(TorchDispatchMode):
    """A captured graph. It identifies memory, and keeps only detached tensors of its own."""

    def __init__(self, machine: Machine | None, device: torch.device) -> None:
        super().__init__()
        self.machine = machine
        self.device = device
        self.later: list[RecordedGraph] = []
        """Graphs captured later from the same pool."""
        self.replays = 0
        self.seed: torch.Tensor | None = None
        """The seed in device memory that all graphs of the device share; each replay writes it."""
        self.made: dict[int, list[torch.Tensor]] = {}
        """Its tensors in memory that the capture allocated, by memory."""
        self._found: dict[int, list[torch.Tensor]] = {}
        """Its tensors in memory that existed before the capture, by memory."""
        self._before: dict[int, torch.UntypedStorage] = {}
        """During the capture: contents of the memory in ``_found`` before it."""
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor], list[torch.Tensor]]] = []
        """Function, arguments, keyword arguments, results, and the results in new memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.endswith("_like"):  # These do not read their argument.
            args = (torch.empty_like(args[0]), *args[1:])
            self.made[key(args[0])] = []
        for tensor in tensors((args, kwargs)):
            if key(tensor) not in self.made and tensor.device.type != "meta":
                if key(tensor) not in self._before:
                    with self._unseen():
                        self._before[key(tensor)] = tensor.untyped_storage().clone()
                self._found.setdefault(key(tensor), [])
        allocates_only = func.overloadpacket.__name__ in _EMPTY
        with torch._C.DisableTorchFunction():  # The machine has already recorded the call.
            result = func(*args, **(kwargs or {}))
            if allocates_only:
                # A real capture runs no kernels, so none fails on values. Here they run: zeros are
                # valid for all of them.
                for tensor in tensors(result):
                    tensor.zero_()
        with torch.no_grad():
            args, kwargs, results = tree_map(self._own, (args, kwargs or {}, tensors(result)))
        if allocates_only:
            if (
                torch.are_deterministic_algorithms_enabled()
                and torch.utils.deterministic.fill_uninitialized_memory
            ):
                for tensor in results:  # torch launches a kernel that fills the memory.
                    value = float("nan") if tensor.is_floating_point() else 101
                    fill = torch.ops.aten.fill_.Scalar
                    self._operations.append((fill, (tensor, value), {}, [tensor], []))
        else:
            given = {key(tensor) for tensor in tensors((args, kwargs))}
            made = [tensor for tensor in results if key(tensor) not in given]
            self._operations.append((func, args, kwargs, results, made))
        return result

    def _own(self, leaf: Any) -> Any:
        if not has_memory(leaf) or leaf.device.type == "meta":
            return leaf
        own = leaf.data
        known = self._found if key(own) in self._found else self.made
        known.setdefault(key(own), []).append(own)
        return own

    def capture(self, work: Callable[[], Any]) -> Any:
        state = torch.get_rng_state()
        try:
            with self:
                return work()
        finally:
            torch.set_rng_state(state)
            with self._unseen():
                for found, values in self._before.items():
                    self._found[found][0].untyped_storage().copy_(values)
            self._before.clear()
            self.spoil()

    def spoil(self) -> None:
        """Spoil all memory of the graph."""
        with self._unseen():
            for own in self.made.values():
                spoil(whole(own[0]))

    def replay(self) -> None:
        self.replays += 1
        for own in self._found.values():
            assert referred(own), "a graph uses memory that was given back"
        if self.machine is not None:
            stream = self.machine.current(self.device)
            self.machine.access(stream, [], [self.machine.memory(self.seed)], "a seed's replay")
        with self._unseen():
            for func, args, kwargs, results, made in self._operations:
                # Autograd does not see the kernels of a graph.
                again = func(*args, **kwargs)
                if made:
                    for old, new in zip(results, tensors(again), strict=True):
                        if any(old is own for own in made):
                            old.copy_(new)
                if self.machine is not None:
                    self._account(func, args, kwargs, made)
            for own in self.made.values():
                if not referred(own):
                    spoil(whole(own[0]))
        for other in self.later:
            other.spoil()

    def _account(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        machine = self.machine
        assert machine is not None
        writes = list(made)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes += tensors(value)
        agent = machine.current(self.device)
        reads = [machine.memory(t) for t in tensors((args, kwargs))]
        machine.access(agent, reads, [machine.memory(t) for t in writes], f"a graph's {func}")

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Run operations as a graph does: without torch's modes, unrecorded by the machine."""
        autocast = torch.autocast("cpu", enabled=False)
        with torch.no_grad(), autocast, patched(self.machine, "run", lambda f, a, k: f(*a, **k)):
            yield


@contextmanager
def patched(machine: Machine | None, name: str, function: Any) -> Iterator[None]:
    if machine is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, name, function)
        yield


class Record:
    """The graphs captured so far."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []
        self.capturing = False

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    def spoil(self) -> None:
        """Spoil the memory of all graphs; nothing may depend on it when no tape is left."""
        for graph in self.graphs:
            graph.spoil()


@contextmanager
def recorded(machine: Machine | None = None) -> Iterator[Record]:
    """Replace CUDA graphs: of the machine's CUDA devices, or, without a machine, of the CPU."""
    record = Record()
    pools: dict[int, list[RecordedGraph]] = {}
    handles = itertools.count(1)
    seeds: dict[torch.device, torch.Tensor] = {}

    def capture(work: Callable[[], Any], stream: Any, pool: int) -> Any:
        device = stream.device if isinstance(stream, Agent) else torch.device("cpu")
        graph = RecordedGraph(machine, device)
        if machine is not None:
            machine.synchronize()  # as torch.cuda.graph does
            seed = seeds.setdefault(device, torch.zeros(()))
            machine.access(stream, [], [machine.memory(seed, device)], "the beginning of a capture")
            graph.seed = seed
        record.capturing = True
        try:
            with (
                machine.using(stream) if machine else nullcontext(),
                patched(machine, "access", lambda *_: 0),
            ):
                result = graph.capture(work)
        finally:
            record.capturing = False
        if machine is not None:
            for known in graph.made.values():
                machine.memory(known[0]).pool = None  # It is freed to the graphs' pool.
        record.graphs.append(graph)
        for earlier in pools.setdefault(pool, []):
            earlier.later.append(graph)
        pools[pool].append(graph)
        return graph, result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_record", capture)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
        patch.setattr(graphs, "_recorders", {})
        if machine is None:
            patch.setattr(stages, "has_graphs", lambda device: True)
        yield record
