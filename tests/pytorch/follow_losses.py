#!/usr/bin/env python3
"""GPT-2 in bf16 here and in PyTorch, from the same weights over the same batches: does the loss follow PyTorch's?

    tests/pytorch/follow_losses.py --dump build/tests/dump_training [--config configs/bench/h200_gpt2_medium.json] [--steps 50]

PyTorch trains with autocast to bf16 and AdamW, three times, with different attention kernels: the largest difference between two of
these runs at any step is its own spread. The test passes when the loss here stays within twice that spread of the mean of the three.
With --device cpu everything runs in fp32 on the CPU, for models small enough, and has to agree to 1e-4."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F


def gpt2_loss(w, tokens, targets, heads, classes, attention):
    """Pre-norm GPT-2 with a tied head. c_attn's rows are packed per head as [q, k, v]; rows of wte behind `classes` are padding."""
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))
    batch, length = tokens.shape
    x = F.embedding(tokens, w["wte.weight"]) + w["wpe.weight"][:length]
    width = x.shape[-1]
    for i in range(layers):
        def p(name):
            return w[f"h.{i}.{name}"]
        a = F.layer_norm(x, (width,), p("ln_1.weight"), p("ln_1.bias"))
        qkv = F.linear(a, p("attn.c_attn.weight"), p("attn.c_attn.bias")).view(batch, length, heads, 3, width // heads)
        q, k, v = (qkv[:, :, :, j].transpose(1, 2) for j in range(3))
        attended = attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + F.linear(attended, p("attn.c_proj.weight"), p("attn.c_proj.bias"))
        m = F.layer_norm(x, (width,), p("ln_2.weight"), p("ln_2.bias"))
        m = F.gelu(F.linear(m, p("mlp.c_fc.weight"), p("mlp.c_fc.bias")), approximate="tanh")
        x = x + F.linear(m, p("mlp.c_proj.weight"), p("mlp.c_proj.bias"))
    x = F.layer_norm(x, (width,), w["ln_f.weight"], w["ln_f.bias"])
    logits = F.linear(x, w["wte.weight"])[..., :classes]
    return F.cross_entropy(logits.reshape(-1, classes).float(), targets.reshape(-1))


def attention_with(backend):
    def attend(q, k, v):
        with torch.nn.attention.sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attend


def torch_losses(arrays, steps, device, heads, classes, recipe, attention):
    w = {name[len("value."):]: torch.tensor(arrays[name], device=device, requires_grad=True) for name in arrays if name.startswith("value.")}
    optimizer = torch.optim.AdamW(w.values(), lr=recipe["lr"], weight_decay=recipe.get("weight_decay", 0.01))
    losses = []
    for step in range(steps):
        tokens, targets = (torch.tensor(arrays[f"{kind}.{step}"], device=device).long() for kind in ("input", "target"))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = gpt2_loss(w, tokens, targets, heads, classes, attention)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def dump(args, folder):
    command = [args.dump, args.config, folder, str(args.steps), f"device={args.device}", *args.override]
    if args.device == "cpu":
        command.append("training.dtype=fp32")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return {name[:-4]: np.load(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".npy")}


def main():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", default=os.path.join(root, "build", "tests", "dump_training"))
    parser.add_argument("--config", default=os.path.join(root, "configs", "bench", "h200_gpt2_medium.json"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--heads", type=int, default=16, help="attention heads of the model")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", help="write all losses here")
    parser.add_argument("override", nargs="*", help="key.path=value, as for pdlbench run")
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    for text in args.override:  # the few that PyTorch has to know
        key, value = text.split("=", 1)
        section = config
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        try:
            section[last] = json.loads(value)
        except json.JSONDecodeError:
            section[last] = value
    recipe, classes = config["training"]["optimizer"], config["workload"]["vocabulary_size"]
    if recipe["name"] != "adamw" or config["workload"].get("dropout", 0.1) != 0.0:
        sys.exit("the comparison is for adamw without dropout: training.optimizer.name=adamw workload.dropout=0")
    with tempfile.TemporaryDirectory() as folder:
        arrays = dump(args, folder)
    ours = arrays["losses"]
    backend = torch.nn.attention.SDPBackend
    kernels = [backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH] if args.device == "cuda" else [backend.MATH]
    runs = [torch_losses(arrays, len(ours), args.device, args.heads, classes, recipe, attention_with(kernel)) for kernel in kernels]
    spread = max((np.abs(a - b).max() for a in runs for b in runs), default=0.0)
    distance = np.abs(ours - np.mean(runs, axis=0)).max()
    allowed = 2.0 * spread if args.device == "cuda" else 1e-4 * ours.max()
    for step in sorted({0, 1, 2, 4, 9, 19, 29, 39, 49, len(ours) - 1}):
        if step < len(ours):
            print(f"step {step + 1:3d}  pdlbench {ours[step]:.5f}  PyTorch " + "  ".join(f"{run[step]:.5f}" for run in runs))
    print(f"largest distance from PyTorch's mean {distance:.2e}, PyTorch's own spread {spread:.2e}, allowed {allowed:.2e}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"pdlbench": ours.tolist(), "pytorch": [run.tolist() for run in runs], "distance": distance, "spread": spread}, file)
    print("FOLLOWS" if distance <= allowed else "DIFFERS")
    return 0 if distance <= allowed else 1


if __name__ == "__main__":
    sys.exit(main())
