#!/usr/bin/env python3
"""Draw what scripts/bench/scaling.py measured: speed of a GPU over the number of GPUs, and what a step waits for.

    scripts/plot/scaling.py DIR/scaling.json --out FIGURE.png

One column for each workload. Above: a GPU's speed as a part of the speed of one GPU with the engine `serial`; PyTorch's as a part of
PyTorch's on one GPU, dashed. Below: the step at the largest number of GPUs, what stands still for other ranks marked, and the peak of
memory beside it.
"""
import argparse
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend that needs no screen)

from plot_runs import DASHES, ENGINE_STYLES, OTHER_STYLE  # noqa: E402

PYTORCH_COLOR = "#777777"


def style(name):
    """The colour of the engine's family, a line of its own for each of its variants."""
    color, marker = ENGINE_STYLES.get(name.split("-")[0], OTHER_STYLE)
    variants = ["1", "2", "3", "intra", "data", "2d", "fc"]
    tail = name.split("-")[1] if "-" in name else ""
    return color, marker, DASHES[variants.index(tail) % 3 + 1 if tail in variants else 0]


def draw_efficiency(axes, rows, workload):
    series = {}
    for row in rows:
        series.setdefault(row.get("engine") or "PyTorch " + row["pytorch"], []).append((row["ranks"], 100.0 * row["efficiency"]))
    for name, points in series.items():
        if name == "serial":
            continue
        ranks, values = zip(*sorted(points))
        if name.startswith("PyTorch"):
            axes.plot(ranks, values, color=PYTORCH_COLOR, linestyle=DASHES[len(name) % 4], label=name, linewidth=1.0)
        else:
            color, marker, dash = style(name)
            axes.plot(ranks, values, color=color, marker=marker, linestyle=dash, label=name, markersize=5)
    sizes = sorted({row["ranks"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.axhline(100.0, color="#bbbbbb", linewidth=0.8)
    axes.set_ylim(bottom=0.0)
    axes.set_title(workload)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("speed of a GPU (% of serial)")
    axes.legend(fontsize=7)


def draw_steps(axes, rows):
    largest = max(row["ranks"] for row in rows)
    rows = [row for row in rows if row["ranks"] == largest and "engine" in row]
    names = [row["engine"] for row in rows]
    step = [row["step_ms"]["median"] for row in rows]
    exposed = [min(row["exposed_step_ms"], whole) for row, whole in zip(rows, step)]
    axes.barh(names, [whole - waits for whole, waits in zip(step, exposed)], color=[style(name)[0] for name in names])
    axes.barh(names, exposed, left=[whole - waits for whole, waits in zip(step, exposed)], color="white", edgecolor="#333333", hatch="///",
              label="stands still for other ranks")
    for y, (row, whole) in enumerate(zip(rows, step)):
        axes.text(whole, y, f" {row['memory_peak_bytes']['total'] / 2**30:.1f} GiB", va="center", fontsize=7)
    axes.set_xlim(right=1.25 * max(step))
    axes.invert_yaxis()
    axes.set_xlabel(f"median step on {largest} GPU{'s' if largest > 1 else ''} (ms)")
    axes.legend(fontsize=7)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=pathlib.Path, help="scaling.json")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    args = parser.parse_args()
    try:
        rows = [row for row in json.loads(args.measured.read_text())["rows"] if "workload" in row]
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {args.measured}: {error}")
    if not any("engine" in row for row in rows):
        sys.exit(f"error: {args.measured} holds no measurement")
    workloads = list(dict.fromkeys(row["workload"] for row in rows if "engine" in row))
    figure, axes = plt.subplots(2, len(workloads), figsize=(5.2 * len(workloads), 8.0), squeeze=False, layout="constrained")
    for column, workload in enumerate(workloads):
        mine = [row for row in rows if row["workload"] == workload]
        draw_efficiency(axes[0][column], mine, workload)
        draw_steps(axes[1][column], mine)
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
