"""PyTorch agrees: from the same initial weights and samples, tiny GPT-2 and VGG have the same logits, loss, gradients and
training losses there as here. LAMB, which PyTorch lacks, is checked against NumPy. Exit code 77 where PyTorch is missing."""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

ARGS = None
STEPS = 10

GPT2 = {
    "name": "agreement-gpt2",
    "workload": {"model": "gpt2-tiny", "data": "synthetic-learnable", "vocabulary_size": 67, "sequence_length": 24, "dropout": 0.0,
                 "train_samples": 256, "validation_samples": 8},
    "engine": {"name": "serial"},
    "training": {"global_batch_size": 6, "seed": 7, "optimizer": {"name": "sgd", "lr": 0.05}},
}
VGG = {
    "name": "agreement-vgg",
    "workload": {"model": "vgg11", "data": "synthetic-learnable", "image_size": 32, "classes": 10, "dropout": 0.0,
                 "train_samples": 256, "validation_samples": 8},
    "engine": {"name": "serial"},
    "training": {"global_batch_size": 8, "seed": 7, "optimizer": {"name": "sgd", "lr": 0.01}},
}


def dump(config, overrides=()):
    """Runs the C++ side; returns every array it wrote, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.json")
        with open(path, "w") as file:
            json.dump(config, file)
        command = [ARGS.dump, path, folder, str(STEPS), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        return {name[:-4]: np.load(os.path.join(folder, name)) for name in os.listdir(folder) if name.endswith(".npy")}


def weights_of(arrays):
    return {name[len("value."):]: torch.tensor(a, requires_grad=True) for name, a in arrays.items() if name.startswith("value.")}


def gpt2_logits(w, tokens, heads=2):
    """Pre-norm GPT-2 with a tied head; c_attn's rows are packed per head as [q, k, v]."""
    layers = 1 + max(int(m.group(1)) for m in (re.match(r"h\.(\d+)\.", name) for name in w) if m)
    batch, length = tokens.shape
    x = w["wte.weight"][tokens] + w["wpe.weight"][:length]
    width = x.shape[-1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    for i in range(layers):
        p = {name.split(f"h.{i}.", 1)[1]: value for name, value in w.items() if name.startswith(f"h.{i}.")}
        a = F.layer_norm(x, (width,), p["ln_1.weight"], p["ln_1.bias"])
        qkv = F.linear(a, p["attn.c_attn.weight"], p["attn.c_attn.bias"]).view(batch, length, heads, 3, width // heads)
        q, k, v = (qkv[:, :, :, j].transpose(1, 2) for j in range(3))
        scores = (q @ k.transpose(-1, -2)) / (width // heads) ** 0.5
        attended = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        attended = attended.transpose(1, 2).reshape(batch, length, width)
        x = x + F.linear(attended, p["attn.c_proj.weight"], p["attn.c_proj.bias"])
        m = F.layer_norm(x, (width,), p["ln_2.weight"], p["ln_2.bias"])
        m = F.linear(m, p["mlp.c_fc.weight"], p["mlp.c_fc.bias"])
        m = 0.5 * m * (1.0 + torch.tanh((2.0 / np.pi) ** 0.5 * (m + 0.044715 * m**3)))
        x = x + F.linear(m, p["mlp.c_proj.weight"], p["mlp.c_proj.bias"])
    x = F.layer_norm(x, (width,), w["ln_f.weight"], w["ln_f.bias"])
    return x @ w["wte.weight"].T


VGG11 = [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]


def vgg_logits(w, images):
    """torchvision's vgg11 without batch norm; images and maps are [N, H, W, C] outside, convolution weights [K, R, S, C]."""
    x = images.permute(0, 3, 1, 2)
    index = 0
    for entry in VGG11:
        if entry == "M":
            x = F.max_pool2d(x, 2)
            index += 1
        else:
            weight = w[f"features.{index}.weight"].permute(0, 3, 1, 2)
            x = F.relu(F.conv2d(x, weight, w[f"features.{index}.bias"], padding=1))
            index += 2
    x = x.permute(0, 2, 3, 1).flatten(1)
    names = sorted({int(n.split(".")[1]) for n in w if n.startswith("classifier.")})
    for i, n in enumerate(names):
        x = F.linear(x, w[f"classifier.{n}.weight"], w[f"classifier.{n}.bias"])
        if i + 1 < len(names):
            x = F.relu(x)
    return x


def loss_of(logits, target):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1).long())


def relative(a, b):
    return float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / max(np.linalg.norm(np.asarray(b, np.float64)), 1e-30))


