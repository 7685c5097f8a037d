#!/usr/bin/env python3
"""All engines on 1, 2, 4, 8 GPUs of one host, beside PyTorch's DDP and FSDP: step times, exposed communication, memory.

    scripts/bench/scaling.py --out DIR [--ranks 1 2 4 8] [--only gpt2-t1024 ...] [--engines ddp zero-3 ...] [--limit SECONDS]
                             [--launcher "mpirun -n"] [--set key=value ...] [--skip-peers]

Every GPU has the same number of samples at any number of GPUs. First each engine is verified in fp32 against its reference, over the
same transport; one that fails is not timed. The efficiency is a GPU's speed as a part of that of one GPU with the engine `serial`.

Made for machines that are lent for a short time: the comparisons that matter most run first, what no longer fits into --limit is
left out by name, and a second call with the same --out measures only what is missing. DIR/scaling.json is complete up to the last run
at any time; DIR keeps the record of each run. scripts/plot/scaling.py draws it. What fails is said, and the exit code is 1 then."""
import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
import time

from runs import ROOT, WITH_TORCH, Failed, gpu_facts, read_record, start, why, write_json

HERE = os.path.dirname(os.path.abspath(__file__))

# name: configuration, overrides, samples of a GPU, PyTorch's model and options
WORKLOADS = {
    "gpt2-t1024": ("h200_gpt2_medium", [], 16, ("gpt2", "--length", "1024")),
    "gpt2-t128": ("h200_gpt2_medium_t128", ["workload.recompute=nothing"], 32, ("gpt2", "--length", "128")),
    "vgg16": ("h200_vgg16", [], 64, ("vgg16",)),
}
UNDIVIDED = {"pipedream"}  # engines that send a mini-batch through whole
PYTORCH_PEERS = {"ddp": "ddp", "zero-3": "fsdp"}  # the engine that a variant of PyTorch is the peer of

# What `verify` trains: small, but with every kind of layer, dropout, several micro-batches, and enough heads, layers and channels to
# be divided over 8 GPUs.
SMALL = {
    "gpt2": {"model": "gpt2-tiny", "sequence_length": 64, "layers": 8, "heads": 8, "dropout": 0.1, "vocabulary_size": 500},
    "vgg16": {"model": "vgg11", "width_multiplier": 0.25, "image_size": 32, "classifier_width": 64, "dropout": 0.2, "classes": 10},
}


def engines(workload, ranks, micro_batches):
    """Name and engine block, the most telling first."""
    split = {"tensor_model_parallel_size": ranks}
    known = {
        "ddp": {"name": "ddp"},
        "zero-3": {"name": "zero", "stage": 3},
        "zero-1": {"name": "zero", "stage": 1},
        "zero-2": {"name": "zero", "stage": 2},
        "lbann": {"name": "lbann"},
        "megatron-intra": {"name": "megatron", **split},
        "megatron-data": {"name": "megatron", "use_distributed_optimizer": True},
        "torchgpipe": {"name": "torchgpipe", "chunks": micro_batches},
        "pipedream": {"name": "pipedream"},
    }
    if workload.startswith("vgg"):
        known["lbann-fc-model"] = {"name": "lbann", "fc": "model"}
    if ranks >= 4:
        known["megatron-2d"] = {"name": "megatron", "tensor_model_parallel_size": 2}
    return known


def micro_batch(engine, samples):
    return 0 if engine in UNDIVIDED else samples


