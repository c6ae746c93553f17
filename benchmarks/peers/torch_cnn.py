"""Peer: an ensemble of CNNs in PyTorch, mapped or in a loop (torch_members.py).

Images have channels first, the optimizer is ``torch.optim.SGD`` (learning rate 0.1,
momentum 0.9), and each member has its own random order of the images.
"""

import functools

import common
import torch
import torch.nn.functional as F
import torch_members
from torch import nn


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding="same")
        self.conv2 = nn.Conv2d(32, 64, 3, padding="same")
        self.fc1 = nn.Linear(7 * 7 * 64, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


def main():
    args = common.arguments(__doc__, ["loop"], members=2)
    mnist = common.load_mnist()
    images = torch.tensor(mnist.train_images).permute(0, 3, 1, 2).contiguous()
    data = images.float() / 255, torch.tensor(mnist.train_labels).long()
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = torch_members.loop_step if args.loop else torch_members.mapped_step
    torch_members.serve(CNN, F.cross_entropy, sgd, data, args, step)


if __name__ == "__main__":
    main()
