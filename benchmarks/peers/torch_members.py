"""Peer: the ensembles of cases.py in PyTorch, mapped or in a Python loop.

The mapped step follows the tutorial "Model ensembling": the states of the modules are
stacked, and ``torch.func.vmap`` maps one ``grad_and_value`` over them, with a batch for
each. One optimizer updates the stacked tensors; since SGD and Adam are elementwise,
this equals one optimizer per member. The loop is the usual one: in every step, each
module in turn takes its batch forward and backward, and its own optimizer updates it.
Both use float32 on the CPU, and a mapped Adam is fused. Batches are indexed from one
tensor with all data, which costs less than a ``DataLoader``. There is one intra-op
thread for each core that the process may use, and one in all for the small networks:
more are no faster on such small products, and many times slower if other processes
compute.
"""

import copy
import functools
import math
import os

import cases
import common
import networks_torch
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value, stack_module_state, vmap


def mapped_step(models, loss_of, make_optimizer):
    """Return a step of batches [K, B, ...] that returns each member's loss, [K]."""
    params, _ = stack_module_state(models)
    optimizer = make_optimizer(params.values())
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss_fn(params, x, y):
        return loss_of(functional_call(skeleton, params, (x,)), y)

    grads_and_losses = vmap(grad_and_value(loss_fn))

    def step(x, y):
        detached = {name: param.detach() for name, param in params.items()}
        grads, losses = grads_and_losses(detached, x, y)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
        return losses

    return step


def loop_step(models, loss_of, make_optimizer):
    """Return the same step as `mapped_step` does, as a loop over the modules."""
    optimizers = [make_optimizer(model.parameters()) for model in models]

    def step(x, y):
        losses = []
        for model, optimizer, inputs, targets in zip(models, optimizers, x, y):
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    return step


def graph_step(models, loss_of, make_optimizer):
    """Return `loop_step`'s step as a CUDA graph, recorded with the first batches."""
    step, graph, held = loop_step(models, loss_of, make_optimizer), None, ()

    def replay(*given):
        nonlocal graph, held
        if graph is None:
            graph, held = torch.cuda.CUDAGraph(), [x.clone() for x in given]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(*held)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                replay.losses = step(*held)
        for mine, new in zip(held, given):
            mine.copy_(new)
        graph.replay()
        return replay.losses

    return replay


def small_loss(outputs, y):
    mean, spread = outputs.unbind(-1)
    variance = F.softplus(spread) + 1e-6
    # F.gaussian_nll_loss branches on its values, which vmap does not allow.
    return ((2 * math.pi * variance).log() + (y - mean) ** 2 / variance).mean() / 2


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


MODELS = {
    "cnn": (networks_torch.cnn, cross_entropy),
    "small": (networks_torch.small, small_loss),
    "transformer": (networks_torch.Transformer, cross_entropy),
}


def main():
    args = common.arguments(__doc__, ["loop"], cases.SETTINGS, members=2)
    make_model, loss_of = MODELS[args.case]
    small, cores = args.case == "small", len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if small else cores)
    x, y = map(torch.tensor, cases.LOAD[args.case]())
    if args.case == "cnn":
        x = x.permute(0, 3, 1, 2).contiguous().float() / 255
    x, y = (each if each.is_floating_point() else each.long() for each in (x, y))
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if rate := cases.RATES.get(args.case):
        optimizer = functools.partial(torch.optim.Adam, lr=rate, fused=not args.loop)

    def start(seed):
        torch.manual_seed(seed)
        models = [make_model() for _ in range(args.members)]
        return (loop_step if args.loop else mapped_step)(models, loss_of, optimizer)

    def losses(step, order):  # [members, steps]
        rows = torch.tensor(order).long().unbind(1)
        return torch.stack([step(x[each], y[each]) for each in rows], 1)

    if small:

        def train(seed, order):
            return losses(start(seed), order).numpy()

        return cases.serve_anew(train, args)
    step, order = start(0), common.endless_order(len(x), args.batch, args.members)

    def run(steps):
        return losses(step, common.next_steps(order, steps)).mean().item()

    return common.serve(args, run)


if __name__ == "__main__":
    main()
