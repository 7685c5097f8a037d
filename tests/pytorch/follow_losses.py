#!/usr/bin/env python3
"""GPT-2 in bf16 here and in PyTorch, from the same weights over the same batches: does the loss follow PyTorch's?

    tests/pytorch/follow_losses.py --dump build/tests/dump_training [--config configs/bench/h200_gpt2_medium.json] [--steps 50]

PyTorch trains with autocast to bf16 and AdamW, with three attention kernels and an fp32 residual stream, and once more with the
residual stream in bf16, as it is here; and once in fp32 with TF32 products, the yardstick. How far a bf16 run ever is from the
yardstick is what bf16 costs. The test passes when that distance here is at most 1.5 times PyTorch's largest, or 2e-3, the last digit
that bf16 could show. Beside it stands the spread of the bf16 runs: how much depends on the order of sums alone.
With --device cpu everything runs in fp32 on the CPU, for models small enough, and has to agree to 1e-4 of the loss."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F


def gpt2_loss(w, tokens, targets, heads, classes, attention, residual):
    """Pre-norm GPT-2 with a tied head. c_attn's rows are packed per head as [q, k, v]; rows of wte behind `classes` are padding."""
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))
    batch, length = tokens.shape
    x = (F.embedding(tokens, w["wte.weight"]) + w["wpe.weight"][:length]).to(residual)
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


def torch_losses(arrays, steps, device, heads, classes, recipe, kernel, bf16=True, residual=torch.float32):
    w = {name[len("value."):]: torch.tensor(arrays[name], device=device, requires_grad=True) for name in arrays if name.startswith("value.")}
    optimizer = torch.optim.AdamW(w.values(), lr=recipe["lr"], weight_decay=recipe.get("weight_decay", 0.01))
    losses = []
    for step in range(steps):
        tokens, targets = (torch.tensor(arrays[f"{kind}.{step}"], device=device).long() for kind in ("input", "target"))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = gpt2_loss(w, tokens, targets, heads, classes, attention_with(kernel), residual)
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


def torch_runs(arrays, steps, device, heads, classes, recipe):
    """Losses of the yardstick and, by name, of the runs in bf16: none on the CPU."""
    kernels = torch.nn.attention.SDPBackend
    given = (arrays, steps, device, heads, classes, recipe)
    if device == "cpu":
        return torch_losses(*given, kernels.MATH, bf16=False), {}
    torch.set_float32_matmul_precision("high")
    runs = {f"bf16 {kernel.name.lower()}": torch_losses(*given, kernel)
            for kernel in (kernels.FLASH_ATTENTION, kernels.EFFICIENT_ATTENTION, kernels.MATH)}
    runs["bf16 residual"] = torch_losses(*given, kernels.FLASH_ATTENTION, residual=torch.bfloat16)
    return torch_losses(*given, kernels.EFFICIENT_ATTENTION, bf16=False), runs


def judge(ours, yardstick, runs):
    """Prints every distance; returns them and whether ours is small enough."""
    far = {name: float(np.abs(run - yardstick).max()) for name, run in runs.items()}
    distance = float(np.abs(ours - yardstick).max())
    spread = max((float(np.abs(a - b).max()) for a in runs.values() for b in runs.values()), default=0.0)
    allowed = max(1.5 * max(far.values()), 2e-3) if runs else 1e-4 * float(ours.max())
    for name, value in far.items():
        print(f"PyTorch {name:26s} {value:.2e} from the yardstick at most")
    print(f"pdlbench {'':25s} {distance:.2e} from the yardstick at most, allowed {allowed:.2e}; spread of PyTorch's bf16 runs {spread:.2e}")
    if np.ptp(yardstick) < 20 * allowed:
        print(f"the loss moves by {np.ptp(yardstick):.2e} only, too little to tell: more --steps, or workload.data=synthetic-learnable")
        return far, distance, allowed, spread, False
    return far, distance, allowed, spread, distance <= allowed


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
    yardstick, runs = torch_runs(arrays, len(ours), args.device, args.heads, classes, recipe)
    for step in sorted({0, 1, 2, 4, 9, 19, 29, 39, 49, len(ours) - 1}):
        if step < len(ours):
            print(f"step {step + 1:3d}  pdlbench {ours[step]:.5f}  PyTorch " + "  ".join(f"{run[step]:.5f}" for run in [yardstick, *runs.values()]))
    far, distance, allowed, spread, follows = judge(ours, yardstick, runs)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"pdlbench": ours.tolist(), "yardstick": yardstick.tolist(), "pytorch": {name: run.tolist() for name, run in runs.items()},
                       "pytorch_distances": far, "distance": distance, "allowed": allowed, "spread": spread, "follows": follows}, file)
    print("FOLLOWS" if follows else "DIFFERS")
    return 0 if follows else 1


if __name__ == "__main__":
    sys.exit(main())