def lamb_update(w, g, m, v, t, lr, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.0):
    """You et al. 2020, with bias correction; all arrays in fp64."""
    m[:] = beta1 * m + (1 - beta1) * g
    v[:] = beta2 * v + (1 - beta2) * g * g
    direction = (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps) + decay * w
    weight_norm, direction_norm = np.linalg.norm(w), np.linalg.norm(direction)
    ratio = weight_norm / direction_norm if weight_norm > 0 and direction_norm > 0 else 1.0
    w -= lr * ratio * direction


class Agreement(unittest.TestCase):
    def check_first_step(self, config, forward):
        arrays = dump(config)
        w = weights_of(arrays)
        logits = forward(w, self.batch(arrays, 0)[0])
        loss = loss_of(logits, self.batch(arrays, 0)[1])
        loss.backward()
        self.assertLess(relative(arrays["logits"].reshape(-1), logits.detach().numpy().reshape(-1)), 4e-6)
        self.assertLess(abs(arrays["losses"][0] - loss.item()) / loss.item(), 1e-6)
        grads = {name[len("grad."):]: a for name, a in arrays.items() if name.startswith("grad.")}
        self.assertEqual(set(grads), set(w))
        for name, value in w.items():
            self.assertLess(relative(grads[name], value.grad.numpy()), 2e-5, name)

    @staticmethod
    def batch(arrays, step):
        inputs = torch.tensor(arrays[f"input.{step}"])
        return (inputs.long() if inputs.dtype == torch.int32 else inputs), torch.tensor(arrays[f"target.{step}"])

    def torch_losses(self, arrays, forward, make_optimizer):
        w = weights_of(arrays)
        optimizer = make_optimizer(list(w.values()))
        losses = []
        for step in range(STEPS):
            inputs, target = self.batch(arrays, step)
            optimizer.zero_grad()
            loss = loss_of(forward(w, inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def check_losses(self, ours, theirs):
        self.assertEqual(len(ours), STEPS)
        self.assertGreater(abs(ours[0] - ours[-1]), 1e-3 * abs(theirs[0] - theirs[-1]), "training changed nothing")
        self.assertGreater(np.ptp(theirs), 20 * 1e-4 * theirs[0], "training changes too little for the comparison to tell")
        for a, b in zip(ours, theirs):
            self.assertLess(abs(a - b) / abs(b), 1e-4)

    def test_gpt2_logits_loss_and_every_gradient(self):
        self.check_first_step(GPT2, gpt2_logits)

    def test_vgg_logits_loss_and_every_gradient(self):
        self.check_first_step(VGG, vgg_logits)

    def test_sgd_momentum_losses(self):
        for config, forward, lr in ((GPT2, gpt2_logits, 0.05), (VGG, vgg_logits, 0.05)):
            arrays = dump(config, [f"training.optimizer.lr={lr}", "training.optimizer.momentum=0.9", "training.optimizer.weight_decay=0.01"])
            theirs = self.torch_losses(arrays, forward, lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.01))
            self.check_losses(arrays["losses"], theirs)

    def test_adamw_losses(self):
        for config, forward in ((GPT2, gpt2_logits), (VGG, vgg_logits)):
            arrays = dump(config, ["training.optimizer.name=adamw", "training.optimizer.lr=0.001", "training.optimizer.weight_decay=0.01"])
            theirs = self.torch_losses(arrays, forward, lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.01))
            self.check_losses(arrays["losses"], theirs)

    def test_lamb_losses_against_numpy(self):
        arrays = dump(GPT2, ["training.optimizer.name=lamb", "training.optimizer.lr=0.01", "training.optimizer.weight_decay=0.01",
                             "training.optimizer.epsilon=1e-6", "training.dtype=fp64"])
        w = weights_of(arrays)
        moments = {name: (np.zeros(v.shape), np.zeros(v.shape)) for name, v in w.items()}
        losses = []
        for step in range(STEPS):
            inputs, target = self.batch(arrays, step)
            loss = loss_of(gpt2_logits(w, inputs), target)
            loss.backward()
            losses.append(loss.item())
            for name, value in w.items():
                numbers = value.detach().numpy()
                lamb_update(numbers, value.grad.numpy(), *moments[name], t=step + 1, lr=0.01, decay=0.01)
                value.grad = None
        for a, b in zip(arrays["losses"], losses):
            self.assertLess(abs(a - b) / abs(b), 1e-9)
        self.assertLess(losses[-1], losses[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump", required=True)
    ARGS, rest = parser.parse_known_args()
    torch.set_num_threads(1)
    unittest.main(argv=[sys.argv[0]])
