"""Peer: PyTorch's tutorial "Model ensembling" (torch.func and vmap), made to train.

The tutorial stacks the states of K modules and maps one functional call over them, a
batch for each; here the mapped function is ``grad_and_value`` of the loss, as in the
tutorials beside it. SGD (learning rate 0.1, momentum 0.9) is written out on the stacked
tensors, in place. float32 on the CPU, channels first, an own random order of the images
for each member, one intra-op thread for each core that the process may use.
"""

import copy
import os

import common
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch_cnn import CNN, load_images


def endless_order(num_images, batch, members):
    steps = num_images // batch
    while True:
        orders = [torch.randperm(num_images) for _ in range(members)]
        yield from torch.stack(orders)[:, : steps * batch].split(batch, dim=1)


def make_step(models, learning_rate, momentum):
    params, buffers = stack_module_state(models)
    params = {name: param.detach() for name, param in params.items()}
    velocity = {name: torch.zeros_like(param) for name, param in params.items()}
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss_fn(params, buffers, images, labels):
        logits = functional_call(skeleton, (params, buffers), (images,))
        return F.cross_entropy(logits, labels)

    grads_and_losses = vmap(grad_and_value(loss_fn))

    def step(images, labels):
        grads, losses = grads_and_losses(params, buffers, images, labels)
        for name, param in params.items():
            velocity[name].mul_(momentum).add_(grads[name])
            param.add_(velocity[name], alpha=-learning_rate)
        return losses

    return step


def train(step, order, images, labels, steps):
    losses = []
    for _ in range(steps):
        perm = next(order)  # [members, batch]
        losses.append(step(images[perm], labels[perm]))
    return torch.stack(losses).mean().item()


def main():
    args = common.arguments(__doc__, members=8)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    images, labels = load_images()
    step = make_step([CNN() for _ in range(args.members)], 0.1, 0.9)
    order = endless_order(len(images), args.batch, args.members)

    def run(steps):
        return train(step, order, images, labels, steps)

    common.serve(run, args.steps, args.members * args.batch, ["torch"])


if __name__ == "__main__":
    main()
