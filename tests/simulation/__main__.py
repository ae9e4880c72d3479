"""`python -m tests.simulation --steps 1000000 --seed N`: the engine's decisions, at length."""

import argparse
import sys

from purestep.simulation.fairness import FEW_ROWS, MIXED, longest_wait
from purestep.simulation.longrun import Failure, configs_for, long_run, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--configs", type=int, help="default: one for 2,000 steps, at least 50")
    parser.add_argument("--jobs", type=int, default=1, help="processes; they change no result")
    parser.add_argument("--wait", action="store_true", help="try nothing but the bounded wait")
    args = parser.parse_args()
    if args.wait:
        print(f"ranks alike, slots are the limit: {longest_wait(args.steps, args.seed)}")
        mixed = longest_wait(args.steps, args.seed, MIXED, **FEW_ROWS)
        print(f"ranks that differ, rows are the limit: {mixed}")
        return 0
    try:
        configs = args.configs or configs_for(args.steps)
        coverage = long_run(args.steps, args.seed, configs, num_jobs=args.jobs)
    except Failure as failure:
        print(report(failure, args.seed))
        return 1
    print(coverage.table())
    print(", ".join(f"{count:,} {kind}" for kind, count in coverage.events.most_common()))
    steps = coverage.events["step"]
    print(
        f"no law was broken in {steps:,} steps of {coverage.configs:,} whole configs, each with "
        f"random numbers of its own, seed {args.seed}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
