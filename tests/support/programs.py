"""Runs commands, and Python programs in processes that :mod:`support.ranks`' server forks.

A program that is started by torchrun imports torch once for the agent and once for each rank, which
takes longer than most of the programs themselves. A forked process has it. It differs from a fresh
one in that handlers of :mod:`atexit` do not run.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.ranks import context_of

OF_TESTS = {str(Path(__file__).parents[level]) for level in (1, 2)}


def run(
    *command: str | Path, code: int | None = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Fails with what the command prints unless it ends with ``code``, if that is not None."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    assert code in (None, done.returncode), f"{command}: {done.stdout}{done.stderr}"
    return done


def python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """As :func:`run`, by this Python."""
    return run(sys.executable, *arguments, **options)


def run_program(path: Path, *arguments: str, folder: Path, ranks: int | None = None) -> str:
    """Run a program and return what all its processes print, in rank order.

    Args:
        path: of the program.
        arguments: what follows the program on the command line.
        folder: the current folder of the processes.
        ranks: the number of processes, with the environment that torchrun would give them; if None,
            one process, as ``python`` would start it.

    As under torchrun, all processes are killed when one fails. Fails with the output of all of them
    unless all exit with 0.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as logs:
        outputs = [(Path(logs, f"{n}.out"), Path(logs, f"{n}.err")) for n in range(ranks or 1)]
        processes = []
        for rank, files in enumerate(outputs):
            environment = dict(os.environ)
            if ranks is not None:
                environment |= _set_by_torchrun(rank, ranks, store.port)
            job = (str(path), arguments, folder, environment, files)
            processes.append(context_of("forkserver").Process(target=_run, args=job))
        try:
            for process in processes:
                process.start()
            running = {process.sentinel: process for process in processes}
            while running and not any(process.exitcode for process in processes):
                ended = wait(list(running))
                for sentinel in ended:
                    running.pop(sentinel).join()
        finally:
            for process in processes:
                if process.is_alive():
                    with contextlib.suppress(ProcessLookupError):  # It has no group yet.
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                    process.join()
        printed = [[file.read_text() for file in files] for files in outputs]
    assert all(process.exitcode == 0 for process in processes), "\n".join(
        f"---- process {n} ended with {process.exitcode}:\n{''.join(texts)}"
        for n, (process, texts) in enumerate(zip(processes, printed, strict=True))
    )
    return "".join(out for out, _ in printed)


def _set_by_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torch and the programs read; the store at ``port`` is the agent's."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _run(
    path: str,
    arguments: tuple[str, ...],
    folder: Path,
    environment: dict[str, str],
    files: tuple[Path, Path],
) -> None:
    os.setsid()  # What the program starts is killed with it.
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()  # It is that of the server when it started.
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # OpenMP has read it when torch was imported.
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [path, *arguments]
    others = [each for each in sys.path if os.path.abspath(each) not in OF_TESTS]
    sys.path = [str(Path(path).parent), *others]
    os.chdir(folder)
    runpy.run_path(path, run_name="__main__")
