#!/usr/bin/env python3
"""PyTorch reference step on the CPU: a small GPT-2 trained with AdamW, fp32.

Prints one JSON line with the median tokens per second over the measured steps.
Debian's PyTorch needs OPENBLAS_CORETYPE=SkylakeX in the environment on CPUs
that its OpenBLAS does not know; pin threads with OMP_PROC_BIND=true OMP_PLACES=cores.
"""
import argparse
import json
import math
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

FUSED_ATTENTION = hasattr(F, "scaled_dot_product_attention")


def gelu_tanh(x):
    try:
        return F.gelu(x, approximate="tanh")
    except TypeError:  # before PyTorch 1.12
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Block(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        if not FUSED_ATTENTION:
            hidden = torch.ones(context, context, dtype=torch.bool).triu(1)
            self.register_buffer("hidden", hidden, persistent=False)

    def attend(self, q, k, v):
        if FUSED_ATTENTION:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        t = q.size(-2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.size(-1)))
        scores = scores.masked_fill(self.hidden[:t, :t], float("-inf"))
        return scores.softmax(-1) @ v

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.down(gelu_tanh(self.up(self.norm2(x))))


class Gpt2(nn.Module):
    def __init__(self, vocab, context, width, layers, heads):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, 0.0, 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, targets):
        x = self.token(ids) + self.position.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)  # tied head
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--warmup", type=int, default=3)
    ap.add_argument("--batch", type=int, default=4)
    ap.add_argument("--fused", action="store_true", help="fused AdamW (PyTorch 2.4 or newer on a CPU)")
    ap.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    ap.add_argument("--compile", action="store_true", help="torch.compile the model")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(1234)
    vocab, context = 8192, 256
    model = Gpt2(vocab, context, width=256, layers=4, heads=4)
    count = sum(p.numel() for p in model.parameters())
    extra = {"fused": True} if a.fused else {}
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, **extra)
    run = torch.compile(model) if a.compile else model
    times, loss = [], None
    for step in range(a.warmup + a.steps):
        ids = torch.randint(0, vocab, (a.batch, context + 1))
        start = time.perf_counter()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.bf16):
            loss = run(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        opt.step()
        loss_value = loss.item()
        if step >= a.warmup:
            times.append(time.perf_counter() - start)
    tokens = a.batch * context
    print(json.dumps({
        "workload": "gpt2-4x256-v8192", "torch": torch.__version__, "threads": a.threads, "steps": a.steps,
        "bf16": a.bf16, "fused_adamw": a.fused, "compile": a.compile, "fused_attention": FUSED_ATTENTION,
        "parameters": count, "tokens_per_s": round(tokens / statistics.median(times), 1),
        "best_tokens_per_s": round(tokens / min(times), 1),
        "step_ms": round(1e3 * statistics.median(times), 2), "loss": round(loss_value, 4),
        "openblas_coretype": os.environ.get("OPENBLAS_CORETYPE"),
    }))


if __name__ == "__main__":
    main()
