"""A fake of CUDA devices: CPU tensors, and a record of streams and events that detects races.

The fake encodes our assumptions about CUDA. It cannot detect violations of a rule that it lacks or
has wrong; only tests on a GPU can.

Tensors are on the CPU; a tag on their memory says which device they pretend to be on. Each
operation is assigned to a stream, as torch does. Vector clocks over the streams and the calling
thread give the *happens-before* order that events establish. A :class:`Race` is raised if

* memory is accessed and the previous write, or a read before this write, need not have happened;
* memory is freed while a stream may still use it, and the stream it was allocated on, to which the
  allocator may give it again, does not wait for that use;
* pinned memory is freed while a stream may still use it, unless the thread has waited for that;
* an asynchronous copy uses CPU memory that is not pinned;
* an operation mixes devices, or the thread reads a value that is on a device.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipekernels.device import channel, streams
from pipekernels.pipeline.engine import stages
from support.cuda.recorded_channel import RecordedChannel, RecordedEvent

p2p_copy = importlib.import_module("pipekernels.ops.device_copy")

CPU = torch.device("cpu")
_UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

Clock = dict["Agent", int]


class Race(AssertionError):
    """Accesses to memory are not ordered, or another rule in the module's docstring is broken."""


class Agent:
    """A sequence of operations: a stream, or the calling thread."""

    def __init__(self, machine: "Machine", device: torch.device, name: str) -> None:
        self.machine, self.device, self.name = machine, device, name
        self.clock: Clock = {}
        self.is_captured = False  # Tests set it.

    def __repr__(self) -> str:
        return self.name

    def follow(self, clock: Clock) -> None:
        for agent, time in clock.items():
            if self.clock.get(agent, 0) < time:
                self.clock[agent] = time

    def tick(self) -> int:
        """The time of an operation issued now, after everything that the thread has waited for."""
        self.follow(self.machine.host.clock)
        time = self.clock[self] = self.clock.get(self, 0) + 1
        return time

    def record_event(self) -> "Point":
        self.follow(self.machine.host.clock)
        return Point(self.machine, dict(self.clock))

    def wait_event(self, event: Any) -> None:
        self.machine.poll()
        event.wait(self)


class Point:
    """A recorded event."""

    def __init__(self, machine: "Machine", clock: Clock) -> None:
        self.machine, self.clock = machine, clock

    def wait(self, stream: Agent) -> None:
        stream.follow(self.clock)

    def has_passed(self) -> bool:
        """Whether the thread knows that this point has been reached."""
        known = self.machine.host.clock
        return all(known.get(agent, 0) >= time for agent, time in self.clock.items())

    def synchronize(self) -> None:
        self.machine.poll()
        self.machine.host_waits += 1
        self.machine.host.follow(self.clock)


class Memory:
    """One allocation."""

    def __init__(self, storage: Any, device: torch.device, pool: Agent | None) -> None:
        self.reference = StorageWeakRef(storage)
        self.device = device
        self.pool = pool  # The stream it was allocated on; None on the CPU.
        self.pinned = False
        self.written: tuple[Agent, int] | None = None
        self.read: dict[Agent, int] = {}


class Copy:
    """A copy between devices: stream, time, and the stream's clock when the copy was issued."""

    def __init__(self, source: torch.device, target: torch.device, agent: Agent, time: int) -> None:
        self.source, self.target, self.agent, self.time = source, target, agent, time
        self.after = dict(agent.clock)


