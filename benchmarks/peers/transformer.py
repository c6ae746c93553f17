"""Shared by the peers of the small transformers: the data and the settings.

A member has two layers of width 64 with 4 heads. Each layer has causal attention and a
hidden layer of 256 with relu, and normalizes before both; positions are learned. A
member learns to predict the next of 64 tokens, in sequences of 32, by Adam at 0.001 in
batches of 32, in its own random order. The sequences are made up: each token follows
from the previous one by a fixed permutation of all tokens, except one in ten, which is
drawn at random.
"""

import common
import numpy as np

LAYERS, WIDTH, HEADS, HIDDEN = 2, 64, 4, 256
VOCABULARY, LENGTH = 64, 32
SEQUENCES = 4096
LEARNING_RATE = 1e-3


def arguments(doc, **numbers):
    return common.arguments(doc, steps=50, batch=32, members=8, **numbers)


def make_sequences():
    """Return tokens and the tokens that follow, both int32 [SEQUENCES, LENGTH]."""
    rng = np.random.default_rng(0)
    rule = rng.permutation(VOCABULARY)
    tokens = rng.integers(VOCABULARY, size=(SEQUENCES, LENGTH + 1), dtype=np.int32)
    follows = rng.random(tokens.shape) < 0.9
    for i in range(LENGTH):
        after = rule[tokens[:, i]]
        tokens[:, i + 1] = np.where(follows[:, i], after, tokens[:, i + 1])
    return tokens[:, :-1], tokens[:, 1:]
