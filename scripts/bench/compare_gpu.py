#!/usr/bin/env python3
"""The GPU benchmarks beside PyTorch's, on one GPU, taking turns.

    scripts/bench/compare_gpu.py [--binary build/pdlbench] [--only NAME ...] [--rounds 1] [--eager] [--skip-peers] [--json FILE]

Each round runs every workload once with pdlbench and once with each variant of PyTorch: torch.compile (eager for TF32), and eager
too with --eager. The table shows medians over rounds and the ratio to the fastest variant. Memory is the arena and what libraries
took, beside the most that PyTorch had allocated. Compiling PyTorch's models takes about a minute each: all of it about eight
minutes. The clocks of a GPU follow its power: read ratios of one run, not numbers of two.

What fails is said and left out; the exit code is 1 then, or when a ratio is below 1. The file of --json is complete up to the last
group of workloads at any time."""
import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile

from runs import ROOT, WITH_TORCH, Failed, gpu_facts, read_record, start, why, write_json

HERE = os.path.dirname(os.path.abspath(__file__))

KEEP = "workload.recompute=nothing"  # memory is of interest at batch 16
# name: configuration, overrides, PyTorch's model and options, batch, tokens of a sample (1 for images)
WORKLOADS = {
    "gpt2-t1024-b16": ("h200_gpt2_medium", [], ("gpt2", "--length", "1024"), 16, 1024),
    "gpt2-t1024-b32": ("h200_gpt2_medium", [KEEP], ("gpt2", "--length", "1024"), 32, 1024),
    "gpt2-t1024-b4": ("h200_gpt2_medium", [KEEP], ("gpt2", "--length", "1024"), 4, 1024),
    "gpt2-t128-b32": ("h200_gpt2_medium_t128", [KEEP], ("gpt2", "--length", "128"), 32, 128),
    "vgg16-b256": ("h200_vgg16", [], ("vgg16",), 256, 1),
    "vgg16-b64": ("h200_vgg16", [], ("vgg16",), 64, 1),
    "vgg16-b256-tf32": ("h200_vgg16", ["training.dtype=tf32"], ("vgg16", "--tf32"), 256, 1),
}


def run_pdlbench(args, name):
    config, overrides, _, batch, tokens = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        command = [args.binary, "run", os.path.join(ROOT, "configs", "bench", config + ".json"), *overrides,
                   f"training.global_batch_size={batch}", f"measure.warmup_steps={args.warmup}",
                   f"measure.max_steps_per_epoch={args.warmup + args.steps}", "--out", out]
        done = start(command, "build it with CUDA, or say where it is with --binary")
        if done.returncode != 0:
            raise Failed(why(command, done))
        run, epoch = read_record(out)
    if epoch["samples"] != batch * epoch["steps"]:
        raise Failed(f"{epoch['samples']} samples in {epoch['steps']} steps, not {batch} a step: is the configuration's data set large enough?")
    arena, library = epoch["memory_peak_bytes"]["total"]["max"], epoch.get("library_bytes", 0)
    return {"per_s": batch * tokens / epoch["step_ms"]["median"] * 1e3, "step_ms": epoch["step_ms"], "mfu": epoch.get("mfu"),
            "gib": (arena + library) / 2**30, "arena_gib": arena / 2**30, "library_gib": library / 2**30,
            "device_gib": epoch["device_memory_used_bytes"] / 2**30, "loss": epoch["train_loss"],
            "gpu": run["ranks"][0].get("gpu"), "versions": run["versions"]}


def run_torch(args, names, variant):
    """One process for all batch sizes of a group. Returns a result for each name that came so far, and what went wrong then."""
    _, _, peer, _, _ = WORKLOADS[names[0]]
    command = [args.python, os.path.join(HERE, "torch_gpu.py"), *peer, "--batch", *[str(WORKLOADS[name][3]) for name in names],
               "--steps", str(args.steps), "--warmup", str(args.warmup), *(["--compile"] if variant == "compile" else [])]
    done = start(command, WITH_TORCH)
    results = dict(zip(names, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]))
    if done.returncode == 0:
        return results, None
    return results, f"{why(command, done)}\n{WITH_TORCH}"