class Bench:
    def __init__(self, args):
        self.args = args
        self.begin = time.monotonic()
        self.path = os.path.join(args.out, "scaling.json")
        self.measured = {"rows": [], "failures": [], "left_out": []}
        if os.path.exists(self.path):
            with open(self.path) as file:
                self.measured = json.load(file)
            self.measured["failures"], self.measured["left_out"] = [], []
        self.measured.update(utc=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), steps=args.steps,
                             set=args.set, gpu=gpu_facts(), topology=topology())

    def left_s(self):
        return self.args.limit - (time.monotonic() - self.begin) if self.args.limit else 1e9

    def row(self, **key):
        return next((row for row in self.measured["rows"] if all(row.get(name) == value for name, value in key.items())), None)

    def attempt(self, what, expected_s, action):
        """Whether it worked. What fails or does not fit is noted, and does not keep the rest from being measured."""
        try:
            if self.left_s() < expected_s:
                self.measured["left_out"].append(what)
                return False
            action()
            return True
        except Failed as error:
            self.measured["failures"].append({"what": what, "error": str(error)})
            print(f"{what} failed: {error}", file=sys.stderr, flush=True)
            return False
        finally:
            write_json(self.path, self.measured)

    def launch(self, ranks, command):
        return [*shlex.split(self.args.launcher), str(ranks), self.args.binary, *command] if ranks > 1 else [self.args.binary, *command]

    def run(self, command):
        return start(command, "build it, or name it with --binary", timeout=max(1.0, min(self.left_s(), self.args.run_limit)))

    def verify(self, workload, engine, block, ranks):
        """Against the engine's reference, once for each kind of model."""
        kind = "vgg16" if workload.startswith("vgg") else "gpt2"
        if self.row(verified=engine, model=kind, ranks=ranks):
            return
        config = {"name": "verify", "workload": {**SMALL[kind], "data": "synthetic-learnable", "train_samples": 256, "validation_samples": 8},
                  "engine": block, "device": self.args.device, "comm": self.args.comm if ranks > 1 else "auto",
                  "training": {"epochs": 1, "global_batch_size": 8 * ranks, "micro_batch_size": micro_batch(engine, 4), "dtype": "fp32",
                               "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}}}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            command = self.launch(ranks, ["verify", file.name, "--steps", "3"])
            done = self.run(command)
        if done.returncode != 0:
            raise Failed(why(command, done))
        self.measured["rows"].append({"verified": engine, "model": kind, "ranks": ranks, "says": done.stdout.strip().splitlines()[-1:]})

    def time(self, workload, engine, block, ranks):
        config, overrides, samples, _ = WORKLOADS[workload]
        out = os.path.join(self.args.out, f"{workload}-{engine}-n{ranks}")
        command = self.launch(ranks, [
            "run", os.path.join(ROOT, "configs", "bench", config + ".json"), *overrides, f"engine={json.dumps(block)}",
            f"training.global_batch_size={samples * ranks}", f"training.micro_batch_size={micro_batch(engine, samples)}", f"device={self.args.device}",
            f"comm={self.args.comm if ranks > 1 else 'auto'}", f"measure.warmup_steps={self.args.warmup}",
            f"measure.max_steps_per_epoch={self.args.warmup + self.args.steps}", *self.args.set, "--out", out, "--force"])
        done = self.run(command)
        if done.returncode != 0:
            raise Failed(why(command, done))
        run, epoch = read_record(out)
        step_ms = epoch["step_ms"]["median"]
        alone = self.row(workload=workload, engine="serial", ranks=1)
        per_s = (epoch["tokens"] or epoch["samples"]) / epoch["steps"] / step_ms * 1e3
        self.measured["rows"].append({
            "workload": workload, "engine": engine, "ranks": ranks, "record": os.path.basename(out), "unit": unit(workload),
            "step_ms": epoch["step_ms"], "per_s": per_s, "efficiency": per_s / ranks / alone["per_s"] if alone else 1.0,
            "exposed_step_ms": epoch["comm_exposed_step_ms"], "bubble_fraction": epoch["bubble_fraction"],
            "memory_peak_bytes": {kind: of["max"] for kind, of in epoch["memory_peak_bytes"].items()}, "comm": epoch["comm"],
            "world": run["world"], "versions": run["versions"]})

    def time_pytorch(self, workload, parallel, ranks):
        _, _, samples, peer = WORKLOADS[workload]
        command = [self.args.python, *(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []),
                   os.path.join(HERE, "torch_gpu.py"), *peer, "--batch", str(samples), "--steps", str(self.args.steps), "--warmup",
                   str(self.args.warmup), "--compile", *(["--parallel", parallel] if ranks > 1 else [])]
        done = self.run(command)
        if done.returncode != 0:
            raise Failed(f"{why(command, done)}\n{WITH_TORCH}")
        result = json.loads(done.stdout.splitlines()[-1])
        alone = self.row(workload=workload, pytorch=parallel, ranks=1)
        self.measured["rows"].append({"workload": workload, "pytorch": parallel, "ranks": ranks, "unit": unit(workload), **result,
                                      "efficiency": result["per_s"] / ranks / alone["per_s"] if alone else 1.0})

    def one_size(self, workload, ranks):
        chosen = {"serial": {"name": "serial"}} if ranks == 1 else engines(workload, ranks, 4 * ranks)
        for engine, block in chosen.items():
            if ranks > 1 and self.args.engines and engine not in self.args.engines:
                continue
            peer = PYTORCH_PEERS.get("ddp" if engine == "serial" else engine)
            what = f"{workload}, {engine} on {ranks}"
            if self.row(workload=workload, engine=engine, ranks=ranks) is None:
                right = ranks == 1 or self.attempt(f"verify of {what}", 20, lambda: self.verify(workload, engine, block, ranks))
                if right:
                    self.attempt(what, 30, lambda: self.time(workload, engine, block, ranks))
            if peer and not self.args.skip_peers and self.row(workload=workload, pytorch=peer, ranks=ranks) is None:
                self.attempt(f"{workload}, PyTorch {peer} on {ranks}", 90, lambda: self.time_pytorch(workload, peer, ranks))


def unit(workload):
    return "images/s" if workload.startswith("vgg") else "tokens/s"


def topology():
    """How the GPUs are connected, as the driver says."""
    try:
        return start(["nvidia-smi", "topo", "-m"], "").stdout.splitlines()
    except Failed:
        return []


def table(rows):
    print(f"{'workload':12s} {'engine':16s} {'GPUs':>4s} {'step ms':>9s} {'speed':>20s} {'effic.':>7s} {'exposed':>9s} {'bubble':>7s} {'GiB':>7s}")
    for row in rows:
        if "workload" not in row:
            continue
        ours = "engine" in row
        name = row["engine"] if ours else "PyTorch " + row["pytorch"]
        step_ms = row["step_ms"]["median"] if ours else row["step_ms"]
        gib = row["memory_peak_bytes"]["total"] / 2**30 if ours else row["peak_gib"]
        more = f"{row['exposed_step_ms']:6.2f} ms {100 * row['bubble_fraction']:5.1f} %" if ours else f"{'':17s}"
        print(f"{row['workload']:12s} {name:16s} {row['ranks']:4d} {step_ms:9.2f} {row['per_s']:11.0f} {row['unit']} "
              f"{100 * row['efficiency']:5.1f} % {more} {gib:7.2f}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the records and of scaling.json")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs; 1 is what efficiency refers to")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    every = list({**engines("vgg", 4, 1)})
    parser.add_argument("--engines", nargs="+", choices=every, metavar="ENGINE", help=", ".join(every))
    parser.add_argument("--binary", default=os.path.join(ROOT, "build", "pdlbench"))
    parser.add_argument("--launcher", default="mpirun -n", help="what starts several ranks; their number comes next")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has PyTorch with CUDA, and torchvision")
    parser.add_argument("--skip-peers", action="store_true", help="run pdlbench only")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--comm", default="nccl", choices=["nccl", "mpi"], help="transport of several ranks")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for every timed run of pdlbench, after all else")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each run")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for all; 0: as long as it takes")
    parser.add_argument("--run-limit", type=float, default=300.0, help="seconds after which a single run counts as failed")
    args = parser.parse_args()
    if min(args.ranks) < 1 or args.steps < 1 or args.warmup < 0:
        parser.error("--ranks and --steps are at least 1, --warmup at least 0")
    return args


def main():
    args = arguments()
    os.makedirs(args.out, exist_ok=True)
    bench = Bench(args)
    for ranks in sorted(args.ranks):
        for workload in args.only:
            bench.one_size(workload, ranks)
    table(bench.measured["rows"])
    for what in bench.measured["left_out"]:
        print(f"left out for want of time: {what}", file=sys.stderr)
    return 1 if bench.measured["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
