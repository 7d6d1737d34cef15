"""``pipekernels run``: torchrun, with each rank bound to its share of the host's cores."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from pipekernels.numa import bound
from pipekernels.numa.topology import places, read_topology, table


def run(arguments: Sequence[str]) -> None:
    """Start ranks as ``torchrun`` does, and wait for them.

    Args:
        arguments: as for torchrun, except that ``--nproc-per-node`` defaults to ``auto``, one rank
            per memory node; and ``--dry-run``, which prints where ranks would run. Ranks get
            ``OMP_NUM_THREADS``, the number of their cores, unless it is already set.

    Raises:
        ValueError: more ranks than cores, or options that do not go together.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank has failed.
    """
    parser = torchrun.get_args_parser()
    parser.prog = "pipekernels run"
    parser.add_argument("--dry-run", action="store_true", help="print where ranks would run")
    parser.set_defaults(nproc_per_node="auto")
    options = parser.parse_args(arguments)
    if getattr(options, "numa_binding", None) is not None:
        raise ValueError(
            "--numa-binding binds ranks by GPU index, but pipekernels run binds them to shares of "
            "the cores; use torchrun with --numa-binding"
        )
    topology = read_topology()
    wanted = options.nproc_per_node
    if wanted != "auto" and not wanted.isdecimal():
        raise ValueError(f"--nproc-per-node must be a number or 'auto', got {wanted!r}")
    ranks = places(topology, len(topology.nodes) if wanted == "auto" else int(wanted))
    shown = table(topology, ranks)
    if options.dry_run:
        print(shown)
        return
    print(shown, file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", str(ranks[0].threads))
    # torchrun starts `bound` in place of the program: it binds its process, and then becomes the
    # program, whose command has to be complete.
    program = options.training_script
    command = [program, *options.training_script_args]
    if not options.no_python:
        command = [sys.executable, "-u", *(["-m"] if options.module else []), *command]
    options.nproc_per_node = str(len(ranks))
    options.module = options.no_python = options.run_path = False
    options.training_script = bound.__file__
    options.training_script_args = [json.dumps([place.cpus for place in ranks]), *command]
    try:
        torchrun.run(options)
    except ChildFailedError as error:  # Which names the script that binds.
        raise ChildFailedError(program, error.failures) from None