def variants_of(name, args):
    if args.skip_peers or (args.peers_of is not None and name not in args.peers_of):
        return []
    compiled = "--tf32" not in WORKLOADS[name][2]
    return (["compile"] if compiled else []) + (["eager"] if args.eager or not compiled else [])


def one_round(names, rows, args, failures):
    """`names` share a PyTorch model, whose batch sizes run in one process."""
    def note(what, text):
        failures.append({"what": what, "error": text})
        print(f"{what} failed: {text}", file=sys.stderr, flush=True)

    for name in names:
        try:
            rows[name]["pdlbench"].append(run_pdlbench(args, name))
        except Failed as error:
            note(f"{name}, pdlbench", str(error))
    for variant in ("compile", "eager"):
        wanted = [name for name in names if variant in variants_of(name, args)]
        if not wanted:
            continue
        try:
            results, error = run_torch(args, wanted, variant)
        except Failed as failed:
            results, error = {}, str(failed)
        for name, result in results.items():
            rows[name]["pytorch"].setdefault(variant, []).append(result)
        if error:
            note(f"{', '.join(name for name in wanted if name not in results)}, PyTorch {variant}", error)


def median(runs, field="per_s"):
    return statistics.median(run[field] for run in runs)


def finish(row):
    """Adds the ratio, when there is one, and returns the row's line of the table."""
    ours, peers = row["pdlbench"], row["pytorch"]
    text = f"{row['workload']:16s} {row['unit']:9s}"
    text += f"{median(ours):10.0f} {median(ours, 'gib'):7.2f}" if ours else f"{'failed':>10s} {'':7s}"
    mfu = ours[0]["mfu"] if ours else None
    text += f" {100 * median(ours, 'mfu'):5.1f}%" if mfu is not None else f" {'-':>6s}"
    if peers:
        best = row["fastest_pytorch"] = max(peers, key=lambda variant: median(peers[variant]))
        text += f"  {best:8s}{median(peers[best]):10.0f} {median(peers[best], 'peak_gib'):7.2f}"
        if ours:
            row["ratio"] = median(ours) / median(peers[best])
            text += f"  {row['ratio']:5.2f}"
    return text


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "pdlbench"))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has PyTorch with CUDA, and torchvision")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument("--peers-of", nargs="*", choices=WORKLOADS, metavar="NAME", help="run PyTorch for these only")
    parser.add_argument("--skip-peers", action="store_true", help="run pdlbench only")
    parser.add_argument("--eager", action="store_true", help="PyTorch without torch.compile, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each run")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them")
    parser.add_argument("--json", help="write the measurements here")
    args = parser.parse_args()
    if min(args.rounds, args.steps) < 1 or args.warmup < 0:
        parser.error("--rounds and --steps are at least 1, --warmup at least 0")
    return args


def main():
    args = arguments()
    names = [name for name in WORKLOADS if name in args.only]
    rows = {name: {"workload": name, "unit": "tokens/s" if WORKLOADS[name][4] > 1 else "images/s", "overrides": WORKLOADS[name][1],
                   "config": f"configs/bench/{WORKLOADS[name][0]}.json", "pdlbench": [], "pytorch": {}} for name in names}
    measured = {"utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "rounds": args.rounds,
                "steps": args.steps, "gpu": gpu_facts(), "rows": list(rows.values()), "failures": []}
    groups = {}
    for name in names:
        groups.setdefault(WORKLOADS[name][2], []).append(name)
    print(f"{'workload':16s} {'unit':9s}{'pdlbench':>10s} {'GiB':>7s} {'mfu':>6s}  {'PyTorch':8s}{'':10s} {'GiB':>7s}  ratio")
    for turn in range(args.rounds):
        for group in groups.values():
            one_round(group, rows, args, measured["failures"])
            for name in group:
                line = finish(rows[name])
                if turn + 1 == args.rounds:
                    print(line, flush=True)
            measured["gpu_last"] = gpu_facts()
            if args.json:
                write_json(args.json, measured)
    return 1 if measured["failures"] or any(row.get("ratio", 1.0) < 1.0 for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
