"""Types of the compiled extension; addresses and handles are plain integers.

Arguments that fit nothing raise ValueError or TypeError; whether there is memory at an address,
nobody can check.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

# ---- build information ----

def build_info() -> dict[str, str | bool]: ...

# ---- tensors ----

def use_tensors(
    cls: type[Tensor],
    parameter: type[Tensor],
    increment_version: Callable[[tuple[Tensor, ...]], None],
    /,
) -> None: ...
def check_memory(tensor: Tensor, /) -> None: ...
def mark_changed(tensor: Tensor, /) -> None: ...

# ---- microbatches ----
# micro_batches: all tensors of the first microbatch first. Where a tensor and its microbatches
# differ in dtype, elements are cast. The CUDA function exists if build_info()["cuda"].

def are_plain(tensors: list[Tensor], /) -> bool: ...
def are_plain_and_fit(dim: int, tensors: int, micro_batches: list[Tensor], /) -> bool: ...
def split_micro_batches(
    tensors: list[Tensor], sizes: Sequence[int], dim: int, dtype: int, threads_or_stream: int, /
) -> list[object] | None: ...
def copy_micro_batches(
    split: bool, dim: int, wholes: list[Tensor], micro_batches: list[Tensor], threads: int
) -> None: ...
def copy_micro_batches_cuda(
    split: bool, dim: int, wholes: list[Tensor], micro_batches: list[Tensor], stream: int
) -> None: ...

# ---- products ----
# They return whether they apply; see ops/weights/k_slices.py and ops/expert_linear.py.

FEW_ROWS: int
INTEGER_ISAS: tuple[int, ...]  # Those of this machine, the portable one first.

def skinny_gemm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, threads: int, /
) -> bool: ...
def expert_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Tensor,
    threads: int,
    /,
) -> bool: ...
def integer_product(
    out: Tensor,
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    chosen: Tensor | None,
    threads: int,
    isa: int = ...,
    /,
) -> bool: ...
def skinny_gemm_partial(
    out: Tensor, x: Tensor, weight: Tensor, slabs: int, threads: int, /
) -> bool: ...

# ---- operators ----

def register_operators(python_kernels: dict[str, Callable[..., object]], /) -> None:
    """For torch from 2.10 on; see ops/linear.py."""

# ---- collectives ----
# Names in the order of their codes; pipekernels/comm/codes.py reads them.

DTYPES: tuple[str, ...]
REDUCIBLE_DTYPES: tuple[str, ...]
REDUCTIONS: tuple[str, ...]
OPERATIONS: tuple[str, ...]
ORDERS: tuple[str, ...]
ALGORITHMS: tuple[str, ...]
CALLS: tuple[str, ...]

def set_peer_error(cls: type[RuntimeError], /) -> None: ...
def open_pidfd(pid: int, /) -> int: ...
def has_reduction(dtype: int, reduction: int, /) -> bool: ...

class Segment:
    @staticmethod
    def create(world_size: int) -> int: ...
    def __init__(self, fd: int, world_size: int) -> None: ...

class Communicator:
    def __init__(self, segment: Segment, rank: int, pidfds: list[int], timeout: float) -> None: ...
    def name(self, handle: int, /) -> None:
        """Let operators name it so until it is closed."""

    def allocate(self, sizes: Sequence[int], dtype: int, /) -> object:
        """A DLPack capsule of a contiguous tensor."""

    def all_reduce(
        self, data: int, count: int, dtype: int, reduction: int, algorithm: int, shape: int = 0, /
    ) -> None: ...
    @property
    def all_reduce_tensor(self) -> Callable[[Tensor, str, str, str], bool]: ...
    @property
    def all_gather_tensor(self) -> Callable[[Tensor, Tensor], bool]: ...
    @property
    def all_reduce_flat(self) -> Callable[[Tensor, str, bool], bool]: ...
    @property
    def reduce_scatter_flat(self) -> Callable[[Tensor, Tensor, str, bool], bool]: ...
    @property
    def all_gather_flat(self) -> Callable[[Tensor, Tensor, bool], bool]: ...
    @property
    def broadcast_flat(self) -> Callable[[Tensor, int, bool], bool]: ...
    def reduce_scatter(
        self, input: int, output: int, count: int, dtype: int, reduction: int, shape: int = 0, /
    ) -> None: ...
    def all_gather(
        self, input: int, output: int, count: int, dtype: int, shape: int = 0, /
    ) -> None: ...
    def broadcast(
        self, data: int, count: int, dtype: int, root: int, shape: int = 0, /
    ) -> None: ...
    def reduce(self, data: int, count: int, dtype: int, reduction: int, root: int, /) -> None: ...
    def send(self, data: int, bytes: int, dst: int, tag: int, /) -> Message: ...
    def receive(self, data: int, bytes: int, src: int, tag: int, /) -> Message:
        """``src`` may be -1, any rank."""

    def send_plain(self, tensor: Tensor, dst: int, tag: int, /) -> Message | None:
        """None if the tensor is not contiguous memory of the CPU."""

    def receive_plain(self, tensor: Tensor, src: int, tag: int, /) -> Message | None: ...
    def exchange(
        self,
        call: int,
        inputs: Sequence[int],
        input_bytes: Sequence[int],
        outputs: Sequence[int],
        output_bytes: Sequence[int],
        *numbers: int,
    ) -> None:
        """Numbers: dtype, root, count. Inputs or outputs are of all ranks, of the root, or none."""

    def announce(self, call: int, dtype: int, reduction: int, root: int, count: int, /) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

class Message:
    """A send or a receive, which uses its memory until it has ended."""

    def _source_rank(self) -> int: ...
    @property
    def has_ended(self) -> bool: ...
    def is_done(self) -> bool:
        """As ``has_ended``, after moving what can be moved now."""

    def wait(self, limit: float | None = None) -> bool:
        """Return False if ``limit`` seconds pass before the end."""

# ---- copies between devices ----
# They exist if build_info()["cuda"]; pipekernels/device/channel.py says what each call does.
# Devices are indices, -1 the CPU.

class P2PEvent:
    def __init__(self) -> None: ...
    def wait(self, device: int, stream: int, /) -> bool: ...
    def synchronize(self) -> None: ...
    def is_done(self) -> bool: ...

class P2PChannel:
    def __init__(self, source: int, target: int, slot_bytes: int) -> None: ...
    @property
    def leaving(self) -> int: ...
    @property
    def arriving(self) -> int: ...
    @property
    def has_peer_access(self) -> bool: ...
    @property
    def has_broken_link(self) -> bool: ...
    def send(
        self,
        event: P2PEvent,
        sources: list[Tensor],
        targets: list[Tensor],
        snapshots: list[Tensor],
        stream: int,
        threads: int,
        /,
    ) -> bool: ...
    def mark(self, event: P2PEvent, streams: list[int], /) -> bool: ...

# ---- collectives on CUDA ----
# They exist if build_info()["cuda"]. Every call names the stream, and whether its thread may wait
# for other ranks' streams.

def has_nvlink(a: int, b: int, /) -> bool: ...

class CudaCommunicator:
    def __init__(
        self,
        core: Communicator,
        device: int,
        symmetric_bytes: int,
        blocks: int = 64,
        parent: CudaCommunicator | None = None,
    ) -> None: ...
    @property
    def broken_links(self) -> str: ...
    @property
    def has_slow_links(self) -> bool: ...
    def allocate(self, sizes: Sequence[int], dtype: int, stream: int, /) -> object | None:
        """A DLPack capsule of a contiguous tensor; ``None`` if there is no room."""

    def all_reduce(
        self,
        data: int,
        count: int,
        dtype: int,
        reduction: int,
        algorithm: int,
        shape: int,
        stream: int,
        may_meet: bool,
        /,
    ) -> None: ...
    def reduce_scatter(
        self,
        input: int,
        output: int,
        count: int,
        dtype: int,
        reduction: int,
        shape: int,
        stream: int,
        may_meet: bool,
        /,
    ) -> None: ...
    def all_gather(
        self,
        input: int,
        output: int,
        count: int,
        dtype: int,
        shape: int,
        stream: int,
        may_meet: bool,
        /,
    ) -> None: ...
    def broadcast(
        self,
        data: int,
        count: int,
        dtype: int,
        root: int,
        shape: int,
        stream: int,
        may_meet: bool,
        /,
    ) -> None: ...
    def check(self) -> None: ...
    def synchronize(self) -> None: ...
    def set_wide_loads(self, wide: bool, /) -> None: ...
    def close(self, abort: bool) -> None: ...
