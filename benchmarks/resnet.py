"""ResNet-20 in Flax, for images of 32 x 32.

`networks.py` and `cifar10.py` train it, and `gpu.py` with group normalization.  He et
al. 2016 describe the network in section 4.2.  Shortcuts have no parameters: where a
block halves the image, they take every other pixel and add channels of zeros.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

WIDTHS = 16, 32, 64


def normalize(x, training, groups, dtype):
    if groups:
        return nn.GroupNorm(groups, dtype=dtype)(x)
    return nn.BatchNorm(not training, momentum=0.9, dtype=dtype)(x)


class Block(nn.Module):
    width: int
    stride: int
    groups: int
    dtype: Any

    @nn.compact
    def __call__(self, x, training):
        how = dict(use_bias=False, dtype=self.dtype)
        y = nn.Conv(self.width, (3, 3), self.stride, **how)(x)
        y = nn.relu(normalize(y, training, self.groups, self.dtype))
        y = nn.Conv(self.width, (3, 3), **how)(y)
        y = normalize(y, training, self.groups, self.dtype)
        x = x[:, :: self.stride, :: self.stride]
        return nn.relu(y + jnp.pad(x, [(0, 0)] * 3 + [(0, self.width - x.shape[-1])]))


class ResNet(nn.Module):
    """Map images [B, H, W, 3] to logits [B, classes]; the default has 20 layers."""

    blocks: int = 3  # of each width, with two convolutions each
    widths: tuple = WIDTHS
    classes: int = 10
    groups: int = 0  # of channels, each normalized for an example; 0 is batches
    dtype: Any = None  # of the layers but the last

    @nn.compact
    def __call__(self, x, training):
        norm = self.groups, self.dtype
        x = nn.Conv(self.widths[0], (3, 3), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(normalize(x, training, *norm))
        for i, width in enumerate(self.widths):
            for j in range(self.blocks):
                stride = 2 if i > 0 and j == 0 else 1
                x = Block(width, stride, *norm)(x, training)
        return nn.Dense(self.classes)(x.mean(axis=(1, 2), dtype=jnp.float32))


def functions(net: nn.Module, example) -> tuple:
    """Return init(key), and apply(params, state, x, training) of a network of Flax.

    Both return a pair with its state, its running statistics, which move in training.
    """

    def init(key):
        state = dict(net.init(key, example, False))
        return state.pop("params"), state

    def apply(params, state, x, training):
        model = {"params": params, **state}
        if not training:
            return net.apply(model, x, False), state
        return net.apply(model, x, True, mutable=[*state])

    return init, apply
