#!/usr/bin/env python3
"""Where the time of a training step goes on a GPU, and what is left to win: operations times how often a step runs them.

    build/tests/gpu_op_times --json ops.json
    scripts/bench/step_budget.py ops.json [--step-ms gpt2=75.2 --step-ms vgg16=43.9]

`floor` is the time at which an operation would run at the rate of this GPU's own 8192^3 matrix product, or, where memory bounds it, at
the rate of streaming reads and writes; `gap` is what lies between. A measured step time shows how much the table leaves out: small
operations, gaps between kernels, and clocks that fall under load."""
import argparse
import json
import sys

# Each model's step as (operation, how often). Several of one kind at sizes that were not measured count as shares of a measured one.
STEPS = {
    "gpt2": ("GPT2-medium, 16 x 1024 tokens, bf16, recompute=gelu", [
        *[(f"gemm.t16384.{name}", 24) for name in (
            "qkv.forward", "proj.forward+residual", "fc1.forward+gelu", "fc2.forward+residual", "fc2.data+gelu+dbias", "fc2.weight+dbias",
            "fc1.data", "fc1.weight", "proj.data", "proj.weight+dbias", "qkv.data", "qkv.weight+dbias")],
        ("gemm.t16384.head.forward", 1), ("gemm.t16384.head.data", 1), ("gemm.t16384.head.weight", 1),
        ("attention.b16t1024.forward", 24), ("attention.b16t1024.backward", 24),
        ("pass.gpt2.layernorm_forward", 49), ("pass.gpt2.layernorm_backward+residual", 49), ("pass.gpt2.gelu_forward", 24),
        ("pass.gpt2.cross_entropy", 1), ("pass.gpt2.embedding_forward", 1), ("pass.gpt2.embedding_backward", 1), ("update.adamw", 1)]),
    "vgg16": ("VGG-16, 256 images of 224 x 224, bf16", [
        ("conv.n256.conv1_1.forward+relu", 1), ("conv.n256.conv1_1.weight", 1),
        *[(f"conv.n256.{name}.{way}", count) for name, count in (
            ("conv1_2", 1), ("conv2_1", 1), ("conv2_2", 1), ("conv3_1", 1), ("conv3_2,3_3", 2), ("conv4_1", 1), ("conv4_2,4_3", 2),
            ("conv5_1,5_2,5_3", 3)) for way in ("forward+relu", "data", "weight")],
        # Elements relative to the first block's: 1, 1/2, 1/4, 1/8, 1/32.
        ("pass.vgg.relu_backward+dbias", 1 + 1 / 2 + 2 / 4 + 2 / 8 + 2 / 32),
        ("pass.vgg.max_pool_forward", 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 32),
        ("pass.vgg.max_pool_backward+relu+dbias", 1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 32)]),
}


def rows_of(table, operations):
    measured = {row["name"]: row for row in table["rows"]}
    missing = sorted({name for name, _ in operations} - measured.keys())
    if missing:
        sys.exit(f"not in the table: {', '.join(missing)}; measure all of it, without --only")
    rows = []
    for name, count in operations:
        row = measured[name]
        ms = count * row["us"] / 1e3
        rows.append((name, count, row["us"], ms, ms * row.get("of_square", row["of_peak"])))
    return sorted(rows, key=lambda row: row[4] - row[3])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="what gpu_op_times wrote")
    parser.add_argument("--step-ms", action="append", default=[], metavar="MODEL=MS", help="measured step times: gpt2=MS, vgg16=MS")
    args = parser.parse_args()
    try:
        with open(args.table, encoding="utf-8") as file:
            table = json.load(file)
        steps = {model: float(ms) for model, ms in (text.split("=", 1) for text in args.step_ms)}
    except (OSError, ValueError) as error:
        sys.exit(f"{args.table} and {args.step_ms}: {error}")
    if steps.keys() - STEPS.keys():
        sys.exit(f"step times are of {', '.join(STEPS)}, not {', '.join(steps.keys() - STEPS.keys())}")
    print(f"{table['gpu']}, {table['libraries']}")
    for model, (title, operations) in STEPS.items():
        rows = rows_of(table, operations)
        total, floor = sum(row[3] for row in rows), sum(row[4] for row in rows)
        print(f"\n{title}\n{'operation':40s}{'times':>8s}{'us':>9s}{'ms':>8s}{'floor':>8s}{'ratio':>7s}{'gap ms':>8s}")
        for name, count, us, ms, least in rows:
            print(f"{name:40s}{count:8.4g}{us:9.1f}{ms:8.2f}{least:8.2f}{ms / least:7.2f}{ms - least:8.2f}")
        print(f"{'sum':40s}{'':17s}{total:8.2f}{floor:8.2f}{total / floor:7.2f}{total - floor:8.2f}")
        if model in steps:
            print(f"{'measured step':40s}{'':17s}{steps[model]:8.2f}{'':15s}{steps[model] - total:8.2f} not in the table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
