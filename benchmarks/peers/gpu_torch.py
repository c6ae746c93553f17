"""Peer: the networks of gpu.py in PyTorch, on a GPU if there is one.

A loop over the members, `torch.func.vmap` and a CUDA graph of the loop train each
(torch_members.py).  Data lie on the device, TensorFloat-32 is allowed, optimizers are
fused, and ResNet-20 has channels last where PyTorch can do it.
"""

import functools
import sys
import time

import common
import gpu
import networks_torch
import torch
import torch.nn.functional as F
import torch_members
from torch import nn

WAYS = {
    "loop": torch_members.loop_step,
    "vmap": torch_members.mapped_step,
    "graph": torch_members.graph_step,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [8192, 512, 8, 8]  # of the transformer: words, width, heads, layers


class Language(nn.Module):
    def __init__(self, words, width, heads, layers):
        super().__init__()
        self.words, how = nn.Embedding(words, width), dict(norm_first=True)
        how |= dict(dropout=0.0, activation=F.gelu, batch_first=True)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, **how)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width))

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        x = self.layers(self.words(x), mask, is_causal=True)
        return F.linear(x, self.words.weight)


class Net(nn.Module):
    """A network of bytes or numbers, in bfloat16 if it is asked for."""

    def __init__(self, inner, half):
        super().__init__()
        self.inner, self.half = inner, half

    def forward(self, x):
        x = x / 255 if x.dtype == torch.uint8 else x
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.half):
            return self.inner(x).float()


def make_model(name):
    norm = functools.partial(nn.GroupNorm, 8)
    resnet = functools.partial(networks_torch.resnet, norm)
    networks = dict(cnn=networks_torch.cnn, small=networks_torch.small)
    networks |= dict(resnet=resnet, resnet16=resnet)
    networks["transformer"] = functools.partial(Language, *SIZES)
    return Net(networks[name](), name == "resnet16").to(DEVICE)


def measure(name, members, steps, way):
    """Return the ms of a step of all members."""
    x, y = (torch.from_numpy(x).to(DEVICE) for x in gpu.draw(name))
    x, y, steps = x.movedim(-1, 1) if x.ndim == 4 else x, y.long(), min(steps, 20)
    sizes = members, steps, gpu.NETWORKS[name].batch
    order = torch.randint(len(x), sizes, device=DEVICE)
    adam = torch.optim.Adam, dict(lr=1e-3, capturable=way == "graph")
    sgd = torch.optim.SGD, dict(lr=0.1, momentum=0.9)
    kind, how = adam if name in ("small", "transformer") else sgd
    models = [make_model(name) for _ in range(members)]
    if "resnet" in name and way != "vmap":
        models = [model.to(memory_format=torch.channels_last) for model in models]
    optimizer = functools.partial(kind, fused=True, **how)
    step = WAYS[way](models, torch_members.cross_entropy, optimizer)

    def run():
        for rows in order.unbind(1):
            losses = step(x[rows], y[rows])
        losses.sum().item()

    return gpu.timed(lambda: run, steps)


def main():
    limit, *flags = sys.argv[1:]
    gpu.timed.end = time.monotonic() + float(limit)
    if flags:
        gpu.shrink()
        SIZES[:] = 32, 16, 8, 1
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    common.say({"cells": torch.__version__})
    for what, *case in gpu.SPEEDS.values():
        if what == "epoch":
            cells = [gpu.attempt(measure, *case, way) for way in WAYS]
            common.say({"cells": cells})


if __name__ == "__main__":
    main()