class Machine:
    """The CPU and its CUDA devices: their streams, memory and current streams."""

    def __init__(self) -> None:
        self.host = Agent(self, CPU, "thread")
        self.host_waits = 0
        self.copies: list[Copy] = []
        self.streams: list[Agent] = []
        self.placing = True  # Whether Tensor.to may move tensors; such moves are not recorded.
        self._memory: dict[int, Memory] = {}
        self._default: dict[torch.device, Agent] = {}
        self._current: dict[torch.device, Agent] = {}
        self.device = torch.device("cuda", 0)  # The current one.
        self._factory: torch.device | None = None
        self._is_unseen = False

    # ---- streams ----

    def default(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return streams.HOST
        if device not in self._default:
            self._default[device] = Agent(self, device, f"default stream of {device}")
        return self._default[device]

    def current(self, device: torch.device) -> Any:
        return self._current.get(device) or self.default(device)

    def currents(self, devices: Iterable[torch.device]) -> list[Any]:
        return [self.current(device) for device in (*devices, self.device)]

    def make_current(self, found: Iterable[Any]) -> None:
        for stream in found:
            self._current[stream.device] = stream
            self.device = stream.device

    def make_device_current(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.device = device

    def new(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return streams.HOST
        self.streams.append(Agent(self, device, f"stream {len(self.streams)} of {device}"))
        return self.streams[-1]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        if stream is streams.HOST:
            yield
            return
        before = self._current.get(stream.device)
        self._current[stream.device] = stream
        try:
            yield
        finally:
            if before is None:
                del self._current[stream.device]
            else:
                self._current[stream.device] = before

    def synchronize(self) -> None:
        for agent in [*self.streams, *self._default.values()]:
            self.host.follow(agent.clock)

    # ---- memory ----

    def empty_like(self, tensors: Any, device: torch.device, stream: Any) -> list[torch.Tensor]:
        with self.using(stream):
            return [torch.empty_like(tensor, device=device) for tensor in tensors]

    def pinned_empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
        self.memory(tensor).pinned = True
        return tensor

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        strides = torch.empty_like(tensor, device="meta").stride()
        return self.pinned_empty(tensor.shape, strides, tensor.dtype)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        known = self._memory.get(tensor.untyped_storage()._cdata)
        return CPU if known is None else known.device

    def memory(self, tensor: torch.Tensor, device: torch.device = CPU) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            pool = None if device.type != "cuda" else self.current(device)
            self._memory[key] = Memory(storage, device, pool)
        return self._memory[key]

    def poll(self) -> None:
        """Check the memory that was freed since the last call.

        Must be called before a stream waits for another stream, or the thread for a stream.
        """
        for key in [k for k, m in self._memory.items() if m.reference.expired()]:
            memory = self._memory.pop(key)
            owner = memory.pool or self.host  # Others get pinned memory from the thread.
            if memory.pool is None and not memory.pinned:
                continue
            owner.follow(self.host.clock)
            uses = dict(memory.read)
            if memory.written is not None:
                agent, time = memory.written
                uses[agent] = max(uses.get(agent, 0), time)
            for agent, time in uses.items():
                if owner.clock.get(agent, 0) < time and agent is not owner:
                    raise Race(f"memory goes back to {owner} while {agent} uses it")

    def access(self, agent: Agent, reads: list[Memory], writes: list[Memory], what: str) -> int:
        time = agent.tick()
        for memory in reads:
            self._check(agent, memory.written, f"{what} reads what")
            memory.read[agent] = time
        for memory in writes:
            self._check(agent, memory.written, f"{what} writes what")
            for use in memory.read.items():
                self._check(agent, use, f"{what} writes what is read and")
            memory.written, memory.read = (agent, time), {}
        return time

    @staticmethod
    def _check(agent: Agent, before: tuple[Agent, int] | None, what: str) -> None:
        if before is not None and agent.clock.get(before[0], 0) < before[1]:
            raise Race(f"{what} {before[0]} may not have done, on {agent}")

    # ---- operations ----

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Operations in the body are not recorded: they are how a fake computes a result."""
        before, self._is_unseen = self._is_unseen, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_unseen = before

    def copy(
        self,
        agent: Agent,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        of: torch.Tensor | None = None,
        between: tuple[torch.device, torch.device] | None = None,
    ) -> None:
        """An asynchronous copy of the extension's, which torch does not see.

        Args:
            of: the tensor that is read, if ``source`` only has its values.
            between: the devices of a copy that is to be listed in :attr:`copies`.
        """
        self.poll()
        memories = [self.memory(source if of is None else of), self.memory(target)]
        for memory in memories:
            if agent is not self.host and memory.device == CPU and not memory.pinned:
                raise Race("a copy goes on with CPU memory that is not pinned")
        time = self.access(agent, memories[:1], memories[1:], "a copy")
        if between is not None:
            self.copies.append(Copy(*between, agent, time))
        with self.unseen():
            target.copy_(source)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_unseen:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = _tensors((args, kwargs))
        if name == "copy_":
            return self._copy(func, args, kwargs)
        devices = {self.device_of(t) for t in inputs if t.dim() or self.device_of(t) != CPU}
        if len(devices) > 1:
            raise Race(f"{name} mixes devices: {sorted(map(str, devices))}")
        device = self._factory or next(iter(devices), CPU)
        if name in ("_local_scalar_dense", "equal") and device != CPU:
            raise Race(f"{name} makes the thread read what is on {device}")
        result = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        made = [t for t in _tensors(result) if t.untyped_storage()._cdata not in known]
        written = [self.memory(t, device) for t in made]
        if func.is_view or name in _UNTOUCHED or name == "detach":
            return result
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [self.memory(t) for t in _tensors(value)]
        agent = self.host if device == CPU else self.current(device)
        self.access(agent, [self.memory(t) for t in inputs], written, name)
        return result

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.poll()
        target, source, *rest = args
        to, of = self.memory(target), self.memory(source)
        overlapped = bool(rest[0] if rest else kwargs.get("non_blocking", False))
        result = func(*args, **kwargs)
        if to.device == of.device:
            agent = self.host if to.device == CPU else self.current(to.device)
            self.access(agent, [of], [to], "copy_")
            return result
        if "cuda" in (to.device.type, of.device.type) and CPU in (to.device, of.device):
            agent = self.current(of.device if to.device == CPU else to.device)
            host = to if to.device == CPU else of
            if overlapped and not host.pinned:
                raise Race("a copy goes on with CPU memory that is not pinned")
            time = self.access(agent, [of], [to], "copy_")
            self.copies.append(Copy(of.device, to.device, agent, time))
            if not overlapped:
                self.host_waits += 1
                self.host.follow(agent.clock)
            return result
        leaving, arriving = self.current(of.device), self.current(to.device)
        leaving.follow(arriving.clock)
        time = self.access(leaving, [of], [to], "copy_")
        self.copies.append(Copy(of.device, to.device, leaving, time))
        arriving.follow(leaving.clock)
        return result

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call of a function of torch, which is to see the pretended devices."""
        if self._is_unseen:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return self.device_of(args[0])
        if func is torch.Tensor.is_pinned:
            return self.memory(args[0]).pinned
        if func is torch.Tensor.to:
            return self._place(args, kwargs)
        if func is p2p_copy._op:  # Its kernels are Python and must see the pretended devices, too.
            return self._p2p_copy(*args)
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "meta":
            return func(*args, **kwargs)
        # Calls inside this one see CPU as the device, so the outermost call names the device.
        before, self._factory = self._factory, self._factory or torch.device(device)
        try:
            return func(*args, **{**kwargs, "device": CPU})
        finally:
            self._factory = before

    def _p2p_copy(self, tensors: Any, device: torch.device, backward: bool) -> Any:
        with _Functions(self):
            if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
                return list(p2p_copy._P2PCopy.apply(device, backward, *tensors))
            return p2p_copy._copy(tensors, device, backward)

    def _place(self, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        wanted = [a for a in (*rest, kwargs.get("device")) if isinstance(a, (torch.device, str))]
        if not wanted or torch.device(wanted[0]) == self.device_of(tensor):
            dtypes = [a for a in rest if isinstance(a, torch.dtype)]
            return tensor.to(*dtypes) if dtypes else tensor
        if not self.placing:
            raise Race("Tensor.to during a run: it would order the copy behind both devices' work")
        with torch.no_grad():
            placed = tensor.detach().clone()
        self._memory.pop(placed.untyped_storage()._cdata, None)
        self.memory(placed, torch.device(wanted[0]))
        return placed


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


class _Operations(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.machine.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.machine.call(func, args, kwargs or {})


@contextmanager
def machine(*, peers: bool = True) -> Iterator[Machine]:
    """A machine with CUDA devices of any index.

    Args:
        peers: whether they can read each other's memory.
    """
    made = Machine()

    def native_channel(source: torch.device, target: torch.device) -> RecordedChannel:
        can_write = peers and {source.type, target.type} == {"cuda"}
        return RecordedChannel(made, source, target, channel.SLOT_BYTES, can_write)

    engine = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _Functions(made):  # torch.autograd.backward may have disabled the mode.
            return engine(*args, **kwargs)

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in (
            "current",
            "currents",
            "default",
            "make_current",
            "using",
            "make_device_current",
        ):
            patch.setattr(streams, name, getattr(made, name))
        patch.setattr(streams, "external", lambda device, handle: handle)
        patch.setattr(streams, "current_handle", made.current)
        patch.setattr(streams, "empty_like", made.empty_like)
        patch.setattr(channel, "native_channel", native_channel)
        patch.setattr(channel, "event_class", lambda: RecordedEvent)
        patch.setattr(channel, "_channels", {})
        patch.setattr(channel, "pinned_like", made.pinned_like)
        patch.setattr(channel, "SLOT_BYTES", 96)
        patch.setattr(torch.autograd, "_engine_run_backward", run_backward)
        patch.setattr(stages, "generators_of", lambda devices: [torch.default_generator])
        stack.enter_context(_Functions(made))
        stack.enter_context(_Operations(made))
        yield made
