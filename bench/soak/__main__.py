"""``python -m bench.soak``: all trials and their table; a result file if they have full length."""

from __future__ import annotations

import argparse
import sys
import time

from bench import records
from bench.soak import losses, mismatches, sums, table

TRIALS = {  # How many, and of what.
    "sums": (10_000, "cases", lambda seed, count: sums.run(seed, list(range(count)))),
    "mismatches": (1_000, "cases", mismatches.run),
    "kills": (1_000, "killed ranks", losses.kill),
    "stops": (30, "stopped ranks", losses.stop),
}


def main() -> int:
    """The exit status: 1 if a survivor noticed a death too late; other failures raise."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (%(default)s)")
    parser.add_argument("--case", type=int, metavar="I", help="this case of the sums alone")
    for name, (count, what, _) in TRIALS.items():
        parser.add_argument(
            f"--{name}", type=int, default=count, metavar="N", help=f"{what} (%(default)s)"
        )
    args = parser.parse_args()
    if args.case is not None:
        print(table([sums.run(args.seed, [args.case])]))
        return 0
    rows = []
    for name, (_, _, run) in TRIALS.items():
        begin = time.perf_counter()
        if (count := getattr(args, name)) > 0:
            rows.append({**run(args.seed, count), "seconds": time.perf_counter() - begin})
    print(table(rows), flush=True)
    if all(getattr(args, name) >= count for name, (count, *_) in TRIALS.items()):
        conditions = {
            "ranks": "processes and threads, of one intra-op thread each",
            "times": "from the signal to the error on a survivor",
            "seed": args.seed,
        }
        print(f"\n{records.save('soak', rows, conditions)}")
    return int(any(row.get("late") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
