#!/usr/bin/env python3
"""PyTorch's training step of the GPU benchmarks: GPT2-medium with AdamW or VGG-16 with SGD, autocast to bf16 or TF32.

    scripts/bench/torch_gpu.py gpt2 --batch 16 32 --length 1024 [--compile]
    scripts/bench/torch_gpu.py vgg16 --batch 256 [--compile] [--tf32]
    torchrun --nproc-per-node 4 scripts/bench/torch_gpu.py gpt2 --batch 16 --parallel ddp|fsdp

Random data that stays on the GPU, fused optimizers, channels-last images. --batch is that of one GPU; fsdp divides parameters,
gradients and moments over all GPUs, block by block. Prints one JSON line for each batch size, each with a model of its own: the
median step of the slowest GPU, the speed of all of them together, the memory of the first."""
import argparse
import functools
import gc
import json
import os
import statistics

import torch
import torch.distributed as dist
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
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)
    shape = (batch, args.length)
    batches = [(torch.randint(VOCABULARY, shape, device="cuda"), torch.randint(VOCABULARY, shape, device="cuda")) for _ in range(4)]
    return model, optimizer, batches, batch * args.length


def vgg16(args, batch):
    import torchvision
    model = Classifier(torchvision.models.vgg16(num_classes=1000)).cuda().to(memory_format=torch.channels_last)
    optimizer = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    return model, optimizer, [(images, torch.randint(1000, (batch,), device="cuda"))], batch


def spread(args, model):
    """The model on all GPUs. bf16 as autocast has it: products in bf16, sums of gradients and weights in fp32."""
    if args.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    if args.parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy() if args.tf32 else MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        parts = model.blocks if args.model == "gpt2" else [part for part in model.modules() if isinstance(part, nn.Linear)]
        for part in parts:
            fully_shard(part, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    return model


def slowest(times_ms):
    """Each step on the GPU where it took longest."""
    if not dist.is_initialized():
        return times_ms
    times = torch.tensor(times_ms, device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def measure(args, batch):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, optimizer_of, batches, work = {"gpt2": gpt2, "vgg16": vgg16}[args.model](args, batch)
    model = spread(args, model)
    optimizer = optimizer_of(model.parameters())
    run = torch.compile(model, dynamic=False) if args.compile else model
    times_ms = []
    for step in range(args.warmup + args.steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        with torch.autocast("cuda", torch.bfloat16, enabled=not args.tf32 and args.parallel != "fsdp"):
            loss = run(*batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        if step >= args.warmup:
            times_ms.append(begin.elapsed_time(end))
    gpus = dist.get_world_size() if dist.is_initialized() else 1
    median = statistics.median(slowest(times_ms))
    return {"torch": torch.__version__, "compile": args.compile, "parallel": args.parallel, "gpus": gpus, "batch": batch,
            "step_ms": round(median, 3), "per_s": round(gpus * work / median * 1e3, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 3), "before_gib": round(before / 2**30, 3),
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "loss": round(loss.item(), 4)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt2", "vgg16"])
    parser.add_argument("--batch", type=int, nargs="+", required=True, help="samples of one GPU in a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="fp32 with TF32 products in place of autocast to bf16")
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none", help="over the processes of torchrun")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=8)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    first = True
    if args.parallel != "none":
        if "LOCAL_RANK" not in os.environ:
            parser.error("--parallel is for processes that torchrun starts")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        first = dist.get_rank() == 0
    for batch in args.batch:
        torch.manual_seed(0)
        result = measure(args, batch)
        if first:
            print(json.dumps(result), flush=True)
        if args.compile:
            torch._dynamo.reset()  # compiled code holds on to its model, and counts as a reason for dynamic shapes
        gc.collect()
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
