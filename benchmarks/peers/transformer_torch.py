"""Peer: the small transformers (transformer.py) in PyTorch, mapped (mapped_torch.py).

Attention is written out in products and a softmax, which ``torch.func.vmap`` maps as it
stands. Layers are drawn as PyTorch draws them. One intra-op thread for each core that
the process may use.
"""

import os

import common
import torch
import torch.nn.functional as F
import transformer
from mapped_torch import make_step
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
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    x, y = (torch.tensor(each).long() for each in transformer.make_sequences())
    models = [Transformer() for _ in range(args.members)]
    step = make_step(models, loss_of, transformer.LEARNING_RATE)
    order = common.endless_order(len(x), args.batch, args.members)

    def run(steps):
        rows = torch.tensor(common.next_steps(order, steps))
        losses = [step(x[each], y[each]) for each in rows.unbind(1)]
        return torch.stack(losses).mean().item()

    common.serve(run, args.steps, args.members * args.batch, ["torch"])


if __name__ == "__main__":
    main()
