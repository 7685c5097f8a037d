#!/usr/bin/env python3
"""The GPU benchmarks beside PyTorch's, on one GPU, one after the other in the same run.

    scripts/bench/compare_gpu.py --binary build/pdlbench [--only NAME ...] [--peers-of NAME ...] [--json FILE]

Each line is one workload: the median step of pdlbench, PyTorch's best variant and the ratio of speeds. Compiling PyTorch's models
takes about a minute each. The clocks of a GPU follow its power: read ratios of one run, not numbers of two."""
import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

KEEP = "workload.recompute=nothing"  # memory is of interest at batch 16
# name: configuration, overrides, arguments of torch_gpu.py, unit
WORKLOADS = {
    "gpt2-t1024-b16": ("h200_gpt2_medium", [], ["gpt2", "--batch", "16", "--compile"], "tokens_per_s"),
    "gpt2-t1024-b32": ("h200_gpt2_medium", ["training.global_batch_size=32", KEEP], ["gpt2", "--batch", "32", "--compile"], "tokens_per_s"),
    "gpt2-t1024-b4": ("h200_gpt2_medium", ["training.global_batch_size=4", KEEP], ["gpt2", "--batch", "4", "--compile"], "tokens_per_s"),
    "gpt2-t128-b32": ("h200_gpt2_medium_t128", [KEEP], ["gpt2", "--batch", "32", "--length", "128", "--compile"], "tokens_per_s"),
    "vgg16-b256": ("h200_vgg16", [], ["vgg16", "--batch", "256", "--compile"], "samples_per_s"),
    "vgg16-b64": ("h200_vgg16", ["training.global_batch_size=64"], ["vgg16", "--batch", "64", "--compile"], "samples_per_s"),
    "vgg16-b256-tf32": ("h200_vgg16", ["training.dtype=tf32"], ["vgg16", "--batch", "256", "--tf32"], "samples_per_s"),
}


def last_line(command, what):
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0 or not done.stdout.strip():
        sys.exit(f"{what} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def run_pdlbench(binary, config, overrides, unit):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        last_line([binary, "run", os.path.join(ROOT, "configs", "bench", config + ".json"), *overrides, "--out", out], "pdlbench")
        with open(os.path.join(out, "epochs.jsonl")) as file:
            epoch = json.loads(file.readlines()[-1])
        with open(os.path.join(out, "run.json")) as file:
            run = json.load(file)
    work = (epoch["tokens"] if unit == "tokens_per_s" else epoch["samples"]) / epoch["steps"]
    peaks = epoch["memory_peak_bytes"]
    return {"per_s": work / epoch["step_ms"]["median"] * 1e3, "step_ms": epoch["step_ms"], "mfu": epoch.get("mfu"),
            "arena_gib": peaks["total"]["max"] / 2**30, "device_gib": epoch["device_memory_used_bytes"] / 2**30,
            "loss": epoch["train_loss"], "versions": run["versions"], "ranks": run["ranks"] if "ranks" in run else run.get("hosts")}


def gpu_facts():
    fields = "name,driver_version,clocks.sm,power.draw,temperature.gpu"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True)
        return dict(zip(fields.split(","), [value.strip() for value in done.stdout.splitlines()[0].split(",")]))
    except (OSError, IndexError):
        return {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "pdlbench"))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has PyTorch with CUDA, and torchvision")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--peers-of", nargs="*", choices=WORKLOADS, metavar="NAME", help="run PyTorch for these only")
    parser.add_argument("--json", help="write the measurements here")
    args = parser.parse_args()
    peers_of = args.only if args.peers_of is None else args.peers_of
    measured = {"utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "gpu": gpu_facts(), "rows": []}
    for name in args.only:
        config, overrides, peer, unit = WORKLOADS[name]
        row = {"workload": name, "unit": unit, "config": f"configs/bench/{config}.json", "overrides": overrides,
               "pdlbench": run_pdlbench(args.binary, config, overrides, unit)}
        ours = row["pdlbench"]
        text = f"{name:16s} pdlbench {ours['per_s']:10.1f} {unit}  {ours['step_ms']['median']:7.2f} ms  {ours['arena_gib']:6.2f} GiB"
        if name in peers_of:
            row["pytorch"] = json.loads(last_line([args.python, os.path.join(HERE, "torch_gpu.py"), *peer], "PyTorch"))
            row["ratio"] = ours["per_s"] / row["pytorch"]["per_s"]
            text += f"  PyTorch {row['pytorch']['per_s']:10.1f}  {row['pytorch']['peak_gib']:6.2f} GiB  ratio {row['ratio']:.2f}"
        measured["rows"].append(row)
        print(text, flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(measured, file, indent=2)
                file.write("\n")


if __name__ == "__main__":
    main()
