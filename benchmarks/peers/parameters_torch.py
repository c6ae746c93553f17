"""Peer: the cases of parameters.py in PyTorch, one round of steps per line of input."""

import argparse
import itertools
import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10
SIZES, RANK = (784, 2048, 2048, 2048, 10), 8
WORDS, WIDTH = 20_000, 128
TOKENS, MODEL, HEADS, LENGTH = 8_000, 256, 4, 64


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, a, b):
        super().__init__()
        self.layer = nn.Linear(a, b).requires_grad_(False)
        self.down = nn.Linear(a, RANK, bias=False)
        self.up = nn.Linear(RANK, b, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, pairs = heads, ((1, 3), (1, 1), (1, 4), (4, 1))
        layers = [nn.Linear(a * width, b * width, bias=False) for a, b in pairs]
        self.qkv, self.out, self.up, self.down = layers

    def forward(self, h):
        parts = self.qkv(standardize(h)).chunk(3, -1)
        parts = [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts]
        z = F.scaled_dot_product_attention(*parts, is_causal=True)
        h = h + self.out(z.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(standardize(h)), approximate="tanh"))


class Language(nn.Module):
    def __init__(self, words, width, heads, layers=2, tied=False):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.out = nn.Linear(width, words, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(standardize(self.blocks(self.words(x)))).flatten(0, 1)


class Differences(nn.Module):
    def __init__(self):
        super().__init__()
        self.volume = nn.Parameter(torch.randn(128, 128, 128))

    def forward(self, x):
        pairs = (torch.roll(self.volume, 1, i) - self.volume for i in range(3))
        return sum((pair**2).sum() for pair in pairs) + x.mean()


class Leaves(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.each = nn.ParameterList(torch.randn(4) for _ in range(count))

    def forward(self, x):
        return sum(((x * leaf) ** 2).mean() for leaf in self.each)


def standardize(h):
    return F.layer_norm(h, h.shape[-1:])


def mlp(layer):
    pairs = list(itertools.starmap(layer, itertools.pairwise(SIZES)))
    return nn.Sequential(*[x for each in pairs for x in (each, nn.ReLU())][:-1])


def make(name, rng):
    """Return the model, its loss, the data and the batch of a case."""

    def cross_entropy(z, y):
        return F.cross_entropy(z, y.flatten())

    images = rng.normal(size=(320, 784)).astype(np.float32), np.arange(320) % 10
    if name.startswith("MLP"):
        return mlp(nn.Linear), cross_entropy, images, 32
    if name.startswith("adapters"):
        return mlp(Adapted), cross_entropy, images, 32
    if name.startswith("embedding"):
        words, last = nn.EmbeddingBag(WORDS, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        bags = rng.integers(WORDS, size=(2560, 16)), np.arange(2560) % 10
        return nn.Sequential(words, last), cross_entropy, bags, 256
    if name.startswith("language"):
        texts = tuple(rng.integers(TOKENS, size=(2, 40, LENGTH)))
        return Language(TOKENS, MODEL, HEADS), cross_entropy, texts, 4
    if "leaves" in name:
        ones = (np.ones((80, 4), np.float32),)
        return Leaves(int(name.split()[0])), lambda z: z, ones, 8
    return Differences(), lambda z: z, (np.zeros((40, 1), np.float32),), 4


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--foreach", action="store_true")
    parser.add_argument("--fused", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model, loss_fn, data, size = make(args.name, np.random.default_rng(0))
    params = [p for p in model.parameters() if p.requires_grad]
    how = {"foreach": args.foreach, "fused": args.fused}
    if args.name.endswith("Adam"):
        optimizer = torch.optim.Adam(params, 1e-3, **how)
    elif args.name.endswith("momentum"):
        optimizer = torch.optim.SGD(params, 1e-2, momentum=0.9, **how)
    else:
        optimizer = torch.optim.SGD(params, 1e-4, **how)
    data = [torch.from_numpy(x) for x in data]
    for _ in sys.stdin:
        begin = time.perf_counter()
        for i in range(STEPS):
            x, *y = (x[i * size : (i + 1) * size] for x in data)
            optimizer.zero_grad()
            loss_fn(model(x), *y).backward()
            optimizer.step()
        ms = (time.perf_counter() - begin) / STEPS * 1e3
        print(json.dumps({"ms": ms}), flush=True)


if __name__ == "__main__":
    main()
