"""Peer: a hundred small networks (small.py) in PyTorch, mapped or in a Python loop.

Mapped as mapped_torch.py has it. With ``--loop``, as most users write it: every step
takes each module in turn through its batch, with a ``torch.optim.Adam`` of its own. One
intra-op thread: more are no faster on products so small, and many times slower where
other processes compute.
"""

import math

import small
import torch
import torch.nn.functional as F
from mapped_torch import make_step
from torch import nn


def make_model():
    """Make a member, with weights as the other peers draw them (He et al. 2015)."""
    inputs, hidden, outputs = small.SIZES
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1])


def loss_of(outputs, y):
    mean, spread = outputs.unbind(-1)
    variance = F.softplus(spread) + small.LEAST_VARIANCE
    # F.gaussian_nll_loss looks at its values, which vmap does not allow.
    return ((2 * math.pi * variance).log() + (y - mean) ** 2 / variance).mean() / 2


def train_mapped(models, x, y, order):
    step = make_step(models, loss_of, small.LEARNING_RATE)
    losses = [step(x[rows], y[rows]) for rows in order.unbind(1)]  # [members, batch]
    return torch.stack(losses, 1)


def train_in_loop(models, x, y, order):
    optimizers = [torch.optim.Adam(m.parameters(), small.LEARNING_RATE) for m in models]
    losses = torch.empty(order.shape[:2])
    for step, rows in enumerate(order.unbind(1)):
        for i, (model, optimizer) in enumerate(zip(models, optimizers)):
            loss = loss_of(model(x[rows[i]]), y[rows[i]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[i, step] = loss.detach()
    return losses


def main():
    args = small.arguments(__doc__, ["loop"], threads=1)
    torch.set_num_threads(args.threads)
    x, y = map(torch.tensor, small.load_concrete())
    order = torch.tensor(small.make_orders(len(x), args.members, args.steps)).long()

    def train(seed):
        torch.manual_seed(seed)
        models = [make_model() for _ in range(args.members)]
        train_models = train_in_loop if args.loop else train_mapped
        return train_models(models, x, y, order).numpy()

    small.serve(train, args, ["torch"])


if __name__ == "__main__":
    main()
