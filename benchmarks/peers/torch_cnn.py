"""The network and the images of the PyTorch peers, channels first."""

import common
import torch
import torch.nn.functional as F
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


def load_images():
    mnist = common.load_mnist()
    images = torch.tensor(mnist.train_images).permute(0, 3, 1, 2).contiguous()
    return images.float() / 255, torch.tensor(mnist.train_labels).long()
