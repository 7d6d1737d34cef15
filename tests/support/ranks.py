"""Runs a function on every rank of a communicator; ranks are threads or processes.

Processes are forked from a server that has imported torch, and transformers where the tests have,
so that a new one takes some 50 ms. The server has not initialized CUDA, so its children can.
"""

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipekernels import Communicator, PeerError
from support import TIMEOUT

PRELOADED = [
    "torch.distributed.fsdp",
    "pytest",
    "numpy",
    "pipekernels.comm.communicator",
]
# Takes about half as long as the modules above, so only where a test has imported transformers.
PRELOADED_WITH_TRANSFORMERS = [
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate",
    "peft",
]


def run_threads(
    world_size: int,
    body: Callable[[Communicator], Any],
    *,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Run ``body(communicator)`` on a thread per rank; returns the results in rank order.

    If ranks raise, raises one of their errors, a PeerError only if there is no other.
    When a rank fails, its communicator aborts the others.
    """
    communicators = Communicator.threads(world_size, timeout=timeout)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(member: Communicator) -> None:
        torch.get_num_threads()  # A new thread ignores the number that is set until it asks for it.
        try:
            with member:
                results[member.rank] = body(member)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in communicators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerError)), errors[0])
    return results


def context_of(start_method: str) -> Any:
    """A context of :mod:`multiprocessing`. The first process decides what the server imports."""
    context = multiprocessing.get_context(start_method)
    more = PRELOADED_WITH_TRANSFORMERS if "transformers" in sys.modules else []
    context.set_forkserver_preload(PRELOADED + more)
    return context


def run_processes(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    killed: tuple[int, ...] = (),
    prepare: tuple[Callable[..., None], Any] | None = None,
    start_method: str = "forkserver",
) -> list[Any]:
    """Run ``body(communicator, *args)`` on a process per rank; returns the results in rank order.

    Args:
        world_size: the number of ranks.
        body: a function at the top level of a module.
        args: more arguments for it; they must be picklable.
        timeout: the communicator's, in seconds.
        killed: ranks that die of a signal; they have no result.
        prepare: a function and its second argument (the first is the rank); called before all else.
        start_method: of :mod:`multiprocessing`.

    If ranks raise, raises one of their errors, a PeerError only if there is no other.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = context_of(start_method)
        ends = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_serve,
                args=(sender, folder, rank, world_size, timeout, prepare, body, args),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(ends)
        ]
        try:
            for process, (_, sender) in zip(processes, ends, strict=True):
                process.start()
                sender.close()
            answers = _collect([receiver for receiver, _ in ends])
        finally:
            for process in processes:
                process.join(1.0 if process.pid is not None else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    errors: list[BaseException] = []
    for rank, answer in enumerate(answers):
        if rank in killed:
            assert answer is None, f"rank {rank} was to be killed"
        elif answer is None:
            errors.append(RuntimeError(f"rank {rank} ended without an answer"))
        elif isinstance(answer[1], BaseException):
            errors.append(answer[1])
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerError)), errors[0])
    return [answer and answer[0] for answer in answers]


def run_group(
    world_size: int, body: Callable[..., Any], *args: Any, hosts: str = "", **options: Any
) -> list[Any]:
    """As :func:`run_processes`, run ``body(rank, *args)`` with a default group of the backend
    ``pipekernels``, which the module of ``body`` must have registered.

    Args:
        hosts: one letter per rank, the host that it pretends to be on; empty for the real host.
    """
    return run_processes(world_size, _in_group, hosts, body, args, **options)


