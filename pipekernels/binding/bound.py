"""Binds a rank to its place, and then becomes its program.

``pipekernels run`` starts it as a script. It imports neither torch nor the package: threads that
these start would not be bound.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys

PREFERRED, PREFERRED_MANY = 1, 5  # Of linux/mempolicy.h; the latter since Linux 5.15.
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def prefer_memory_of(nodes: list[int]) -> str | None:
    """Let this process's memory come from ``nodes`` while they have some.

    Returns:
        Why that is not possible, if it is not. Memory then comes from the node of the core that
        first touches it, which is one of ``nodes`` mostly.
    """
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"unknown on {platform.machine()}"
    bits = ctypes.c_uint64 * (max(nodes) // 64 + 1)
    mask = bits()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    mode = PREFERRED if len(nodes) == 1 else PREFERRED_MANY
    if libc.syscall(number, mode, ctypes.byref(mask), ctypes.c_ulong(64 * len(mask) + 1)) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def main(places: str, *command: str) -> None:
    """Bind this process, whose rank on this host is ``LOCAL_RANK``, and run ``command`` in it.

    Args:
        places: JSON, ``[[cpus, nodes], ...]`` by local rank.
        command: a program and its arguments.
    """
    cpus, nodes = json.loads(places)[int(os.environ["LOCAL_RANK"])]
    os.sched_setaffinity(0, cpus)
    failure = prefer_memory_of(nodes) if nodes else None
    if failure is not None:
        print(f"pipekernels run: no memory policy: {failure}", file=sys.stderr, flush=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
