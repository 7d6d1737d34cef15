"""Isolated steps: each is a process with a time limit, a log and an outcome."""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

SKIPPED = 77  # exit status of a command that cannot run here; its last line says why
PATIENCE = 5.0  # seconds to print stacks after a timeout, and to die


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step.

    Attributes:
        name: the step's.
        status: ``'passed'``, ``'failed'``, ``'timed out'``, ``'unkillable'`` (it did not end after
            SIGKILL), ``'not run'`` for lack of time or as another is unkillable, or ``'skipped'``
            as it cannot run here.
        seconds: its duration.
        note: one line: the reason or result, or what the step printed in lines ``note: ...``.
        output: all that it printed.
    """

    name: str
    status: str
    seconds: float
    note: str = ""
    output: str = ""

    @property
    def good(self) -> bool:
        """Whether nothing went wrong as far as it ran."""
        return self.status in ("passed", "skipped", "not run")


class Log:
    """Writes to a file and to the terminal, whole pieces at a time from any thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        with self._lock:
            for stream in (self._file, sys.stdout):
                stream.write(text)
                stream.flush()


class Running(abc.ABC):
    """A process that leads a session, so that it can be killed with all its child processes.

    On a timeout it is first sent SIGABRT: Python's fault handler then prints the stacks of all
    threads. A process that a driver holds does not end even after SIGKILL.

    Attributes:
        pid: its id, and its session's.
        unkillable: ids of processes that did not end. They hold the GPU, so nothing else is to use
            it.
    """

    unkillable: ClassVar[list[int]] = []
    pid: int

    @property
    @abc.abstractmethod
    def output(self) -> str:
        """All that it has printed so far."""

    @abc.abstractmethod
    def join(self, seconds: float) -> int | None:
        """Wait at most so long for its end; the exit status, or None if it still runs."""

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if it did not end in time and was killed."""
        status = self.join(max(0.0, seconds))
        if status is None:
            self._signal(signal.SIGABRT)
            self.join(PATIENCE)
        self._signal(signal.SIGKILL)  # what is left of its session
        if self.join(PATIENCE) is None:
            self.unkillable.append(self.pid)
        return status

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Process(Running):
    """A command.

    Args:
        command: what to run.
        environment: added to this process's own.
        log: if given, receives each line of output at once; ``output`` has all lines.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Log | None = None
    ) -> None:
        self._lines: list[str] = []
        self._log = log
        defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=os.environ | defaults | dict(environment),
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), daemon=True
        )
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def join(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def wait(self, seconds: float) -> int | None:
        status = super().wait(seconds)
        self._reader.join(PATIENCE)  # Processes that left the session may keep the output open.
        return status

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.append(line)
            if self._log is not None:
                self._log.write(line)


def run_step(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    deadline: float,
    log: Log | None,
    *,
    live: bool = True,
) -> Outcome:
    """Run one command until ``deadline`` (of ``time.monotonic``) at most, unless a process of an
    earlier step cannot be killed.

    Args:
        log: where its output goes, if anywhere.
        live: log it line by line; otherwise at its end, for steps that run in parallel.
    """
    begin = time.monotonic()
    if deadline <= begin:
        return Outcome(name, "not run", 0.0, "no time was left for it")
    if Process.unkillable:
        return Outcome(name, "not run", 0.0, f"process {Process.unkillable[0]} holds the GPU")
    title = f"\n==== {name}\n"
    if log is not None and live:
        log.write(title)
    try:
        process = Process(command, environment, log if live else None)
    except OSError as error:
        return Outcome(name, "failed", 0.0, f"it cannot be started: {error}")
    status = process.wait(deadline - begin)
    output = process.output
    if log is not None and not live:
        log.write(title + output)
    seconds = time.monotonic() - begin
    lines = output.strip().splitlines() or [""]
    if process.pid in Process.unkillable:
        note = f"process {process.pid} did not end after SIGKILL: {lines[-1]}"
        return Outcome(name, "unkillable", seconds, note, output)
    if status is None:
        return Outcome(name, "timed out", seconds, lines[-1], output)
    if status == SKIPPED:
        return Outcome(name, "skipped", seconds, lines[-1], output)
    if status:
        return Outcome(name, "failed", seconds, f"exit status {status}: {lines[-1]}", output)
    notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
    return Outcome(name, "passed", seconds, "; ".join(notes), output)
