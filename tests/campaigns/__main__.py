"""`python -m campaigns [--quick] [NAME...]`: runs the named campaigns, or all; ends with 1 if any went wrong."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from support.mounting import Session

from campaigns import copies, programs, twins, versions
from campaigns.harness import Campaign, run_campaign

CAMPAIGNS: dict[str, Campaign] = {
    "fio-psync": partial(programs.fio, "psync", ["--direct=1"]),
    "fio-libaio": partial(programs.fio, "libaio", ["--direct=1", "--iodepth=16"]),
    "fio-io_uring": partial(programs.fio, "io_uring", ["--direct=1", "--iodepth=16"]),
    "fio-mmap": partial(programs.fio, "mmap", []),
    "twins": twins.twins,
    "twins-killed": twins.killed_twins,
    "twins-killed-cuda": partial(twins.killed_twins, driver="cuda"),
    "attached": programs.killed,
    "daemons-killed": programs.killed_daemons,
    "daemons-killed-held": partial(programs.killed_daemons, hold=True),
    "fsx": programs.exercised,
    "fsx-killed": partial(programs.killed_daemons, names=programs.EXERCISERS, memory=programs.EXERCISED),
    "versions": versions.followed,
    "copies": copies.synced,
    "fuzz": programs.attacked,
    "stress-ng": programs.stress_ng,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaigns", description="Long campaigns of real programs on gpufs mounts.")
    parser.add_argument("--quick", action="store_true", help="a minute in all")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CAMPAIGNS)}; all without one")
    options = parser.parse_args()
    unknown = set(options.names) - set(CAMPAIGNS)
    if unknown:
        parser.error(f"unknown campaigns: {', '.join(sorted(unknown))}")
    session = Session()
    failed = []
    try:
        for name in options.names or CAMPAIGNS:
            if not run_campaign(session, name, CAMPAIGNS[name], quick=options.quick):
                failed.append(name)
    finally:
        report = session.close()
    if report:
        print(f"watchdog:\n{report}")
    print(f"campaigns: {'failed: ' + ', '.join(failed) if failed else 'all good'}", flush=True)
    return 1 if failed or report else 0


if __name__ == "__main__":
    sys.exit(main())
