#!/usr/bin/env python3
"""Two tables of gpu_op_times: which operations became slower.

    build/tests/gpu_op_times --json new.json
    scripts/bench/compare_ops.py OLD NEW [--tolerance 0.05] [--only PREFIX]

An operation has slipped when its median time is longer by more than the tolerance. The exit code is 1 when one has or is missing from
the new table, 2 when a table cannot be read. Both tables should come from one GPU: a difference of GPUs, libraries or clocks is said
first."""
import argparse
import json
import sys


class Unreadable(Exception):
    pass


def read(path):
    """The table as a whole, and its medians in microseconds by name."""
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
        times = {row["name"]: float(row["us"]) for row in table["rows"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"{path} is no table of gpu_op_times: {error!r}") from error
    if not all(us > 0 for us in times.values()):
        raise Unreadable(f"{path} has times that are not above 0")
    return table, times


def differences_of_setting(old, new):
    lines = []
    for what in ("gpu", "libraries"):
        if old.get(what) != new.get(what):
            lines.append(f"{what}: {old.get(what)} and {new.get(what)}")
    for what in ("sm_clock_mhz", "throttle"):
        values = [table.get("state_after", {}).get(what) for table in (old, new)]
        if values[0] != values[1]:
            lines.append(f"{what} at the end: {values[0]} and {values[1]}")
    return lines


def compare(old, new, tolerance):
    """Lines to print, and how many operations slipped or are missing."""
    lines, bad = [], 0
    for name, us in old.items():
        if name not in new:
            lines.append(f"{name:40s} {us:10.1f} {'missing':>10s}")
            bad += 1
            continue
        ratio = new[name] / us
        if 1 / (1 + tolerance) <= ratio <= 1 + tolerance:
            continue
        lines.append(f"{name:40s} {us:10.1f} {new[name]:10.1f} {ratio:7.3f}  {'slower' if ratio > 1 else 'faster'}")
        bad += ratio > 1
    return lines, bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--tolerance", type=float, default=0.05, help="relative, default 0.05")
    parser.add_argument("--only", default="", metavar="PREFIX", help="operations whose names begin so")
    args = parser.parse_args()
    if not 0 <= args.tolerance < 10:
        parser.error(f"--tolerance is a share such as 0.05, not {args.tolerance}")
    try:
        (old_table, old), (new_table, new) = read(args.old), read(args.new)
    except Unreadable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    old, new = ({name: us for name, us in times.items() if name.startswith(args.only)} for times in (old, new))
    if not old:
        print(f"error: {args.old} has no operation {args.only}...", file=sys.stderr)
        return 2
    for line in differences_of_setting(old_table, new_table):
        print("not alike: " + line)
    lines, bad = compare(old, new, args.tolerance)
    if lines:
        print(f"{'operation':40s} {'old us':>10s} {'new us':>10s} {'new/old':>7s}")
    for line in lines:
        print(line)
    added = sorted(set(new) - set(old))
    if added:
        print("only in the new table: " + ", ".join(added))
    print(f"{len(old)} operations, {bad} slower or missing at a tolerance of {args.tolerance:g}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
