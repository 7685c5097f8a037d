#!/usr/bin/env python3
"""The two reference steps of the CPU backend beside PyTorch's: same shapes, same cores, taking turns.

    scripts/bench/compare_cpu.py [--threads 1 2] [--rounds 3] [--python PYTHON] [--json FILE]

Each round times pdlbench and every PyTorch variant once; the table shows medians over rounds and the ratio to the fastest variant
of PyTorch. Read ratios: the speed of a shared machine drifts by more than the programs differ."""
import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

STEPS = {
    "gpt2": {"config": "configs/bench/cpu_gpt2.json", "peer": "torch_gpt2_cpu.py", "unit": "tokens_per_s", "variants": [[]]},
    "vgg11": {"config": "configs/bench/cpu_vgg11.json", "peer": "torch_vgg11_cpu.py", "unit": "images_per_s",
              "variants": [[], ["--channels-last"]]},
}


def environment(threads):
    """Pinned threads for both. Debian's OpenBLAS does not know newer processors and then runs several times slower."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true", "OMP_PLACES": "cores",
            "OPENBLAS_CORETYPE": os.environ.get("OPENBLAS_CORETYPE", "SkylakeX")}


def run_pdlbench(binary, step, threads):
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        command = [binary, "run", os.path.join(ROOT, step["config"]), f"limits.threads_per_rank={threads}", "--out", out]
        done = subprocess.run(command, env=environment(threads), capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        with open(os.path.join(out, "epochs.jsonl")) as file:
            epoch = json.loads(file.readlines()[-1])
        with open(os.path.join(out, "run.json")) as file:
            versions = json.load(file)["versions"]
        work = epoch["tokens"] or epoch["samples"]
        return work / epoch["steps"] / epoch["step_ms"]["median"] * 1e3, versions


def run_torch(python, step, variant, threads):
    command = [python, os.path.join(HERE, step["peer"]), "--threads", str(threads), "--steps", "12", *variant]
    done = subprocess.run(command, env=environment(threads), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result[step["unit"]], result["torch"]


def processor():
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), platform.machine())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "pdlbench"))
    parser.add_argument("--python", nargs="+", default=["/usr/bin/python3"], help="interpreters that have PyTorch")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the measurements here")
    args = parser.parse_args()
    measured = {"utc": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), "processor": processor(),
                "cores": os.cpu_count(), "rounds": args.rounds, "rows": []}
    for name, step in STEPS.items():
        for threads in args.threads:
            ours, peers = [], {}
            for _ in range(args.rounds):
                speed, measured["pdlbench_versions"] = run_pdlbench(args.binary, step, threads)
                ours.append(speed)
                for python in args.python:
                    for variant in step["variants"]:
                        speed, version = run_torch(python, step, variant, threads)
                        peers.setdefault(" ".join([version, *variant]), []).append(speed)
            best = max(peers, key=lambda key: statistics.median(peers[key]))
            ratio = statistics.median(ours) / statistics.median(peers[best])
            measured["rows"].append({"step": name, "threads": threads, "unit": step["unit"], "pdlbench": ours, "pytorch": peers,
                                     "fastest_pytorch": best, "ratio": ratio})
            print(f"{name:6s} {threads} thread{'s' if threads > 1 else ' '}  pdlbench {statistics.median(ours):9.1f}  "
                  f"PyTorch {best} {statistics.median(peers[best]):9.1f} {step['unit']}  ratio {ratio:.2f}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(measured, file, indent=2)
            file.write("\n")
    return 0 if all(row["ratio"] >= 1.0 for row in measured["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
