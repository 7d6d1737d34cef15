"""``python -m demo``: three acts, each beside what a user would pick instead, in about a minute.

Exits with 1 if a result differs from that of the peer.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from demo import collectives, generate, picture, train
from demo.results import NOISE
from demo.sizes import FULL, QUICK

OLDEST = "2.10"  # compile_decoding needs it.


def main(arguments: list[str] | None = None) -> int:
    """Run the acts, draw the picture, print the summary; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, whose speeds say nothing")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for files")
    options = parser.parse_args(arguments)
    output: Path = options.output
    if TorchVersion(torch.__version__) < OLDEST:
        parser.error(f"the demo needs torch {OLDEST} or newer, this is {torch.__version__}")
    if output.exists() and not output.is_dir():
        parser.error(f"--output must name a folder, got the file {output}; name another path")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # Show progress in a pipe as well.
    begin = time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    sizes = QUICK if options.quick else FULL
    load = os.getloadavg()[0]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores with a load of {load:.1f}; speeds are "
        "those of idle cores only if it is near 0"
    )

    training = train.run(sizes, output)
    generation = generate.run(sizes, training.model, output)
    all_reduces = collectives.run(sizes)
    picture.draw(training, generation, all_reduces, output / "demo.png")

    acts: tuple[Any, ...] = (training, generation, all_reduces)
    speed_ups = [speed_up for act in acts for speed_up in act.speed_ups]
    faster = "; ".join(str(one) for one in speed_ups if one.ratio > NOISE)
    not_faster = "; ".join(str(one) for one in speed_ups if one.ratio <= NOISE)
    took, alone = (training.memory[name] for name in (train.PIPEKERNELS, train.ACCUMULATED))
    print(
        f"\n{output}/: demo.png, losses.csv, model.pt; {time.perf_counter() - begin:.0f} seconds"
        f"\n\nfaster      {faster or 'nothing'}\n"
        f"not faster  {not_faster or 'nothing'}\n"
        f"memory      a stage takes {took:.0f} MiB, one process with the whole model {alone:.0f}"
    )
    for number, act in enumerate(acts, 1):
        print(f"act {number}       {'; '.join(map(str, act.checks)) or 'left out'}")
    return 0 if all(check.holds for act in acts for check in act.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
