"""Records of runs that never were, for tests of the scripts: plausible curves, every field filled."""

import json
import math
import pathlib

KINDS = ["parameters", "weight_versions", "gradients", "optimizer", "activations", "communication", "workspace"]
MIB = 2**20


def spread(value):
    return {"min": 0.95 * value, "mean": 0.98 * value, "max": value}


def byte_spread(value):
    return {"min": int(0.9 * value), "mean": int(0.95 * value), "max": int(value)}


def epoch(index, metric, value, train_s, memory_mib, tokens_per_sample):
    """`memory_mib` has one number for each of KINDS."""
    peaks = {kind: byte_spread(mib * MIB) for kind, mib in zip(KINDS, memory_mib)}
    peaks["total"] = byte_spread(0.93 * sum(memory_mib) * MIB)
    predicted = {kind: int(mib * MIB) for kind, mib in zip(KINDS, memory_mib)}
    predicted["total"] = sum(predicted.values())
    loss = math.log(value) if metric == "perplexity" and value > 0 else 2.0 - value
    step_ms = 1000.0 * train_s / 200
    return {
        "schema_version": 1, "epoch": index, "steps": 200, "samples": 6400, "tokens": 6400 * tokens_per_sample,
        "epoch_s": train_s * 1.05, "train_s": spread(train_s), "eval_s": 0.05 * train_s,
        "data_s": spread(0.02 * train_s), "forward_s": spread(0.3 * train_s), "backward_s": spread(0.5 * train_s),
        "comm_exposed_s": spread(0.1 * train_s), "optimizer_s": spread(0.08 * train_s), "bubble_fraction": 0.0,
        "step_ms": {"median": step_ms, "p5": 0.95 * step_ms, "p95": 1.1 * step_ms, "p99": 1.2 * step_ms,
                    "min": 0.9 * step_ms, "max": 1.3 * step_ms},
        "samples_per_s": 6400 / train_s, "tokens_per_s": 6400 * tokens_per_sample / train_s, "flops_per_s": 1e12,
        "train_loss": loss, "val_loss": loss, "val_metric": {"name": metric, "value": value}, "lr": 0.001,
        "elapsed_s": 1.05 * train_s * (index + 1), "memory_peak_bytes": peaks, "memory_predicted_bytes": predicted,
        "device_memory_used_bytes": int(sum(memory_mib) * MIB * 1.2),
        "comm": {"dp.all_reduce": {"calls": 400, "bytes": 10**9, "busy_s": 0.3 * train_s, "exposed_s": 0.1 * train_s}},
        "extrapolated": False,
    }


def run(engine, ranks, model, epochs, **changes):
    """run.json of a success; `changes` replace fields, those of `world` too."""
    world = {"ranks": ranks, "dp": ranks, "tp": 1, "pp": 1, "ranks_per_device": 1,
             "comm": "mpi" if ranks > 1 else "self", "launcher": "hydra"}
    record = {
        "schema_version": 1, "status": "success", "reason": "", "name": f"{model}-{engine}-x{ranks}", "engine": engine,
        "model": model, "backend": "cpu", "dtype": "fp32", "start_utc": "2026-02-03T04:05:06Z",
        "end_utc": "2026-02-03T05:05:06Z", "epochs_planned": epochs, "epochs_recorded": epochs, "world": world,
        "synthetic_data": False, "data": {"name": "sample"}, "command": "pdlbench run sample.json",
        "config_hash": "0123456789abcdef", "config": {"name": "sample"}, "engine_description": {}, "versions": {},
        "environment": {}, "hosts": ["node1"],
        "ranks": [{"rank": rank, "local_rank": rank, "host": "node1", "device": "cpu", "device_uuid": "", "threads": 1}
                  for rank in range(ranks)],
        "resumes": [],
    }
    for key, value in changes.items():
        (world if key in world else record)[key] = value
    return record


def write(directory, record, epochs):
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    lines = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in epochs)
    (directory / "epochs.jsonl").write_text(lines, encoding="utf-8")
    return directory


def write_language_run(directory, engine, ranks, epochs=6, epoch_s=60.0, memory_mib=None, start=900.0, **changes):
    memory = memory_mib or [400, 0, 400, 800, 1500, 50, 200]
    values = [22.0 + start * math.exp(-1.1 * (i + 1)) for i in range(epochs)]
    lines = [epoch(i, "perplexity", value, epoch_s, memory, 128) for i, value in enumerate(values)]
    return write(directory, run(engine, ranks, "gpt2-small", epochs, **changes), lines)


def write_vision_run(directory, engine, ranks, epochs=6, epoch_s=40.0, memory_mib=None, best=0.62, **changes):
    memory = memory_mib or [500, 0, 500, 500, 900, 25, 300]
    values = [best * (1.0 - math.exp(-0.5 * (i + 1))) for i in range(epochs)]
    lines = [epoch(i, "accuracy", value, epoch_s, memory, 0) for i, value in enumerate(values)]
    return write(directory, run(engine, ranks, "vgg16", epochs, **changes), lines)
