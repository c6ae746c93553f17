"""Peer: an ensemble as PyTorch users write it, a Python loop over the members.

K modules (channels first, float32, on the CPU), each with its own
``torch.optim.SGD`` (learning rate 0.1, momentum 0.9) and its own random order of the
images; every step takes each member through one batch: forward, backward, update. One
intra-op thread for each core that the process may use. The images lie in one float32
tensor and batches are indexed from it, which costs less than a ``DataLoader``.
"""

import os

import common
import torch
import torch.nn.functional as F
from torch_cnn import CNN, load_images


def endless_order(num_images, batch):
    while True:
        order = torch.randperm(num_images)
        yield from order[: num_images // batch * batch].split(batch)


def train(members, images, labels, steps):
    losses = []
    for _ in range(steps):
        for model, optimizer, order in members:
            perm = next(order)
            loss = F.cross_entropy(model(images[perm]), labels[perm])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def main():
    args = common.arguments(__doc__, members=2)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    images, labels = load_images()
    members = []
    for model in [CNN() for _ in range(args.members)]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        members.append((model, optimizer, endless_order(len(images), args.batch)))

    def run(steps):
        return train(members, images, labels, steps)

    common.serve(run, args.steps, args.members * args.batch, ["torch"])


if __name__ == "__main__":
    main()
