"""The communicator: construction, ownership of resources, and closing."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist

from pipekernels import _backend
from pipekernels._arguments import integer
from pipekernels._torch_private import timeout_of
from pipekernels.comm.bootstrap.processes import join_processes, problem_of, raise_join_failure
from pipekernels.comm.bootstrap.rendezvous import (
    Rendezvous,
    check_timeout,
    of_color,
    over_group,
    over_store,
)
from pipekernels.comm.collectives import Collectives, CpuBackend, MakeDeviceBackend
from pipekernels.comm.cuda import (
    DEFAULT_BLOCKS,
    CudaBackend,
    between_hosts,
    check_blocks,
    over_links,
)
from pipekernels.comm.errors import PeerError
from pipekernels.comm.process_group import over_gloo
from pipekernels.comm.shared_memory import SharedMemoryBackend

if TYPE_CHECKING:
    from typing_extensions import Self

_handles = itertools.count(1)
# Compiled programs name a communicator by its handle. An entry lives as long as its communicator.
_by_handle: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator(Collectives):
    """One rank's view of a communicator.

    Make one by :meth:`from_process_group` or :meth:`from_store` (ranks are processes), or by
    :meth:`threads` (ranks are threads of this process). All ranks call the same collectives in the
    same order; calls from several threads of one rank run one after another. Elements are combined
    in rank order, 16-bit floats in float32 and rounded once, so all ranks get the same bits, in
    every run and by every algorithm. See :doc:`/guides/communicators`; :doc:`/guides/cuda` on GPUs,
    where a collective runs in the current stream and returns at once. For gradients see
    :mod:`pipekernels.ops`. Over several hosts torch's Gloo and NCCL run the collectives, whose
    results and errors are then torch's: see :doc:`/guides/hosts`.

    Every collective may raise, besides the errors that it lists itself:

    * TypeError: an argument is not a tensor.
    * ValueError: the ranks call different collectives, or with different shapes, dtypes or
      arguments; raised on all ranks, and the communicator stays usable. Or a tensor is on a device
      that this rank does not use, or is not strided.
    * PeerError: a rank has died, closed or given up; raised on all remaining ranks. Names the rank.
      Ends the communicator.
    * TimeoutError: a rank did not arrive within ``timeout``. Ends the communicator.
    * RuntimeError: the communicator was closed or has ended, or this process was forked.

    After an error the contents of a collective's result are undefined. An error in a rank's own
    arguments is raised before any communication, on that rank only.
    """

    def __new__(cls, *parts: Any) -> Self:
        if not parts:
            raise TypeError(
                "a Communicator is made by Communicator.from_process_group() in a program that "
                "torchrun starts, by from_store(), or by threads(n), for n threads of this process"
            )
        return super().__new__(cls)

    def __init__(
        self,
        cpu_backend: CpuBackend,
        make_device_backend: MakeDeviceBackend,
        rank: int,
        world_size: int,
        timeout: float,
        divide: Callable[[Communicator, int | None, int], Communicator | None],
    ) -> None:
        super().__init__(cpu_backend, make_device_backend, rank, world_size)
        self._timeout = timeout
        self._divide = divide
        # torch caches compiled graphs across processes and runs, keyed by the handle only; but they
        # depend on rank and world size, so these are part of it.
        self._handle = next(_handles) << 40 | rank << 20 | world_size
        _by_handle[self._handle] = self
        if isinstance(cpu_backend, SharedMemoryBackend):
            cpu_backend.core.name(self._handle)  # For operators that take no Python.

    @classmethod
    def from_process_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | None = None,
        device_blocks: int = DEFAULT_BLOCKS,
    ) -> Communicator:
        """A communicator over the ranks of a ``torch.distributed`` group, of one host or several.

        A collective over the group, with the group's own timeout; on one host only GPUs need the
        group afterwards, see :doc:`/guides/cuda`.

        Args:
            group: the default group if ``None``. Over several hosts its engine runs collectives of
                CUDA tensors; collectives of CPU tensors run on a new Gloo group.
            timeout: seconds that this rank waits for the others in each later call. Default: 30, or
                the timeout of ``group`` where CUDA can be used.
            device_blocks: the most thread blocks of a collective on CUDA, up to 64, the same on all
                ranks; see :doc:`/guides/cuda`.

        Raises:
            RuntimeError: ``torch.distributed`` is not initialised, or the ranks cannot share memory
                or reach each other.
            ValueError: this process is not in ``group``, or an argument is not in its range.
        """
        if timeout is not None:
            check_timeout(timeout)
        check_blocks(device_blocks)
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; start the program by torchrun and call "
                "init_process_group() first, or use Communicator.threads()"
            )
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not a member of the group; pass one that it is in")
        if timeout is None:
            # Programs on GPUs expect NCCL's patience: one rank may write a checkpoint meanwhile.
            timeout = timeout_of(group) if torch.cuda.is_available() else 30.0
        return cast("Communicator", cls._join(over_group(group), timeout, device_blocks))

    @classmethod
    def from_store(
        cls,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout: float = 30.0,
        device_blocks: int = DEFAULT_BLOCKS,
    ) -> Communicator:
        """A communicator over processes that share a store and have no process group, without which
        CUDA tensors do not go from host to host.

        Args:
            store: the ranks make their communicators over it in the same order. After a restart it
                needs a new prefix, a ``PrefixStore``. Anyone with write access can prevent the
                ranks from joining.
            rank, world_size: this rank, and the number of ranks, at most 65536.
            timeout: seconds, from this call on, until all ranks must have joined; then as for
                :meth:`from_process_group`.
            device_blocks: as there.

        Raises:
            RuntimeError: the ranks cannot share memory or reach each other, or the store holds
                invalid messages.
            TimeoutError: a rank did not join within ``timeout``.
            ValueError: an argument is not in its range.
        """
        check_timeout(timeout)
        check_blocks(device_blocks)
        rendezvous = over_store(store, rank, world_size, timeout)
        return cast("Communicator", cls._join(rendezvous, timeout, device_blocks))

    @classmethod
    def _join(
        cls,
        rendezvous: Rendezvous,
        timeout: float,
        device_blocks: int,
        color: int | None = 0,
        key: int = 0,
    ) -> Communicator | None:
        joined = join_processes(rendezvous, color, key)
        if joined is None:
            return None
        rank, world_size, hosts = joined.rank, joined.world_size, joined.hosts
        backend: CpuBackend
        make: MakeDeviceBackend
        if hosts == 1:
            # From here on the extension owns the segment and the pidfds.
            core = _load().Communicator(joined.segment, rank, joined.pidfds, timeout)
            backend, store = SharedMemoryBackend(core), None  # split() uses the shared memory.
            make_cuda = functools.partial(CudaBackend, backend, blocks=device_blocks)
            make = functools.partial(over_links, make_cuda, rendezvous.group)
        else:
            store = rendezvous.store
            assert store is not None, "only processes of one host have no store"
            own_store = dist.PrefixStore(joined.name, store)
            backend = over_gloo(own_store, rank, world_size, hosts, timeout)
            make = functools.partial(between_hosts, rendezvous.group, hosts)

        def divide(parent: Communicator, color: int | None, key: int) -> Communicator | None:
            ranks = Rendezvous(parent._rank, parent._world_size, parent._exchange, store)
            return cls._join(ranks, timeout, device_blocks, color, key)

        return cls(backend, make, rank, world_size, timeout, divide)

    @classmethod
    def threads(
        cls, world_size: int, *, timeout: float = 30.0, device_blocks: int = DEFAULT_BLOCKS
    ) -> list[Communicator]:
        """Communicators for ``world_size`` ranks, at most 1024, that are threads of this process:
        each calls from a thread of its own. Other arguments: as :meth:`from_process_group`.

        Raises:
            TypeError, ValueError: an argument is not a number, or not in its range.
        """
        check_timeout(timeout)
        check_blocks(device_blocks)
        world_size = integer("world_size", world_size)
        module = _load()
        # The ranks have one mapping of a segment, and no pidfds: a thread cannot die alone.
        fd = module.Segment.create(world_size)
        try:
            segment = module.Segment(fd, world_size)
        finally:
            os.close(fd)
        divide = functools.partial(_divide_threads, device_blocks=device_blocks)
        communicators = []
        for rank in range(world_size):
            local = SharedMemoryBackend(module.Communicator(segment, rank, [], timeout))
            make_cuda = functools.partial(CudaBackend, local, blocks=device_blocks)
            make = functools.partial(over_links, make_cuda, None)
            communicators.append(cls(local, make, rank, world_size, timeout, divide))
        return communicators

    @staticmethod
    def from_handle(handle: int) -> Communicator:
        """The communicator with this :attr:`handle`.

        Raises:
            RuntimeError: it has been closed or garbage-collected.
        """
        communicator = _by_handle.get(handle)
        if communicator is None:
            raise RuntimeError(
                f"no communicator has handle {handle}: it was closed or garbage-collected; keep "
                "the Communicator referenced until the last forward and backward that use it are "
                "done"
            )
        return communicator

    @property
    def timeout(self) -> float:
        """Seconds that this rank waits for the others, in any call."""
        return self._timeout

    @property
    def handle(self) -> int:
        """A number that identifies this communicator, its rank and world size in this process."""
        return self._handle

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """A communicator over the ranks that give the same ``color``, as ``MPI_Comm_split`` does.

        A collective over all ranks. This communicator and the new ones, which have its options, are
        closed, and fail, independently.

        Args:
            color: chooses the new communicator; ``None`` for a rank that joins none.
            key: orders the ranks of the new communicator; this rank if ``None``. Ranks with equal
                keys keep their order.

        Raises:
            TypeError: ``color`` or ``key`` is neither an integer nor ``None``.
            RuntimeError: the ranks cannot share memory or reach each other.
        """
        for name, value in (("color", color), ("key", key)):
            if value is not None and not isinstance(value, int):
                raise TypeError(f"{name} must be an int or None, got {type(value).__name__}")
        key = self._rank if key is None else int(key)
        child = self._divide(self, None if color is None else int(color), key)
        if child is not None:
            child._parent = weakref.ref(self)
        return child

    def close(self) -> None:
        """Leave: peers that need this rank, now or later, get a :class:`PeerError`.

        Frees the shared memory, except for symmetric tensors that are still in use. Idempotent. A
        collective in progress in another thread, or interrupted by the signal handler that calls
        this, fails; collectives on a CUDA device are waited for.
        """
        _by_handle.pop(self._handle, None)
        if self._cuda_backend is not None:
            self._cuda_backend.close(abort=False)
        self._cpu_backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *details: object) -> None:
        if error_type is not None:  # Tell the peers that this rank failed.
            if self._cuda_backend is not None:
                self._cuda_backend.close(abort=True)
            self._cpu_backend.abort()
        self.close()

    def __repr__(self) -> str:
        return f"Communicator(rank={self._rank}, world_size={self._world_size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # A copy of a layer, or of a model, shares it.

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be pickled, because it belongs to this process; of a sharded "
            "layer or model, save state_dict() (this rank's part) or full_state_dict() (the whole)"
        )


def _load() -> Any:
    module = _backend.load()
    module.set_peer_error(PeerError)
    return module


class _Choice(NamedTuple):
    color: int | None
    key: int


class _Made(NamedTuple):
    handles: list[int]  # Of communicators, or none of these and the problem.
    problem: str


def _divide_threads(
    parent: Communicator, color: int | None, key: int, *, device_blocks: int
) -> Communicator | None:
    """:meth:`Communicator.split` for ranks that are threads: the first rank makes the new ones."""
    ranks = of_color(parent._exchange(_Choice(color, key), _Choice), color)
    made: list[Communicator] = []
    problem = ""
    if color is not None and ranks[0] == parent.rank:
        try:
            made = Communicator.threads(
                len(ranks), timeout=parent.timeout, device_blocks=device_blocks
            )
        except Exception as error:  # noqa: BLE001 (Sent to the peers.)
            problem = problem_of(0, error)
    answers = parent._exchange(_Made([comm.handle for comm in made], problem), _Made)
    handles, problem = answers[ranks[0]]
    child = Communicator.from_handle(handles[ranks.index(parent.rank)]) if handles else None
    parent.barrier()  # Keep ``made`` alive until every rank has taken its communicator.
    raise_join_failure([problem])
    return child


class CollectiveBarrier:
    """Makes the communicators of ``world_size`` ranks that are threads, one for each; arguments
    and errors as for :meth:`pipekernels.Communicator.threads`."""

    def __init__(self, world_size: int, *, timeout: float = 30.0) -> None:
        self._communicators = Communicator.threads(world_size, timeout=timeout)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._communicators)

    def communicator(self, rank: int) -> Communicator:
        """The communicator of ``rank``, for its thread to use.

        Raises:
            ValueError: no rank has this index.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        return self._communicators[rank]

    def wait(self, rank: int) -> None:
        """Return when all ranks have called it; errors as in :meth:`Communicator.barrier`."""
        self.communicator(rank).barrier()
