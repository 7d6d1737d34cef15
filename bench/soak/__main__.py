"""``python -m bench.soak``: all trials and their table; a result file if they have full length."""

from __future__ import annotations

import argparse
import sys

from bench import harness
from bench.soak import losses, mismatches, sums, table

SUMS, MISMATCHES, KILLS, STOPS = 10_000, 1_000, 1_000, 30


def main() -> int:
    """The exit status: 1 if a survivor noticed a death too late; other failures raise."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (%(default)s)")
    parser.add_argument("--sums", type=int, default=SUMS, metavar="N", help="cases (%(default)s)")
    parser.add_argument("--case", type=int, metavar="I", help="this case of the sums alone")
    parser.add_argument(
        "--mismatches", type=int, default=MISMATCHES, metavar="N", help="cases (%(default)s)"
    )
    parser.add_argument(
        "--kills", type=int, default=KILLS, metavar="N", help="killed ranks (%(default)s)"
    )
    parser.add_argument(
        "--stops", type=int, default=STOPS, metavar="N", help="stopped ranks (%(default)s)"
    )
    args = parser.parse_args()
    if args.case is not None:
        print(table(sums.run(args.seed, [args.case])))
        return 0

    rows = []
    for run, trials in (
        (lambda seed, count: sums.run(seed, list(range(count))), args.sums),
        (mismatches.run, args.mismatches),
        (losses.kill, args.kills),
        (losses.stop, args.stops),
    ):
        if trials > 0:
            rows += run(args.seed, trials)
    print(table(rows), flush=True)
    wanted = (args.sums, args.mismatches, args.kills, args.stops)
    if all(
        n >= default for n, default in zip(wanted, (SUMS, MISMATCHES, KILLS, STOPS), strict=True)
    ):
        conditions = {
            "ranks": "processes and threads, of one intra-op thread each",
            "times": "from the signal to the error on a survivor",
            "seed": args.seed,
        }
        print(f"\n{harness.save('soak', rows, conditions)}")
    return int(any(row.get("late") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
