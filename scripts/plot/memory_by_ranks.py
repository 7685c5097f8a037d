#!/usr/bin/env python3
"""Predicted memory of a rank over the number of ranks, beside the published curve of GPT2-medium (figure 9 of the study).

    scripts/plot/memory_by_ranks.py [--binary build/pdlbench] [--dtype bf16]

Nothing is run: every number is `pdlbench plan` for configs/study/*. Absolute numbers depend on kernels and on what is kept
for the backward pass; what the division saves, in the last columns, does not.
"""
import argparse
import json
import os
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def gigabytes(binary, config, ranks, overrides):
    path = os.path.join(ROOT, "configs/study", config)
    done = subprocess.run([binary, "plan", path, "--ranks", str(ranks), "--json", *overrides], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["memory_predicted_bytes"]["total"] / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build/pdlbench"))
    parser.add_argument("--dtype", default="bf16", help="training.dtype of the plans")
    args = parser.parse_args()
    with open(os.path.join(ROOT, "results/published/gpt2_memory_by_ranks.json"), encoding="utf-8") as file:
        published = json.load(file)
    adam = 'training.optimizer={"name": "adamw", "lr": 0.001, "weight_decay": 0.01}'
    dtype = f"training.dtype={args.dtype}"
    columns = {"ddp": ("ddp_gpt2_medium.json", [adam])}
    for stage in (1, 2, 3):
        columns[f"zero {stage}"] = ("zero_gpt2_medium.json", [f"engine.stage={stage}"])
    columns["deepspeed-2021, 2"] = ("zero_gpt2_medium_deepspeed.json", [])
    names = list(columns)
    print("GB per rank, " + args.dtype + "; published: fp16 mixed precision")
    print(f"{'ranks':>6}" + "".join(f"{name:>18}" for name in names) + f"{'published ddp':>16}{'published zero':>16}{'zero 2 / ddp':>14}"
          f"{'published':>11}")
    for i, ranks in enumerate(published["ranks"]):
        values = [gigabytes(args.binary, config, ranks, [dtype, *more]) for config, more in columns.values()]
        ddp, zero = published["gigabytes"]["ddp"][i], published["gigabytes"]["zero"][i]
        print(f"{ranks:>6}" + "".join(f"{value:>18.2f}" for value in values) +
              f"{ddp:>16.1f}{zero:>16.1f}{values[2] / values[0]:>13.0%} {zero / ddp:>10.0%}")
    print(f"\nmegatron-intra: all ranks divide layers, 32 sequences for each\n{'ranks':>6}{'predicted':>12}{'published':>12}")
    for ranks, value in zip(published["ranks"], published["gigabytes"]["megatron-intra"]):
        if value is not None:
            batch = f"training.batch_size_per_rank={32 * ranks}"
            predicted = gigabytes(args.binary, "megatron_intra_gpt2_medium.json", ranks, [adam, dtype, batch])
            print(f"{ranks:>6}{predicted:>12.2f}{value:>12.1f}")


if __name__ == "__main__":
    main()
