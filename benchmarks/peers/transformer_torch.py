"""Peer: the small transformers (transformer.py) in PyTorch, mapped (torch_members.py).

Attention is written out as products and a softmax, which ``torch.func.vmap`` can map.
PyTorch's defaults draw the layers, and ``torch.optim.Adam`` is fused.
"""

import functools

import torch
import torch.nn.functional as F
import torch_members
import transformer
from torch import nn
from transformer import HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, WIDTH


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.outputs = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        x = self.inputs(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = x.permute(2, 0, 3, 1, 4)  # each [B, HEADS, LENGTH, ...]
        scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.outputs((weights @ value).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        hidden = nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
        self.hidden = nn.Sequential(nn.LayerNorm(WIDTH), *hidden)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.hidden(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layers = [Layer() for _ in range(LAYERS)]
        last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.Sequential(*layers, *last)

    def forward(self, tokens):
        return self.layers(self.embed(tokens) + self.positions)


def loss_of(logits, after):
    return F.cross_entropy(logits.flatten(0, 1), after.flatten())


def main():
    args = transformer.arguments(__doc__)
    data = [torch.tensor(each).long() for each in transformer.make_sequences()]
    rate = transformer.LEARNING_RATE
    adam = functools.partial(torch.optim.Adam, lr=rate, fused=True)
    torch_members.serve(Transformer, loss_of, adam, data, args)


if __name__ == "__main__":
    main()
