"""Shared by the PyTorch peers: a step of K modules, mapped or in a Python loop.

The mapped step follows the tutorial "Model ensembling": the states of the modules are
stacked, and ``torch.func.vmap`` maps one ``grad_and_value`` over them, with a batch for
each. One optimizer updates the stacked tensors; since SGD and Adam are elementwise,
this equals one optimizer per member. The loop is the usual one: in every step, each
module in turn takes its batch forward and backward, and its own optimizer updates it.
Both use float32 on the CPU. Batches are indexed from one tensor with all data, which
costs less than a ``DataLoader``. There is one intra-op thread for each core that the
process may use.
"""

import copy
import os

import common
import torch
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


def serve(make_model, loss_of, make_optimizer, data, args, make_step=mapped_step):
    """Serve rounds of steps; each round starts from the states of the last one."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    x, y = data
    models = [make_model() for _ in range(args.members)]
    step = make_step(models, loss_of, make_optimizer)
    order = common.endless_order(len(x), args.batch, args.members)

    def run(steps):
        rows = torch.tensor(common.next_steps(order, steps))
        losses = [step(x[each], y[each]) for each in rows.unbind(1)]
        return torch.stack(losses).mean().item()

    common.serve(run, args, ["torch"])