def _in_group(
    comm: Communicator, hosts: str, body: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    store = dist.PrefixStore("group", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    if hosts:
        os.environ["PIPEKERNELS_HOST_ID"] = hosts[comm.rank]
    place: Any = {"rank": comm.rank, "world_size": comm.world_size}
    dist.init_process_group("cpu:pipekernels", store=store, **place)
    return body(comm.rank, *args)


def _serve(
    sender: Connection,
    folder: str,
    rank: int,
    world_size: int,
    timeout: float,
    prepare: tuple[Callable[..., None], Any] | None,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        if prepare is not None:
            prepare[0](rank, prepare[1])
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        with Communicator.from_process_group(timeout=timeout) as communicator:
            answer: Any = (body(communicator, *args), None)
    except BaseException as error:  # noqa: BLE001
        if hasattr(error, "add_note"):  # From Python 3.11 on.
            error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        answer = None, error
    sender.send(answer)
    sender.close()
    os._exit(0)  # Do not wait for peers, as destroying the group would.


def _collect(receivers: list[Connection]) -> list[tuple[Any, Any] | None]:
    answers: dict[Any, tuple[Any, Any] | None] = {}
    waiting: list[Any] = list(receivers)
    while waiting:
        for receiver in list[Any](wait(waiting)):
            try:
                answers[receiver] = receiver.recv()
            except EOFError:  # The process has died.
                answers[receiver] = None
            waiting.remove(receiver)
    return [answers[receiver] for receiver in receivers]


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream current in this thread; does nothing for the CPU.

    On CUDA, backwards also run on the calling thread. All ranks of a device would otherwise share
    autograd's one thread for it, and could deadlock: one rank's backward waits for a peer's, which
    that thread runs only afterwards.
    """
    if device.type == "cpu":
        yield
        return
    with (
        torch.cuda.stream(torch.cuda.Stream(device)),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def on(device: torch.device, body: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function that a rank on ``device`` calls: ``body(communicator, *args, *further
    arguments)``.

    It raises if the communicator has failed on the device. It can be pickled if ``body`` can.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # Tensors made for ``body`` are then ready in every stream.
    return functools.partial(_run, device, body, args)


def _run(
    device: torch.device,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    communicator: Communicator,
    *more: Any,
) -> Any:
    with own_stream(device):
        result = body(communicator, *args, *more)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
            communicator.synchronize()  # Raises errors of the device.
    return result


def body_of(module: str, name: str, *args: Any) -> Any:
    """Run the body of a test that :func:`as_test` has made."""
    return getattr(importlib.import_module(module), name).body(*args)


def as_test(start: Callable[..., object], body: Callable[..., Any], fixture: str = "") -> Any:
    """A test in the place of ``body``, with the parameters that ``body`` has behind the first one.

    It calls ``start`` with the value of ``fixture``, if that is named, with ``body``, which can be
    pickled though its name stands for the test, and with the values of the parameters.
    """
    first = [fixture] * bool(fixture)
    names = first + list(inspect.signature(body).parameters)[1:]

    def test(**values: Any) -> None:
        call = functools.partial(body_of, body.__module__, body.__name__)
        given = [values[name] for name in names]
        start(*given[: len(first)], call, *given[len(first) :])

    made: Any = test
    made.__name__, made.__doc__, made.__module__ = body.__name__, body.__doc__, body.__module__
    kind = inspect.Parameter.KEYWORD_ONLY
    made.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    made.body = body
    return made


def in_group(world_size: int, **options: Any) -> Callable[[Callable[..., object]], Any]:
    """Make a test of ``body(rank, *others)``, see :func:`as_test`, by :func:`run_group`."""
    return functools.partial(as_test, functools.partial(run_group, world_size, **options))


def on_ranks(
    world_size: int, *runs: Callable[..., Any], **options: Any
) -> Callable[[Callable[..., object]], Any]:
    """Make a test of ``body(communicator, *others)``, see :func:`as_test`, on ranks that each of
    ``runs`` starts, processes if there is none; with a ``device`` among the others also on CUDA."""
    runs = runs or (run_processes,)
    marks = {run_processes: pytest.mark.processes}
    params = [pytest.param(run, marks=marks.get(run, ()), id=run.__name__) for run in runs]

    def start(run: Callable[..., Any], body: Callable[..., Any], *others: Any) -> None:
        devices = [each for each in others if isinstance(each, torch.device)]
        device = devices[0] if devices else torch.device("cpu")
        run(world_size, on(device, body, *others), **options)

    return lambda body: pytest.mark.parametrize("run", params)(as_test(start, body, "run"))


def leakable_resources() -> list[str]:
    """What a communicator could leak: names in /dev/shm, descriptors, mappings."""
    others = ("sem.", "torch_")  # Of processes that are not ours.
    names = [name for name in os.listdir("/dev/shm") if not name.startswith(others)]
    found = [f"/dev/shm/{name}" for name in names]
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The descriptor of the listing is closed.
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "pidfd" in target or "memfd" in target:
                found.append(target)
    mappings = re.findall(r"(\d+) +/memfd:pipekernels", Path("/proc/self/maps").read_text())
    return sorted(found + [f"mapping of inode {inode}" for inode in set(mappings)])
