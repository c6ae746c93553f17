"""Peer: a hundred small networks (small.py) in PyTorch, mapped or in a Python loop.

As the tutorial "Model ensembling" has it: the states of K modules are stacked, and
``torch.func.vmap`` maps one ``grad_and_value`` over them, a batch for each; one
``torch.optim.Adam(fused=True)`` updates the stacked tensors, which is each member's own
Adam, as it is elementwise. With ``--loop``, as most users write it: every step takes
each module in turn through its batch, with a ``torch.optim.Adam`` of its own. One
intra-op thread: more are no faster on products so small, and many times slower where
other processes compute.
"""

import copy
import math

import small
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap


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
    params, _ = stack_module_state(models)
    optimizer = torch.optim.Adam(params.values(), small.LEARNING_RATE, fused=True)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss_fn(params, x, y):
        return loss_of(functional_call(skeleton, params, (x,)), y)

    grads_and_losses = vmap(grad_and_value(loss_fn))
    losses = []
    for rows in order.unbind(1):  # [members, batch]
        detached = {name: param.detach() for name, param in params.items()}
        grads, loss = grads_and_losses(detached, x[rows], y[rows])
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        losses.append(loss)
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
