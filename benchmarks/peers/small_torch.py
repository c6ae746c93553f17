"""Peer: a hundred small networks (small.py) in PyTorch, mapped or in a Python loop.

torch_members.py has both ways; the optimizer is ``torch.optim.Adam``, fused if it is
mapped. There is one intra-op thread: more threads are no faster on such small products,
and many times slower if other processes compute.
"""

import functools
import math

import small
import torch
import torch.nn.functional as F
import torch_members
from torch import nn


def make_model():
    """Make a member, with weights drawn as in the other peers (He et al. 2015)."""
    inputs, hidden, outputs = small.SIZES
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def loss_of(outputs, y):
    mean, spread = outputs.unbind(-1)
    variance = F.softplus(spread) + small.LEAST_VARIANCE
    # F.gaussian_nll_loss branches on its values, which vmap does not allow.
    return ((2 * math.pi * variance).log() + (y - mean) ** 2 / variance).mean() / 2


def main():
    args = small.arguments(__doc__, ["loop"])
    torch.set_num_threads(1)
    x, y = map(torch.tensor, small.load_concrete())
    order = torch.tensor(small.make_orders(len(x), args.members, args.steps)).long()
    make_step = torch_members.loop_step if args.loop else torch_members.mapped_step
    rate, fused = small.LEARNING_RATE, not args.loop
    adam = functools.partial(torch.optim.Adam, lr=rate, fused=fused)

    def train(seed):
        torch.manual_seed(seed)
        models = [make_model() for _ in range(args.members)]
        step = make_step(models, loss_of, adam)
        losses = [step(x[rows], y[rows]) for rows in order.unbind(1)]
        return torch.stack(losses, 1).numpy()

    small.serve(train, args, ["torch"])


if __name__ == "__main__":
    main()
