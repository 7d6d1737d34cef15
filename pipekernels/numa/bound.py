"""Binds a rank to its cores, then replaces itself by the rank's program.

``pipekernels run`` starts this script. It imports neither torch nor the package, whose threads
would not be bound. Memory follows the cores: by default Linux allocates it on the node of the core
that first touches it.
"""

from __future__ import annotations

import json
import os
import sys


def main(places: str, *command: str) -> None:
    """Bind this process, whose rank on this host is ``LOCAL_RANK``, and run ``command`` in it.

    Args:
        places: JSON, the CPUs of each local rank.
        command: a program and its arguments.
    """
    os.sched_setaffinity(0, json.loads(places)[int(os.environ["LOCAL_RANK"])])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
