#!/usr/bin/env python3
"""PyTorch's training step of the GPU benchmarks: GPT2-medium with AdamW or VGG-16 with SGD, autocast to bf16 or TF32.

    scripts/bench/torch_gpu.py gpt2 --batch 16 32 --length 1024 [--compile]
    scripts/bench/torch_gpu.py vgg16 --batch 256 [--compile] [--tf32]

Random data that stays on the GPU, fused optimizers, channels-last images. Prints one JSON line for each batch size, each with a model
of its own: median step, speed, memory."""
import argparse
import gc
import json
import statistics

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, PADDED = 50257, 50304


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2Medium(nn.Module):
    def __init__(self, length, layers=24, width=1024, heads=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(PADDED, width), nn.Embedding(max(length, 1024), width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, PADDED, bias=False)
        self.head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, PADDED).float(), targets.view(-1))


class Classifier(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        return F.cross_entropy(self.model(images).float(), labels)


def gpt2(args, batch):
    model = Gpt2Medium(args.length).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    shape = (batch, args.length)
    batches = [(torch.randint(VOCABULARY, shape, device="cuda"), torch.randint(VOCABULARY, shape, device="cuda")) for _ in range(4)]
    return model, optimizer, batches, batch * args.length


def vgg16(args, batch):
    import torchvision
    model = Classifier(torchvision.models.vgg16(num_classes=1000)).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return model, optimizer, [(images, torch.randint(1000, (batch,), device="cuda"))], batch


def measure(args, batch):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, optimizer, batches, work = {"gpt2": gpt2, "vgg16": vgg16}[args.model](args, batch)
    run = torch.compile(model, dynamic=False) if args.compile else model
    times_ms = []
    for step in range(args.warmup + args.steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        with torch.autocast("cuda", torch.bfloat16, enabled=not args.tf32):
            loss = run(*batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        if step >= args.warmup:
            times_ms.append(begin.elapsed_time(end))
    median = statistics.median(times_ms)
    return {"torch": torch.__version__, "compile": args.compile, "batch": batch, "step_ms": round(median, 3),
            "per_s": round(work / median * 1e3, 1), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3), "before_gib": round(before / 2**30, 3),
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "loss": round(loss.item(), 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt2", "vgg16"])
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    parser.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="fp32 with TF32 products in place of autocast to bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    for batch in args.batch:
        torch.manual_seed(0)
        print(json.dumps(measure(args, batch)), flush=True)
        if args.compile:
            torch._dynamo.reset()  # compiled code holds on to its model, and counts as a reason for dynamic shapes
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
