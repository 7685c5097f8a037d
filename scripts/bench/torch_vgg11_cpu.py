#!/usr/bin/env python3
"""PyTorch reference step on the CPU: VGG-11 for 32x32 images with SGD and momentum, fp32.

Eight 3x3 convolutions with bias and ReLU, five max-pools, one 512 -> 10 linear layer.
Prints one JSON line with the median images per second over the measured steps.
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYOUT = [64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool"]


def vgg11(classes=10):
    layers, channels = [], 3
    for item in LAYOUT:
        if item == "pool":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, item, 3, padding=1), nn.ReLU(inplace=True)]
            channels = item
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--warmup", type=int, default=3)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--channels-last", action="store_true")
    ap.add_argument("--fused", action="store_true", help="fused SGD (PyTorch 2.4 or newer on a CPU)")
    ap.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    ap.add_argument("--compile", action="store_true", help="torch.compile the model")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(1234)
    layout = torch.channels_last if a.channels_last else torch.contiguous_format
    model = vgg11().to(memory_format=layout)
    count = sum(p.numel() for p in model.parameters())
    extra = {"fused": True} if a.fused else {}
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, **extra)
    run = torch.compile(model) if a.compile else model
    times = []
    for step in range(a.warmup + a.steps):
        images = torch.randn(a.batch, 3, 32, 32).contiguous(memory_format=layout)
        labels = torch.randint(0, 10, (a.batch,))
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.bf16):
            loss = F.cross_entropy(run(images), labels)
        loss.backward()
        opt.step()
        loss_value = loss.item()
        if step >= a.warmup:
            times.append(time.perf_counter() - start)
    print(json.dumps({
        "workload": "vgg11-32", "torch": torch.__version__, "threads": a.threads, "steps": a.steps,
        "channels_last": a.channels_last, "bf16": a.bf16, "fused_sgd": a.fused, "compile": a.compile,
        "parameters": count, "images_per_s": round(a.batch / statistics.median(times), 2),
        "best_images_per_s": round(a.batch / min(times), 2),
        "step_ms": round(1e3 * statistics.median(times), 2), "loss": round(loss_value, 4),
        "openblas_coretype": os.environ.get("OPENBLAS_CORETYPE"),
    }))


if __name__ == "__main__":
    main()
